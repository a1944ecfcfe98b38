# SPDX-License-Identifier: Apache-2.0
"""Tests that what is compiled keeps the order that the primitives promise: seen in PTX, with no GPU."""

import gc
import re

import pytest
import torch
import triton.language as tl
from tests.tiles import example, kernels
from tests.tiles.machine_code import (
    ACQUIRE,
    CONSUMER,
    PRODUCER,
    RELEASE,
    ZERO,
    addresses,
    compile_to_ptx,
    depends_on,
    find,
    find_makers,
    follows_acquire,
    make_channel,
)
from triton.compiler import CompilationError
from triton.runtime.jit import JITCallable
from triton.tools.tensor_descriptor import TensorDescriptor

from stretto import tiles
from stretto.tiles import signals
from stretto.tiles.compile_only import TARGETS, compile_kernel

X = torch.zeros(256, dtype=torch.bfloat16)
WORDS = torch.zeros(1024, dtype=torch.int32)
NVIDIA = ["sm_90", "sm_100"]


def launches():
    """Every kernel of the tests with arguments for it; the last two use descriptors."""
    local = make_channel("local")
    broadcast = make_channel()
    p2p = make_channel("p2p")
    entered = p2p._replace(begun_in_kernel=tl.constexpr(True))
    descriptor = TensorDescriptor(torch.zeros(1024, 64, dtype=torch.bfloat16), [1024, 64], [64, 1], [128, 64])
    return {
        "push_tiles": (broadcast, PRODUCER, X, X, 96, 4, 128),
        "pull_tiles": (local, PRODUCER, X, X, 96, 32, 4, 128),
        "copy_tiles": (broadcast, CONSUMER, X, X, 96, 32, 128, 128),
        "scatter_tiles": (p2p, PRODUCER, X, X, 96, 32, 128),
        "add_tiles": (p2p, PRODUCER, X, X, 96, 8, 128, 128),
        "pass_around": (broadcast, X, X, X, 96, 128),
        "exchange_all": (broadcast, X, X, X, 96, 128),
        "exchange_packets": (entered, WORDS, WORDS, WORDS, 4, 64),
        "multiply_as_it_comes": (broadcast, PRODUCER, X, X, X, 512, True, 64, 64, 64),
        "store_by_descriptor": (broadcast, PRODUCER, descriptor, descriptor, True, 128),
        "load_by_descriptor": (broadcast, PRODUCER, descriptor, descriptor, True, 128),
    }


@pytest.mark.parametrize("target", ["sm_90", "sm_100", "gfx942"])
def test_every_kernel_compiles(target):
    for name, arguments in launches().items():
        if "descriptor" in name and target == "gfx942":
            with pytest.raises(CompilationError) as refused:
                compile_kernel(getattr(kernels, name), arguments, {}, target)
            error = refused.value
            while error.__cause__ is not None:
                error = error.__cause__
            assert "TMA needs an NVIDIA GPU of sm_90 or newer, not gfx942" in str(error)
            continue
        forms = compile_kernel(getattr(kernels, name), arguments, {}, target)
        assert forms.keys() >= {"cubin" if target in NVIDIA else "hsaco"}, name


@pytest.mark.parametrize("target", ["sm_90", "sm_100", "gfx942"])
def test_the_kernels_that_wait_on_a_stream_compile(target):
    channel = make_channel("broadcast")
    for kernel, arguments in ((signals.wait_for_channel, (channel, 1, 2)), (signals.wait_for_all, (channel, 2, 9))):
        lines = compile_kernel(kernel, arguments, {}, target)
        assert lines.keys() >= {"cubin" if target in NVIDIA else "hsaco"}
    ptx = compile_to_ptx(signals.wait_for_all, (channel, 2, 9))
    assert sum(bool(re.search(ACQUIRE, line)) for line in ptx) == 2 * 3  # a look and a loop for each other rank


def test_unknown_targets_are_refused():
    with pytest.raises(ValueError, match="sm_80, sm_90, sm_100, gfx942, not for 'sm_1'"):
        compile_kernel(kernels.push_tiles, launches()["push_tiles"], {}, "sm_1")
    assert "sm_80" in TARGETS


@pytest.mark.parametrize("target", NVIDIA)
@pytest.mark.parametrize("name", ["push_tiles", "pull_tiles", "scatter_tiles", "pass_around", "exchange_all"])
def test_a_barrier_of_the_block_stands_between_a_tiles_stores_and_its_signal(name, target):
    lines = compile_to_ptx(getattr(kernels, name), launches()[name], target)
    releases = [number for number, line in enumerate(lines) if re.search(RELEASE, line)]
    assert releases
    for release in releases:
        # A broadcast's signals follow each other; the barrier before the first is before all.
        before = [line for line in lines[:release] if re.search(r"st\.global|bar\.sync", line)]
        assert before[-1].startswith("bar.sync"), before[-3:]
    assert not any(re.search(r"sys\.relaxed|relaxed\.sys", line) for line in lines)


@pytest.mark.parametrize("target", NVIDIA)
def test_loads_after_a_wait_use_addresses_that_it_computed(target):
    arguments = (make_channel(), PRODUCER, CONSUMER, X, X, X, X, 1024, 512, 4, 256, 128, 128, 64)
    lines = compile_to_ptx(example.all_gather_gemm, arguments, target)
    copies = addresses(lines, r"cp\.async\.cg")
    assert len(copies) > 8  # the software pipeliner has been here
    guarded = [number for number, register in copies if depends_on(lines, register, ZERO)]
    # Of the loop's two operands one is gathered; half of the prologue's and half of the loop's copies are of it.
    assert len(guarded) == len(copies) // 2
    assert follows_acquire(lines, find(lines, ZERO))


@pytest.mark.parametrize("target", NVIDIA)
def test_a_wait_inside_a_pipelined_loop_stays_before_its_loads(target):
    with_sum = launches()["multiply_as_it_comes"]
    without = tuple(False if argument is True else argument for argument in with_sum)
    loads = r"cp\.async\.c[ag]|ld\.global\.(nc\.)?(L1.*\.)?v\d\.b32"
    guarded = {}
    for name, arguments in (("with", with_sum), ("without", without)):
        lines = compile_to_ptx(kernels.multiply_as_it_comes, arguments, target, num_stages=3)
        guarded[name] = [depends_on(lines, register, ZERO) for _, register in addresses(lines, loads)]
    assert sum(guarded["with"]) == len(guarded["with"]) // 2 > 0  # a's loads, and not b's
    assert not any(guarded["without"])  # so that this test sees the difference


@pytest.mark.parametrize("target", NVIDIA)
def test_a_descriptors_store_is_done_and_fenced_before_the_signal(target):
    arguments = launches()["store_by_descriptor"]
    lines = compile_to_ptx(kernels.store_by_descriptor, arguments, target)
    store = find(lines, r"cp\.async\.bulk\.tensor.*global\.shared")
    done = find(lines, r"cp\.async\.bulk\.wait_group +0", store)
    fence = find(lines, r"fence\.proxy\.async;", done)
    barrier = find(lines, r"bar\.sync", fence)
    assert find(lines, RELEASE) > barrier > fence > done > store


@pytest.mark.parametrize("target", NVIDIA)
def test_a_descriptors_load_is_fenced_after_the_acquire(target):
    lines = compile_to_ptx(kernels.load_by_descriptor, launches()["load_by_descriptor"], target)
    load = find(lines, r"cp\.async\.bulk\.tensor.*shared.*global")
    row = re.search(r"\{ *%r\d+, (%r\d+)", lines[load].partition("[")[2])[1]
    zeros = [number for number in find_makers(lines, row) if re.search(ZERO, lines[number])]
    assert zeros
    assert all("fence.proxy.async;" in lines[zero - 3 : zero] and follows_acquire(lines, zero) for zero in zeros)


def test_the_clock_and_the_limit_are_read_only_in_long_waits():
    lines = compile_to_ptx(kernels.copy_tiles, launches()["copy_tiles"])
    first_look = find(lines, ACQUIRE)
    skips = find(lines, r"@%p\d+ bra", first_look)
    assert find(lines, r"%globaltimer", first_look) > skips
    assert find(lines, r"%globaltimer") > first_look


@pytest.mark.long
def test_a_kernels_key_in_tritons_cache_does_not_depend_on_what_was_compiled_before():
    keys = set()
    gc.unfreeze()  # kernels that were there when the tests began are listed, too (tests.conftest)
    for first in (tiles.end_call, tiles.end_unsignalled_call, kernels.exchange_packets):
        for one in gc.get_objects():
            if issubclass(type(one), JITCallable):  # forget its key
                one.hash, one.used_global_vals = None, {}
        keys.add((first.cache_key, tiles.end_call.cache_key, kernels.exchange_packets.cache_key)[1:])
    gc.freeze()
    assert len(keys) == 1

# SPDX-License-Identifier: Apache-2.0
"""Look-ups that put through NVSHMEM, without it: what is refused, whom a rank stores to, and the kernels' machine code.

NVSHMEM's device library is for GPU machines. Here its functions are stubs, which Triton links in the same way.
"""

import importlib
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric
import torch.utils._triton
import triton.language as tl
from tests.tiles.machine_code import RELEASE, find, make_channel

from stretto.ops.embedding.index_errors import IndexErrorReport
from stretto.ops.embedding.output_ring import CHANNELS
from stretto.ops.embedding.pooling_kernel import Bags, KernelTables, PoolingConfig
from stretto.ops.embedding.put.operator import STAGING_BYTES, PutSlots, require_nvshmem
from stretto.tiles.compile_only import compile_kernel

SLOT = 1 << 16
WORDS = torch.zeros(64, dtype=torch.int32)
LONGS = torch.zeros(64, dtype=torch.int64)
STUBS = {
    "nvshmemx_putmem_block": "i64, i64, i64, i32",
    "nvshmemx_putmem_signal_block": "i64, i64, i64, i64, i64, i32, i32",
    "nvshmemx_signal_op": "i64, i64, i32, i32",
    "nvshmem_signal_wait_until": "i64, i32, i64",
    "nvshmem_fence": "",
    "nvshmem_quiet": "",
}
PUT, PUT_SIGNAL, SIGNAL, AWAIT, FENCE, QUIET = (rf"call\.uni {name}," for name in STUBS)
ACQUIRE = r"ld\.global\.sys\.acquire\.b64"


@pytest.fixture(scope="module")
def kernels():
    """The module of the kernels, with the bindings as they are on a machine with a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.utils._triton, "has_triton", lambda: True)
        yield importlib.import_module("stretto.ops.embedding.put.kernel")


@pytest.fixture(scope="module")
def stubs(tmp_path_factory):
    """Functions that do nothing that a compiler may leave out."""
    path = tmp_path_factory.mktemp("stubs") / "libnvshmem_device.ll"
    path.write_text(
        "\n".join(
            f'define i32 @{name}({types}) noinline {{\n call void asm sideeffect "", "~{{memory}}"()\n ret i32 0\n}}'
            for name, types in STUBS.items()
        )
    )
    return {"libnvshmem_device": str(path)}


def exchange(kernels, dtype=torch.float32):
    return kernels.PutExchange(LONGS, LONGS, LONGS, torch.zeros(64, dtype=dtype), LONGS, WORDS)


def compile_pool(kernels, stubs, target="sm_90", bags=1, dtype=torch.float32, dim=256, weighted=False):
    """All forms of `pool_and_put`."""
    lookup = KernelTables(LONGS, 64, 1024, 65536, 100_000, *(tl.constexpr(value) for value in (dim, 256, 4, 4)))
    pooling = PoolingConfig(*(tl.constexpr(value) for value in (bags, 8 // bags, 8, False, True)))
    arguments = (
        make_channel("p2p"), exchange(kernels, dtype), lookup, pooling,
        Bags(LONGS, LONGS, torch.zeros(64) if weighted else None), torch.zeros(64, dtype=dtype), 12345,
        IndexErrorReport(WORDS, LONGS), "mixed",
    )  # fmt: skip
    options = {"num_warps": 2, "num_stages": 1, "extern_libs": stubs}
    return compile_kernel(kernels.pool_and_put, arguments, options, target)


def to_lines(forms):
    return [line.strip() for line in forms["ptx"].splitlines()]


def make_slots(addresses, rank=0):
    size = -(-8 * len(addresses) * (CHANNELS + 2) // 128) * 128 + 2 * SLOT + STAGING_BYTES
    return PutSlots(torch.zeros(size, dtype=torch.uint8), addresses, rank, SLOT, 30.0)


def test_tensors_on_cpus_are_refused():
    with pytest.raises(ValueError, match="puts between GPUs, by compiled kernels, and these tensors are on cpu"):
        require_nvshmem(torch.device("cpu"))


def test_missing_packages_are_named(monkeypatch):
    device = torch.device("cuda", 0)
    monkeypatch.setattr(symmetric, "is_nvshmem_available", lambda: False)
    with pytest.raises(RuntimeError, match="torch found no NVSHMEM"):
        require_nvshmem(device)
    monkeypatch.setattr(symmetric, "is_nvshmem_available", lambda: True)
    monkeypatch.setattr(symmetric, "get_backend", lambda _: "CUDA")
    with pytest.raises(ValueError, match=r"symmetric memory is 'CUDA': call .*set_backend\(\"NVSHMEM\"\) before"):
        require_nvshmem(device)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("forks_torch_processes")
def test_the_operators_come_without_nvshmems_bindings():
    code = "import sys, stretto.ops; print(any('nvshmem' in name for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_rank_stores_to_ranks_with_peer_access_unless_puts_are_requested():
    slots = make_slots([4096, 0, 4096 + 320, 8192], rank=2)
    assert slots.channel.addresses.tolist() == [0] * 4 + [-320, 0, 0, 3776]
    assert slots.find_peer_access(None) == (True, False, True, True)
    assert slots.find_peer_access([False, False, False, True]) == (False, False, True, True)
    with pytest.raises(ValueError, match=r"rank 2 cannot store into rank 1's memory: give False"):
        slots.find_peer_access([True] * 4)


def test_calls_take_two_outputs_in_turn():
    slots = make_slots([4096])
    first, second, third = (slots.take((4, 8), torch.float16) for _ in range(3))
    assert first.data_ptr() == third.data_ptr()
    assert abs(first.data_ptr() - second.data_ptr()) == SLOT
    assert first.shape == (4, 8)


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
@pytest.mark.parametrize("bags", [1, 8])
def test_a_put_is_ordered_after_its_staging_and_a_barrier_and_its_signal_after_a_fence(kernels, stubs, target, bags):
    lines = to_lines(compile_pool(kernels, stubs, target, bags))
    fence, last, put = find(lines, FENCE), find(lines, PUT_SIGNAL), find(lines, PUT)
    assert sum(bool(re.search(rf"{PUT}|{PUT_SIGNAL}", line)) for line in lines) == 2
    for place in (fence, put):
        before = [line for line in lines[:place] if re.search(r"st\.global|bar\.sync", line)]
        assert before[-1].startswith("bar.sync")
    assert fence < last
    assert not [line for line in lines[fence + 1 : last] if re.search(r"^(@%p\d+ )?(st\.global|bra|call)", line)]
    # The staging place is not written again before all threads have come here.
    assert lines[find(lines, r"bar\.sync|st\.global", max(last, put))].startswith("bar.sync")


def test_a_stored_slice_is_signalled_after_a_barrier(kernels, stubs):
    lines = to_lines(compile_pool(kernels, stubs))
    releases = [number for number, line in enumerate(lines) if re.search(RELEASE + r"\.add", line)]
    assert len(releases) == 1
    before = [line for line in lines[: releases[0]] if re.search(r"st\.global|bar\.sync", line)]
    assert before[-1].startswith("bar.sync")


def test_puts_are_complete_before_a_program_waits_and_are_visible_after_an_acquire(kernels, stubs):
    lines = to_lines(compile_pool(kernels, stubs))
    assert max(find(lines, PUT), find(lines, PUT_SIGNAL)) < find(lines, QUIET) < find(lines, ACQUIRE)
    assert find(lines, ACQUIRE, find(lines, QUIET)) < find(lines, AWAIT)


def test_signals_are_added_and_awaited_by_the_numbers_of_nvshmems_headers(kernels, stubs):
    text = str(compile_pool(kernels, stubs)["ttir"])
    (added,) = re.findall(r'extern_elementwise ([^{]*)\{[^}]*symbol = "nvshmemx_putmem_signal_block"', text)
    assert re.search(r"%c10_i32\w*, %\w+ *$", added.strip())
    (awaited,) = re.findall(r'extern_elementwise ([^{]*)\{[^}]*symbol = "nvshmem_signal_wait_until"', text)
    assert re.search(r", %c5_i32\w*, ", awaited)


def test_a_call_begins_with_a_word_to_every_other_rank(kernels, stubs):
    arguments = (make_channel("p2p"), exchange(kernels), LONGS, 12345, 64)
    lines = to_lines(compile_kernel(kernels.begin_putting, arguments, {"num_warps": 1, "extern_libs": stubs}, "sm_90"))
    assert sum(bool(re.search(SIGNAL, line)) for line in lines) == 3
    assert sum(bool(re.search(RELEASE + r"\.exch", line)) for line in lines) == 3
    assert find(lines, QUIET) > max(number for number, line in enumerate(lines) if re.search(SIGNAL, line))


@pytest.mark.parametrize(("dtype", "dim", "weighted"), [(torch.bfloat16, 0, True), (torch.float16, 256, False)])
def test_other_dtypes_dims_and_weights_compile(kernels, stubs, dtype, dim, weighted):
    assert "cubin" in compile_pool(kernels, stubs, bags=2, dtype=dtype, dim=dim, weighted=weighted)

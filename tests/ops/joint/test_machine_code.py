# SPDX-License-Identifier: Apache-2.0
"""What the kernel of joint schedules is compiled to, without a GPU."""

import re

import pytest
import torch
import triton.language as tl
from tests.ops.test_machine_code import NARROW, WIDE, describe_copied, find_depths, tma_loads
from tests.tiles.machine_code import (
    ACQUIRE,
    RELEASE,
    WORLD,
    compile_to_ptx,
    find,
    find_spills,
    make_channel,
)

from stretto import tiles
from stretto.ops.gemm import describe_gemm
from stretto.ops.joint.kernel import MovedRows, MoveTables, joint_gemm, joint_gemm_by_copies
from stretto.tiles.compile_only import compile_kernel, count_shared_bytes
from stretto.tiles.puts import Puts

M, N, K = 4096, 2048, 1024


def joint_arguments(blocks, is_gather, dtype=torch.bfloat16, k=K, puts=None):
    table = torch.empty(64, dtype=torch.int32)
    mapping = tiles.look_up_tiles(*[table] * 5)
    width = k if is_gather else N
    landed, x = torch.empty(M, width, dtype=dtype), torch.empty(M // WORLD if is_gather else M, k, dtype=dtype)
    inputs = x if is_gather else torch.empty(M, N, dtype=dtype)
    gemm, a, b, _ = describe_gemm(landed if is_gather else x, torch.empty(N, k, dtype=dtype), None, blocks)
    tables = MoveTables(*[table] * 4, 12, 6, 32, 16, width, 0, M, tl.constexpr(is_gather))
    out = torch.empty(M if is_gather else M // WORLD, N, dtype=dtype)
    channel = make_channel("p2p")
    moved, bias = MovedRows(inputs, landed, out), torch.empty(N, dtype=dtype)
    return channel, puts, mapping, mapping, mapping, tables, gemm, a, b, moved, bias


def copied_arguments(blocks, is_gather, dtype=torch.bfloat16):
    """The arguments of `joint_gemm_by_copies`, of whole tiles, whose loops are flattened."""
    target, x = torch.empty(M, N, dtype=dtype), torch.empty(M // WORLD, K, dtype=dtype) if is_gather else None
    a, weight = torch.empty(M, K, dtype=dtype), torch.empty(N, K, dtype=dtype)
    return describe_copied(blocks, a, weight, None, target, torch.empty(N, dtype=dtype), x=x)


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("blocks", [WIDE, NARROW])
@pytest.mark.parametrize("is_gather", [True, False])
def test_loops_beside_copy_engines_are_flattened_pipelined_and_wait_before_loads_alone(is_gather, blocks, tmp_path):
    options, arguments = (
        {"num_warps": blocks.num_warps, "num_stages": blocks.num_stages},
        copied_arguments(blocks, is_gather),
    )
    lines = compile_to_ptx(joint_gemm_by_copies, arguments, **options)
    loops = 2 if is_gather else 1  # own rows, and those that come
    assert find_depths(compile_kernel(joint_gemm_by_copies, arguments, options, "sm_90")["ttgir"]) == [1] * loops
    guarded = [is_guarded for _, is_guarded, _ in tma_loads(lines)]
    assert len(guarded) == 2 * blocks.num_stages * loops
    assert sum(guarded) == (blocks.num_stages if is_gather else 0)
    assert find_spills(lines, tmp_path) == 0
    assert count_shared_bytes(joint_gemm_by_copies, arguments, options, "sm_90") <= (227 << 10) // (
        8 // blocks.num_warps
    )


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("blocks", [WIDE._replace(num_stages=3), NARROW])
@pytest.mark.parametrize("is_gather", [True, False])
def test_tiles_load_by_tma_after_their_wait_and_spill_nothing(is_gather, blocks, tmp_path):
    options = {"num_warps": blocks.num_warps, "num_stages": blocks.num_stages}
    lines = compile_to_ptx(joint_gemm, joint_arguments(blocks, is_gather), **options)
    guarded = [is_guarded for _, is_guarded, _ in tma_loads(lines)]
    assert len(guarded) == 2 * blocks.num_stages
    assert any(guarded) == is_gather
    find(lines, ACQUIRE)
    releases = [number for number, line in enumerate(lines) if re.search(RELEASE + r"\.add", line)]
    for release in releases:
        before = [line for line in lines[:release] if re.search(r"st\.global|bar\.sync", line)]
        assert before[-1].startswith("bar.sync"), before[-3:]
    find(lines, r"st\.global\.v4\.b32")
    assert find_spills(lines, tmp_path) == 0


def make_puts():
    """The puts of a group of WORLD ranks, with four slots for each of 16 movers."""
    words, numbers = torch.zeros(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int64)
    constants = [tl.constexpr(number) for number in (WORLD, 64, 32768, 64, 1024, 4)]
    octets = torch.zeros(64, dtype=torch.uint8)
    return Puts(0, *constants, 3, 0, words, octets, numbers, numbers, numbers, *[words] * 5)


def test_puts_follow_their_stores_and_received_rows_precede_their_signal(tmp_path):
    options = {"num_warps": NARROW.num_warps, "num_stages": NARROW.num_stages}
    lines = compile_to_ptx(joint_gemm, joint_arguments(NARROW, is_gather=True, puts=make_puts()), **options)
    posts = [number for number, line in enumerate(lines) if re.search(RELEASE + r"\.exch\.b64", line)]
    assert len(posts) == 2  # a slice and a credit
    for post in posts:
        *_, barrier, first, second, third = [line for line in lines[:post] if re.search(r"st\.global|bar\.sync", line)]
        assert barrier.startswith("bar.sync")
        assert all("st.global.b64" in line for line in (first, second, third))
    releases = [number for number, line in enumerate(lines) if re.search(RELEASE + r"\.add", line)]
    for release in releases:
        before = [line for line in lines[:release] if re.search(r"st\.global|bar\.sync", line)]
        assert before[-1].startswith("bar.sync"), before[-3:]
    assert find_spills(lines, tmp_path) == 0

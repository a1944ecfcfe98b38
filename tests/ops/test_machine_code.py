"""What the operators' kernels are compiled to, without a GPU: TMA, a pipelined loop, and nothing above its wait."""

import re

import pytest
import torch
from tests.tiles.machine_code import (
    ACQUIRE,
    RELEASE,
    WORLD,
    ZERO,
    addresses,
    compile_to_ptx,
    depends_on,
    find,
    find_makers,
    follows_acquire,
    make_channel,
)

from stretto.ops.all_gather_matmul import all_gather_gemm, map_rows
from stretto.ops.gemm import Blocks, describe_gemm, look_up_blocks
from stretto.ops.matmul_reduce_scatter import gemm_reduce_scatter, map_tiles
from stretto.tiles.compile_only import compile_kernel

WIDE = Blocks(128, 256, 64, 8, 8, 4, 132)
NARROW = Blocks(128, 128, 64, 8, 4, 4, 132)
BY_POINTERS = Blocks(128, 128, 32, 8, 8, 3, 132)
FEW_ROWS = Blocks(16, 128, 128, 8, 4, 4, 132)
ROWS, N, K = 1024, 2048, 1024
TMA_LOAD = r"cp\.async\.bulk\.tensor\.2d\.shared\S*\.global"
NVIDIA = ["sm_90", "sm_100"]


def matrices(rows, n, k, transposed, dtype):
    weight = torch.empty(k, n, dtype=dtype).t() if transposed else torch.empty(n, k, dtype=dtype)
    return torch.empty(WORLD * rows, k, dtype=dtype), weight, torch.empty(n, dtype=dtype)


def gather_arguments(blocks=WIDE, rows=ROWS, n=N, k=K, transposed=False, dtype=torch.bfloat16):
    gathered, weight, bias = matrices(rows, n, k, transposed, dtype)
    _, consumer = map_rows(rows, WORLD, blocks.m, k * dtype.itemsize)
    operands = describe_gemm(gathered, weight, torch.empty(WORLD * rows, n, dtype=dtype), blocks)
    return make_channel("broadcast"), consumer, *operands, bias


def scatter_arguments(blocks=WIDE, rows=ROWS, n=N, k=K, transposed=False, dtype=torch.bfloat16):
    x, weight, bias = matrices(rows, n, k, transposed, dtype)
    gemm, a, b, _ = describe_gemm(x, weight, None, blocks)
    out, staging = torch.empty(rows, n, dtype=dtype), torch.empty(1, dtype=dtype)
    part_rows = max(1, min(blocks.m, 8192 // blocks.n))
    return make_channel("p2p"), map_tiles(rows, n, WORLD, blocks), gemm, a, b, staging, out, bias, rows, part_rows


KERNELS = {"gather": (all_gather_gemm, gather_arguments), "scatter": (gemm_reduce_scatter, scatter_arguments)}


def to_ptx(name, target="sm_90", blocks=WIDE, **sizes):
    kernel, arguments = KERNELS[name]
    options = {"num_warps": blocks.num_warps, "num_stages": blocks.num_stages}
    return compile_to_ptx(kernel, arguments(blocks, **sizes), target, **options)


def tma_loads(lines):
    """(line, whether a coordinate is made of a wait's zero, descriptor) of every load by TMA."""
    loads = []
    for number, line in enumerate(lines):
        if re.search(TMA_LOAD, line):
            descriptor, coordinates = re.search(r"\[(%rd\d+), \{([^}]*)\}\]", line).groups()
            guarded = any(depends_on(lines, register, ZERO) for register in coordinates.split(", "))
            loads.append((number, guarded, descriptor))
    return loads


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
@pytest.mark.parametrize("name", KERNELS)
def test_odd_sizes_compile_by_pointers_everywhere(name, target):
    kernel, arguments = KERNELS[name]
    for sizes in ({"k": 1021}, {"n": 2045, "transposed": True}):
        forms = compile_kernel(kernel, arguments(BY_POINTERS, **sizes), {"num_warps": 8, "num_stages": 3}, target)
        assert forms.keys() >= {"hsaco" if target == "gfx942" else "cubin"}
        assert "cp.async.bulk.tensor" not in forms.get("ptx", "")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", KERNELS)
def test_sizes_of_one_which_triton_compiles_in_compile_too(name, rank):
    kernel, arguments = KERNELS[name]
    for sizes in ({"n": 1}, {"k": 1}, {"n": 1, "k": 1}, {"rows": 1}, {"rows": 1, "n": 1, "k": 1}):
        channel, *others = arguments(FEW_ROWS, **sizes)
        compile_kernel(kernel, (channel._replace(rank=rank), *others), {"num_warps": 4, "num_stages": 2}, "sm_90")


@pytest.mark.parametrize("target", NVIDIA)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", KERNELS)
def test_the_loop_over_k_loads_by_tma_and_is_pipelined(name, transposed, target):
    lines = to_ptx(name, target, transposed=transposed)
    assert len(tma_loads(lines)) >= 2 * WIDE.num_stages  # all but one stage ahead of the loop, and one in it
    find(lines, r"wgmma\.mma_async|tcgen05\.mma")


@pytest.mark.parametrize("blocks", [NARROW, FEW_ROWS])
@pytest.mark.parametrize("name", KERNELS)
def test_smaller_tiles_load_by_tma_too(name, blocks):
    assert len(tma_loads(to_ptx(name, blocks=blocks))) == 2 * blocks.num_stages


@pytest.mark.parametrize("target", NVIDIA)
def test_gathered_rows_are_loaded_after_the_wait_and_from_coordinates_that_it_made(target):
    lines = to_ptx("gather", target)
    loads = tma_loads(lines)
    waited = {descriptor for _, guarded, descriptor in loads if guarded}
    assert len(waited) == 1  # the gathered rows' descriptor
    assert sum(descriptor in waited for _, _, descriptor in loads) == len(loads) // 2
    assert all(guarded == (descriptor in waited) for _, guarded, descriptor in loads)
    acquire = find(lines, ACQUIRE)
    assert all(number > acquire for number, _, descriptor in loads if descriptor in waited)
    row = re.search(r"\{[^,]*, (%r\d+)\}", lines[next(number for number, guarded, _ in loads if guarded)])[1]
    zeros = [number for number in find_makers(lines, row) if re.search(ZERO, lines[number])]
    assert zeros
    assert all("fence.proxy.async;" in lines[zero - 3 : zero] and follows_acquire(lines, zero) for zero in zeros)


@pytest.mark.parametrize("target", NVIDIA)
def test_partial_sums_are_signalled_after_a_barrier_and_loaded_through_the_wait(target):
    lines = to_ptx("scatter", target)
    releases = [number for number, line in enumerate(lines) if re.search(RELEASE + r"\.add", line)]
    assert releases
    for release in releases:
        before = [line for line in lines[:release] if re.search(r"st\.global|bar\.sync", line)]
        assert before[-1].startswith("bar.sync"), before[-3:]
    wide = addresses(lines, r"ld\.global\.v4\.b32")
    assert wide  # partial sums are loaded by 16 bytes
    assert all(depends_on(lines, register, ZERO) for _, register in wide)
    assert not any(guarded for _, guarded, _ in tma_loads(lines))  # x and weight wait for nobody
    assert not any(re.search(r"sys\.relaxed|relaxed\.sys", line) for line in lines)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("m", [1, 20, 64, 4096])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_entry_of_the_table_of_block_sizes_compiles(name, m, dtype):
    for by_tma in (True, False):
        for fills_gpu in (True, False) if by_tma and m > 64 and dtype == torch.bfloat16 else (True,):
            blocks = look_up_blocks(m, dtype == torch.float32, by_tma, fills_gpu, 132)
            assert bool(tma_loads(to_ptx(name, blocks=blocks, k=K if by_tma else K - 3, dtype=dtype))) == by_tma

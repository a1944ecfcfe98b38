# SPDX-License-Identifier: Apache-2.0
"""Tests of what the operators' kernels are compiled to, without a GPU: TMA, a pipelined loop,
and nothing above its wait.
"""

import re

import pytest
import torch
import triton
import triton.language as tl
from tests.tiles.machine_code import (
    ACQUIRE,
    RELEASE,
    WORLD,
    ZERO,
    addresses,
    compile_to_ptx,
    count_registers,
    depends_on,
    find,
    find_makers,
    find_spills,
    find_spills_in_products,
    follows_acquire,
    make_channel,
)
from torch.torch_version import TorchVersion

from stretto import tiles
from stretto.ops.all_gather_matmul import PushedRows, all_gather_gemm_by_programs, map_rows
from stretto.ops.config import GemmProblem, KernelConfig, Machine, default_blocks
from stretto.ops.gemm import (
    DATA_PARALLEL,
    Blocks,
    Scales,
    StreamK,
    count_column_parts,
    count_store_parts,
    describe_gemm,
    describe_matrix,
    has_power_of_two_columns,
    takes_tma,
)
from stretto.ops.joint.kernel import CopiedTiles, add_rows, joint_gemm_by_copies
from stretto.ops.operands import FP8
from stretto.ops.small_m import PacketExchange, gemm_exchange
from stretto.ops.tuning import vary_blocks
from stretto.tiles import begin_call
from stretto.tiles.compile_only import compile_kernel, count_shared_bytes

WIDE = Blocks(128, 256, 64, 2, 8, 4, 132)
NARROW = Blocks(128, 128, 64, 2, 4, 3, 264)
DEEP = Blocks(128, 128, 128, 2, 8, 3, 132)
BY_POINTERS = Blocks(128, 128, 32, 8, 8, 3, 132)
FEW_ROWS = Blocks(16, 64, 128, 1, 4, 8, 132)
ODD = Blocks(64, 96, 128, 1, 4, 4, 132)
ROWS, N, K = 1024, 2048, 1024
TMA_LOAD = r"cp\.async\.bulk\.tensor\.2d\.shared\S*\.global"
NVIDIA = ["sm_90", "sm_100"]
WORDS = torch.empty(1, dtype=torch.int32)


def fails_by_triton_3_9(reason):
    """A mark for what Triton 3.9 does worse than 3.6 to 3.8; the test fails if that is mended."""
    return pytest.mark.xfail(TorchVersion(triton.__version__) >= "3.9", strict=True, reason=reason)


def matrices(rows, n, k, transposed, dtype, out_dtype=None):
    """x, the weight, the bias, what the output is of, and the scales that fp8 has."""
    weight = torch.empty(k, n, dtype=dtype).t() if transposed else torch.empty(n, k, dtype=dtype)
    out_dtype = out_dtype or (torch.bfloat16 if dtype == FP8 else dtype)
    scales = Scales(torch.empty(WORLD * rows), torch.empty(n)) if dtype == FP8 else None
    return torch.empty(WORLD * rows, k, dtype=dtype), weight, torch.empty(n, dtype=out_dtype), out_dtype, scales


def begun_in_kernel(mode):
    """A channel whose call begins and ends in the kernel."""
    return make_channel(mode)._replace(begun_in_kernel=tl.constexpr(True))


def gather_arguments(
    blocks=WIDE,
    rows=ROWS,
    n=N,
    k=K,
    transposed=False,
    dtype=torch.bfloat16,
    transfer="copies",
    shares=DATA_PARALLEL,
    out_dtype=None,
):
    gathered, weight, bias, out_dtype, scales = matrices(rows, n, k, transposed, dtype, out_dtype)
    out, x = torch.empty(WORLD * rows, n, dtype=out_dtype), torch.empty(rows, k, dtype=dtype)
    if transfer == "copies":
        return describe_copied(blocks, gathered, weight, scales, out, bias, x=x, shares=shares)
    producer, consumer = map_rows(rows, WORLD, 16, blocks.m, k * dtype.itemsize)
    odd = not has_power_of_two_columns(blocks)
    gemm, a, b, c = describe_gemm(gathered, weight, out, blocks, scales=scales, in_parts=odd)
    channel = begun_in_kernel("broadcast")
    pushed = PushedRows(x, None if scales is None else torch.empty(rows), rows, gathered, rows, 1 << 18, 16)
    return channel, producer, consumer, gemm, shares, pushed, a, b, bias, c


def copied_arguments(
    blocks=WIDE,
    rows=ROWS,
    n=N,
    k=K,
    transposed=False,
    dtype=torch.bfloat16,
    shares=DATA_PARALLEL,
    by_tma=True,
    sums=None,
):
    """The arguments of a reduction's product. by_tma: TMA stores tiles, if it can, and so the loop is flattened."""
    x, weight, bias, out_dtype, scales = matrices(rows, n, k, transposed, dtype)
    product = torch.empty(WORLD * rows, n, dtype=sums or out_dtype)
    return describe_copied(blocks, x, weight, scales, product, bias, shares=shares, by_tma=by_tma)


def describe_copied(blocks, a, weight, scales, target, bias, *, x=None, shares=DATA_PARALLEL, by_tma=True):
    """The arguments of `joint_gemm_by_copies`. x: this rank's rows, of a gather. by_tma: as of `copied_arguments`."""
    gemm, left, right, _ = describe_gemm(a, weight, None, blocks, scales=scales)
    stored, parts = target, count_store_parts(blocks, a.element_size(), target.element_size())
    is_whole = bool(by_tma and gemm.by_tma.value and parts and takes_tma(target))
    if is_whole:
        gemm = gemm._replace(stores_by_tma=tl.constexpr(True), out_parts=tl.constexpr(parts))
        stored = describe_matrix(target, (blocks.m, blocks.n // parts))
    table, rows, is_gather = torch.empty(64, dtype=torch.int32), len(a) // WORLD, x is not None
    own = describe_matrix(x, (blocks.m, blocks.k)) if is_gather and gemm.by_tma.value and takes_tma(x) else None
    own_scales = torch.empty(rows) if is_gather and scales is not None else None
    order = CopiedTiles(
        -(-len(a) // blocks.m), -(-rows // blocks.m) if is_gather else 0, rows, 0, len(a), table,
        32 * blocks.num_warps, own_scales, tl.constexpr(is_gather), tl.constexpr(is_whole),
    )  # fmt: skip
    return make_channel("p2p"), tiles.look_up_tiles(*[table] * 5), order, gemm, shares, own, left, right, stored, bias


def sum_arguments(sources=3, totals=(torch.bfloat16, torch.bfloat16)):
    """The arguments of `add_rows`."""
    size = 64 * N
    return (
        (torch.empty(size, dtype=torch.bfloat16),) * sources,
        tuple(torch.empty(size, dtype=one) for one in totals),
        torch.empty(N, dtype=torch.bfloat16),
        N,
        size,
    )


def exchange_arguments(
    blocks=FEW_ROWS, rows=4, n=N, k=K, transposed=False, dtype=torch.bfloat16, form="one-shot", shares=False
):
    x, weight, bias, out_dtype, scales = matrices(rows, n, k, transposed, dtype)
    gemm, a, b, _ = describe_gemm(x, weight, None, blocks, scales=scales, in_parts=True)
    rows = rows if form == "scatter" else WORLD * rows
    out, staging = torch.empty(rows, n, dtype=out_dtype), torch.empty(1, dtype=torch.int32)
    dealt = StreamK(0, 16, 16, torch.empty(1) if shares else None, WORDS)
    chunk = max(256, 64 * blocks.num_warps)  # a packet a thread, also where warps have 64
    exchange = PacketExchange(rows, 1 << 20, tl.constexpr(form), tl.constexpr(chunk), tl.constexpr(n % 8 == 0))
    return begun_in_kernel("p2p"), gemm, dealt, exchange, a, b, staging, bias, out


KERNELS = {
    "gather": (joint_gemm_by_copies, gather_arguments),
    "exchange": (gemm_exchange, exchange_arguments),
    "copied": (joint_gemm_by_copies, copied_arguments),
}
OPERATORS = {
    "gather": "all_gather_matmul",
    "exchange": "matmul_all_reduce",
    "copied": "matmul_reduce_scatter",
}
LARGE = ["gather", "copied"]
SHARED = StreamK(132, 16, 8, torch.empty(1), WORDS)  # of the last wave's tiles, in halves
LOOPS = {"gather": 2, "exchange": 1, "copied": 1}
"""Loops over k: a gather's by copies over own rows, and over those that come."""


def find_kernel(name, transfer="copies", **_):
    """The kernel of that name: a gather has one for rows that copy engines move, and one whose programs move them."""
    return all_gather_gemm_by_programs if transfer == "programs" else KERNELS[name][0]


def to_ptx(name, target="sm_90", blocks=WIDE, **sizes):
    kernel, arguments = find_kernel(name, **sizes), KERNELS[name][1]
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


@pytest.mark.sampled(3)
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
@pytest.mark.parametrize("name", KERNELS)
def test_odd_sizes_compile_by_pointers_everywhere(name, target):
    kernel, arguments = KERNELS[name]
    for sizes in ({"k": 1021}, {"n": 2045, "transposed": True}):
        forms = compile_kernel(kernel, arguments(BY_POINTERS, **sizes), {"num_warps": 8, "num_stages": 3}, target)
        assert forms.keys() >= {"hsaco" if target == "gfx942" else "cubin"}
        assert "cp.async.bulk.tensor" not in forms.get("ptx", "")


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
@pytest.mark.parametrize("name", KERNELS)
def test_sizes_of_one_which_triton_compiles_in_compile_too(name, rank):
    kernel, arguments = KERNELS[name]
    for sizes in ({"n": 1}, {"k": 1}, {"n": 1, "k": 1}, {"rows": 1}, {"rows": 1, "n": 1, "k": 1}):
        channel, *others = arguments(FEW_ROWS, **sizes)
        first = rank if isinstance(channel, int) else channel._replace(rank=rank)
        compile_kernel(kernel, (first, *others), {"num_warps": 4, "num_stages": 2}, "sm_90")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("target", NVIDIA)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", LARGE)
def test_the_loop_over_k_loads_by_tma_and_is_pipelined(name, transposed, target):
    lines = to_ptx(name, target, transposed=transposed)
    # All but one stage ahead of each loop, and one in it.
    assert len(tma_loads(lines)) >= 2 * WIDE.num_stages * LOOPS[name]
    find(lines, r"wgmma\.mma_async|tcgen05\.mma")


@pytest.mark.parametrize("blocks", [NARROW, FEW_ROWS])
@pytest.mark.parametrize("name", KERNELS)
def test_smaller_tiles_load_by_tma_too(name, blocks):
    loads = 1 + (count_column_parts(blocks) if name == "exchange" else 1)
    assert len(tma_loads(to_ptx(name, blocks=blocks))) == loads * blocks.num_stages * LOOPS[name]


@pytest.mark.parametrize("transfer", ["copies", "programs"])  # polls, and waits
@pytest.mark.parametrize("target", NVIDIA)
def test_gathered_rows_are_loaded_after_the_wait_and_from_coordinates_that_it_made(target, transfer):
    lines = to_ptx("gather", target, transfer=transfer)
    loads = tma_loads(lines)
    waited = {descriptor for _, guarded, descriptor in loads if guarded}
    assert len(waited) == 1  # the gathered rows' descriptor
    of_loops = 1 if transfer == "programs" else 2  # of which own rows' has as many loads
    assert sum(descriptor in waited for _, _, descriptor in loads) == len(loads) // (2 * of_loops)
    assert all(guarded == (descriptor in waited) for _, guarded, descriptor in loads)
    acquire = find(lines, ACQUIRE)
    assert all(number > acquire for number, _, descriptor in loads if descriptor in waited)
    row = re.search(r"\{[^,]*, (%r\d+)\}", lines[next(number for number, guarded, _ in loads if guarded)])[1]
    zeros = [number for number in find_makers(lines, row) if re.search(ZERO, lines[number])]
    assert zeros
    assert all("fence.proxy.async;" in lines[zero - 3 : zero] and follows_acquire(lines, zero) for zero in zeros)


def find_depths(ttgir):
    """In how many loops each product stands: one, if its loop is flattened."""
    loops, depths = [], []
    for line in ttgir.splitlines():
        indent = len(line) - len(line.lstrip())
        while loops and indent <= loops[-1] and line.strip():
            loops.pop()
        if "warp_group_dot " in line:
            depths.append(len(loops))
        if "scf.for" in line:
            loops.append(indent)
    return depths


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("gather", WIDE),
        ("gather", NARROW),
        ("copied", WIDE),
        ("copied", NARROW),
    ],
)
def test_loops_over_whole_tiles_are_flattened_and_pipelined(name, blocks):
    kernel, arguments = KERNELS[name][0], KERNELS[name][1](blocks)
    options = {"num_warps": blocks.num_warps, "num_stages": blocks.num_stages}
    forms = compile_kernel(kernel, arguments, options, "sm_90")
    assert find_depths(forms["ttgir"]) == [1] * LOOPS[name]
    loads = tma_loads(to_ptx(name, blocks=blocks))
    assert len(loads) == 2 * blocks.num_stages * LOOPS[name]
    assert sum(guarded for _, guarded, _ in loads) == (blocks.num_stages if name == "gather" else 0)


def test_sums_in_fp32_fit_beside_the_loads_by_pointers_too():
    blocks = WIDE._replace(num_stages=3)
    arguments = copied_arguments(blocks, k=K - 3, sums=torch.float32)
    options = {"num_warps": blocks.num_warps, "num_stages": blocks.num_stages}
    assert count_shared_bytes(joint_gemm_by_copies, arguments, options, "sm_90") + 1024 <= 228 << 10


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize("blocks", [pytest.param(WIDE, marks=pytest.mark.long), NARROW])
def test_sums_in_fp32_of_16_bit_operands_are_stored_by_tma_beside_the_loads(blocks, tmp_path):
    kernel, arguments = joint_gemm_by_copies, copied_arguments(blocks, sums=torch.float32)
    options = {"num_warps": blocks.num_warps, "num_stages": blocks.num_stages}
    assert count_shared_bytes(kernel, arguments, options, "sm_90") + 1024 <= (228 << 10) * 132 // blocks.programs
    lines = compile_to_ptx(kernel, arguments, **options)
    assert sum("cp.async.bulk.tensor.2d.global" in line for line in lines) >= 4
    assert find_spills(lines, tmp_path) == 0


@pytest.mark.parametrize("by_tma", [False, True])
@pytest.mark.parametrize("target", NVIDIA)
def test_threads_count_a_tile_after_their_stores_and_without_a_barrier(target, by_tma):
    lines = to_ptx("copied", target, by_tma=by_tma)
    counts = [number for number, line in enumerate(lines) if re.search(r"red\.release\.gpu\.global\.add", line)]
    assert len(counts) >= 2  # of the tile before, and of this one
    for count in counts:
        assert lines[count].startswith("@yes")
        assert any("setp.ne.s32 yes" in line for line in lines[count - 4 : count])
        assert ("@yes cp.async.bulk.wait_group 0;" in lines[count - 3 : count]) == by_tma
        assert not any(line.startswith("bar.sync") for line in lines[count - 3 : count])
    store = r"cp\.async\.bulk\.tensor\.2d\.global" if by_tma else r"st\.global"
    stores = [number for number, line in enumerate(lines) if re.search(store, line)]
    loop = [number for number in stores if counts[0] < number < counts[1]]
    assert loop  # one count before the loop's stores, the other after
    assert not any(re.search(RELEASE, line) for line in lines)  # no other signal is sent


def test_sums_go_by_16_bytes_and_leave_a_place_beside_the_product(tmp_path):
    lines = compile_to_ptx(add_rows, sum_arguments(), num_warps=4)
    for wide in (r"ld\.global\.v4\.b32", r"st\.global\.v4\.b32"):
        find(lines, wide)
    registers = 128 * count_registers(lines, tmp_path)
    for blocks in (WIDE, NARROW):
        programs, threads = blocks.programs // 132, 32 * blocks.num_warps
        product = threads * programs * count_registers(to_ptx("copied", blocks=blocks), tmp_path)
        assert product + registers <= 1 << 16


def test_programs_move_rows_by_16_bytes_and_signal_after_a_barrier():
    lines = to_ptx("gather", transfer="programs")
    assert addresses(lines, r"ld\.global\.v4\.b32")
    assert addresses(lines, r"st\.global\.v4\.b32")
    releases = [number for number, line in enumerate(lines) if re.search(RELEASE, line)]
    assert releases
    for release in releases:
        before = [line for line in lines[:release] if re.search(r"st\.global|bar\.sync", line)]
        assert before[-1].startswith("bar.sync"), before[-3:]


@pytest.mark.parametrize("form", ["one-shot", "two-shot", "scatter"])
@pytest.mark.parametrize(("n", "store"), [(N, "st.global.v2.b64"), (N - 4, "st.global.b32")])
def test_packets_are_stored_whole_four_at_a_time_and_polled_again(form, n, store):
    lines = to_ptx("exchange", blocks=FEW_ROWS, form=form, n=n)
    assert any(store in line for line in lines)
    # At each rank's packets, before and in the loop, of two shots also at the owner's; and at the failure flag.
    looks = [line for line in lines if re.search(r"ld\.volatile\.global\S*\.b32", line)]
    assert len(looks) >= 2 * 4 + (2 if form == "two-shot" else 0) + 1
    # Not by assembly of ours, which every thread executes that has a copy of an element: a packet is stored once.
    assert not any("st.relaxed" in line for line in lines)
    assert not any(re.search(RELEASE + r"\.add", line) for line in lines)  # no signal: packets are their own


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("blocks", [ODD, ODD._replace(m=16, k=256, num_stages=3), ODD._replace(n=224, k=64)])
@pytest.mark.parametrize(("name", "transfer"), [("exchange", {}), ("gather", {"transfer": "programs"})])
def test_tiles_of_several_parts_load_few_rows_once_a_step(name, transfer, blocks, transposed, tmp_path):
    parts, stages = blocks.n // 32, blocks.num_stages
    lines = to_ptx(name, blocks=blocks, transposed=transposed, **transfer)
    loads = [descriptor for _, _, descriptor in tma_loads(lines)]
    counts = sorted(loads.count(descriptor) for descriptor in set(loads))
    assert counts == [stages, parts * stages]  # of x, and of the weight
    assert not find_spills_in_products(lines, tmp_path)
    if not transfer:  # programs that move rows, too, keep what the moves need across them, outside of the loop
        assert find_spills(lines, tmp_path) == 0


@pytest.mark.sampled(4)
@pytest.mark.parametrize("n", [12288, 24576, 28672, 53248])
@pytest.mark.parametrize("m", [1, 32, 64])
@pytest.mark.parametrize("name", ["exchange", "gather"])
def test_few_rows_tiles_fit_into_shared_memory(name, m, n):
    blocks = default_blocks(
        GemmProblem(OPERATORS[name], m, n, K, torch.bfloat16, False, WORLD), Machine(132, True, True)
    )
    sizes = {"transfer": "programs"} if name == "gather" else {}
    kernel, arguments = find_kernel(name, **sizes), KERNELS[name][1]
    options = {"num_warps": blocks.num_warps, "num_stages": blocks.num_stages}
    assert count_shared_bytes(kernel, arguments(blocks, **sizes), options, "sm_90") + 1024 <= 228 << 10


def test_steps_that_programs_share_are_joined_after_a_barrier_and_an_acquire():
    lines = to_ptx("exchange", blocks=FEW_ROWS, shares=True)
    joined = find(lines, r"atom\.\S*acq_rel\S*\.add")
    before = [line for line in lines[:joined] if re.search(r"st\.global|bar\.sync", line)]
    assert before[-1].startswith("bar.sync")


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "sizes", "loops"), [("gather", {}, 2), ("gather", {"transfer": "programs"}, 1), ("copied", {}, 2)]
)
def test_tiles_that_are_cut_cost_the_loop_nothing(name, sizes, loops, tmp_path):
    sizes = sizes | {"shares": SHARED}
    lines = to_ptx(name, **sizes)
    assert len(tma_loads(lines)) == 2 * WIDE.num_stages * loops
    joins = [number for number, line in enumerate(lines) if re.search(r"atom\.\S*acq_rel\S*\.add", line)]
    assert joins
    for join in joins:
        before = [line for line in lines[:join] if re.search(r"st\.global|bar\.sync", line)]
        assert before[-1].startswith("bar.sync")
    assert find_spills(lines, tmp_path) <= 200  # registers of the epilogue's addresses, outside of the loop over k
    kernel, arguments = find_kernel(name, **sizes), KERNELS[name][1]
    options = {"num_warps": WIDE.num_warps, "num_stages": WIDE.num_stages}
    assert count_shared_bytes(kernel, arguments(WIDE, **sizes), options, "sm_90") + 1024 <= 228 << 10


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", KERNELS)
def test_no_kernel_of_the_sizes_that_count_spills(name, tmp_path):
    for blocks in (WIDE, NARROW) if name in LARGE else (FEW_ROWS, FEW_ROWS._replace(m=64, num_stages=6)):
        assert find_spills(to_ptx(name, blocks=blocks), tmp_path) == 0


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("m", [1, 20, 64, 4096])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_default_tiles_of_any_size_compile(name, m, dtype):
    operator = OPERATORS[name]
    for by_tma in (True, False):
        blocks = default_blocks(GemmProblem(operator, m, N, K, dtype, False, WORLD), Machine(132, by_tma, True))
        if name in LARGE:
            blocks = KernelConfig(blocks=blocks).with_power_of_two_tiles().blocks
        assert bool(tma_loads(to_ptx(name, blocks=blocks, k=K if by_tma else K - 3, dtype=dtype))) == by_tma


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "m"),
    [
        ("exchange", 1),
        pytest.param("exchange", 64, marks=pytest.mark.long),
        ("gather", 512),
        pytest.param("copied", 512, marks=pytest.mark.long),
        *(pytest.param(name, 16384, marks=pytest.mark.exhaustive) for name in LARGE),
        *(
            pytest.param(name, m, marks=pytest.mark.exhaustive)
            for name, m in (("exchange", 20), *((name, 4096) for name in LARGE))
        ),
    ],
)
def test_fp8_goes_to_tensor_cores_and_spills_nothing(name, m, tmp_path):
    blocks = default_blocks(GemmProblem(OPERATORS[name], m, 12288, 12288, FP8, False, WORLD), Machine(132, True, True))
    lines = to_ptx(name, blocks=blocks, dtype=FP8)
    assert tma_loads(lines)
    products = {match.group(1) for line in lines if (match := re.search(r"(?:wgmma|mma)\S*\.f32\.(\w+)\.", line))}
    assert products == {"e4m3" if blocks.m >= 64 else "f16"}  # fewer rows are no such instruction's
    assert find_spills(lines, tmp_path) == 0
    kernel, arguments = KERNELS[name]
    options = {"num_warps": blocks.num_warps, "num_stages": blocks.num_stages}
    assert count_shared_bytes(kernel, arguments(blocks, dtype=FP8), options, "sm_90") + 1024 <= 228 << 10


@pytest.mark.long
def test_fp32_products_of_fp8_are_stored_beside_the_loads(tmp_path):
    call = GemmProblem("all_gather_matmul", 4096, 12288, 12288, FP8, False, WORLD)
    for blocks in {plan.blocks._replace(group_rows=1) for plan in vary_blocks(call, Machine(132, True, True))}:
        arguments = gather_arguments(blocks, dtype=FP8, out_dtype=torch.float32)
        options = {"num_warps": blocks.num_warps, "num_stages": blocks.num_stages}
        shared = count_shared_bytes(joint_gemm_by_copies, arguments, options, "sm_90")
        assert shared + 1024 <= (228 << 10) * 132 // blocks.programs, blocks
        # 64 x 256 in four warps: of two registers.
        assert find_spills(compile_to_ptx(joint_gemm_by_copies, arguments, **options), tmp_path) <= 8, blocks


@pytest.mark.parametrize("name", LARGE)
def test_the_tuners_candidates_compile_at_typical_sizes(name):
    operator = OPERATORS[name]
    call = GemmProblem(operator, 8192, 12288, 12288, torch.bfloat16, False, WORLD)
    for blocks in {plan.blocks._replace(group_rows=8) for plan in vary_blocks(call, Machine(132, True, True))}:
        assert tma_loads(to_ptx(name, blocks=blocks))


@pytest.mark.parametrize("transfer", ["copies", "programs"])
@pytest.mark.parametrize(("blocks", "shares"), [(WIDE, 1), (DEEP, 1), (NARROW, 2)])
@pytest.mark.parametrize("name", LARGE)
def test_as_many_programs_fit_on_a_multiprocessor_as_blocks_are_made_for(name, blocks, shares, transfer):
    sizes = {"transfer": transfer} if name == "gather" else {}
    kernel, arguments = find_kernel(name, **sizes), KERNELS[name][1]
    options = {"num_warps": blocks.num_warps, "num_stages": blocks.num_stages}
    size = count_shared_bytes(kernel, arguments(blocks, **sizes), options, "sm_90")
    assert shares * (size + 1024) <= 228 << 10  # a block takes 1 KB more than it asks for


@pytest.mark.parametrize(
    "blocks",
    [
        WIDE,
        pytest.param(
            NARROW,
            marks=fails_by_triton_3_9(
                "two programs take 512 bytes more, and begin_call would need 56 more than are left"
            ),
        ),
    ],
)
def test_a_gather_by_copies_leaves_room_on_every_multiprocessor_for_the_beginning_of_another_call(blocks, tmp_path):
    """Its programs fill the GPU and wait for copies of peers, which begin once the peer's `begin_call` has run."""
    kernel, arguments = KERNELS["gather"][0], KERNELS["gather"][1](blocks)
    options = {"num_warps": blocks.num_warps, "num_stages": blocks.num_stages}
    table = torch.empty(2, WORLD, 32, dtype=torch.int32)
    beginning = make_channel(), None, table, 0, True, 32
    programs = blocks.programs // 132
    registers = count_registers(compile_to_ptx(kernel, arguments, **options), tmp_path) * 32 * blocks.num_warps
    others = count_registers(compile_to_ptx(begin_call, beginning, num_warps=4), tmp_path) * 128
    assert programs * registers + others <= 64 << 10
    shared = count_shared_bytes(kernel, arguments, options, "sm_90") + 1024
    assert programs * shared + count_shared_bytes(begin_call, beginning, {"num_warps": 4}, "sm_90") + 1024 <= 228 << 10

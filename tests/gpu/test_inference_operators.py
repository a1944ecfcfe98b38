# SPDX-License-Identifier: Apache-2.0
"""Operators of inference on GPUs: beside fp64, in graphs, and the same bits in every batch, tile and world."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from stretto import ops
from stretto.ops.gemm import Blocks
from stretto.ops.invariant.kernels import (
    Tile,
    choose_blocks,
    find_wide,
    is_for_streaming,
    multiply_in_parts,
    multiply_leaves,
)
from stretto.ops.invariant.matmul import add_by_tree
from stretto.ops.small_m import choose_streaming
from tests.differences import largest
from tests.gpu.test_operators import poison
from tests.ops.decoding.sequences import Batch, make_batch

BF16 = torch.bfloat16
pytestmark = pytest.mark.ranks(2, own=(2, 4, 8), among=(2, 4, 8))
EPS = 1e-5


def rarely(*values: Any) -> Any:
    """A case that compiles much, of a mechanism that other cases show."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def draw(seed: int, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """The same numbers on every rank, of about 1, with a row and a column of large ones."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    numbers = torch.randn(*shape, generator=generator, device="cuda")
    numbers[..., 0] *= 8
    return numbers.to(dtype)


def cut(whole: Tensor) -> Tensor:
    """This rank's part of the last dim."""
    return whole.chunk(dist.get_world_size(), -1)[dist.get_rank()].contiguous()


def relative_error(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).abs().max() / (expected.abs().max() or 1)).item()


def normalize(total: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """RMS norm in fp64 without a bias, layer norm with one."""
    total, size = total.double(), (total.shape[-1],)
    if bias is None:
        return torch.nn.functional.rms_norm(total, size, weight.double(), EPS)
    return torch.nn.functional.layer_norm(total, size, weight.double(), bias.double(), EPS)


def list_launches(call: Callable[[], object]) -> list[str]:
    """The names of the kernels, copies and fills that a call runs on the GPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    on_gpu = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return [event.name for event in on_gpu if not event.is_user_annotation]


@torch.no_grad()
def compare_norms(kind: str, m: int, n: int, k: int, dtype: torch.dtype) -> dict[str, Any]:
    """Errors of each form, whether ranks, replays and separate calls have the same bits."""
    world, found = dist.get_world_size(), {}
    x, weight, residual = draw(1, m, k, dtype=dtype), draw(2, n, k, dtype=dtype) / k**0.5, draw(3, m, n, dtype=dtype)
    norm_weight, bias = draw(4, n, dtype=torch.float32), draw(5, n, dtype=dtype)
    given = draw(6, n) if kind == "layer" else None
    own_x, own_weight = cut(x), cut(weight)
    total = residual.double() + x.double() @ weight.double().t() + bias.double()

    options: dict[str, Any] = {"eps": EPS, "norm": kind, "bias": bias, "norm_bias": given}
    partial = own_x @ own_weight.t()
    processors = torch.cuda.get_device_properties().multi_processor_count
    streaming = choose_streaming(m, n, k // world, processors) if is_for_streaming(own_x, own_weight) else None
    calls: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
        "fused": lambda: ops.matmul_all_reduce_norm(
            own_x, own_weight, residual, norm_weight, implementation=ops.KernelConfig(exchange="packets"), **options
        ),
        "streamed": lambda: ops.matmul_all_reduce_norm(
            own_x, own_weight, residual, norm_weight,
            implementation=ops.KernelConfig(exchange="packets", blocks=streaming), **options
        ),
        "two shots": lambda: ops.matmul_all_reduce_norm(
            own_x, own_weight, residual, norm_weight,
            implementation=ops.KernelConfig(exchange="packets", shots=2), **options
        ),
        "invariant": lambda: ops.matmul_all_reduce_norm(
            own_x, own_weight, residual, norm_weight, implementation="kernel", invariant=True, **options
        ),
        "sum": lambda: ops.all_reduce_norm(partial, residual, norm_weight, implementation="kernel", **options),
        "invariant sum": lambda: ops.all_reduce_norm(
            partial, residual, norm_weight, implementation="kernel", invariant=True, **options
        ),
    }  # fmt: skip
    for name, call in calls.items():
        normed, added = call()
        errors = relative_error(added, total), relative_error(normed, normalize(added, norm_weight, given))
        first = normed.clone(), added.clone()
        call()  # the first one after kernels were loaded sets a longer limit of waits
        launches = list_launches(call)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again = call()
        same = True
        for turn in range(5):
            if turn % world == dist.get_rank():
                torch.cuda._sleep(200_000)
            graph.replay()
            same &= all(torch.equal(one, other) for one, other in zip(again, first, strict=True))
        poison()
        found[name] = *errors, same, launches, normed.view(torch.uint8).long().sum().item()
    return found


@pytest.mark.parametrize(
    ("kind", "m", "n", "k", "dtype"),
    [
        ("rms", 64, 4096, 14336, BF16),
        ("layer", 5, 130, 256, torch.float32),  # leaves of other k than multiples of 16 are copied first
        rarely("rms", 1, 4096, 4096, BF16),
        rarely("layer", 7, 1000, 512, torch.float16),
        rarely("rms", 5, 130, 512, torch.float32),
    ],
    ids=str,
)
def test_product_sum_and_norm(
    run_ranks: Callable[..., list[Any]], world: int, kind: str, m: int, n: int, k: int, dtype: torch.dtype
) -> None:
    results = run_ranks(world, compare_norms, kind, m, n, k, dtype)
    limit = {BF16: 2**-7, torch.float16: 2**-9, torch.float32: 1e-5}[dtype]
    for name, (added, normed, same, launches, _) in results[0].items():
        assert added < limit, (name, added)
        assert normed < limit, (name, normed)
        assert same, f"{name}: a replay had other bits"
        assert len(launches) <= (1 if "sum" in name else 2), (name, launches)
        assert len({each[name][4] for each in results}) == 1, f"{name}: ranks have different bits"


@torch.no_grad()
def multiply_few(m: int, n: int, k: int) -> tuple[float, float]:
    """Errors of one rank's sum and norm."""
    x, weight, residual = draw(1, m, k), draw(2, n, k) / k**0.5, draw(3, m, n)
    norm_weight, bias = draw(4, n), draw(5, n)
    normed, added = ops.matmul_all_reduce_norm(x, weight, residual, norm_weight, eps=EPS, bias=bias)
    total = residual.double() + x.double() @ weight.double().t() + bias.double()
    return relative_error(added, total), relative_error(normed, normalize(added, norm_weight, None))


@pytest.mark.ranks(1, own=(1,), among=(1,))
@pytest.mark.parametrize(("m", "n", "k"), [(1, 4096, 14336), (16, 1000, 4096)])
def test_one_rank_streams_few_rows(run_ranks: Callable[..., list[Any]], world: int, m: int, n: int, k: int) -> None:
    assert largest(run_ranks(world, multiply_few, m, n, k)[0]) < 2**-7


@torch.no_grad()
def compare_ranks(n: int, k: int, dtype: torch.dtype, *, tries_all: bool) -> dict[str, bool]:
    """Whether invariant calls have the bits of one rank's product of the whole k, for many m, tiles and layouts.

    tries_all: every tile, not only the smallest and the largest.
    """
    world, rank, same = dist.get_world_size(), dist.get_rank(), {}
    whole, weight = draw(1, 768, k, dtype=dtype), draw(2, n, k, dtype=dtype) / k**0.5
    bias, residual, norm_weight = draw(3, n, dtype=dtype), draw(4, 768, n, dtype=dtype), draw(5, n, dtype=torch.float32)
    own, own_weight = cut(whole), cut(weight)
    expected = ops.invariant_matmul(whole, weight, bias=bias, leaves=8)
    added = (residual.float() + expected.float()).to(dtype)
    normed = ops.invariant_norm(added, norm_weight, eps=EPS)
    for m in (1, 2, 8, 63, 64, 65, 200, 768) if tries_all else (1, 8, 65, 768):
        rows = slice(768 - m, 768) if m < 768 else slice(0, 768)
        same[f"rows {m}"] = torch.equal(ops.invariant_matmul(whole[rows], weight, bias=bias, leaves=8), expected[rows])
        if m <= 200:  # of 8 ranks in several parts
            options = {"invariant": True, "implementation": "kernel"}
            found = ops.matmul_all_reduce(own[rows], own_weight, bias=bias, **options)
            same[f"all-reduce {m}"] = torch.equal(found, expected[rows])
            both = ops.matmul_all_reduce_norm(
                own[rows], own_weight, residual[rows], norm_weight, eps=EPS, bias=bias, **options
            )
            same[f"sum {m}"], same[f"norm {m}"] = (
                torch.equal(both[1], added[rows]), torch.equal(both[0], normed[rows])
            )  # fmt: skip
            if m % world == 0:
                part = ops.matmul_reduce_scatter(own[rows], own_weight, bias=bias, **options)
                same[f"reduce-scatter {m}"] = torch.equal(part, expected[rows].chunk(world)[rank])
    plain = ops.invariant_matmul(whole, weight)
    same["columns"] = torch.equal(ops.invariant_matmul(whole, weight[: n // 2].contiguous()), plain[:, : n // 2])
    same["transposed"] = torch.equal(ops.invariant_matmul(whole, weight.t().contiguous().t()), plain)
    for leaves in (1, 8):
        right = multiply_leaves(whole, weight, None, leaves, torch.float32)
        for m in (8, 64, 768):
            first = choose_blocks(m, n, k // leaves, dtype.itemsize, 132)
            shapes = [(first.m, width) for width in (16, 32, 64, 128)] + [(64, 256), (128, 64)]
            turned = [(height, width) for height in (16, 64) for width in (64, 128) if m <= 64]
            for place, (height, width) in enumerate(
                [*shapes, *turned] if tries_all else [shapes[0], (64, 256), *turned]
            ):
                is_turned = place >= (len(shapes) if tries_all else 2)
                for depth in (16, 32, 64, 128) if tries_all else (16, 64):
                    if depth > first.k or (height + width) * depth * dtype.itemsize * 2 > 200_000:
                        continue
                    tile = Tile(first._replace(m=height, n=width, k=depth, num_stages=2), 1, is_turned)
                    found = multiply_leaves(whole[:m], weight, None, leaves, torch.float32, tile)
                    same[f"{leaves} leaves, {tile}"] = torch.equal(found, right[:m])
    few = Blocks(16, 64, 16, 1, 4, 3, 0)
    for m, tile in ((768, None), *((8, Tile(few, parts, is_turned=True)) for parts in (2, 4, 8))):
        sums = multiply_in_parts(whole[:m], weight, 8, tile)
        same[f"{len(sums)} parts of {m}"] = torch.equal(add_by_tree(list(sums)), right[:m])
    return same


@pytest.mark.parametrize(
    ("n", "k", "dtype", "tries_all"),
    [
        (1024, 4096, BF16, False),
        rarely(1024, 4096, BF16, True),
        rarely(520, 1536, torch.float16, True),
        rarely(96, 200, BF16, True),
    ],
    ids=str,
)
def test_bits_depend_neither_on_rows_nor_tiles_nor_ranks(
    run_ranks: Callable[..., list[Any]], world: int, n: int, k: int, dtype: torch.dtype, tries_all: bool
) -> None:
    for same in run_ranks(world, compare_ranks, n, k, dtype, tries_all=tries_all):
        assert all(same.values()), [name for name, equal in same.items() if not equal]


@torch.no_grad()
def compare_wide() -> list[str]:
    """Products of a whole k whose rows have other bits in wide tiles of many rows than among few."""
    wrong = []
    for n, k in ((12288, 512), (8200, 200)):
        x, weight = draw(1, 2048, k), draw(2, n, k) / k**0.5
        assert find_wide(x, weight) is not None
        whole = ops.invariant_matmul(x, weight)
        expected = x.double() @ weight.double().t()
        if not relative_error(whole, expected) <= 2**-7:
            wrong.append(f"{n} x {k}: wrong")
        for first, last in ((0, 1), (100, 164), (1800, 2000)):  # of these none is wide
            if not torch.equal(ops.invariant_matmul(x[first:last].contiguous(), weight), whole[first:last]):
                wrong.append(f"{n} x {k}: rows {first} to {last}")
    return wrong


@pytest.mark.ranks(1, own=(1,), among=(1,))
def test_wide_tiles_have_the_bits_of_few_rows(run_ranks: Callable[..., list[Any]], world: int) -> None:
    assert run_ranks(world, compare_wide) == [[]]


@torch.no_grad()
def compare_attention(batch: Batch, dtype: torch.dtype) -> list[float]:
    """Errors beside torch's, eagerly, and replayed with other lengths."""
    tensors = make_batch(batch, dtype, "cuda")
    wide = make_batch(batch, dtype, "cuda", wide=True)
    options = {"window": batch.window, "query_offsets": tensors.offsets}
    errors = []
    for invariant in (False, True):
        out = ops.paged_attention(*tensors.operands, implementation="kernel", invariant=invariant, **options)
        expected = ops.paged_attention(*wide.operands, implementation="library", **options)
        errors.append(relative_error(out, expected.double()))
        if tensors.offsets is not None:
            continue
        graph, lengths = torch.cuda.CUDAGraph(), tensors.operands[4]
        with torch.cuda.graph(graph):
            again = ops.paged_attention(*tensors.operands, implementation="kernel", invariant=invariant, **options)
        lengths.sub_(1).clamp_(min=0)
        graph.replay()
        expected = ops.paged_attention(*wide.operands[:4], lengths, implementation="library", **options)
        errors.append(relative_error(again, expected.double()))
        lengths.copy_(wide.operands[4])
    return errors


BATCHES = [
    Batch([1] * 64, [1024] * 64, heads=32, kv_heads=8, size=128, page=16),
    Batch([1] * 5, [1, 17, 0, 4096, 300], heads=32, kv_heads=8, size=128, page=16),
    Batch([1, 300, 1, 17, 2], [900, 300, 1, 700, 2], heads=32, kv_heads=8, size=128, page=64),
    Batch([1, 130, 1, 64], [900, 400, 1, 64], heads=28, kv_heads=4, size=80, page=16, window=100),
    Batch([40, 1], [40, 513], heads=8, kv_heads=8, size=256, page=32),
    Batch([40, 1], [40, 513], heads=12, kv_heads=1, size=64, page=128),
]


@pytest.mark.ranks(1, own=(1,), among=(1,))
@pytest.mark.parametrize(
    ("batch", "dtype"),
    [
        pytest.param(batch, dtype, marks=[] if dtype == usual else [pytest.mark.exhaustive])
        for batch, usual in zip(BATCHES, (BF16, None, BF16, torch.float16, BF16, None), strict=True)
        for dtype in (BF16, torch.float16, torch.float32)
    ],
    ids=lambda one: (
        f"{one.heads} heads of {one.size}, {sum(one.counts)} tokens" if isinstance(one, Batch) else str(one)
    ),
)
def test_paged_attention(run_ranks: Callable[..., list[Any]], world: int, batch: Batch, dtype: torch.dtype) -> None:
    limit = {BF16: 2**-6, torch.float16: 2**-9, torch.float32: 1e-5}[dtype]
    (errors,) = run_ranks(world, compare_attention, batch, dtype)
    assert largest(errors) < limit, errors


@torch.no_grad()
def compare_mixes(size: int, heads: int, kv_heads: int, window: int | None) -> list[str]:
    """Mixes of batch and chunks whose tokens have other bits than those of one sequence in one chunk."""
    lengths, page = [700, 513, 64, 1, 300, 257], 16
    batch = Batch(lengths, lengths, heads=heads, kv_heads=kv_heads, size=size, page=page, window=window)
    q, keys, values, table, _ = make_batch(batch, BF16, "cuda").operands
    parts = q.split(lengths)
    wrong, generator = [], torch.Generator().manual_seed(5)

    def attend(chosen: list[tuple[int, int, int]]) -> list[Tensor]:
        """The tokens of (sequence, first, last + 1), in one call."""
        counts = [last - first for _, first, last in chosen]
        offsets = torch.tensor([0, *counts], device="cuda").cumsum(0).int()
        out = ops.paged_attention(
            torch.cat([parts[number][first:last] for number, first, last in chosen]),
            keys, values, table[[number for number, _, _ in chosen]].contiguous(),
            torch.tensor([last for _, _, last in chosen], device="cuda", dtype=torch.int32),
            query_offsets=None if counts == [1] * len(counts) else offsets,
            window=window, invariant=True, implementation="kernel",
        )  # fmt: skip
        return list(out.split(counts))

    alone = [attend([(number, 0, length)])[0] for number, length in enumerate(lengths)]
    for mix in range(20):
        chosen = []
        for number in torch.randperm(len(lengths), generator=generator)[: 1 + mix % len(lengths)].tolist():
            last = int(torch.randint(1, lengths[number] + 1, (), generator=generator))
            most = 1 if mix % 3 == 0 else last
            chosen.append((number, last - int(torch.randint(1, most + 1, (), generator=generator)), last))
        for (number, first, last), found in zip(chosen, attend(chosen), strict=True):
            if not torch.equal(found, alone[number][first:last]):
                wrong.append(f"mix {mix} of {chosen}: sequence {number}")
    return wrong


@pytest.mark.ranks(1, own=(1,), among=(1,))
@pytest.mark.parametrize(
    ("size", "heads", "kv_heads", "window"),
    [(128, 8, 2, 200), rarely(128, 32, 8, None), rarely(64, 12, 12, None), rarely(96, 14, 2, None)],
)
def test_an_invariant_token_has_the_same_bits_in_every_batch_and_chunk(
    run_ranks: Callable[..., list[Any]], world: int, size: int, heads: int, kv_heads: int, window: int | None
) -> None:
    assert run_ranks(world, compare_mixes, size, heads, kv_heads, window) == [[]]

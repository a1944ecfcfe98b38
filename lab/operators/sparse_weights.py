# SPDX-License-Identifier: Apache-2.0
"""`python -m lab sparse`: the kernels of `stretto.optim.sparse` beside a plain copy; layers by cuBLAS and cuSPARSE.

The bytes of a row are those that must move: dense numbers and bitmap once, and what is left once; of positions, 4 bytes
for each number that is left in place of the bitmap. A copy moves each number twice. All are timed in turn.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from statistics import median
from typing import Annotated, Any, get_args

import torch
import triton
import triton.language as tl
from torch import Tensor

from lab.harness import Bench, column
from stretto.bench.harness import run_ranks, time_each_step
from stretto.bench.settings import Needs, Option, Repeats, Rounds
from stretto.cluster.detection import count_gpus
from stretto.execution import SparseIndexKind, check_sparsity
from stretto.optim.sparse import BitmapIndex, SparseIndex, make_index
from stretto.optim.sparse.index import make_table
from stretto.optim.sparse.masks import pack
from stretto.parallel import Grid
from stretto.quantities import MAX_COUNT, require_least
from stretto.tiles.launches import launch_kernel

_MANY = 32  # tensors that one launch takes


@dataclass(frozen=True)
class SparseSetting:
    """Sparsities, numbers of a weight, and widths of layers (Singh, figure 4.1: batch 576, 128^2 to 4096^2)."""

    sparsities: Annotated[tuple[float, ...], Option("Parts that are pruned, with commas.")] = (0.5, 0.8, 0.9, 0.95)
    numbers: Annotated[int, Option("Numbers of the weight that is compressed.", least=1, most=MAX_COUNT)] = 1 << 28
    widths: Annotated[tuple[int, ...], Option("Inputs and outputs of the layers, with commas.")] = (
        128,
        256,
        512,
        1024,
        2048,
        4096,
    )
    batch: Annotated[int, Option("Rows of the layers' inputs.", least=1, most=MAX_COUNT)] = 576
    variants: Annotated[bool, Option("Time the bitmap's kernels in all variants, and nothing else.")] = False
    cpu: Annotated[bool, Option("Try it on the CPU, with small --numbers and --widths.", "--cpu")] = False
    repeats: Repeats = 20
    rounds: Rounds = 5

    def __post_init__(self) -> None:
        for sparsity in self.sparsities:
            check_sparsity(sparsity)
        require_least(1, repeats=self.repeats, rounds=self.rounds)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A run. size: numbers of the weight, or inputs and outputs of the layer."""

    what: str = column("what")
    sparsity: float | None = column("sparsity")
    size: int = column("numbers, or width")
    milliseconds: float = column("ms", "{:.4f}")
    terabytes: float | None = column("TB/s", "{:.2f}", None)
    of_copy: float | None = column("of the best copy", "{:.0%}", None)
    dense_milliseconds: float | None = column("dense (ms)", "{:.4f}", None)
    over_dense: float | None = column("times the dense time", "{:.1f}", None)


@triton.jit
def copy_numbers(source, out, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy BLOCK numbers. Synchronization: none."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(source + at, mask=at < size), mask=at < size)


def run_sparse(setting: SparseSetting) -> list[Row]:
    if not setting.cpu and not count_gpus():
        raise ValueError("this takes a GPU, and this machine has none; --cpu tries it without")
    return run_ranks(1, measure_all, setting, trains=False)


def measure_all(setting: SparseSetting) -> list[Row]:
    device = Grid(device="cpu" if setting.cpu else None).device
    return _measure_kernels(setting, device) + ([] if setting.variants else _measure_layers(setting, device))


def _time(runs: dict[str, Callable[[], Any]], setting: SparseSetting) -> dict[str, float]:
    """Median seconds of each run, timed in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(setting.rounds):
        for name, run in runs.items():
            seconds[name] += time_each_step(run, warm_up=3 if number == 0 else 1, repeats=setting.repeats)
    return {name: median(each) for name, each in seconds.items()}


def _measure_kernels(setting: SparseSetting, device: torch.device) -> list[Row]:
    size, rows = setting.numbers, list[Row]()
    dense = torch.randn(size, dtype=torch.bfloat16, device=device)
    other = torch.empty_like(dense)
    runs: dict[str, Callable[[], Any]] = {"torch copy": partial(other.copy_, dense)}
    for block, warps in ((1024, 4), (4096, 4), (8192, 8)) if device.type == "cuda" else ():
        programs = triton.cdiv(size, block)
        copy = partial(launch_kernel, copy_numbers, programs, dense, other, size, BLOCK=block, num_warps=warps)
        runs[f"Triton copy, {block} a program"] = copy
    copies, num_bytes = set(runs), dict.fromkeys(runs, 4.0 * size)
    about: dict[str, float] = {}
    for sparsity in setting.sparsities:
        mask = torch.rand(size, device=device) >= sparsity
        bits = pack(mask)
        for kind in get_args(SparseIndexKind)[: 1 if setting.variants else None]:
            index = make_index(bits, size, kind)
            # Each index keeps its memory to the end: all of them are timed in turn.
            for name, run, moved in _list_runs(index, dense, torch.zeros_like(dense), setting.variants):
                key = f"{name}, {kind} {sparsity}"
                runs[key], num_bytes[key], about[key] = run, moved, sparsity
            if kind == "bitmap" and not setting.variants:
                for name, run in _list_runs_of_many(mask, dense):
                    key = f"{name} of {_MANY} tensors, {kind} {sparsity}"
                    runs[key], num_bytes[key], about[key] = run, num_bytes[f"{name}, {kind} {sparsity}"], sparsity
    seconds = _time(runs, setting)
    copied = max(num_bytes[name] / seconds[name] for name in copies)
    for name in runs:
        rate = num_bytes[name] / seconds[name]
        rows.append(
            Row(
                what=name,
                sparsity=about.get(name),
                size=size,
                milliseconds=seconds[name] * 1e3,
                terabytes=rate / 1e12,
                of_copy=rate / copied,
            )
        )
    return rows


def _list_runs(
    index: SparseIndex, dense: Tensor, whole: Tensor, variants: bool
) -> list[tuple[str, Callable[[], Any], float]]:
    """Names, calls and bytes of what is done with an index."""
    left = index.compress(dense, dense.new_empty(index.count))
    own, of_dense = index.num_bytes + 2.0 * index.count, 2.0 * index.size
    if index.num_bytes == 4 * index.count:  # of positions, only these numbers move
        of_dense = 2.0 * index.count
    rates = own + of_dense, own + of_dense + 2.0 * index.count, own + of_dense
    if not variants or not isinstance(index, BitmapIndex):
        calls: list[tuple[str, Callable[[], Any]]] = [
            ("compress", partial(index.compress, dense, left)),
            ("compress and add", partial(index.compress, dense, left, adds=True)),
            ("expand", partial(index.expand, left, whole)),
        ]
        return [(*call, moved) for call, moved in zip(calls, rates, strict=True)]
    found = []
    for turns in (1, 2, 4):
        shape = {"turns": turns}
        calls = [
            ("compress", partial(index.launch_compress, dense, left, False, **shape)),
            ("compress and add", partial(index.launch_compress, dense, left, True, **shape)),
            ("expand", partial(index.launch_expand, left, whole, [], **shape)),
        ]
        for (name, call), moved in zip(calls, rates, strict=True):
            found.append((f"{name}, {turns} blocks a warp", call, moved))
    return found


def _list_runs_of_many(mask: Tensor, dense: Tensor) -> list[tuple[str, Callable[[], Any]]]:
    """Names and calls of what one launch does with all tensors of a table; none on a CPU."""
    indices = [make_index(pack(part), len(part)) for part in mask.chunk(_MANY)]
    firsts = [0, *accumulate(index.count for index in indices)]
    table = make_table(indices, firsts[:-1], torch.zeros_like(dense).chunk(_MANY))
    if table is None:
        return []
    left, read = dense.new_zeros(firsts[-1]), dict(enumerate(dense.chunk(_MANY)))
    return [
        ("compress", partial(table.compress, read, left, adds=False)),
        ("compress and add", partial(table.compress, read, left, adds=True)),
        ("expand", partial(table.expand, left, 0, firsts[-1])),
    ]


def _measure_layers(setting: SparseSetting, device: torch.device) -> list[Row]:
    """A linear layer with pruned weights, in fp16: dense by cuBLAS, and sparse by cuSPARSE (Singh, figure 4.1)."""
    rows, dtype = [], torch.float32 if setting.cpu else torch.float16
    for width in setting.widths:
        inputs = torch.randn(width, setting.batch, dtype=dtype, device=device)
        weight = torch.randn(width, width, dtype=dtype, device=device)
        runs: dict[str, Callable[[], Any]] = {"dense": partial(torch.mm, weight, inputs)}
        for sparsity in setting.sparsities:
            pruned = torch.where(torch.rand_like(weight) >= sparsity, weight, 0).to_sparse_csr()
            runs[str(sparsity)] = partial(torch.mm, pruned, inputs)
        seconds = _time(runs, setting)
        for sparsity in setting.sparsities:
            taken, dense = seconds[str(sparsity)], seconds["dense"]
            rows.append(
                Row(
                    what="layer by cuSPARSE",
                    sparsity=sparsity,
                    size=width,
                    milliseconds=taken * 1e3,
                    dense_milliseconds=dense * 1e3,
                    over_dense=taken / dense,
                )
            )
    return rows


BENCH = Bench(
    "sparse",
    "Compress and expand of pruned weights beside a copy, and layers by cuBLAS and cuSPARSE.",
    SparseSetting,
    run_sparse,
    Row,
    title="Pruned weights",
    needs=Needs.ONE_GPU,
    about=lambda setting: {"batch": setting.batch},
)

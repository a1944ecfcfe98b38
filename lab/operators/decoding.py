# SPDX-License-Identifier: Apache-2.0
"""`python -m lab decoding`: the calls of a decoding step, each beside the fastest public way to do it, in one run.

Caches and weights rotate through more memory than a GPU's caches hold. A row has the bytes that a call must read, and
the part of the GPU's memory bandwidth that this makes of the time.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from lab.harness import Bench, Measured, column, keep_rows
from stretto import ops
from stretto.bench.harness import print_row, run_ranks
from stretto.bench.interleaved import TimingEffort, time_interleaved
from stretto.bench.settings import Needs, Option, Ranks, Rounds, require_known
from stretto.cluster import Cluster
from stretto.parallel import Grid
from stretto.quantities import MAX_COUNT, MAX_LENGTH, require_least

SIZE, PAGE = 128, 16  # numbers of a head, and tokens of a page
HIDDEN, DEPTHS = 4096, (4096, 14336)  # n of products, which is the norm's, and k of all ranks
_ROTATED_BYTES = 512 << 20  # more than a GPU's L2 cache
EPS = 1e-5
DECODING_CALLS = ("attention", "products")


@dataclass(frozen=True)
class DecodingSetting:
    """Settings of `python -m lab decoding`."""

    only: Annotated[tuple[str, ...], Option("attention, products, with commas.", "--only")] = DECODING_CALLS
    batches: Annotated[tuple[int, ...], Option("Tokens of a step, one a sequence, with commas.")] = (1, 8, 64)
    context: Annotated[int, Option("Tokens in each sequence's cache.", least=1, most=MAX_LENGTH)] = 1024
    heads: Annotated[int, Option("Heads of queries, of this rank.", least=1, most=MAX_COUNT)] = 32
    kv_heads: Annotated[int, Option("Heads of keys and values, of this rank.", least=1, most=MAX_COUNT)] = 8
    rounds: Rounds = 4
    ranks: Ranks = None

    def __post_init__(self) -> None:
        require_known("call", self.only, DECODING_CALLS)
        require_least(1, batches=min(self.batches, default=0))
        if self.heads % self.kv_heads:
            least = self.kv_heads * max(1, round(self.heads / self.kv_heads))
            raise ValueError(f"--heads is a multiple of --kv-heads, {self.kv_heads}, not {self.heads}: {least} will do")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A call."""

    call: str = column("call")
    m: int = column("tokens")
    shape: str = column("shape")
    stretto: float = column("Stretto (us)", "{:.1f}")
    invariant: float | None = column("invariant (us)", "{:.1f}", None)
    library: float | None = column("library (us)", "{:.1f}", None)
    to_library: float | None = column("library / Stretto", "{:.2f}", None)
    cost: float | None = column("cost of invariance", "{:.0%}", None)
    megabytes: float = column("reads (MB)", "{:.1f}")
    bandwidth: float | None = column("of memory bandwidth", "{:.0%}", None)
    error: float | None = column("error", "{:.0e}", None)


def run_decoding(setting: DecodingSetting, out: Path) -> Measured:
    """Measure all calls; the JSON is written anew after every row."""
    ranks = setting.ranks or 1
    rows = run_ranks(ranks, measure_all, ranks, out, setting, trains=False)
    return Measured(rows, {"ranks": ranks}, title=f"Calls of a decoding step, {ranks} ranks")


@torch.no_grad()
def measure_all(ranks: int, out: Path, setting: DecodingSetting) -> list[dict[str, Any]]:
    """The job of each rank; returns the rows. Rank 0 writes them."""
    device = Grid(data=ranks, device=None if torch.cuda.is_available() else "cpu").device
    memory = Cluster.detect().gpu.memory_bandwidth if device.type == "cuda" else None
    rows: list[dict[str, Any]] = []
    measures: list[tuple[str, Callable[..., Iterator[dict[str, Any]]]]] = [
        ("attention", measure_attention),
        ("products", measure_products),
    ]
    for what, measure in measures:
        for m in setting.batches if what in setting.only else ():
            for row in measure(setting, m, device):
                if memory:
                    row["bandwidth"] = row["megabytes"] * 1e12 / memory / row["stretto"]
                rows.append(row)
                print_row(row)
                if dist.get_rank() == 0:
                    keep_rows(out, "decoding", Row, {"ranks": ranks}, rows)
    return rows


def measure_attention(setting: DecodingSetting, m: int, device: torch.device) -> Iterator[dict[str, Any]]:
    """Attention of a token of each of m sequences, beside torch's on contiguous caches."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    pages = -(-setting.context // PAGE)
    size = 2 * m * setting.context * setting.kv_heads * SIZE * dtype.itemsize
    copies = max(1, min(64, _ROTATED_BYTES // size)) if device.type == "cuda" else 1
    shape = copies * m * pages, PAGE, setting.kv_heads, SIZE
    keys, values = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    q = torch.randn(m, setting.heads, SIZE, device=device, dtype=dtype)
    tables = torch.randperm(copies * m * pages, device=device).int().view(copies, m, pages)
    lengths = torch.full((m,), setting.context, dtype=torch.int32, device=device)
    whole = [
        one[tables[0].long()].flatten(1, 2)[:, : setting.context].transpose(1, 2).contiguous() for one in (keys, values)
    ]
    whole = [one[None].repeat(min(copies, 8), 1, 1, 1, 1) for one in whole]  # as many as the caches forget
    turns = itertools.cycle(range(copies)), itertools.cycle(range(min(copies, 8)))

    def attend(**options: Any) -> Tensor:
        return ops.paged_attention(q, keys, values, tables[next(turns[0])], lengths, **options)

    def attend_contiguous() -> Tensor:
        turn = next(turns[1])
        out = functional.scaled_dot_product_attention(
            q[:, :, None], whole[0][turn], whole[1][turn], enable_gqa=setting.heads != setting.kv_heads
        )
        return out[:, :, 0]

    runs: dict[str, Callable[[], Any]] = {
        "stretto": attend,
        "invariant": partial(attend, invariant=True),
        "library": attend_contiguous,
    }
    row = {"call": "attention", "m": m, "shape": f"{setting.context} x {setting.heads}/{setting.kv_heads}"}
    error = ops.paged_attention(q, keys, values, tables[0], lengths).float() - attend_contiguous().float()
    row |= {"megabytes": size / 1e6, "error": error.abs().max().item()}
    yield row | _time(runs, setting)


def measure_products(setting: DecodingSetting, m: int, device: torch.device) -> Iterator[dict[str, Any]]:
    """Products with their sum, residual and norm, beside torch's and the backend's."""
    world, n = dist.get_world_size(), HIDDEN
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for depth in DEPTHS:
        k = depth // world
        size = n * k * dtype.itemsize
        copies = max(2, min(32, _ROTATED_BYTES // size)) if device.type == "cuda" else 1
        weights = [torch.randn(n, k, device=device, dtype=dtype) / depth**0.5 for _ in range(copies)]
        x, residual = (torch.randn(m, columns, device=device, dtype=dtype) for columns in (k, n))
        norm_weight, turns = torch.ones(n, device=device, dtype=dtype), itertools.cycle(weights)
        dist.broadcast(residual, 0)

        def fuse(x: Tensor, residual: Tensor, norm_weight: Tensor, turns: Iterator[Tensor], invariant: bool) -> Any:
            return ops.matmul_all_reduce_norm(x, next(turns), residual, norm_weight, eps=EPS, invariant=invariant)

        def compose(x: Tensor, residual: Tensor, norm_weight: Tensor, turns: Iterator[Tensor]) -> Any:
            total = x @ next(turns).t()
            if world > 1:
                dist.all_reduce(total)
            added = residual + total
            return functional.rms_norm(added, (n,), norm_weight, EPS), added

        given = x, residual, norm_weight, turns
        runs: dict[str, Callable[[], Any]] = {
            "stretto": partial(fuse, *given, False),
            "invariant": partial(fuse, *given, True),
            "library": partial(compose, *given),
        }
        ours, theirs = fuse(*given[:3], iter(weights), False), compose(*given[:3], iter(weights))
        row = {"call": "product, sum, norm", "m": m, "shape": f"{n} x {k}", "megabytes": size / 1e6}
        yield row | {"error": (ours[0] - theirs[0]).abs().max().item()} | _time(runs, setting)


def _time(runs: dict[str, Callable[[], Any]], setting: DecodingSetting) -> dict[str, float]:
    """Microseconds of each run in a graph, and what they say."""
    found = time_interleaved(runs, 0, is_graph=torch.cuda.is_available(), effort=TimingEffort(setting.rounds, 5))
    times = {name: timed.seconds * 1e6 for name, timed in found.items()}
    more = {"to_library": times["library"] / times["stretto"], "cost": times["invariant"] / times["stretto"] - 1}
    return times | more


BENCH = Bench(
    "decoding",
    "Attention to a paged cache, and products with their sum and norm, compared with torch's and the backend's.",
    DecodingSetting,
    run_decoding,
    Row,
    title="Calls of a decoding step",
    needs=Needs.RANKS,
    about=lambda setting: {},
)

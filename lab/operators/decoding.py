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
from stretto.memory.gpus import count_processors
from stretto.ops.decoding.paged_kernels import SINGLES, PagedCall, PagedConfig, attend_by_kernels
from stretto.ops.invariant.kernels import Tile, choose_tile, multiply_in_parts, multiply_leaves
from stretto.parallel import Grid
from stretto.quantities import MAX_COUNT, MAX_LENGTH, require_least
from stretto.tiles.launches import count_shared_bytes

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
    size: Annotated[int, Option("Numbers of a head.", least=16, most=256)] = 128
    page: Annotated[int, Option("Tokens of a page.", least=1, most=MAX_LENGTH)] = 16
    hidden: Annotated[int, Option("n of products, and columns of the norm.", least=16, most=MAX_COUNT)] = 4096
    depths: Annotated[tuple[int, ...], Option("k of products, of all ranks, with commas.")] = (4096, 14336)
    has_variants: Annotated[bool, Option("Time other tiles of the kernels too.", "--variants/--no-variants")] = False
    rounds: Rounds = 4
    ranks: Ranks = None

    def __post_init__(self) -> None:
        require_known("call", self.only, DECODING_CALLS)
        require_least(1, batches=min(self.batches, default=0), depths=min(self.depths, default=0))
        if self.heads % self.kv_heads:
            least = self.kv_heads * max(1, round(self.heads / self.kv_heads))
            raise ValueError(f"--heads is a multiple of --kv-heads, {self.kv_heads}, not {self.heads}: {least} will do")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A call, or one of its kernels' tiles."""

    call: str = column("call")
    m: int = column("tokens")
    shape: str = column("shape")
    variant: str | None = column("tiles", default=None)
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
    """Attention of a token of each of m sequences, beside torch's on contiguous caches; and other tiles."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    pages = -(-setting.context // setting.page)
    size = 2 * m * setting.context * setting.kv_heads * setting.size * dtype.itemsize
    copies = max(1, min(64, _ROTATED_BYTES // size)) if device.type == "cuda" else 1
    shape = copies * m * pages, setting.page, setting.kv_heads, setting.size
    keys, values = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    q = torch.randn(m, setting.heads, setting.size, device=device, dtype=dtype)
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
    if not setting.has_variants or device.type != "cuda":
        return
    configs = [
        PagedConfig(SINGLES.rows, depth, warps, stages, programs)
        for depth, warps in ((32, 1), (32, 2), (32, 4), (64, 2), (64, 4), (128, 4), (128, 8))
        for stages in (2, 3, 5)  # 3 and 4 are one: loads by way of a table take two stages more a tile
        for programs in (4, 8, 16)
    ]

    def attend_by(config: PagedConfig) -> Tensor:
        call = PagedCall(q, keys, values, tables[next(turns[0])], lengths, None, setting.size**-0.5, 0, False)
        return attend_by_kernels(call, config)

    yield from _time_variants(row, {_name(one): partial(attend_by, one) for one in configs}, setting)


def measure_products(setting: DecodingSetting, m: int, device: torch.device) -> Iterator[dict[str, Any]]:
    """Products with their sum, residual and norm, beside torch's and the backend's; and tiles of invariant ones."""
    world, n = dist.get_world_size(), setting.hidden
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for depth in setting.depths:
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
        if not setting.has_variants or device.type != "cuda":
            continue
        leaves = ops.LEAVES // world
        first = choose_tile(
            m, n, k // leaves, leaves, dtype.itemsize, count_processors(device.index), takes_parts=world == 1,
            shared=count_shared_bytes(device),
        )  # fmt: skip
        blocks = first.blocks
        variants: dict[str, Callable[[], Any]] = {}
        for width, deep, stages in itertools.product((64, 128), (64, 128), (3, 4, 6, 10)):
            if (blocks.m + width) * deep * stages * dtype.itemsize < 220_000:
                tile = first._replace(blocks=blocks._replace(n=width, k=min(deep, blocks.k), num_stages=stages))
                name = f"{leaves} leaves in {tile.parts}, {_name(tile.blocks)}"
                variants[name] = partial(_multiply, x, turns, leaves, tile)
        yield from _time_variants(row | {"call": "invariant product"}, variants, setting)


def _multiply(x: Tensor, turns: Iterator[Tensor], leaves: int, tile: Tile) -> Tensor:
    if tile.parts > 1:
        return multiply_in_parts(x, next(turns), leaves, tile)
    return multiply_leaves(x, next(turns), None, leaves, torch.float32, tile)


def _name(config: Any) -> str:
    return " ".join(f"{key}={value}" for key, value in config._asdict().items())


def _time(runs: dict[str, Callable[[], Any]], setting: DecodingSetting) -> dict[str, float]:
    """Microseconds of each run in a graph, and what they say."""
    found = time_interleaved(runs, 0, is_graph=torch.cuda.is_available(), effort=TimingEffort(setting.rounds, 5))
    times = {name: timed.seconds * 1e6 for name, timed in found.items()}
    more = {"to_library": times["library"] / times["stretto"], "cost": times["invariant"] / times["stretto"] - 1}
    return times | more


def _time_variants(
    row: dict[str, Any], runs: dict[str, Callable[[], Any]], setting: DecodingSetting
) -> Iterator[dict[str, Any]]:
    """A row of each variant, the fastest first."""
    found = time_interleaved(runs, 0, is_graph=True, effort=TimingEffort(setting.rounds, 5))
    for name, timed in sorted(found.items(), key=lambda pair: pair[1].seconds):
        yield {**row, "error": None, "variant": name, "stretto": timed.seconds * 1e6}


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

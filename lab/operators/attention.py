# SPDX-License-Identifier: Apache-2.0
"""`python -m lab attention`: attention over a sequence that ranks share, forward and backward, beside public ways.

32 heads, 8 KV heads of size 128, bf16; causal rows are zig-zag; packed ones (`--masks packed`) are documents of The
Pile's lengths cut by work, without peers. "alone" is one GPU's attention to the whole sequence by the fastest kernel,
divided by the ranks; "exchange", NCCL's all-gather of keys and values (backward, also the
reduce-scatter of their gradients). Peers: an all-gather and torch's attention (flash where causal, whose mask is
aligned with the last key), torch's context parallelism, which gathers or rotates by NCCL's sends, and Ulysses around
cuDNN's kernel. "hidden" is Flux's equation 2, with that exchange as the communication. Backward rows time autograd
alone. With `--cluster` rows are only predicted; balance and bytes of packed ones are counted. Without GPUs rows are
small, for a try of the command, and without torch's context parallelism, which has no kernel there.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lab.cases import Case, measure_cases, predict_cases
from lab.harness import Bench, Measured, column
from lab.operators.attention_peers import attend_here, by_gathering, by_ulysses, torch_context
from stretto import ops, tiles
from stretto.bench.harness import FAILURES, in_one_line
from stretto.bench.interleaved import TimingEffort, time_interleaved
from stretto.bench.settings import Needs, Option, Ranks, require_known
from stretto.cluster import Cluster
from stretto.ops.attention import list_chunks
from stretto.ops.attention.exchange import Peers
from stretto.ops.attention.plan import Mask, measure_work
from stretto.parallel import Grid
from stretto.planner.compute import BACKWARD_ATTENTION, Device
from stretto.planner.documents import PILE, PackedDocuments, draw_starts

HEADS, KV_HEADS, SIZE = 32, 8, 128
ROW_BYTES = 4 * KV_HEADS * SIZE  # of a position's keys and values, in bf16
PASSES = ("forward", "backward")
OURS = ("all_gather", "ring", "ulysses")
PEERS = ("gathered", "torch_gather", "torch_ring", "torch_ulysses")


@dataclass(frozen=True)
class AttentionSetting:
    """Settings of `python -m lab attention`. Raises ValueError for an unknown mask or pass."""

    sequences: Annotated[tuple[int, ...], Option("Lengths of the whole sequence.")] = (16384, 32768, 65536, 131072)
    masks: Annotated[tuple[str, ...], Option("causal, full, packed, with commas.")] = ("causal", "full")
    only: Annotated[tuple[str, ...], Option("forward, backward, with commas.")] = PASSES
    ranks: Ranks = None
    variants: Annotated[bool, Option("Also with kernels in turn on one stream, and without peers.")] = False
    cluster: Annotated[str | None, Option("Only predict, for this cluster: a file or a preset's name.")] = None

    def __post_init__(self) -> None:
        require_known("mask", self.masks, ("causal", "full", "packed"))
        require_known("pass", self.only, PASSES)

    def cases(self) -> list[dict[str, Any]]:
        """Length, mask and pass of each row."""
        keys = itertools.product(self.sequences, self.masks, self.only)
        return [{"sequence": length, "mask": mask, "kind": kind} for length, mask, kind in keys]


@dataclass(frozen=True)
class Row:
    """One pass: times on the slowest rank."""

    sequence: int = column("sequence")
    mask: str = column("mask")
    kind: str = column("pass")
    alone: float | None = column("one GPU / ranks (ms)", "{:.3f}")
    exchange: float | None = column("exchange (ms)", "{:.3f}")
    gathered: float | None = column("all-gather, then attention (ms)", "{:.3f}")
    torch_gather: float | None = column("torch's, gathering (ms)", "{:.3f}")
    torch_ring: float | None = column("torch's, ring (ms)", "{:.3f}")
    torch_ulysses: float | None = column("Ulysses (ms)", "{:.3f}")
    zigzag: float | None = column("Stretto, all-gather, packed zig-zag (ms)", "{:.3f}")
    turns: float | None = column("the same, kernels in turn, the exchange's last (ms)", "{:.3f}")
    urgent: float | None = column("the same, kernels in turn (ms)", "{:.3f}")
    all_gather: float | None = column("Stretto, all-gather (ms)", "{:.3f}")
    ring: float | None = column("Stretto, ring (ms)", "{:.3f}")
    ulysses: float | None = column("Stretto, Ulysses (ms)", "{:.3f}")
    over: float | None = column("all-gather over one GPU / ranks", "{:+.1%}")
    hidden: float | None = column("hidden", "{:.0%}")
    gain: float | None = column("best peer / best of Stretto", "{:.2f}")
    predicted: float | None = column("predicted (ms)", "{:.3f}")
    difference: float | None = column("largest difference", "{:.0e}")
    balance: str | None = column(
        "largest work / mean, and MB of keys of the rank that receives most: cut by work; zig-zag"
    )
    failed: str | None = column("failed")


def run_attention(setting: AttentionSetting, out: Path) -> Measured:
    assert setting.ranks is not None
    cases, name = setting.cases(), f"attention-{setting.ranks}"
    about = {"ranks": setting.ranks, "heads": HEADS, "kv_heads": KV_HEADS, "size": SIZE}
    if setting.cluster is not None:
        return predict_cases(name, about, cases, setting.cluster, partial(_predict, setting.ranks))
    measured = measure_with_variants if setting.variants else measure
    name += "-variants" * setting.variants
    return measure_cases(name, about, cases, setting.ranks, measured, row=Row, out=out)


def _predict(ranks: int, cluster: Cluster, sequence: int, mask: str, kind: str) -> Case:
    """A rank's share of the products; keys under its own ones, which are one part in `ranks`, and what does not fit."""
    products = 4 * sequence * sequence * HEADS * SIZE / (1 if mask == "full" else 2) / ranks
    balance, own, sent, length, cuts = 1.0, 1 / ranks, (ranks - 1) * (0.75 if mask == "causal" else 1), sequence, {}
    if mask == "packed":
        documents = draw_starts(PILE, sequence, seed=1)
        packed = PackedDocuments((documents,))
        products, length = products * packed.share, round(packed.length)
        balance, own, sent, *_ = packed.over_context(ranks)
        cuts = {"balance": describe_cuts(documents, ranks, ROW_BYTES)}
    passes, ways = (1.0, 1) if kind == "forward" else (BACKWARD_ATTENTION, 2)  # keys, backward also their gradients
    alone = Device(cluster, "bf16").attention(products * passes, length)
    one_way = sent * ROW_BYTES * sequence / ranks / cluster.require("in_node.bandwidth")
    hides = alone * own / ways  # backward, keys and their gradients under one half each
    exposed, exchange = max(one_way - hides, 0) * ways, one_way * ways
    times = {"alone": alone, "exchange": exchange, "predicted": alone * balance + exposed}
    return {name: each * 1e3 for name, each in times.items()} | {"hidden": 1 - exposed / exchange} | cuts


def describe_cuts(documents: tuple[int, ...], ranks: int, row_bytes: int) -> str:
    """Of documents cut by work, and zig-zag: the most scores of a rank over the mean, and MB that come to one at most.

    row_bytes: of a position's keys and values.
    """
    mask, length = Mask(True, None, documents), documents[-1] // ranks
    works = [measure_work(layout, ranks, length, mask) for layout in ("balanced", "zigzag")]
    return "; ".join(
        f"{max(each.scores) * ranks / sum(each.scores):.2f}, {max(each.received) * row_bytes / 1e6:.1f}"
        for each in works
    )


def measure(grid: Grid, sequence: int, mask: str, kind: str) -> Case:
    return _Attention(sequence, mask, grid).measure(kind == "backward")


def measure_with_variants(grid: Grid, sequence: int, mask: str, kind: str) -> Case:
    return _Attention(sequence, mask, grid).measure(kind == "backward", with_variants=True)


@contextmanager
def in_turn(stream_index: int) -> Iterator[None]:
    """Have kernels of own keys and of others' take turns, and the exchange's kernels on this side stream."""
    with mock.patch.object(Peers, "fork", return_value=None), mock.patch.object(tiles, "URGENT", stream_index):
        yield


class _Attention:
    """One length: this rank's operands of either layout, and the ways to attend."""

    def __init__(self, length: int, mask: str, grid: Grid) -> None:
        self.causal, self.device = mask != "full", grid.device
        self.layout = {"causal": "zigzag", "full": "contiguous", "packed": "balanced"}[mask]
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        assert dist.group.WORLD is not None
        self.group = dist.group.WORLD
        heads, kv_heads, size = (HEADS, KV_HEADS, SIZE) if self.device.type == "cuda" else (8, self.ranks, 16)
        whole, length = length, length if self.device.type == "cuda" else 64 * self.ranks
        generator = torch.Generator(self.device).manual_seed(1)
        shapes = [(1, length, count, size) for count in (heads, kv_heads, kv_heads, heads)]
        make = partial(torch.randn, generator=generator, device=self.device, dtype=torch.bfloat16)
        self.whole = [make(shape).transpose(1, 2) for shape in shapes]  # q, k, v and the output's gradient
        starts = {start * length // whole for start in draw_starts(PILE, whole, seed=1)}
        self.documents = tuple(sorted(starts)) if mask == "packed" else None
        self.places = {layout: self._list_rows(layout, length) for layout in ("contiguous", "zigzag", "balanced")}

    def _list_rows(self, layout: str, length: int) -> Tensor:
        chunks = list_chunks(layout, self.rank, self.ranks, length // self.ranks, self.documents)
        return torch.cat([torch.arange(*each, device=self.device) for each in chunks])

    def _cut(self, layout: str) -> list[Tensor]:
        return [each.transpose(1, 2)[:, self.places[layout]].transpose(1, 2) for each in self.whole]

    def measure(self, backward: bool, *, with_variants: bool = False) -> Case:
        """Times of all ways, and their largest difference from one GPU's, of a result or of q's gradient."""
        documents = None if self.documents is None else torch.tensor(self.documents)
        attend: Any = partial(ops.context_attention, causal=self.causal, documents=documents)
        ways: dict[str, tuple[Callable[..., Tensor], str]] = {
            name: (partial(attend, layout=self.layout, implementation=name), self.layout) for name in OURS
        }
        here: Any = partial(attend_here, is_causal=self.causal)
        if documents is not None:
            ways["zigzag"] = partial(attend, layout="zigzag", implementation="all_gather"), "zigzag"
            here = partial(attend, group=dist.new_group([self.rank], use_local_synchronization=True))
        elif not with_variants:
            ways |= {
                "gathered": (partial(by_gathering, self.group, self.causal), self.layout),
                "torch_ulysses": (partial(by_ulysses, self.group, self.causal), "contiguous"),
            }
        kernels = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
        failed: list[str] = []
        with sdpa_kernel(kernels, set_priority=True):
            alone = self._prepare(here, self.whole, backward)
            right = alone()
            runs: dict[str, Callable[[], Any]] = {"alone": alone, "exchange": partial(self._exchange, backward)}
            differences = []
            for name, (way, place) in ways.items():
                try:
                    run = self._prepare(way, self._cut(place), backward)
                    found = run()
                except FAILURES as error:
                    if name not in PEERS:
                        raise
                    failed.append(f"{name}: {in_one_line(error)}")
                    continue
                wanted = right.transpose(1, 2)[:, self.places[place]].transpose(1, 2)
                differences.append((found - wanted).abs().max() / wanted.abs().max())
                runs[name] = run
            if with_variants:
                runs["turns"] = in_turn(0)(runs["all_gather"])
                runs["urgent"] = in_turn(tiles.URGENT)(runs["all_gather"])
            times = _time(runs)
            del runs, right
            rotations = (("torch_gather", "allgather"), ("torch_ring", "alltoall"))
            has_torch = self.device.type == "cuda" and documents is None and not with_variants
            for name, method in rotations if has_torch else ():
                try:
                    times |= self._time_torch(name, method, backward)
                except FAILURES as error:
                    failed.append(f"{name}: {in_one_line(error)}")
        times["alone"] /= self.ranks
        peers = [times[name] for name in PEERS if name in times]
        over = times["all_gather"] / times["alone"] - 1
        hidden = 1 - (times["all_gather"] - times["alone"]) / times["exchange"]
        gain = min(peers) / min(times[name] for name in OURS) if peers else None
        row_bytes = 2 * self.whole[1].shape[1] * self.whole[1].shape[3] * self.whole[1].element_size()
        balance = None if self.documents is None else describe_cuts(self.documents, self.ranks, row_bytes)
        return times | {
            "balance": balance, "over": over, "hidden": hidden, "gain": gain,
            "difference": torch.stack(differences).max().item(),
            "failed": "; ".join(failed) or None,
        }  # fmt: skip

    def _prepare(self, way: Callable[..., Tensor], operands: list[Tensor], backward: bool) -> Callable[[], Tensor]:
        """The call to time: of the way, or of its gradients; q's is returned."""
        *leaves, grad = operands
        if not backward:
            return torch.no_grad()(partial(way, *leaves))
        leaves = [each.detach().requires_grad_() for each in leaves]
        out = way(*leaves)
        return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)[0]

    def _exchange(self, backward: bool) -> None:
        rows = torch.cat(self.whole[1:3], -1)[0].transpose(0, 1).chunk(self.ranks)[0].contiguous()
        gathered = torch.cat([rows] * self.ranks)
        dist.all_gather_into_tensor(gathered, rows)
        if backward:
            dist.reduce_scatter_tensor(rows, gathered)

    def _time_torch(self, name: str, method: str, backward: bool) -> dict[str, float]:
        q, k, v, grad = self._cut(self.layout)
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))  # it takes no grouped queries
        with torch_context(self.group, self.whole[0].shape[2], method, self.causal) as attend:
            return _time({name: self._prepare(attend, [q, k, v, grad], backward)})


def _time(runs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    timed = time_interleaved(runs, 64 << 20, is_graph=False, effort=TimingEffort(rounds=3, replays=5))
    return {name: each.seconds * 1e3 for name, each in timed.items()}


BENCH = Bench(
    "attention",
    "Attention over a sequence that ranks share, with an all-gather, torch's context parallelism and Ulysses.",
    AttentionSetting,
    run_attention,
    Row,
    title=lambda setting: f"Attention to a shared sequence, bf16, {setting.ranks} ranks",
    needs=Needs.RANKS,
    about=lambda setting: {},
)

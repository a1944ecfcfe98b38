# SPDX-License-Identifier: Apache-2.0
"""`python -m lab few-tokens`: few tokens to their experts' ranks and back, as in decoding, in microseconds.

Runs move the same bytes, one row a token and rank, and are captured. The peers are given the order of rows and their
numbers, which Stretto finds itself: NCCL's all_to_all_single, twice; torch's all_to_all_vdev, twice and not captured,
in a job of its own, for it takes NVSHMEM as the backend of torch's symmetric memory; and two messages one way, the
least that there and back can take: a kernel of packets that sends each other rank as many bytes, and does nothing else.
With `--cluster` rows are only predicted. On CPUs the library runs, for a try of the command.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from lab.cases import Case, measure_cases, predict_cases
from lab.experts import MODELS, ROUTINGS
from lab.experts.routing import count_rows_sent, draw_routing
from lab.harness import Bench, Measured, column
from stretto import tiles
from stretto.bench.interleaved import TimingEffort, time_interleaved
from stretto.bench.operators.peers import world_name
from stretto.bench.settings import Needs, Option, Ranks, require_known
from stretto.cluster import Cluster
from stretto.memory.gpus import limit_waiting
from stretto.ops import moe
from stretto.parallel import Grid

STORES = 0.78  # of NVLink's rate, as stores of all multiprocessors of an H200 to three peers reach: 351 of 450 GB/s
LAUNCH = 3.0  # us, of a kernel and a packet there: the one-shot all-reduce of 1 KB takes 2.9 on H200, 3.3 on H100
LOOKS = 0.8  # us, for what depends on what has arrived: the counts, then the choices, whose rows are then polled
LARGEST = 128
_TINY = (32, 8, 2)


@dataclass(frozen=True)
class FewTokensSetting:
    """Settings of `python -m lab few-tokens`. Raises ValueError for an unknown model or routing, and other numbers."""

    models: Annotated[tuple[str, ...], Option("Whose shapes: those of `python -m lab grouped`.")] = ("qwen3-30b-a3b",)
    routing: Annotated[tuple[str, ...], Option(f"{', '.join(ROUTINGS)}, with commas.")] = ROUTINGS[:1]
    tokens: Annotated[tuple[int, ...], Option("Of a rank, with commas.")] = (1, 8, 32, 128)
    with_vdev: Annotated[bool, Option("Measure torch's all_to_all_vdev, too.", "--vdev/--no-vdev")] = True
    ranks: Ranks = None
    cluster: Annotated[str | None, Option("Only predict, for this cluster: a file or a preset's name.")] = None

    def __post_init__(self) -> None:
        require_known("model", self.models, MODELS)
        require_known("routing", self.routing, ROUTINGS)
        for number in self.tokens:
            if not 1 <= number <= LARGEST:
                raise ValueError(f"{number} tokens of a rank: 1 to {LARGEST} will do")

    def cases(self) -> list[dict[str, Any]]:
        """Model, routing and tokens of each row."""
        keys = itertools.product(self.models, self.routing, self.tokens)
        return [{"model": model, "routing": routing, "tokens": tokens} for model, routing, tokens in keys]


@dataclass(frozen=True)
class Row:
    """Times there and back, on the slowest rank; kilobytes: of the rank that sends most to others, one way."""

    model: str = column("model")
    routing: str = column("routing")
    tokens: int = column("tokens a rank")
    kilobytes: float | None = column("sent one way (KB)", "{:.0f}")
    nccl: float | None = column("NCCL twice (us)", "{:.1f}")
    vdev: float | None = column("all_to_all_vdev twice (us)", "{:.1f}")
    messages: float | None = column("two messages (us)", "{:.1f}")
    dispatch: float | None = column("dispatch (us)", "{:.1f}")
    combine: float | None = column("combine (us)", "{:.1f}")
    stretto: float | None = column("both (us)", "{:.1f}")
    fp8: float | None = column("both, fp8 (us)", "{:.1f}")
    predicted: float | None = column("predicted (us)", "{:.1f}")
    to_messages: float | None = column("both to messages", "{:.2f}")
    failed: str | None = column("failed")


def run_few(setting: FewTokensSetting, out: Path) -> Measured:
    """Predict all rows, or measure them, those of all_to_all_vdev last."""
    assert setting.ranks is not None
    cases, name, about = setting.cases(), f"few-tokens-{setting.ranks}", {"ranks": setting.ranks}
    if setting.cluster is not None:
        return predict_cases(name, about, cases, setting.cluster, partial(_predict, setting.ranks))
    vdev = measure_vdev if setting.with_vdev else None
    return measure_cases(name, about, cases, setting.ranks, measure, row=Row, out=out, with_nvshmem=vdev)


def _predict(ranks: int, cluster: Cluster, model: str, routing: str, tokens: int) -> Case:
    """A launch and the bytes over NVLink's rate for each message; each operator also looks at what has arrived."""
    hidden, _, experts, k = MODELS[model]
    sent = (
        count_rows_sent(draw_routing(tokens, experts, k, routing, torch.device("cpu"), rank)[0], experts, ranks, rank)
        for rank in range(ranks)
    )
    most = 2 * hidden * max(rows for _, rows in sent)
    message = LAUNCH + most / (STORES * cluster.require("in_node.bandwidth")) * 1e6
    times = {"messages": 2 * message, "predicted": 2 * (message + LOOKS)}
    return {"kilobytes": most / 1e3, **times, "to_messages": times["predicted"] / times["messages"]}


def measure(grid: Grid, model: str, routing: str, tokens: int) -> Case:
    """The columns of a row but all_to_all_vdev's."""
    return _FewTokens(model, routing, tokens, grid).measure()


class _FewTokens:
    """The tokens, weights and routing of this rank, in bf16, and its rows for each rank, one a token and rank."""

    def __init__(self, model: str, routing: str, tokens: int, grid: Grid) -> None:
        hidden, _, self.experts, k = MODELS[model]
        if grid.device.type != "cuda":
            hidden, self.experts, k = _TINY
        self.rank, self.ranks, self.tokens = dist.get_rank(), dist.get_world_size(), tokens
        assert dist.group.WORLD is not None
        self.group = dist.group.WORLD
        self.ids, self.weights = draw_routing(tokens, self.experts, k, routing, grid.device, self.rank)
        self.x = torch.randn(tokens, hidden, device=grid.device, dtype=torch.bfloat16)
        owners = self.ids // (self.experts // self.ranks)
        of_ranks = torch.zeros(self.ranks, tokens, device=grid.device).scatter_(0, owners.t(), 1.0)
        self.sorted = self.x[of_ranks.nonzero()[:, 1]]
        self.splits = of_ranks.sum(1).long()
        counts = torch.empty_like(self.splits)
        dist.all_to_all_single(counts, self.splits)
        self.sends, self.receives = self.splits.tolist(), counts.tolist()
        most = self.splits.sum() - self.splits[self.rank]
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        self.bytes = int(most) * hidden * self.x.element_size()

    def measure(self) -> Case:
        """Times of all runs but all_to_all_vdev."""
        received, back = self.x.new_empty(sum(self.receives), self.x.shape[1]), torch.empty_like(self.sorted)
        sent = self.dispatch()

        def by_nccl() -> None:
            dist.all_to_all_single(received, self.sorted, self.receives, self.sends)
            dist.all_to_all_single(back, received, self.sends, self.receives)

        def both(payload: torch.dtype | None) -> Tensor:
            found = self.dispatch(payload)
            return moe.combine_few(found.rows, found.handle)

        runs: dict[str, Callable[[], Any]] = {
            "nccl": by_nccl,
            "dispatch": self.dispatch,
            "combine": partial(moe.combine_few, sent.rows, sent.handle),
            "stretto": partial(both, None),
            "fp8": partial(both, torch.float8_e4m3fn),
        }
        row: Case = {"kilobytes": self.bytes / 1e3}
        if not self.x.is_cuda:
            return row | _time(runs)
        messages = _Messages(self.bytes // (self.ranks - 1), self.group, self.x.device)
        row |= _time(runs | {"messages": messages.send_twice})
        return row | {"to_messages": row["stretto"] / row["messages"]}

    def dispatch(self, payload: torch.dtype | None = None) -> moe.DispatchedFew:
        """Dispatch with as little memory as the tokens need."""
        with torch.no_grad():
            return moe.dispatch_few(
                self.x, self.ids, self.weights, self.experts, self.group, max_tokens=self.tokens, payload=payload
            )


class _Messages:
    """Messages of so many bytes from each rank to each other one at once, by packets: a launch."""

    def __init__(self, size: int, group: dist.ProcessGroup, device: torch.device) -> None:
        world = group.size()
        self._words = max(-(-size // 16), 1) * 4
        self._channel = tiles.BlockChannel.allocate(group, channels=1, data_bytes=2 * 4 * world * self._words)
        self._staging = self._channel.tensor((2, world, self._words), torch.int32)
        self._sent = torch.randint(1 << 30, (self._words,), dtype=torch.int32, device=device)
        self._received = torch.empty(world, self._words, dtype=torch.int32, device=device)
        self._block = 512 if self._words < 1 << 16 else 2048
        units = (world - 1) * triton.cdiv(self._words, self._block)
        self._programs = limit_waiting(units, device)

    def send_twice(self) -> None:
        """Two messages each, one after another."""
        for _ in range(2):
            channel = self._channel.enter("messages", "p2p")
            arguments = channel, self._staging, self._sent, self._received, self._words, self._block
            warps = self._block // 128
            self._channel.launch(send_messages, arguments[4:], self._programs, arguments, num_warps=warps)


@triton.jit
def send_messages(channel, staging, sent, received, WORDS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """received [ranks, WORDS]: the words that each other rank sends.

    Signals: none but the packets. Waits: for those of all other ranks; units to be sent are claimed, so running
    programs send all of them before any of them waits. Reuse: two slots, by the call's number: see `call_slot`.
    """
    others: tl.constexpr = channel.world - 1
    slot = staging + tiles.call_slot(channel).to(tl.int64) * (channel.world * WORDS)
    publishes = tiles.may_publish(channel)
    units: tl.constexpr = others * ((WORDS + BLOCK - 1) // BLOCK)
    unit = tiles.claim(channel)
    while unit < units:
        peer = (channel.rank + 1 + unit % others) % channel.world
        at = unit // others * BLOCK + tl.arange(0, BLOCK)
        data = tl.load(sent + at, mask=at < WORDS, other=0)
        tiles.push_packets(
            channel, slot + channel.rank * WORDS, at, data, at < WORDS, rank=peer, in_fours=True, publishes=publishes
        )
        unit = tiles.claim(channel)
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        peer = (channel.rank + 1 + unit % others) % channel.world
        at = unit // others * BLOCK + tl.arange(0, BLOCK)
        data = tiles.take_packets(channel, slot + peer * WORDS + at, at < WORDS, unit, peer)
        tl.store(received + peer * WORDS + at, data, mask=at < WORDS)
    tiles.end_unsignalled_call(channel)


def _time(runs: dict[str, Callable[[], Any]], never_captured: tuple[str, ...] = ()) -> dict[str, float]:
    effort = TimingEffort(rounds=6, replays=20)
    found = time_interleaved(runs, 1 << 20, is_graph=True, effort=effort, never_captured=never_captured, rests=False)
    return {name: timed.seconds * 1e6 for name, timed in found.items()}


def measure_vdev(grid: Grid, model: str, routing: str, tokens: int) -> Case:
    """Torch's all_to_all_vdev there and back."""
    import torch.distributed._symmetric_memory as symmetric

    name, case = world_name(), _FewTokens(model, routing, tokens, grid)
    make = partial(symmetric.empty, device=grid.device)
    # Symmetric memory has one size on all ranks: that of the most rows that there may be.
    shape = case.ranks * tokens, case.x.shape[1]
    rows, received, back = (make(shape, dtype=torch.bfloat16) for _ in range(3))
    rows[: len(case.sorted)].copy_(case.sorted)
    splits, returned = (make((case.ranks,), dtype=torch.int64) for _ in range(2))
    places, places_back = (make((2, case.ranks), dtype=torch.int64) for _ in range(2))
    splits.copy_(case.splits)
    returned.copy_(torch.tensor(case.receives))

    def both() -> None:
        torch.ops.symm_mem.all_to_all_vdev(rows, received, splits, places, name)
        torch.ops.symm_mem.all_to_all_vdev(received, back, returned, places_back, name)

    return _time({"vdev": both}, ("vdev",))


BENCH = Bench(
    "few-tokens",
    "Few tokens to their experts' ranks and back, with NCCL, all_to_all_vdev and two one-way messages.",
    FewTokensSetting,
    run_few,
    Row,
    title=lambda setting: f"Dispatch and combine of few tokens, bf16, {setting.ranks} ranks, captured",
    needs=Needs.RANKS,
    about=lambda setting: {},
)

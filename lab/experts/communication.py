# SPDX-License-Identifier: Apache-2.0
"""`python -m lab experts`: what duplicate token dropping and communication-aware checkpointing save (figure 7.5).

Three runs train the same mixture of experts with the same grid: TED's baseline, which recomputes whole blocks and sends
every token from each rank of x; with dropped duplicates (Singh, section 7.3.1); and with communication that is kept as
well (section 7.3.2). Ranks are processes of one machine, and a link's bandwidth is emulated by waiting: each collective
begins after the time that a ring algorithm's bytes take. x has a fast link, as within a node, and all other axes a slow
one. Nothing is overlapped (overlap=False). The planner predicts the bytes before anything is timed.

With `--gpus` ranks are GPUs, which compute in bf16 and send over their own links, overlapped as by default: bytes are
counted in the first step, and only whole steps are timed.
"""

import os
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist

from lab.harness import ANY_CPU, Bench, Measured, Table, column
from lab.papers import read_paper
from lab.pictures import describe_origin
from stretto.bench.harness import print_table, run_ranks
from stretto.bench.settings import Option, Repeats, Rounds, SeqLen, WarmUp
from stretto.bench.training.runs import Step, Stepped, TrainingRun, local_batch, measure
from stretto.cluster import GPU, Cluster, FlopRates, NodeLink
from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid, clip_grad_norm_, count_collectives, parallelize
from stretto.parallel.comm.collectives import running_collective
from stretto.parallel.comm.counting import CollectiveCall
from stretto.planner import GridPlan, predict


@dataclass(frozen=True)
class ComparedRun:
    """A bar of figure 7.5: its name there, and options of parallelize."""

    name: str
    options: Mapping[str, Any]


PARTS = ("all-to-all", "all over x", "all-reduce", "reduce-scatter, all-gather", "gradients, and all else", "step")
ALL_TO_ALL, OVER_X, ALL_REDUCE, IN_ITS_PLACE, GRADIENTS, STEP = PARTS
BARS = (
    ComparedRun("baseline", {"recompute": "full", "drop_duplicates": False}),
    ComparedRun("DTD", {"recompute": "full"}),
    ComparedRun("DTD + CAC", {"recompute": "communication"}),
)
PUBLISHED = {ALL_TO_ALL: "saved_all_to_all", OVER_X: "saved_over_x", STEP: "saved"}


@dataclass(frozen=True)
class ExpertsSetting:
    """The training of `python -m lab experts`, and its links. Raises ValueError for settings that cannot work.

    As in Singh's figure 7.5, every second block has experts, as many as data has ranks (equation 7.1), and a token
    passes one. Links are in MB/s: of x, whose ranks are in one node there, and of all others.
    """

    data: Annotated[int, Option("Ranks along data, and experts: each of these ranks has one.", least=2)] = 2
    x: Annotated[int, Option("Ranks along x, which have the same tokens.", least=2)] = 4
    link: Annotated[float, Option("Bandwidth between nodes in MB/s, for all axes but x.")] = 0.125
    node_link: Annotated[float, Option("Bandwidth within a node in MB/s, for x.")] = 0.75
    layers: Annotated[int, Option("Transformer blocks; every second one has experts.", least=2)] = 2
    hidden: Annotated[int, Option("Width of a token's vector; heads are of 16, on GPUs of 128.", least=1)] = 64
    batch: Annotated[int, Option("Sequences of a step.", least=1)] = 8
    seq_len: SeqLen = 128
    warm_up: WarmUp = 0
    repeats: Repeats = 2
    rounds: Rounds = 1
    on_gpus: Annotated[bool, Option("GPUs, with their own links, in place of CPU processes.", "--gpus")] = False
    cluster: Annotated[str, Option("Whose links predict GPUs' times: a file or a preset's name.")] = "dgx-h100"
    only_predicts: Annotated[bool, Option("Only predict.", "--predict")] = False

    def __post_init__(self) -> None:
        for name, rate in (("link", self.link), ("node_link", self.node_link)):
            if rate <= 0:
                raise ValueError(f"{name} is {rate} MB/s, but must be more than 0; 1 would do")
        if self.layers % 2:
            raise ValueError(
                f"layers is {self.layers}, but blocks alternate, so that it must be even; {self.layers + 1} would do"
            )
        if self.hidden % self.head or self.hidden // self.head % self.x:
            raise ValueError(
                f"hidden is {self.hidden}, but must be {self.head} times a number of heads that x = {self.x} divides; "
                f"{self.head * self.x} would do"
            )
        if self.batch % self.data:
            raise ValueError(
                f"batch is {self.batch}, which data = {self.data} does not divide; "
                f"{-(-self.batch // self.data) * self.data} would do"
            )

    @property
    def head(self) -> int:
        return 128 if self.on_gpus else 16

    @property
    def ranks(self) -> int:
        return self.data * self.x

    @property
    def grid(self) -> dict[str, int]:
        """The sizes of the grid's axes."""
        return {"data": self.data, "x": self.x, "expert": self.data}

    @property
    def model(self) -> GPTConfig:
        sizes: dict[str, Any] = {
            "vocab": 256,
            "max_seq_len": self.seq_len,
            "num_experts": self.data,
            "experts_per_token": 1,
        }
        return GPTConfig(self.layers, self.hidden, self.hidden // self.head, moe_layers="every:2", **sizes)


@dataclass(frozen=True)
class Row:
    """A part of a run's step: measured, predicted and published."""

    name: str = column("run")
    part: str = column("of it")
    calls: int | None = column("calls a MoE block")
    megabytes: float | None = column("sent by a rank (MB)", "{:.3f}")
    predicted_megabytes: float | None = column("predicted (MB)", "{:.3f}")
    milliseconds: float | None = column("time (ms)", "{:,.0f}")
    predicted_milliseconds: float | None = column("predicted (ms)", "{:,.0f}")
    saved: float | None = column("less than baseline", "{:.1%}")
    predicted_saved: float | None = column("predicted", "{:.1%}")
    published_saved: float | None = column("figure 7.5", "{:.1%}")
    loss: float | None = column("first loss", "{:.5f}")
    gradient_norm: float | None = column("gradient norm", "{:.5f}")


def compare_runs(setting: ExpertsSetting) -> Measured:
    name = "experts-gpus" if setting.on_gpus else "experts"
    predictions = {bar.name: predict_bytes(setting, bar) for bar in BARS}
    if setting.only_predicts:
        rows = tabulate(setting, predictions)
        return Measured(rows, {"machine": ANY_CPU}, name=f"predictions-{name}")
    if not setting.on_gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the links are between processes of the CPU
    elif (gpus := torch.cuda.device_count()) < setting.ranks:
        raise ValueError(f"data x x is {setting.ranks} GPUs, and there are {gpus}: fewer ranks would do, or no --gpus")
    before = Table("Before measuring: bytes by the planner, over the links' rates", tabulate(setting, predictions), Row)
    print_table(before.title, before.columns(), before.rows)
    runs, calls = run_ranks(setting.ranks, measure_bars, setting)
    return Measured(tabulate(setting, predictions, runs, calls), {"runs": runs}, name=name)


def predict_bytes(setting: ExpertsSetting, bar: ComparedRun) -> dict[str, float]:
    """Bytes that a rank sends in a step, by part, where every expert has as many tokens."""
    sent = _predict(setting, bar, _cluster_of_a_byte_a_second(setting.ranks)).communication
    return {ALL_TO_ALL: sent["all_to_all"], OVER_X: sent["all_reduce_x"], GRADIENTS: sent["all_reduce_data"]}


def _predict(setting: ExpertsSetting, bar: ComparedRun, cluster: Cluster) -> GridPlan:
    return predict(
        setting.model,
        cluster,
        grid=setting.grid,
        batch=setting.batch,
        seq_len=setting.seq_len,
        dtype="bf16" if setting.on_gpus else "fp32",
        optimizer="sgd",
        overlaps=setting.on_gpus,
        imbalance=1.0,
        **bar.options,
    )


def _cluster_of_a_byte_a_second(ranks: int) -> Cluster:
    """A node of CPU ranks with links of 1 byte/s: predicted seconds equal the bytes that a rank sends."""
    return Cluster(
        name="CPU ranks",
        gpus_per_node=ranks,
        gpu=GPU(name="CPU", memory=1e12, memory_bandwidth=1e10, peak_flops=FlopRates(fp32=1e11, bf16=1e11)),
        in_node=NodeLink(bandwidth=1.0, latency=1e-30),
    )


def _make_gpt(config: GPTConfig, device: torch.device) -> GPT:
    """The whole model, with the same fp32 weights on every rank."""
    torch.manual_seed(0)
    with torch.device(device):
        return GPT(config)


def predict_milliseconds(setting: ExpertsSetting, bar: ComparedRun, sent: Mapping[str, float]) -> dict[str, float]:
    """A step and its parts: bytes over the emulated links' rates, or by the planner for the cluster of GPUs."""
    if setting.on_gpus:
        return {STEP: _predict(setting, bar, Cluster.find(setting.cluster)).step_time * 1e3}
    rates = {ALL_TO_ALL: setting.link, OVER_X: setting.node_link, GRADIENTS: setting.link}
    milliseconds = {part: number / rates[part] / 1e3 for part, number in sent.items()}
    return milliseconds | {STEP: sum(milliseconds.values())}


def measure_bars(setting: ExpertsSetting) -> tuple[list[dict[str, Any]], dict[str, dict[str, int]]]:
    """The job of each rank: a row for each bar, without links and with them, and a block's calls by bar and part."""
    device = None if setting.on_gpus else "cpu"
    grid = Grid(data=setting.data, x=setting.x, expert=setting.data, device=device)
    calls = {bar.name: count_calls(grid, bar) for bar in BARS}
    cases = [(is_slow, bar) for is_slow in ((False,) if setting.on_gpus else (False, True)) for bar in BARS]
    runs = [
        TrainingRun(
            f"{bar.name}, {'slow' if is_slow else 'no'} links", partial(_TrainStep, setting, grid, bar, is_slow)
        )
        for is_slow, bar in cases
    ]
    rows = measure(runs, setting, grid.device, extra=_describe_messages)
    return [{"bar": bar.name, "is_slow": is_slow} | row for (is_slow, bar), row in zip(cases, rows, strict=True)], calls


class _TrainStep:
    """A training step over slow links; records the bytes that the last step sent and its seconds of waits, by part."""

    def __init__(self, setting: ExpertsSetting, grid: Grid, bar: ComparedRun, is_slow: bool) -> None:
        self._grid = grid
        self._rates = (setting.node_link * 1e6, setting.link * 1e6) if is_slow else None
        self._batch = local_batch(setting, grid.coordinate("batch"), grid.size("batch"), grid.device)
        model = _make_gpt(setting.model, grid.device)
        dtype = torch.bfloat16 if setting.on_gpus else None
        self._model = parallelize(model, grid, dtype=dtype, overlap=setting.on_gpus, **bar.options)
        self._counts_once = setting.on_gpus  # counting slows the host
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        self.device = grid.device
        self.sent: dict[str, int] = {}
        self.waited: dict[str, float] = {}

    def __call__(self) -> Stepped:
        counts = not (self._counts_once and self.sent)
        if counts:
            self.sent, self.waited = defaultdict(int), defaultdict(float)
        with count_collectives(self._grid, before=self._wait) if counts else nullcontext():
            loss = self._model(*self._batch)
            loss.backward()
        norm = clip_grad_norm_(self._model.parameters(), 1.0, self._grid)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return Stepped(loss.detach(), norm)

    def _wait(self, call: CollectiveCall) -> None:
        part = _part_of(call)
        self.sent[part] += call.bytes_sent
        if self._rates is not None:
            began = time.perf_counter()
            time.sleep(call.bytes_sent / self._rates[call.axis != "x"])
            self.waited[part] += time.perf_counter() - began


def _part_of(call: CollectiveCall) -> str:
    kind = running_collective() or call.kind  # CPUs reduce-scatter experts' rows by an all-to-all
    if call.axis == "x":
        return ALL_REDUCE if kind == "all_reduce" else IN_ITS_PLACE
    return ALL_TO_ALL if call.axis == "expert" and kind == "all_to_all" else GRADIENTS


def _describe_messages(step: Step) -> dict[str, Any]:
    """Means over ranks of the bytes that the last step sent, and of the seconds that it waited."""
    assert isinstance(step, _TrainStep)
    parts = (ALL_TO_ALL, ALL_REDUCE, IN_ITS_PLACE, GRADIENTS)
    means = torch.tensor(
        [[step.sent.get(part, 0) for part in parts], [step.waited.get(part, 0.0) for part in parts]],
        dtype=torch.float64,
        device=step.device,
    )
    dist.all_reduce(means)
    sent, waited = (dict(zip(parts, each, strict=True)) for each in (means / dist.get_world_size()).tolist())
    return {"sent": sent, "waited": waited}


def count_calls(grid: Grid, bar: ComparedRun) -> dict[str, int]:
    """Return how often a block with experts sends tokens or rows in a step, by part: two such blocks less one.

    Smaller messages (numbers of rows, routers' weights) are not counted.
    """
    tokens, heads = 128, grid.size("x")
    least = tokens * 32  # bytes: a quarter of what is sent where experts have as many tokens each
    sizes: dict[str, Any] = {"ffn": 16 * heads, "vocab": 64, "max_seq_len": tokens}
    experts: dict[str, Any] = {"num_experts": 4 * grid.size("expert"), "experts_per_token": 2}
    counts: list[Counter[str]] = []
    for layers in (2, 1):
        config = GPTConfig(layers, 32 * heads, heads, **sizes, **experts)
        found: Counter[str] = Counter()

        def count(call: CollectiveCall, found: Counter[str] = found) -> None:
            if call.axis in ("x", "expert") and call.bytes_sent > least:
                found[_part_of(call)] += 1

        model = parallelize(_make_gpt(config, grid.device), grid, overlap=False, **bar.options)
        generator = torch.Generator().manual_seed(grid.coordinate("batch"))
        batch = torch.randint(64, (1, tokens), generator=generator).to(grid.device)
        with count_collectives(grid, before=count):
            model(batch, batch).backward()
        counts.append(found)
    counts[0].subtract(counts[1])
    return dict(+counts[0])


def tabulate(
    setting: ExpertsSetting,
    predictions: Mapping[str, Mapping[str, float]],
    runs: Sequence[Mapping[str, Any]] = (),
    calls: Mapping[str, Mapping[str, int]] | None = None,
) -> list[dict[str, Any]]:
    """Rows for each bar and part of a step, with the prediction and the paper's value.

    A predicted step of CPU ranks is the time of its bytes over the links plus, once measured, the step without links.
    """
    found = {(run["bar"], run["is_slow"]): run for run in runs if "error" not in run}
    rows: list[dict[str, Any]] = []
    published = read_paper("singh")["figure-7-5"]
    for bar in BARS:
        predicted = predictions[bar.name]
        milliseconds = predict_milliseconds(setting, bar, predicted)
        if not setting.on_gpus and (plain := found.get((bar.name, False))) is not None:
            milliseconds[STEP] += plain["step_milliseconds"]
        run = found.get((bar.name, not setting.on_gpus))
        measured = {} if run is None else _measured_parts(run)
        for part in PARTS:
            sent, spent = measured.get(part, (None, None))
            row: dict[str, Any] = {
                "name": bar.name,
                "part": part,
                "calls": None if calls is None else calls.get(bar.name, {}).get(part),
                "megabytes": sent,
                "predicted_megabytes": predicted[part] / 1e6 if part in predicted else None,
                "milliseconds": None if setting.on_gpus and part != STEP else spent,
                "predicted_milliseconds": milliseconds.get(part),
                "published_saved": published.get(PUBLISHED.get(part, ""), {}).get(bar.name),
            }
            if part == STEP and run is not None:
                row |= {"loss": run["loss"], "gradient_norm": run["gradient_norm"]}
            first = next((other for other in rows if other["part"] == part), None)
            if first is not None and part not in (IN_ITS_PLACE, GRADIENTS):
                for prefix in ("", "predicted_"):
                    before, after = (each[f"{prefix}milliseconds"] for each in (first, row))
                    if before and after is not None:
                        row[f"{prefix}saved"] = 1 - after / before
            rows.append(row)
    return rows


def _measured_parts(run: Mapping[str, Any]) -> dict[str, tuple[float | None, float]]:
    """(MB that a rank has sent, ms) of each part."""
    sent, waited = (dict(run[key]) for key in ("sent", "waited"))
    for spent in (sent, waited):
        spent[OVER_X] = spent[ALL_REDUCE] + spent[IN_ITS_PLACE]
    parts: dict[str, tuple[float | None, float]] = {part: (sent[part] / 1e6, waited[part] * 1e3) for part in sent}
    return parts | {STEP: (None, run["step_milliseconds"])}


def plot_experts(data: dict[str, Any], picture: Path) -> None:
    """Draw a step of each run as a bar of its parts, and next to it the savings relative to the baseline."""
    from lab.style import OTHER_PEER, PEER, THIRD_PEER, drawing, name_bars
    from stretto.report.style import EXPOSED, LIGHT, SERIES, STRETTO

    rows = {(row["name"], row["part"]): row for row in data["rows"]}
    names = list(dict.fromkeys(row["name"] for row in data["rows"]))[::-1]
    parts = (ALL_TO_ALL, ALL_REDUCE, IN_ITS_PLACE, GRADIENTS)
    compared = [row for row in data["rows"] if row["published_saved"] is not None][::-1]
    with drawing(picture, 11, max(0.75 * len(names), 0.45 * len(compared)) + 0.6) as drawn:
        steps, saved = drawn.panels(1, 2, width_ratios=(3, 2))[0]
        lengths = [0.0] * len(names)
        looks = (EXPOSED, STRETTO, OTHER_PEER, SERIES[3])
        for part, look in zip(parts, looks, strict=True):
            times = [rows[name, part]["milliseconds"] / 1e3 for name in names]
            steps.barh(range(len(names)), times, 0.6, left=lengths, label=part, **look.bar)
            lengths = [length + more for length, more in zip(lengths, times, strict=True)]
        whole = [rows[name, "step"]["milliseconds"] / 1e3 for name in names]
        rest = [all_of_it - length for all_of_it, length in zip(whole, lengths, strict=True)]
        label = "computation, and waits for other ranks"
        bars = steps.barh(range(len(names)), rest, 0.6, left=lengths, label=label, **PEER.bar)
        drawn.label_bars(steps, bars, [f"{seconds:,.2f}" for seconds in whole])
        name_bars(steps, range(len(names)), names)
        steps.set_xlabel("seconds a step")
        places = range(len(compared))
        kinds = (
            ("published_saved", "published, figure 7.5", THIRD_PEER.bar),
            ("predicted_saved", "predicted here", {"facecolor": LIGHT}),
            ("saved", "measured here", SERIES[2].bar),
        )
        for turn, (key, label, bar) in enumerate(kinds):
            values = [100 * row[key] for row in compared]
            bars = saved.barh([place + 0.27 * (turn - 1) for place in places], values, 0.25, label=label, **bar)
            drawn.label_bars(saved, bars, [f"{value:.0f}" for value in values])
        name_bars(saved, places, [f"{row['part']}, {row['name']}" for row in compared])
        saved.set_xlabel("less time than the baseline (%)")
        setting = data["setting"]
        drawn.title = (
            f"A step of a mixture of experts on data={setting['data']} x={setting['x']} expert={setting['data']}"
        )
        drawn.subtitle = describe_origin(data)
        drawn.caption = (
            f"Links are made by waiting: {setting['node_link']:g} MB/s over x, {setting['link']:g} MB/s over all other "
            "axes. DTD: duplicate token dropping. CAC: communication-aware checkpointing. Figure 7.5 of Singh's "
            "dissertation: 6.7 billion parameters, 32 experts, 128 GPUs, x = 4."
        )


BENCH = Bench(
    "experts",
    "Savings by duplicate token dropping and communication-aware checkpointing, over slow links between processes.",
    ExpertsSetting,
    compare_runs,
    Row,
    title=lambda setting: (
        f"Figure 7.5 on {setting.ranks} " + ("GPUs" if setting.on_gpus else "CPU ranks, links made by waiting")
    ),
    plot=plot_experts,
)

# SPDX-License-Identifier: Apache-2.0
"""`python -m lab dlrm`: a DLRM's training step with fused look-up and all-to-all, and with PyTorch's functions.

All run in one job, interleaved, with the same model, batches and optimizers. "library" is the baseline of
Punniyamurthy et al.: nn.functional.embedding_bag a table, all_to_all_single and cat, with row-wise Adagrad on the
sparse gradients. "kernel" updates the tables in the fused backward pass. "ahead" is the kernel, with the next batch's
indices exchanged beside the step, as `stretto train` does; "graph" also replays the step as a CUDA graph. What a step
takes longer than one whose indices were exchanged before it is the exposed exchange. Half of the ranks with half of the
batch have as much work each: `--ranks 2 --batch 32768` stands for 4 ranks.
"""

import itertools
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lab.harness import Bench, column, keep_rows
from lab.pictures import describe_origin
from stretto.bench.harness import run_ranks, time_steps
from stretto.bench.settings import Needs, Option, Ranks, Repeats, Rounds, WarmUp, require_known
from stretto.bench.training.runs import Stepped, TrainingRun, measure
from stretto.parallel import CapturedStep, Grid
from stretto.recommendation import DLRM, DLRMConfig, ShardedTables, begin_exchange, distribute_tables
from stretto.recommendation.data import SyntheticClicks
from stretto.recommendation.index_exchange import IndexExchange
from stretto.recommendation.pooled_exchange import TableLookups
from stretto.train.data import rank_rows

IMPLEMENTATIONS = ("library", "kernel", "ahead", "graph")


@dataclass(frozen=True)
class DlrmSetting:
    """Settings of `python -m lab dlrm`."""

    model: Annotated[str, Option("small, kaggle, mlperf-v2 or paper.")] = "mlperf-v2"
    max_rows: Annotated[int | None, Option("Cut longer tables down to so many rows (default: none).", least=1)] = None
    tables: Annotated[int | None, Option("How many tables, for paper.", least=1)] = None
    ranks: Ranks = None
    batch: Annotated[int, Option("Global batch in samples.", least=1)] = 65536
    implementations: Annotated[tuple[str, ...], Option("library, kernel, ahead, graph, with commas.")] = IMPLEMENTATIONS
    warm_up: WarmUp = 3
    repeats: Repeats = 10
    rounds: Rounds = 3
    seq_len: ClassVar[int] = 1  # of a sample

    def __post_init__(self) -> None:
        require_known("implementation", self.implementations, IMPLEMENTATIONS)
        if self.ranks is not None and self.batch % self.ranks:
            raise ValueError(f"a batch of {self.batch} cannot be cut into {self.ranks} parts")
        self.config()

    def config(self) -> DLRMConfig:
        """The model. ValueError for an unknown one, or for `tables` if the model's tables differ in size."""
        config = DLRMConfig.preset(self.model)
        if self.tables is not None:
            if self.tables < 1 or len(set(zip(config.rows, config.pooling, strict=True))) > 1:
                raise ValueError(
                    f"--tables is {self.tables}, but is at least 1, and for a model whose tables are alike: paper"
                )
            config = replace(config, rows=config.rows[:1] * self.tables, pooling=config.pooling[:1])
        return config if self.max_rows is None else config.capped(self.max_rows)


@dataclass(frozen=True)
class Row:
    """An implementation of the look-up and its exchange."""

    name: str = column("look-up and exchange")
    step_milliseconds: float = column("step (ms)", "{:.2f}")
    samples_per_second: float = column("samples/s", "{:,.0f}")
    less_time: float = column("less time than library", "{:.1%}")
    forward_milliseconds: float = column("look-up and exchange (ms)", "{:.2f}")
    indices_milliseconds: float = column("indices' exchange (ms)", "{:.2f}")
    exposed_milliseconds: float = column("of it exposed (ms)", "{:.2f}")
    peak_memory_gib: float = column("peak memory (GiB)", "{:.1f}")
    loss: float = column("loss", "{:.6f}")
    last_loss: float = column("last loss", "{:.6f}")


BATCHES = 4  # used in turn, since a single one would stay in the caches


@dataclass(frozen=True)
class _ClicksBatch:
    dense: Tensor
    indices: Tensor
    offsets: Tensor  # on the CPU
    labels: Tensor


def measure_dlrm(setting: DlrmSetting, ranks: int, out: Path) -> list[dict[str, Any]]:
    """The job of each rank; returns a row an implementation. Rank 0 writes them after each."""
    grid = Grid(data=ranks)
    batches = _make_batches(setting, grid)
    runs = [TrainingRun(name, partial(_Step, name, setting, grid, batches)) for name in setting.implementations]

    def keep(rows: list[dict[str, Any]]) -> None:
        keep_rows(out, BENCH.name, Row, _about(setting), _compare(rows, ranks))

    rows = measure(runs, setting, grid.device, extra=lambda step: cast(_Step, step).time_lookups(), keep=keep)
    return _compare(rows, ranks)


def _compare(rows: list[dict[str, Any]], ranks: int) -> list[dict[str, Any]]:
    """Add samples a second, and how much less time than the library a step took."""
    library = next((row.get("step_milliseconds") for row in rows if row["name"] == "library"), None)
    for row in rows:
        if "step_milliseconds" in row:
            row["samples_per_second"] = row["tokens_per_second_per_gpu"] * ranks  # a sample is one token here
            if library is not None and row["name"] != "library":
                row["less_time"] = 1 - row["step_milliseconds"] / library
    return rows


class _Step:
    """A training step, whose loss is that of the global batch."""

    def __init__(self, name: Any, setting: DlrmSetting, grid: Grid, batches: list[_ClicksBatch]) -> None:
        config = setting.config()
        with torch.device("meta"):
            model = DLRM(config)
        implementation: Any = "library" if name == "library" else "kernel"
        distribute_tables(model, grid, pooling=config.pooling, implementation=implementation)
        assert isinstance(model.tables, ShardedTables)
        self._model, self._tables, self._setting = model, model.tables, setting
        self._batches, self._turn = itertools.cycle(batches), batches[0]
        self._is_ahead = name in ("ahead", "graph")
        self._sent: tuple[_ClicksBatch, IndexExchange] | None = None
        fused = grid.device.type == "cuda"
        parameters = nn.ModuleList([model.bottom, model.top]).parameters()
        self._optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=fused, capturable=fused)
        model.tables.fuse_update("rowwise-adagrad", lr=0.02)
        self._captured = CapturedStep(self._run) if name == "graph" else None

    def __call__(self) -> Stepped:
        if not self._is_ahead:
            batch = next(self._batches)
            return self._train(batch, self._tables.exchange(batch.indices, batch.offsets))
        (batch, exchange), self._sent = self._sent or self._send(), self._send()
        lookups = exchange.wait()
        if self._captured is not None:
            self._sent[1].issue()
        return self._train(batch, lookups)

    def _send(self) -> tuple[_ClicksBatch, IndexExchange]:
        batch = next(self._batches)
        return batch, begin_exchange(self._tables, batch.indices, batch.offsets)

    def _train(self, batch: _ClicksBatch, lookups: TableLookups) -> Stepped:
        self._lookups = lookups
        given = batch.dense, lookups.indices, lookups.offsets, batch.labels
        (loss,) = (self._captured or self._run)(*given)
        # This rank's part of the loss; the mean over ranks is reported.
        return Stepped(loss * dist.get_world_size(), torch.zeros(()))

    def _run(self, dense: Tensor, indices: Tensor, offsets: Tensor, labels: Tensor) -> tuple[Tensor]:
        lookups = replace(self._lookups, indices=indices, offsets=offsets)
        loss = self._model(dense, lookups, None, labels=labels, num_samples=self._setting.batch)
        if self._sent is not None:
            self._sent[1].issue()
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return (loss.detach(),)

    def time_lookups(self) -> dict[str, float]:
        """Milliseconds of the forward look-up with its exchange, of the indices' exchange before it, and of what the
        latter adds to a step."""
        times = {"warm_up": self._setting.warm_up, "repeats": self._setting.repeats}
        given = self._turn.indices, self._turn.offsets
        whole = time_steps(self, **times)
        with torch.no_grad():
            exchange = time_steps(lambda: self._tables.exchange(*given), **times)
            lookups = self._tables.exchange(*given)
            forward = time_steps(lambda: self._tables.pool(lookups), **times)
        self._sent = None
        without = time_steps(lambda: self._train(self._turn, lookups), **times)
        return {
            "forward_milliseconds": forward * 1e3,
            "indices_milliseconds": exchange * 1e3,
            "exposed_milliseconds": (whole - without) * 1e3,
        }


def _make_batches(setting: DlrmSetting, grid: Grid) -> list[_ClicksBatch]:
    """Make this rank's parts of a few global batches, on its device."""
    config = setting.config()
    clicks = SyntheticClicks(BATCHES * setting.batch, config.rows, config.pooling, dense=config.dense, seed=0)
    rows = rank_rows(setting.batch, grid.coordinate("data"), grid.size("data"))
    batches = []
    for number in range(BATCHES):
        read = clicks.read(number * setting.batch + np.arange(rows.start, rows.stop))
        dense, indices, labels = (
            torch.from_numpy(array).to(grid.device) for array in (read.dense, read.indices, read.labels)
        )
        batches.append(_ClicksBatch(dense, indices, torch.from_numpy(read.offsets), labels))
    return batches


def plot_dlrm(data: dict[str, Any], picture: Path) -> None:
    """Draw the step time of each implementation as a bar, with the look-up and its all-to-all hatched."""
    from lab.style import drawing, name_bars
    from stretto.report.style import EXPOSED, STRETTO, Look

    rows = [row for row in data["rows"] if "step_milliseconds" in row][::-1]
    names = {
        "library": "PyTorch's functions",
        "kernel": "Stretto's fused operator",
        "ahead": "and indices a step ahead",
        "graph": "and a CUDA graph",
    }
    looks: tuple[Look, Look] = (STRETTO, EXPOSED)
    with drawing(picture, 8, 0.4 * len(rows) + 0.6) as drawn:
        panel = drawn.panels(1, 1)[0, 0]
        forward = [row["forward_milliseconds"] for row in rows]
        rest = [row["step_milliseconds"] - part for row, part in zip(rows, forward, strict=True)]
        panel.barh(range(len(rows)), rest, 0.7, label="the rest of the step", **looks[0].bar)
        bars = panel.barh(
            range(len(rows)), forward, 0.7, left=rest, label="forward look-up and all-to-all", **looks[1].bar
        )
        drawn.label_bars(panel, bars, [f"{row['step_milliseconds']:,.2f}" for row in rows])
        name_bars(panel, range(len(rows)), [names.get(row["name"], row["name"]) for row in rows])
        panel.set_xlabel("ms a training step")
        setting = data["setting"]
        tables = len(setting["model"]["rows"])
        drawn.title = f"A DLRM's training step: {tables} tables, global batch {setting['batch']:,}"
        drawn.subtitle = describe_origin(data)
        drawn.caption = (
            "The fused operator looks up and sends at once; its tables' optimizer is fused into the backward pass."
        )


def _about(setting: DlrmSetting) -> dict[str, Any]:
    return {"ranks": setting.ranks, "setting": asdict(setting) | {"model": asdict(setting.config())}}


BENCH = Bench(
    "dlrm",
    "A DLRM's training step with look-up and all-to-all fused, compared with PyTorch's functions.",
    DlrmSetting,
    lambda setting, out: run_ranks(setting.ranks, measure_dlrm, setting, setting.ranks, out),
    Row,
    title=lambda setting: f"DLRM {setting.model}, global batch {setting.batch}, {setting.ranks} ranks",
    plot=plot_dlrm,
    needs=Needs.RANKS,
    about=_about,
)

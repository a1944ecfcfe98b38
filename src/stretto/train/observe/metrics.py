# SPDX-License-Identifier: Apache-2.0
"""Writes and reads a run's metrics: metrics.jsonl with a line for each step, and summary.json.

They go to TensorBoard and Weights & Biases too, if asked, by the same names.
"""

import importlib.util
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from stretto.atomic_files import write_atomically
from stretto.launch.failures import JobError
from stretto.train.config.options import RunOptions

if TYPE_CHECKING:
    from stretto.train.observe.experts import ExpertMetrics

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"
_TAIL_BYTES = 1 << 18  # of a metrics.jsonl, which hold many steps


class DivergenceError(JobError, ArithmeticError):
    """The loss, the gradient's norm or a weight is no longer a finite number."""

    kind, has_advice, would_recur = "diverged", True, True


class CorruptionError(JobError, RuntimeError):
    """Ranks that must hold the same weights hold others. `ranks`: those that differ from the majority, or all."""

    kind, is_whole = "corrupted", True

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks, self.rank = tuple(ranks), min(ranks)
        self.blames_rank = len(ranks) == 1

    def __reduce__(self) -> tuple[Any, ...]:
        return CorruptionError, (str(self), self.ranks)


@dataclass(frozen=True)
class StepMetrics:
    """The metrics of one optimizer step.

    loss: the mean over the global batch's tokens (or samples). grad_norm: before clipping; None if it is not finite.
    skipped: the step has changed nothing, since its loss or its norm is not finite. seconds: the step's duration. rate:
    tokens or samples per second of the whole job. seen: tokens or samples that the model has been trained on so far.
    unit: which of the two they count. ranks: of the job. mfu: model FLOPs utilization, from 0 to 1; None on CPUs, and
    where the model's FLOPs or the GPU's peak are unknown. evaluation: measured on held-out samples after the step, if
    it was due. experts: of a mixture of experts, what its routers did.
    """

    step: int
    loss: float
    grad_norm: float | None
    lr: float
    rate: float
    seconds: float
    seen: int
    unit: Literal["tokens", "samples"] = "tokens"
    ranks: int = 1
    mfu: float | None = None
    evaluation: Mapping[str, float | None] = field(default_factory=dict)
    experts: "ExpertMetrics | None" = None
    skipped: bool = False

    def as_line(self) -> dict[str, Any]:
        """The step as an object of metrics.jsonl."""
        return {
            "step": self.step,
            "loss": self.loss if math.isfinite(self.loss) else None,  # JSON has no NaN
            "grad_norm": self.grad_norm,
            "lr": self.lr,
            f"{self.unit}_per_second": self.rate,
            f"{self.unit}_per_second_per_rank": self.rate / self.ranks,
            **({} if self.mfu is None else {"mfu": self.mfu}),
            "seconds": self.seconds,
            self.unit: self.seen,
            **({"skipped": True} if self.skipped else {}),
            **({} if self.experts is None else self.experts.as_line()),
            **self.evaluation,
        }

    def as_scalars(self) -> dict[str, float]:
        """The step's numbers by the names that TensorBoard and Weights & Biases group by: `train/loss`."""
        line, rate = self.as_line(), f"{self.unit}_per_second"
        shown = {
            f"train/{name}": line.get(name) for name in ("loss", "grad_norm", "lr", rate, f"{rate}_per_rank", "mfu")
        }
        shown |= {f"evaluation/{name}": value for name, value in self.evaluation.items()}
        known = {name: value for name, value in shown.items() if value is not None}
        return known | ({} if self.experts is None else self.experts.as_scalars())


class MetricsLog:
    """Appends steps to `out/metrics.jsonl`, each flushed, and to TensorBoard and Weights & Biases if asked. For rank 0.

    A run that starts after step `start` keeps the file's lines up to `start`, so that no step is written twice. In
    Weights & Biases each start is a separate run, in a group with the folder's name.

    A file that is removed meanwhile, or moved away, is written again, with a warning. has_lost_folder: the
    run's configuration was removed, too: its whole folder probably, which `rm -r` empties file by file.

    wandb: the project, or None. options: of the run, for Weights & Biases.
    """

    def __init__(
        self,
        out: Path,
        start: int,
        *,
        tensorboard: bool = False,
        wandb: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._path = path = out / METRICS_FILE
        self.has_lost_folder = False
        configuration = out / "config.toml"
        self._configuration = configuration if configuration.exists() else None
        kept = [line for line, values in read_steps(path) if values["step"] <= start] if has_history(out, start) else []
        write_atomically(path, "".join(kept))  # a kill at this moment must not lose the history
        self._file = open(path, "a+", encoding="utf-8")  # noqa: SIM115  (closed by __exit__)
        self._tensorboard = _open_tensorboard(out, start) if tensorboard else None
        self._wandb = None if wandb is None else _open_wandb(out, wandb, options or {})

    def _write_again(self) -> None:
        """Write all lines to a new file, from the old one, which is still open."""
        logger.warning("%s was removed while the run trained: it is written again", self._path)
        self._file.seek(0)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path, self._file.read())
        self._file.close()
        self._file = open(self._path, "a+", encoding="utf-8")  # noqa: SIM115  (closed by __exit__)

    def write(self, metrics: StepMetrics) -> None:
        self.has_lost_folder |= self._configuration is not None and not self._configuration.exists()
        if not self._path.exists():
            self._write_again()
        self._file.write(json.dumps(metrics.as_line()) + "\n")
        self._file.flush()
        scalars = metrics.as_scalars()
        if self._tensorboard is not None:
            for name, value in scalars.items():
                self._tensorboard.add_scalar(name, value, metrics.step)
        if self._wandb is not None:
            self._wandb.log(scalars, step=metrics.step)

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code=0 if error is None else 1)


def has_history(out: Path, start: int) -> bool:
    """Check whether a run that starts after step `start` keeps lines of an earlier metrics.jsonl."""
    return start > 0 and (out / METRICS_FILE).is_file()


def require_loggers(options: RunOptions) -> None:
    """Raise ValueError if a run asks for TensorBoard or Weights & Biases, and its package is not installed."""
    if options.wandb in ("true", "false"):  # of `--set train.wandb=true`
        raise ValueError(f"train.wandb is {options.wandb}, but names a project; train.wandb=none is for none")
    for option, off, package in (("tensorboard", False, "tensorboard"), ("wandb", None, "wandb")):
        value = getattr(options, option)
        if value != off and importlib.util.find_spec(package) is None:
            shown = str(value).lower() if isinstance(value, bool) else repr(value)
            raise ValueError(
                f"train.{option} is {shown}, but the package {package} is not installed: "
                f"pip install 'stretto[{package}]', or set train.{option}={str(off).lower()}"
            )


def write_summary(out: Path, summary: dict[str, Any]) -> None:
    """Write `out/summary.json`, whole or not at all."""
    write_atomically(out / SUMMARY_FILE, json.dumps(summary, indent=2) + "\n")


def read_steps(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the lines of a metrics.jsonl and their contents. A truncated last line, left by a kill, is skipped.

    The loss of a skipped step is NaN if it was not finite. Raises ValueError with the number of any other line that is
    not a step.
    """
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            text = line.decode()
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                return
            raise ValueError(f"{path}: line {number} is damaged: {error}; correct or delete the file") from error
        if isinstance(values, dict) and values.get("skipped") is True and values.get("loss") is None:
            values["loss"] = math.nan
        is_of_samples = isinstance(values, dict) and "samples_per_second" in values
        rate = "samples_per_second" if is_of_samples else "tokens_per_second"
        for key, kind in (("step", int), ("loss", float), (rate, float)):
            value = values.get(key) if isinstance(values, dict) else None
            if isinstance(value, bool) or not isinstance(value, int | kind):
                raise ValueError(
                    f"{path}: line {number} is no step: it has no number {key!r}; correct or delete the file"
                )
        yield text, values


def last_step(out: Path) -> int | None:
    """The last step in the metrics.jsonl of `out`, read from the file's end; None if there is none."""
    try:
        with open(out / METRICS_FILE, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().splitlines(keepends=True)
    except OSError:
        return None
    for line in reversed(lines):
        try:
            step = json.loads(line)["step"] if line.endswith(b"\n") else None  # a step is being written
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        if isinstance(step, int):
            return step
    return None


def _open_tensorboard(out: Path, start: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter  # an optional dependency

    return SummaryWriter(str(out / "tensorboard"), purge_step=start + 1)


def _open_wandb(out: Path, project: str, options: Mapping[str, Any]) -> Any:
    import wandb  # an optional dependency

    try:
        return wandb.init(project=project, group=out.name, dir=str(out), config=dict(options))
    except Exception as error:  # without a network or a login it raises its own exceptions
        raise ValueError(
            f"Weights & Biases does not start for train.wandb={project!r}: {error}: run `wandb login`, or set "
            "WANDB_MODE=offline in the environment, or train.wandb=none"
        ) from error

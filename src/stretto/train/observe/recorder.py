# SPDX-License-Identifier: Apache-2.0
"""Records each step's loss, norm and duration in the log and on the screen, without stalling the device."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from stretto import counters
from stretto.memory import failures
from stretto.train.observe.experts import NUMBERS_OF_ROUTER, ExpertMetrics
from stretto.train.observe.metrics import DivergenceError, MetricsLog, StepMetrics
from stretto.train.observe.progress import ProgressReporter

# Steps in a row that may change nothing. An overflow halves the loss scale, and the largest one is 1 after 24. A loss
# that is not finite for so many batches in a row does not come from the data: the weights are spoiled.
MAX_SKIPPED = 32


@dataclass(frozen=True)
class _Launched:
    """A launched step: where its loss, norm and routing numbers arrive, and the CUDA events before and after it."""

    step: int
    lr: float
    numbers: Tensor
    began: torch.cuda.Event | None
    arrival: torch.cuda.Event | None


class StepRecorder:
    """Turns steps into StepMetrics, for the log, the screen and the summary.

    On a GPU, a step's numbers are read after the next step was launched, so the device never idles for them; on a CPU
    they are read immediately. Every rank reads its own values, and all raise DivergenceError for the same step.

    items_until: the tokens or samples of all steps up to one.
    full_rate: tokens or samples per second if all ranks computed at their peak FLOP/s, which the utilization is a part
    of; None if it is unknown. skips_overflows: steps whose norm alone is not finite change nothing, and training goes
    on, as the loss scale adapts. skips_nonfinite: so do steps whose loss or norm is not finite; a line on the screen
    says so. on_nonfinite: called on all ranks with a step whose loss or norm is not finite; its return value ends the
    message.
    """

    def __init__(
        self,
        items_until: Callable[[int], int],
        log: MetricsLog | None,
        reporter: ProgressReporter,
        *,
        unit: Literal["tokens", "samples"] = "tokens",
        ranks: int = 1,
        full_rate: float | None = None,
        skips_overflows: bool = False,
        skips_nonfinite: bool = False,
        on_nonfinite: Callable[[int], str] = lambda step: "",
    ) -> None:
        self._items_until, self._unit = items_until, unit
        self._ranks, self._full_rate = ranks, full_rate
        self._log, self._reporter = log, reporter
        self._skips_overflows, self._skips_nonfinite, self._skipped = skips_overflows, skips_nonfinite, 0
        self._on_nonfinite = on_nonfinite
        self._waiting: list[_Launched] = []
        self._durations: list[float] = []
        self._items: list[int] = []  # of each of these steps
        self._mark: torch.cuda.Event | None = None
        self.restart_clock()
        self.last: StepMetrics | None = None

    def add(
        self,
        step: int,
        lr: float,
        loss: Tensor,
        grad_norm: Tensor,
        evaluate: Callable[[], Mapping[str, float | None]] | None = None,
        *,
        routing: Tensor | None = None,
    ) -> None:
        """Record a launched step, whose `loss` and `grad_norm` (0-dim, on the device) may not be computed yet.

        routing: of a mixture of experts, what `observe.experts.pack` returns.
        With `evaluate`, wait for the step, then evaluate. The evaluation's time does not count as a step's.
        """
        numbers = torch.stack((loss.detach().double(), grad_norm.detach().double()))
        if routing is not None:
            numbers = torch.cat((numbers, routing.flatten()))
        began = self._mark
        arrival: torch.cuda.Event | None = None
        if numbers.is_cuda:
            on_host = torch.empty(len(numbers), dtype=torch.float64, pin_memory=True, device="cpu")
            numbers = on_host.copy_(numbers, non_blocking=True)
            self._mark = arrival = _mark_now()
        self._waiting.append(_Launched(step, lr, numbers, began, arrival))
        if evaluate is not None:
            while len(self._waiting) > 1:
                self._record(self._waiting.pop(0))
            metrics = self._measure(self._waiting.pop(0))
            self._publish(replace(metrics, evaluation=evaluate()))
            self.restart_clock()
        while len(self._waiting) > (0 if arrival is None else 1):
            self._record(self._waiting.pop(0))

    def has_lost_folder(self) -> bool:
        """True if the run's folder was removed while the run trained, as far as this rank's log shows."""
        return self._log is not None and self._log.has_lost_folder

    def flush(self) -> None:
        """Wait for all steps' numbers, for example so that no checkpoint stores a diverged state."""
        while self._waiting:
            self._record(self._waiting.pop(0))

    def restart_clock(self) -> None:
        """Start timing the next step now, so that what was done since the last step (a checkpoint) does not count."""
        self._clock = time.perf_counter()
        self._mark = _mark_now() if torch.cuda.is_initialized() else None

    def rate(self) -> float:
        """Tokens or samples per second, over all steps but the first, which warms up (if there are more)."""
        first = 1 if len(self._durations) > 1 else 0
        return sum(self._items[first:]) / sum(self._durations[first:])

    def mfu(self) -> float | None:
        """Model FLOPs utilization at `rate`, from 0 to 1; None if it is unknown."""
        return None if self._full_rate is None else self.rate() / self._full_rate

    def seconds(self) -> float:
        """The duration of all steps, without checkpoints."""
        return sum(self._durations)

    def _record(self, launched: _Launched) -> None:
        self._publish(self._measure(launched))

    def _measure(self, launched: _Launched) -> StepMetrics:
        if launched.arrival is not None:
            with counters.waiting_for((), "this rank's GPU"):
                launched.arrival.synchronize()
        failures.check()  # if a wait failed in this step, its numbers are wrong
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        if launched.began is not None and launched.arrival is not None:
            # The host reads a step's numbers late, and the last two steps' together, so the device's events are used.
            seconds = launched.began.elapsed_time(launched.arrival) / 1e3
        loss, grad_norm = launched.numbers[:2].tolist()
        routing = launched.numbers[2:].view(-1, NUMBERS_OF_ROUTER).tolist()
        is_skipped = self._judge(launched.step, loss, grad_norm)
        self._durations.append(seconds)
        seen = self._items_until(launched.step)
        self._items.append(seen - self._items_until(launched.step - 1))
        rate = self._items[-1] / seconds
        return StepMetrics(
            step=launched.step,
            loss=loss,
            grad_norm=grad_norm if math.isfinite(grad_norm) else None,
            lr=launched.lr,
            rate=rate,
            seconds=seconds,
            seen=seen,
            unit=self._unit,
            ranks=self._ranks,
            mfu=None if self._full_rate is None else rate / self._full_rate,
            experts=ExpertMetrics.of(routing) if routing else None,
            skipped=is_skipped,
        )

    def _judge(self, step: int, loss: float, grad_norm: float) -> bool:
        """True if the step has changed nothing. Raises DivergenceError if the run ends with it."""
        bad = [(name, value) for name, value in (("loss", loss), ("gradient's norm", grad_norm))]
        bad = [(name, value) for name, value in bad if not math.isfinite(value)]
        if not bad:
            self._skipped = 0
            return False
        self._skipped += 1
        is_overflow = self._skips_overflows and math.isfinite(loss)
        if not is_overflow:
            (name, value), where = bad[0], self._on_nonfinite(step)
            if not self._skips_nonfinite:
                raise DivergenceError(f"the {name} is {value} in step {step}{where}")
            self._reporter.print_message(f"step {step} is skipped: the {name} is {value}{where}")
        if self._skipped > MAX_SKIPPED:
            what = "gradients have overflowed" if is_overflow else "the loss or the gradient's norm was not finite"
            raise DivergenceError(f"{what} in {self._skipped} steps in a row, of which the last is {step}")
        return True

    def _publish(self, metrics: StepMetrics) -> None:
        self.last = metrics
        if self._log is not None:
            self._log.write(metrics)
        self._reporter.show(metrics)


def _mark_now() -> torch.cuda.Event:
    mark = torch.cuda.Event(enable_timing=True)
    mark.record()
    return mark

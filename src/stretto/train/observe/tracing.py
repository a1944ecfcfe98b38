"""Profiles some of a run's steps on rank 0 and writes `out/trace.json`, which `observe.timeline` reads."""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from stretto.axes import NAMES
from stretto.parallel import Grid
from stretto.parallel.comm.counting import axes_of_groups
from stretto.train.observe.progress import ProgressReporter
from stretto.train.observe.recorder import StepRecorder
from stretto.train.observe.timeline import GROUP_MARK, STEP_MARK, TRACE_FILE, Timeline, read_timeline

# Enough that each of the threads that gloo has for a group (two) gets some.
SIGNS_OF_LIFE = 32


def steps_to_trace(start: int, end: int) -> range:
    """Which of the steps after `start`, up to `end`, are traced: the fourth and fifth, by when a run goes its pace.

    A shorter run's last two, or the last alone of one or two.
    """
    steps = range(start + 1, end + 1)
    return steps[3:5] if len(steps) >= 5 else steps[-2:] if len(steps) >= 3 else steps[-1:]


class StepTracer(AbstractContextManager["StepTracer"]):
    """Profiles a run's `steps` on rank 0, and writes their trace into `file`; nothing where `steps` is empty.

    Every rank of the grid has one, with the same steps. The steps' results are those without it. What it takes to
    start and to write is left out of the steps' times. `timeline` is what was traced, once it is written, on rank 0.
    Leaving the context by an exception writes nothing.
    """

    def __init__(
        self, file: Path, grid: Grid, steps: range, recorder: StepRecorder, reporter: ProgressReporter
    ) -> None:
        self._file, self._grid, self._steps = file, grid, steps
        self._recorder, self._reporter = recorder, reporter
        self._profiler: profile | None = None
        self.timeline: Timeline | None = None

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """What runs inside is that step, and is profiled if it is one of those to trace."""
        if step not in self._steps:
            yield
            return
        if step == self._steps[0]:
            self._start()
        with record_function(STEP_MARK + str(step)):
            yield
            if step == self._steps[-1] and self._profiler is not None:
                self._wait_for_device()

    def end(self, step: int) -> None:
        """The step has been recorded: write the trace if it was the last to trace."""
        if self._profiler is not None and step == self._steps[-1]:
            self.finish()

    def finish(self) -> None:
        """Write what has been traced, also when the run ends before all of it was."""
        if self._profiler is None:
            return
        self._recorder.flush()
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        self._write(profiler)
        self.timeline = read_timeline(self._file)
        self._reporter.say(_in_words(self.timeline))
        self._recorder.restart_clock()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            profiler.stop()

    def _start(self) -> None:
        self._recorder.flush()
        if dist.get_rank() == 0:
            activities = [ProfilerActivity.CPU]
            if self._grid.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
                self._wait_for_device()
            self._profiler = profile(activities=activities)
            with _quiet_profiler():
                self._profiler.start()
        if self._grid.device.type == "cpu":
            _show_threads(self._grid)
        self._recorder.restart_clock()

    def _wait_for_device(self) -> None:
        if self._grid.device.type == "cuda":
            torch.cuda.synchronize(self._grid.device)

    def _write(self, profiler: profile) -> None:
        """The profiler's file, completed and moved into place whole."""
        with tempfile.TemporaryDirectory(dir=self._file.parent, prefix=".trace-") as folder:
            path = Path(folder) / TRACE_FILE
            profiler.export_chrome_trace(str(path))
            trace = json.loads(path.read_text(encoding="utf-8"))
            trace.pop("traceName", None)  # where the profiler wrote it
            trace["stretto"] = {
                "groups": axes_of_groups(self._grid),
                "rank": dist.get_rank(),
                "grid": dict(self._grid.sizes),
            }
            path.write_text(json.dumps(trace), encoding="utf-8")
            os.replace(path, self._file)


def _show_threads(grid: Grid) -> None:
    """Let each axis communicate alone, under a mark: gloo has threads for each group, and the trace only their ids."""
    for axis in NAMES:
        if grid.size(axis) > 1:
            with record_function(GROUP_MARK + axis):
                nothing = [torch.zeros(1) for _ in range(SIGNS_OF_LIFE)]
                works = [dist.all_reduce(tensor, group=grid.group(axis), async_op=True) for tensor in nothing]
                for work in works:
                    work.wait()


def _in_words(timeline: Timeline) -> str:
    first, last = timeline.steps[0].number, timeline.steps[-1].number
    which = f"steps {first} and {last}" if first != last else f"step {first}"
    exposed = [f"{axis} {seconds * 1e3:.1f}" for axis, seconds in timeline.exposed_by_axis.items() if seconds]
    by_axis = f" ({', '.join(exposed)})" if exposed else ""
    return (
        f"traced {which}: {timeline.step_time * 1e3:.1f} ms a step, "
        f"of which exposed communication {timeline.exposed_total * 1e3:.1f} ms{by_axis}"
    )


@contextmanager
def _quiet_profiler() -> Iterator[None]:
    """Keep the profiler's own messages off the screen: it reads how loud to be when it is first used."""
    name = "KINETO_LOG_LEVEL"
    before = os.environ.get(name)
    os.environ.setdefault(name, "99")
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]

# SPDX-License-Identifier: Apache-2.0
"""Profiles some steps of a run on rank 0 and writes `out/trace.json`, which `observe.timeline` reads."""

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from stretto.axes import EXPERT, EXPERT_AXES, NAMES, REPLICAS, SHARDS
from stretto.parallel import Grid
from stretto.parallel.comm.counting import axes_of_groups
from stretto.train.observe.progress import ProgressReporter
from stretto.train.observe.recorder import StepRecorder
from stretto.train.observe.timeline import GROUP_MARK, STEP_MARK, TRACE_FILE, Timeline, read_timeline

# All-reduces that identify a group's gloo threads: enough that each of the two threads of a group runs some.
PROBES = 32


def steps_to_trace(start: int, end: int) -> range:
    """Choose the steps to trace after `start`, up to `end`: the fourth and fifth, which are past the warm-up.

    In a shorter run, the last two; of one or two steps, only the last.
    """
    steps = range(start + 1, end + 1)
    return steps[3:5] if len(steps) >= 5 else steps[-2:] if len(steps) >= 3 else steps[-1:]


class StepTracer(AbstractContextManager["StepTracer"]):
    """Profiles a run's `steps` on rank 0, and writes their trace to `file`. Does nothing if `steps` is empty.

    Every rank of the grid has one, with the same steps. layers: of the model on this rank, for the host's time of each.
    Tracing does not change the steps' results, and the time to start and write it does not count as a step's.
    `timeline` is the trace's Timeline on rank 0, once it is written. An exception in the context leaves no file.
    recorder, reporter: the run's, if it is one's.
    """

    def __init__(
        self,
        file: Path,
        grid: Grid,
        steps: range,
        recorder: StepRecorder | None = None,
        reporter: ProgressReporter | None = None,
        layers: int = 0,
    ) -> None:
        self._file, self._grid, self._steps, self._layers = file, grid, steps, layers
        self._recorder, self._reporter = recorder, reporter
        self._profiler: profile | None = None
        self.timeline: Timeline | None = None

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Run a step in this context: it is profiled if it is one of the steps to trace."""
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
        """Write the trace if `step`, which the recorder has, was the last one to trace."""
        if self._profiler is not None and step == self._steps[-1]:
            self.finish()

    def finish(self) -> None:
        """Write what has been traced, also if the run ends before the last step to trace."""
        if self._profiler is None:
            return
        if self._recorder is not None:
            self._recorder.flush()
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        self._write(profiler)
        self.timeline = read_timeline(self._file)
        if self._reporter is not None:
            self._reporter.print_message(_describe(self.timeline))
        if self._recorder is not None:
            self._recorder.restart_clock()

    def __exit__(self, *_: object) -> None:
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            profiler.stop()

    def _start(self) -> None:
        if self._recorder is not None:
            self._recorder.flush()
        if dist.get_rank() == 0:
            activities = [ProfilerActivity.CPU]
            if self._grid.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
                self._wait_for_device()
            # Events of gloo's threads have no sizes, so the calls' shapes are needed; those of NCCL's kernels have
            # them.
            self._profiler = profile(activities=activities, record_shapes=self._grid.device.type == "cpu")
            with _quiet_profiler():
                self._profiler.start()
        if self._grid.device.type == "cpu":
            _identify_gloo_threads(self._grid)
        if self._recorder is not None:
            self._recorder.restart_clock()

    def _wait_for_device(self) -> None:
        if self._grid.device.type == "cuda":
            torch.cuda.synchronize(self._grid.device)

    def _write(self, profiler: profile) -> None:
        """Write the profiler's trace, add what `read_timeline` needs, and move it into place."""
        with tempfile.TemporaryDirectory(dir=self._file.parent, prefix=".trace-") as folder:
            path = Path(folder) / TRACE_FILE
            profiler.export_chrome_trace(str(path))
            trace = json.loads(path.read_text(encoding="utf-8"))
            trace.pop("traceName", None)  # the temporary path
            trace["stretto"] = {
                "groups": axes_of_groups(self._grid),
                "rank": dist.get_rank(),
                "grid": dict(self._grid.sizes),
                "layers": self._layers,
            }
            path.write_text(json.dumps(trace), encoding="utf-8")
            os.replace(path, self._file)


def trace_steps(run: Callable[[], object], grid: Grid, file: str | Path, steps: int = 2) -> Timeline | None:
    """Call `run` so often, a step of training or of an engine, and write a trace of it; the timeline, on rank 0.

    Collective: all ranks of the grid make the same calls.
    """
    with StepTracer(Path(file), grid, range(1, steps + 1)) as tracer:
        for step in range(1, steps + 1):
            with tracer.step(step):
                run()
            tracer.end(step)
    return tracer.timeline


def _identify_gloo_threads(grid: Grid) -> None:
    """Let each axis communicate alone, under a mark in the trace.

    gloo has its own threads for each group, and the trace has only their ids: the mark identifies their axis.
    """
    of_experts = EXPERT_AXES if grid.size(EXPERT) > 1 else ()
    for axis in (*of_experts, REPLICAS, SHARDS, *NAMES):  # of one group, the last mark counts
        if grid.size(axis) > 1:
            with record_function(GROUP_MARK + axis):
                tensors = [torch.zeros(1, device="cpu") for _ in range(PROBES)]
                works = [dist.all_reduce(tensor, group=grid.group(axis), async_op=True) for tensor in tensors]
                for work in works:
                    work.wait()


def _describe(timeline: Timeline) -> str:
    first, last = timeline.steps[0].number, timeline.steps[-1].number
    which = f"steps {first} and {last}" if first != last else f"step {first}"
    exposed = [f"{axis} {seconds * 1e3:.1f}" for axis, seconds in timeline.exposed_by_axis.items() if seconds]
    by_axis = f" ({', '.join(exposed)})" if exposed else ""
    alone = timeline.exposed_host_copies
    copies = [
        f"{row} {seconds * 1e3:.1f} ms ({alone[row] * 1e3:.1f} exposed)"
        for row, seconds in timeline.host_copies.items()
        if seconds
    ]
    return (
        f"traced {which}: {timeline.step_time * 1e3:.1f} ms a step, "
        f"of which exposed communication {timeline.exposed_total * 1e3:.1f} ms{by_axis}"
        + ("" if timeline.host is None else f"; launching it took the host {timeline.host * 1e3:.1f} ms")
        + ("" if timeline.host_per_layer is None else f", {timeline.host_per_layer * 1e3:.2f} ms a layer")
        + (f"; copies {', '.join(copies)}" if copies else "")
    )


@contextmanager
def _quiet_profiler() -> Iterator[None]:
    """Silence the profiler's own messages: it reads its log level when it is first used."""
    name = "KINETO_LOG_LEVEL"
    before = os.environ.get(name)
    os.environ.setdefault(name, "99")
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]

# SPDX-License-Identifier: Apache-2.0
"""The training loop: `train(config)`, which every rank of a job calls.

It loops over optimizer steps. The loop over a step's micro-batches is in `stretto.train.step_executor`.
"""

import json
import logging
import os
import resource
import sys
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stretto import counters
from stretto.atomic_files import write_atomically
from stretto.axes import NAMES
from stretto.cluster import Cluster
from stretto.counters import note, phase
from stretto.launch.elastic import CHECKED, mark_begun, mark_ended
from stretto.launch.run_lock import training_lock
from stretto.launch.watching import device_waits
from stretto.launch.watching.joining import watched
from stretto.launch.watching.slow_ranks import SLOW_RANK_FILE
from stretto.memory import allocated_bytes, failures
from stretto.parallel import Grid, count_collectives
from stretto.train.checkpoint import checkpoint_path, newest_checkpoint, prepare_folder
from stretto.train.checkpoint.integrity import DamagedError
from stretto.train.checkpoint.metadata import read_metadata
from stretto.train.checkpoint.operator_choices import gather_choices, restore_choices
from stretto.train.checkpoint.resuming import start_from_newest
from stretto.train.checkpoint.retention import Retention
from stretto.train.checkpoint.saver import Saver
from stretto.train.checkpoint.torch_format import read_index
from stretto.train.config import config_to_toml
from stretto.train.config.gpt import TrainConfig
from stretto.train.config.options import JobConfig
from stretto.train.devices import resolve_device
from stretto.train.kinds import kind_of
from stretto.train.nonfinite import require_finite_start, save_batch
from stretto.train.observe.metrics import (
    SUMMARY_FILE,
    CorruptionError,
    DivergenceError,
    MetricsLog,
    require_loggers,
    write_summary,
)
from stretto.train.observe.progress import Display, ProgressReporter, open_reporter
from stretto.train.observe.recorder import StepRecorder
from stretto.train.observe.timeline import TRACE_FILE
from stretto.train.observe.tracing import StepTracer, steps_to_trace
from stretto.train.optimizer import learning_rate
from stretto.train.preflight import preflight
from stretto.train.replicas import ReplicaCheck
from stretto.train.stopping import StopRequest
from stretto.train.task import TrainTask

logger = logging.getLogger(__name__)


def train(config: JobConfig, *, display: Display = "auto") -> None:
    """Train as `config` says, from the start or from a checkpoint, and write all results to `config.out`.

    Every rank of the job calls it, with torch.distributed's environment (a run of one rank needs none). It initializes
    the job's process group and destroys it again, unless the caller has initialized it. It ends early, with a
    checkpoint, when a rank gets SIGINT, SIGTERM or SIGHUP. display: what rank 0 shows on the screen.

    Raises ValueError for an invalid configuration, invalid data or an invalid checkpoint, or while another run uses
    `config.out`, and DivergenceError, with the step and how to continue, when the loss is no longer finite.
    """
    is_callers_group = dist.is_initialized()
    if is_callers_group or CHECKED in os.environ:  # `launch` is called after the whole preflight
        require_loggers(config.train)
    else:
        config = preflight(config)  # of a program that calls this: before anything is made or written
    is_captured = getattr(config.train, "cuda_graph", False)
    os.environ.update(device_waits.environment(times_nccl=not is_captured))  # before the process group is made
    # A process group that the caller has initialized keeps the caller's time limit.
    timeout = None if is_callers_group else config.train.timeout
    with watched(config.train.timeout, config.out):
        note("start")
        grid = Grid(**config.grid.sizes(), device=resolve_device(config).device, timeout=timeout)
        counters.name_groups(grid.group_names())
        try:
            with training_lock(config.out) if dist.get_rank() == 0 else nullcontext():
                if config.train.preflight:
                    _check_machines(grid, config)
                _train_on(grid, config, display)
        except Exception:
            if not is_callers_group and config.ranks == 1:  # several ranks end with their processes
                dist.destroy_process_group()
            raise
        note("exit")
        failures.synchronize(grid.device)
        if not is_callers_group:
            # Without the barrier, this process could close its connections at exit while another rank still uses them.
            dist.barrier()
            dist.destroy_process_group()


def _check_machines(grid: Grid, config: JobConfig) -> None:
    """Measure the machines; rank 0 warns of what is slow, and writes all to the run's folder."""
    from stretto.launch.preflight import check_machines

    named = config.cluster if isinstance(config, TrainConfig) else None
    cluster = None if named is None else Cluster.find(named)
    report = check_machines(grid.device, folder=config.out, cluster=cluster)
    if report.rank == 0:
        write_atomically(config.out / "preflight.json", json.dumps(asdict(report), indent=1))
        for fault in report.faults:
            logger.warning("preflight: %s", fault)


def _train_on(grid: Grid, config: JobConfig, display: Display) -> None:
    """Run the whole training on a grid: resume, train all steps, and write the summary."""
    is_first = dist.get_rank() == 0
    resumed_from, (task, start) = start_from_newest(
        config.out, config.train.resume, lambda checkpoint: _start_task(config, grid, checkpoint)
    )
    if start >= config.train.steps:
        if is_first:
            logger.warning(
                "%s is at step %d of train.steps=%d: nothing is left to do", resumed_from, start, config.train.steps
            )
        return
    with ExitStack() as stack:
        stack.callback(task.close)
        log, reporter = None, ProgressReporter()
        if is_first:
            prepare_folder(config.out, start)
            for file in (SUMMARY_FILE, TRACE_FILE):
                (config.out / file).unlink(missing_ok=True)  # this run may be interrupted before it replaces them
            log = stack.enter_context(
                MetricsLog(
                    config.out,
                    start,
                    tensorboard=config.train.tensorboard,
                    wandb=config.train.wandb,
                    options=config.model_dump(mode="json"),
                )
            )
            mark_begun(config.out, start)
            reporter = open_reporter(display, start=start, steps=config.train.steps, every=config.train.log_every)
        stack.enter_context(reporter)
        stop = stack.enter_context(StopRequest())
        saver = stack.enter_context(
            Saver(
                config.out,
                grid.device,
                Retention.of(config.train),
                is_async=config.train.async_save,
                log=reporter.print_message if is_first else lambda _: None,
            )
        )
        task.before_update = saver.wait_on_device
        replicas = None if config.train.verify_steps is None else ReplicaCheck(task)
        ranks = grid.size("world")
        recorder = StepRecorder(
            config.items_until,
            log,
            reporter,
            unit=config.unit,
            ranks=ranks,
            full_rate=task.full_rate(),
            skips_overflows=task.skips_overflows,
            skips_nonfinite=config.train.on_nonfinite == "skip",
            on_nonfinite=partial(_inspect_nonfinite, task, replicas),
        )
        if is_first and config.train.resume == "latest" and resumed_from is None:
            reporter.print_message(f"train.resume is 'latest', but {config.out} has no checkpoint: starts at step 0")
        if is_first and (layout := task.layout()) is not None:
            reporter.print_message(layout)
        predicted = task.predict() if is_first else None
        if predicted is not None:
            reporter.print_message(_describe_prediction(predicted))
        traced = steps_to_trace(start, config.train.steps) if config.train.trace else range(0)
        tracer = stack.enter_context(
            StepTracer(config.out / TRACE_FILE, grid, traced, recorder, reporter, task.count_layers())
        )
        _measure_waits(grid, is_captured=getattr(config.train, "cuda_graph", False))
        try:
            bytes_sent = _train_steps(task, start, stop, saver, recorder, reporter, tracer, replicas)
        except DivergenceError as error:
            last = start if recorder.last is None else recorder.last.step
            with suppress(OSError):  # the divergence comes first
                saver.wait()  # every rank has diverged: the checkpoint that is being written may be the one to name
            raise DivergenceError(f"{error}; {_how_to_continue(config, last, resumed_from, start)}") from None
        except CorruptionError as error:
            with suppress(OSError):
                saver.wait()  # the checkpoint that is being written was verified
            raise CorruptionError(f"{error}; {_where_it_was_verified(config)}", error.ranks) from None
        peak_memory = _peak_memory(grid)
        if is_first:
            about = {"peak_memory_bytes": peak_memory, "bytes_sent": bytes_sent}
            measured = {} if tracer.timeline is None else {"measured": tracer.timeline.summary()}
            expected = {} if predicted is None else {"predicted": predicted}
            write_summary(config.out, _summary(task, recorder) | about | measured | expected)
            if recorder.last is not None and recorder.last.step == config.train.steps:
                mark_ended(config.out)
            if recorder.has_lost_folder():
                raise ValueError(_what_is_left(config, recorder))


def _what_is_left(config: JobConfig, recorder: StepRecorder) -> str:
    """Write the run's configuration again, and say what there is of a run whose files were removed."""
    assert recorder.last is not None
    write_atomically(config.out / "config.toml", config_to_toml(config))
    return (
        f"{config.out} or its config.toml was removed while the run trained: it was stopped after step "
        f"{recorder.last.step}, and its metrics and {newest_checkpoint(config.out)} were written there again; "
        "train.resume='latest' continues"
    )


def _start_task(config: JobConfig, grid: Grid, checkpoint: Path | None) -> tuple[TrainTask, int]:
    """Build the task, and load a checkpoint, if there is one. Returns the task, and the step after which it starts."""
    note("build")
    task = kind_of(config).make_task(config, grid)
    note("load")
    try:
        restore_choices(None if checkpoint is None else read_index(checkpoint), grid.device)
        start, weights_file = (0, task.start()) if checkpoint is None else (task.resume(checkpoint), checkpoint)
        if weights_file is not None:
            require_finite_start(task, weights_file)
    except DamagedError:
        task.close()
        raise
    return task, start


def _describe_prediction(predicted: dict[str, Any]) -> str:
    step, exposed = predicted["step_time"] * 1e3, sum(predicted["exposed"].values()) * 1e3
    return (
        f"predicted: {step:,.3g} ms a step, of which exposed communication {exposed:,.3g} ms; "
        f"{predicted['peak_memory'] / 1e9:,.3g} GB at the peak"
    )


def _summary(task: TrainTask, recorder: StepRecorder) -> dict[str, Any]:
    assert recorder.last is not None
    device = task.grid.device
    return {
        "steps": recorder.last.step,
        "loss": recorder.last.as_line()["loss"],
        **recorder.last.evaluation,
        "seconds": recorder.seconds(),
        f"{task.config.unit}_per_second": recorder.rate(),
        **({} if recorder.mfu() is None else {"mfu": recorder.mfu()}),
        "parameters": task.num_parameters(),
        "ranks": task.grid.size("world"),
        "grid": dict(task.grid.sizes),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        **_slow_rank(),
    }


def _slow_rank() -> dict[str, Any]:
    """The rank that the watcher has reported last as slow, for `summary.json`; empty if it has reported none."""
    folder = counters.shared_folder()
    with suppress(OSError, ValueError):
        if folder is not None:
            return {"slow_rank": json.loads((folder / SLOW_RANK_FILE).read_text())}
    return {}


def _measure_waits(grid: Grid, *, is_captured: bool) -> None:
    """Choose how this rank measures the time of a step in which it waits: see `launch.watching.slow_ranks`."""
    if grid.device.type != "cuda":
        counters.measure_windows("cpu")
    elif is_captured:  # collectives in a CUDA graph are not recorded
        counters.measure_windows("host")
    else:
        counters.measure_windows("nccl", device_waits.NcclWindows())


def _train_steps(
    task: TrainTask,
    start: int,
    stop: StopRequest,
    saver: Saver,
    recorder: StepRecorder,
    reporter: ProgressReporter,
    tracer: StepTracer,
    replicas: ReplicaCheck | None,
) -> dict[str, int]:
    """Run all steps after `start`, with checkpoints. Returns the bytes that a rank sends in a step, by axis.

    Weights are verified before they are saved, so that no checkpoint is newer than the last step that was verified.
    """
    options = task.config.train
    # The second step's bytes are counted: the first one also has one-time communication.
    counted = min(start + 2, options.steps)
    bytes_sent: dict[str, int] = {}
    for step in range(start + 1, options.steps + 1):
        lr = learning_rate(step, options)
        counting = count_collectives(task.grid) if step == counted else nullcontext()
        with tracer.step(step), counting as counts:
            loss, grad_norm = task.step(step, lr)
        if counts is not None:
            bytes_sent = dict.fromkeys(NAMES, 0) | counts.bytes_by_axis()
        evaluation = task.evaluation(step)
        with nullcontext() if evaluation is None else phase("evaluate"):
            recorder.add(step, lr, loss, grad_norm, evaluation, routing=task.routing())
        tracer.end(step)
        if step == start + 1 and options.checkpoint_every is not None:
            recorder.flush()
            with phase("save", step):
                saver.prepare(task.state())  # after the first step the optimizer has its state
            recorder.restart_clock()
        if saver.has_failed() or recorder.has_lost_folder():
            stop.request()  # all ranks end after the same step, in `save`
        is_stopping = stop.is_agreed()
        is_due = options.checkpoint_every is not None and step % options.checkpoint_every == 0
        saves = is_due or is_stopping or step == options.steps
        if replicas is not None and (saves or step % (options.verify_steps or 1) == 0):
            replicas.check(step)
        if saves:
            recorder.flush()
            note("save", step)
            last = recorder.last
            measured = None if last is None or last.step != step else last.evaluation
            ends = is_stopping or step == options.steps
            description = task.description() | {"operators": gather_choices()}
            saver.save(step, task.state(), description, measured, waits=ends)
            recorder.restart_clock()
        if is_stopping and not recorder.has_lost_folder():
            reporter.print_message(f"stopped after step {step}; train.resume='latest' continues from there")
        if is_stopping:
            break
    tracer.finish()
    return bytes_sent


def _inspect_nonfinite(task: TrainTask, replicas: ReplicaCheck | None, step: int) -> str:
    """Save the batch of a step that is not finite. If that comes from one rank's weights, raise CorruptionError."""
    where = save_batch(task, step)
    if replicas is not None:
        replicas.check(step)
    return where


def _where_it_was_verified(config: JobConfig) -> str:
    """Say whether the newest checkpoint holds weights that were compared before they were saved."""
    newest = newest_checkpoint(config.out)
    if newest is None:
        return "there is no checkpoint of verified weights"
    was_verified = read_metadata(newest).run.get("train", {}).get("verify_steps") is not None
    return f"the weights of {newest} were {'' if was_verified else 'not '}verified before they were saved"


def _how_to_continue(config: JobConfig, last: int, resumed_from: Path | None, start: int) -> str:
    """Say what to change, and where to continue, after a run whose last step with a finite loss and norm was `last`.

    A step's loss and norm belong to the weights before it: the checkpoint of `last` holds the weights with which the
    next step failed, so an older one is named.
    """
    sound = newest_checkpoint(config.out, before=checkpoint_path(config.out, last))
    if sound is None and start < last:
        sound = resumed_from
    change = f"a lower train.lr than {config.train.lr:g}, or another train.seed"
    if sound is None:
        return f"no checkpoint has weights whose loss was finite: start again, --set train.resume=none, with {change}"
    return (
        f"the last checkpoint whose weights had a finite loss is {sound}: continue with --set train.resume={sound} and "
        f"{change}, since the same run diverges again"
    )


def _peak_memory(grid: Grid) -> int:
    """The highest peak memory of any rank, in bytes: allocated on its GPU, or resident in its process on a CPU."""
    if grid.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(grid.device) + allocated_bytes(grid.device)
    else:
        unit = 1 if sys.platform == "darwin" else 1024  # macOS reports bytes, Linux KiB
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    highest = torch.tensor(peak, dtype=torch.int64, device=grid.device)
    if grid.size("world") > 1:
        dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    return int(highest.item())

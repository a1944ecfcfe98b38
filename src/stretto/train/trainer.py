"""Training: `train(config)`, called by every rank of a job."""

import logging
import resource
import sys
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stretto.memory import allocated_bytes, failures
from stretto.parallel import AXES, Grid, count_collectives
from stretto.train.checkpoint import checkpoint_path, find_checkpoint, newest_checkpoint, prepare_folder
from stretto.train.config.dlrm import DLRMTrainConfig
from stretto.train.config.gpt import TrainConfig
from stretto.train.config.options import JobConfig
from stretto.train.gpt.prediction import in_words
from stretto.train.launch import resolve_device
from stretto.train.launch.run_lock import training_lock
from stretto.train.launch.stopping import StopRequest
from stretto.train.observe.metrics import SUMMARY_FILE, DivergenceError, MetricsLog, require_tensorboard, write_summary
from stretto.train.observe.progress import Display, ProgressReporter, open_reporter
from stretto.train.observe.recorder import StepRecorder
from stretto.train.observe.timeline import TRACE_FILE
from stretto.train.observe.tracing import StepTracer, steps_to_trace
from stretto.train.optimizer import learning_rate
from stretto.train.task import TrainTask

logger = logging.getLogger(__name__)


def train(config: JobConfig, *, display: Display = "auto") -> None:
    """Train as `config` says, from the start or from a checkpoint, and leave everything in `config.out`.

    Every rank of the job calls it, with torch.distributed's environment (a run of one rank needs none). It joins
    the job's process group and leaves it again, unless the caller has joined. Ends early, with a checkpoint, when a
    rank gets SIGINT, SIGTERM or SIGHUP. `display` is what rank 0 shows on the screen.

    Raises ValueError for what the configuration, the data or the checkpoint does not allow, or while another run is
    going on in `config.out`, and
    DivergenceError, with the step and how to go on, when the loss is no longer a number.
    """
    if config.train.tensorboard:
        require_tensorboard()
    is_callers_group = dist.is_initialized()
    # A group that the caller has made keeps the time limit that the caller gave it.
    timeout = None if is_callers_group else config.train.timeout
    grid = Grid(**config.grid.sizes(), device=resolve_device(config).device, timeout=timeout)
    try:
        with training_lock(config.out) if dist.get_rank() == 0 else nullcontext():
            _train_on(grid, config, display)
    except Exception:
        if not is_callers_group and config.ranks == 1:  # several ranks end with their processes
            dist.destroy_process_group()
        raise
    failures.synchronize(grid.device)
    if not is_callers_group:
        # Python's own end would close the connections at any moment, also while another rank uses them.
        dist.barrier()
        dist.destroy_process_group()


def _train_on(grid: Grid, config: JobConfig, display: Display) -> None:
    """All of a run, on a grid that is there."""
    is_first = dist.get_rank() == 0
    resumed_from = find_checkpoint(config.out, config.train.resume)
    run = _make_run(config, grid)
    start = 0 if resumed_from is None else run.resume(resumed_from)
    if start >= config.train.steps:
        if is_first:
            logger.warning(
                "%s is at step %d of train.steps=%d: nothing is left to do",
                resumed_from,
                start,
                config.train.steps,
            )
        return
    with ExitStack() as stack:
        stack.callback(run.close)
        log, reporter = None, ProgressReporter()
        if is_first:
            prepare_folder(config.out, start)
            for file in (SUMMARY_FILE, TRACE_FILE):
                (config.out / file).unlink(missing_ok=True)  # an earlier run's, should this one be cut short
            log = stack.enter_context(MetricsLog(config.out, start, tensorboard=config.train.tensorboard))
            reporter = open_reporter(display, start=start, steps=config.train.steps, every=config.train.log_every)
        stack.enter_context(reporter)
        stop = stack.enter_context(StopRequest())
        recorder = StepRecorder(config.items_a_step, log, reporter, unit=config.unit)
        if is_first and (layout := run.layout()) is not None:
            reporter.say(layout)
        predicted = run.predict() if is_first else None
        if predicted is not None:
            reporter.say(in_words(predicted))
        traced = steps_to_trace(start, config.train.steps) if config.train.trace else range(0)
        tracer = stack.enter_context(StepTracer(config.out / TRACE_FILE, grid, traced, recorder, reporter))
        try:
            bytes_sent = _train_steps(run, start, stop, recorder, reporter, tracer)
        except DivergenceError as error:
            last = start if recorder.last is None else recorder.last.step
            raise DivergenceError(f"{error}; {_how_to_go_on(config, last, resumed_from, start)}") from None
        peak_memory = _peak_memory(grid)
        if is_first:
            about = {"peak_memory_bytes": peak_memory, "bytes_sent": bytes_sent}
            measured = {} if tracer.timeline is None else {"measured": tracer.timeline.summary()}
            expected = {} if predicted is None else {"predicted": predicted}
            write_summary(config.out, _summary(run, recorder) | about | measured | expected)


def _make_run(config: JobConfig, grid: Grid) -> TrainTask:
    """What trains this kind of model."""
    match config:
        case TrainConfig():
            from stretto.train.gpt.task import GPTTask

            return GPTTask(config, grid)
        case DLRMTrainConfig():
            from stretto.train.dlrm.task import DLRMTask

            return DLRMTask(config, grid)
    raise TypeError(f"there is nothing to train a {type(config).__name__} with")


def _summary(run: TrainTask, recorder: StepRecorder) -> dict[str, Any]:
    """The run in a few numbers, for `summary.json`."""
    assert recorder.last is not None
    device = run.grid.device
    return {
        "steps": recorder.last.step,
        "loss": recorder.last.loss,
        **recorder.last.evaluation,
        "seconds": recorder.seconds(),
        f"{run.config.unit}_per_second": recorder.rate(),
        "parameters": run.parameters(),
        "ranks": run.grid.size("world"),
        "grid": dict(run.grid.sizes),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }


def _train_steps(
    run: TrainTask,
    start: int,
    stop: StopRequest,
    recorder: StepRecorder,
    reporter: ProgressReporter,
    tracer: StepTracer,
) -> dict[str, int]:
    """All steps after `start`, with checkpoints. Returns the bytes that a rank sends a step, by axis."""
    options = run.config.train
    # One early step is counted, and not the first, where there is another: what that sends once is no one's
    # concern.
    counted = min(start + 2, options.steps)
    bytes_sent: dict[str, int] = {}
    for step in range(start + 1, options.steps + 1):
        lr = learning_rate(
            step, lr=options.lr, min_lr=options.min_lr, warmup_steps=options.warmup_steps, steps=options.steps
        )
        counting = count_collectives(run.grid) if step == counted else nullcontext()
        with tracer.step(step), counting as counts:
            loss, grad_norm = run.step(step, lr)
        if counts is not None:
            bytes_sent = dict.fromkeys(AXES, 0) | counts.bytes_by_axis()
        recorder.add(step, lr, loss, grad_norm, run.evaluation(step))
        tracer.end(step)
        is_stopping = stop.is_agreed()
        is_due = options.checkpoint_every is not None and step % options.checkpoint_every == 0
        if is_due or is_stopping or step == options.steps:
            recorder.flush()
            run.save(step)
            recorder.restart_clock()
        if is_stopping:
            reporter.say(f"stopped after step {step}; train.resume='latest' continues from there")
            break
    tracer.finish()
    return bytes_sent


def _how_to_go_on(config: JobConfig, last: int, resumed_from: Path | None, start: int) -> str:
    """What to change, and where to continue, after a run whose last step with a finite loss and norm was `last`.

    These are of the weights before that step: its checkpoint holds the ones that the next step failed with.
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
    """The most memory, in bytes, that any rank has had: allocated on its GPU, or resident in its process."""
    if grid.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(grid.device) + allocated_bytes(grid.device)
    else:
        unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    highest = torch.tensor(peak, dtype=torch.int64, device=grid.device)
    if grid.size("world") > 1:
        dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    return int(highest.item())

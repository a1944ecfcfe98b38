"""Training: `train(config)`, called by every rank of a job."""

import logging
import resource
import sys
from contextlib import ExitStack, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from stretto.memory import allocated_bytes
from stretto.models import GPT
from stretto.parallel import (
    AXES,
    CapturedStep,
    Grid,
    Overlap,
    checkpoint_activations,
    clip_scale,
    count_collectives,
    deferred_reduction,
    gradient_norm,
    micro_batch_of,
    parallelize,
)
from stretto.train.checkpoint import (
    find_checkpoint,
    load_checkpoint,
    newest_checkpoint,
    prepare_folder,
    save_checkpoint,
)
from stretto.train.data import Sampler, rank_rows
from stretto.train.launch import resolve_device
from stretto.train.metrics import SUMMARY_FILE, MetricsLog, require_tensorboard, write_summary
from stretto.train.optimizer import build_optimizer
from stretto.train.options import TrainConfig
from stretto.train.prediction import in_words, predict_run
from stretto.train.preflight import build_model_config, open_data
from stretto.train.progress import Display, Reporter, open_reporter
from stretto.train.recorder import DivergenceError, StepRecorder
from stretto.train.run_lock import training_lock
from stretto.train.schedule import learning_rate
from stretto.train.stopping import StopRequest
from stretto.train.timeline import TRACE_FILE
from stretto.train.tracing import StepTracer, steps_to_trace

logger = logging.getLogger(__name__)

COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


def train(config: TrainConfig, *, display: Display = "auto") -> None:
    """Train as `config` says, from the start or from a checkpoint, and leave everything in `config.out`.

    Every rank of the job calls it, with torch.distributed's environment (a run of one rank needs none). It joins
    the job's process group and leaves it again, unless the caller has joined. Ends early, with a checkpoint, when a
    rank gets SIGINT, SIGTERM or SIGHUP. `display` is what rank 0 shows on the screen.

    Raises ValueError for what the configuration, the data or the checkpoint does not allow, or while another run is
    going on in `config.out`, and
    DivergenceError, with the step and the last checkpoint, when the loss is no longer a number.
    """
    if config.train.tensorboard:
        require_tensorboard()
    is_callers_group = dist.is_initialized()
    grid = Grid(**config.grid.sizes(), device=resolve_device(config).device)
    try:
        with training_lock(config.out) if dist.get_rank() == 0 else nullcontext():
            _train_on(grid, config, display)
    except Exception:
        if not is_callers_group and config.ranks == 1:  # several ranks end with their processes
            dist.destroy_process_group()
        raise
    if not is_callers_group:
        # Python's own end would close the connections at any moment, also while another rank uses them.
        dist.barrier()
        dist.destroy_process_group()


def _train_on(grid: Grid, config: TrainConfig, display: Display) -> None:
    """All of a run, on a grid that is there."""
    is_first = dist.get_rank() == 0
    resumed_from = find_checkpoint(config.out, config.train.resume)
    run = _Run(config, grid)
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
        log, reporter = None, Reporter()
        if is_first:
            prepare_folder(config.out, start)
            for file in (SUMMARY_FILE, TRACE_FILE):
                (config.out / file).unlink(missing_ok=True)  # an earlier run's, should this one be cut short
            log = stack.enter_context(MetricsLog(config.out, start, tensorboard=config.train.tensorboard))
            reporter = open_reporter(display, start=start, steps=config.train.steps, every=config.train.log_every)
        stack.enter_context(reporter)
        stop = stack.enter_context(StopRequest())
        recorder = StepRecorder(config.train.batch * config.train.seq_len, log, reporter)
        predicted = predict_run(config, run.model_config) if is_first else None
        if predicted is not None:
            reporter.say(in_words(predicted))
        traced = steps_to_trace(start, config.train.steps) if config.train.trace else range(0)
        tracer = stack.enter_context(StepTracer(config.out / TRACE_FILE, grid, traced, recorder, reporter))
        try:
            bytes_sent = _train_steps(run, start, stop, recorder, reporter, tracer)
        except DivergenceError as error:
            raise DivergenceError(f"{error}; {_last_checkpoint(config)}") from None
        peak_memory = _peak_memory(grid)
        if is_first:
            about = {"peak_memory_bytes": peak_memory, "bytes_sent": bytes_sent}
            measured = {} if tracer.timeline is None else {"measured": tracer.timeline.summary()}
            expected = {} if predicted is None else {"predicted": predicted}
            write_summary(config.out, run.summary(recorder) | about | measured | expected)


class _Run:
    """What a step needs, on this rank: the model on its grid, the optimizer, and the data in its order."""

    def __init__(self, config: TrainConfig, grid: Grid) -> None:
        self.config, self.grid = config, grid
        options = config.train
        self.dataset = open_data(config)
        self.model_config = build_model_config(config, self.dataset)
        torch.manual_seed(options.seed)  # for dropout; weights are seeded by their names
        self.sampler = Sampler(len(self.dataset), options.batch, options.seed)
        with torch.device("meta"):
            model = GPT(self.model_config)
        dtype = COMPUTE_DTYPES[options.dtype]
        self.model = parallelize(
            model.double() if dtype == torch.float64 else model,
            grid,
            dtype=dtype,
            keep_gathered=options.keep_gathered,
            overlap=Overlap(**dict(config.overlap)),
            tune_matmuls=options.tune_matmuls,
            shard_sequence=options.shard_sequence,
            seed=options.seed,
        )
        if options.checkpoint_activations:
            checkpoint_activations(self.model)
        self.optimizer = build_optimizer(self.model, options)
        self._captured = CapturedStep(self._compute) if options.cuda_graph else None

    def resume(self, checkpoint: Any) -> int:
        """Load a checkpoint. Returns its step."""
        metadata = load_checkpoint(checkpoint, self.model, self.optimizer)
        if self.grid.coordinate("world") == 0:
            for key, now in self.data_description().items():
                if metadata.data.get(key) != now:
                    logger.warning(
                        "the checkpoint's data had %s=%r, and this run's has %r: it will not see the "
                        "sequences that it would have seen",
                        key,
                        metadata.data.get(key),
                        now,
                    )
        return metadata.step

    def step(self, step: int, lr: float) -> tuple[Tensor, Tensor]:
        """Step `step` (1 is the first): the global mean loss and the gradient's norm, 0-dim, on the device."""
        options = self.config.train
        tokens, targets = self._batch(step)
        if self._captured is not None:
            rate = torch.tensor(lr, dtype=torch.float32).pin_memory().to(self.grid.device, non_blocking=True)
            loss, grad_norm = self._captured(tokens, targets, rate)
            return loss, grad_norm
        dropout_seed = int(np.random.SeedSequence((options.seed, step)).generate_state(1, np.uint64)[0] >> 1)
        return self._compute(tokens, targets, lr, dropout_seed)

    def _compute(
        self, tokens: Tensor, targets: Tensor, lr: float | Tensor, dropout_seed: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """A step on this rank's rows of the batch. `dropout_seed=None`: nothing is drawn."""
        options = self.config.train
        micro_batches = list(zip(*(t.split(options.micro_batch or len(t)) for t in (tokens, targets)), strict=True))
        # All targets of a token stream are valid, so their number needs no counting.
        num_targets = options.batch * options.seq_len
        total = torch.zeros((), dtype=torch.float64, device=self.grid.device)
        done = 0
        for inputs, wanted in micro_batches:
            is_last = done + len(inputs) == len(tokens)
            # Every rank draws the same dropout seeds for each micro-batch, and a resumed run those that it would have
            # drawn: masks are told apart by the rows of the global batch.
            if dropout_seed is not None:
                torch.manual_seed(dropout_seed)
            with (
                nullcontext() if is_last else deferred_reduction(self.model),
                micro_batch_of(self.model, len(tokens), done),
            ):
                loss = self.model(inputs, wanted, num_targets=num_targets)
                loss.backward()
            total += loss.detach()
            done += len(inputs)
        grad_norm = gradient_norm(self.model.parameters(), self.grid)
        self.optimizer.step(lr, None if options.clip is None else clip_scale(grad_norm, options.clip))
        return total, grad_norm

    def close(self) -> None:
        """Let go of what would outlive the process group."""
        if self._captured is not None:
            self._captured.close()

    def save(self, step: int) -> None:
        """Write the checkpoint of `step`."""
        save_checkpoint(
            self.config.out,
            step,
            self.model,
            self.optimizer,
            model_config=self.model_config,
            run=self.config.model_dump(mode="json"),
            data=self.data_description(),
            keep=self.config.train.keep_checkpoints,
        )

    def data_description(self) -> dict[str, Any]:
        """What a resumed run must share to see the same sequences in the same order."""
        options = self.config.train
        return {
            "fingerprint": self.dataset.fingerprint,
            "seed": options.seed,
            "batch": options.batch,
            "seq_len": options.seq_len,
        }

    def summary(self, recorder: StepRecorder) -> dict[str, Any]:
        """The run in a few numbers, for `summary.json`."""
        assert recorder.last is not None
        device = self.grid.device
        return {
            "steps": recorder.last.step,
            "loss": recorder.last.loss,
            "seconds": recorder.seconds(),
            "tokens_per_second": recorder.tokens_per_second(),
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "ranks": self.grid.size("world"),
            "grid": dict(self.grid.sizes),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        }

    def _batch(self, step: int) -> tuple[Tensor, Tensor]:
        """This rank's rows of the step's batch, on the device: tokens and targets, int64 [rows, seq_len]."""
        rows = rank_rows(self.config.train.batch, self.grid.coordinate("batch"), self.grid.size("batch"))
        sequences = np.stack([self.dataset[index] for index in self.sampler.indices(step - 1)[rows]])
        batch = torch.from_numpy(sequences)
        if self.grid.device.type == "cuda":
            batch = batch.pin_memory().to(self.grid.device, non_blocking=True)
        return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()


def _train_steps(
    run: _Run, start: int, stop: StopRequest, recorder: StepRecorder, reporter: Reporter, tracer: StepTracer
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
        recorder.add(step, lr, loss, grad_norm)
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


def _last_checkpoint(config: TrainConfig) -> str:
    newest = newest_checkpoint(config.out)
    return "no checkpoint had been written" if newest is None else f"the last checkpoint is {newest}"


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

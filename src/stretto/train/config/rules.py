# SPDX-License-Identifier: Apache-2.0
"""The rules between the options of a GPT's training run, and the grid nearest to one that breaks them. No torch."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, cast

from stretto.axes import EXPERT, NAMES, STAGE_AXES, GridSizes, check_sizes
from stretto.execution import ExecutionOptions, Fp8, Fp8Recipe
from stretto.huggingface.public_models import PUBLIC_MODELS
from stretto.planner.grids import divisors, every_grid
from stretto.schedules import build_schedule
from stretto.train.config.options import GridConfig, broken, contradictions_of_run, nearest_multiple

if TYPE_CHECKING:
    from stretto.train.config.gpt import RunConfig, TrainConfig


def contradictions(config: "TrainConfig") -> list[str]:
    """Check the rules between options. Returns a message for each rule that is broken."""
    checks = (
        _check_sizes, lambda each: contradictions_of_run(each.train), _check_fp8, _check_ramp, _check_invariance,
        _check_copies, _check_state, _check_pruning, _check_pipeline, _check_reshard, _check_graph, _check_data,
    )  # fmt: skip
    return [problem for check in checks for problem in check(config)]


def _check_sizes(config: "TrainConfig") -> Iterator[str]:
    grid, run, model = config.grid, config.train, config.model
    parts = grid.batch_parts
    if grid.ranks != config.ranks:
        yield (
            f"ranks is {config.ranks}, but the grid {grid} has {grid.ranks}; "
            f"the grid {nearest_grid(grid, config.ranks)} would do, or ranks={grid.ranks}"
        )
    if run.batch % parts:
        yield (
            f"train.batch is {run.batch}, but grid.data x grid.z = {parts} must divide it; "
            f"the nearest batch that would do is {nearest_multiple(run.batch, parts)}"
        )
    elif run.micro_batch is not None and run.batch // parts % run.micro_batch:
        local, wanted = run.batch // parts, run.micro_batch
        yield (
            f"train.micro_batch is {wanted}, but must divide a rank's {local} sequences "
            f"(train.batch {run.batch} / (grid.data x grid.z = {parts})); the nearest that would do is "
            f"{min(divisors(local), key=lambda n: abs(n - wanted))}, "
            f"or a train.batch of {nearest_multiple(run.batch, parts * wanted)}"
        )
    else:
        tokens = (run.micro_batch or run.batch // parts) * run.seq_len // grid.context
        if run.shard_sequence and tokens % grid.x:
            near = nearest_multiple(run.seq_len, grid.x * grid.context)
            yield (
                f"train.shard_sequence is on, but grid.x = {grid.x} must divide a rank's {tokens} tokens at once "
                f"(its micro-batch x train.seq_len); train.seq_len={near} would do"
            )
    if grid.context > 1 and run.seq_len % (2 * grid.context):
        yield (
            f"train.seq_len is {run.seq_len}, but 2 x grid.context = {2 * grid.context}, the number of parts that a "
            f"sequence is cut into, must divide it; {nearest_multiple(run.seq_len, 2 * grid.context)} would do"
        )
    options = {"train.shard_sequence is on": run.shard_sequence, f"grid.context is {grid.context}": grid.context > 1}
    if model.balance == "sequence" or (model.balance == "bias" and model.balance_loss):
        loss = "model.balance" if model.balance == "sequence" else "model.balance_loss"
        for option in broken(options):
            yield (
                f"{option} and {loss} is {getattr(model, loss.partition('.')[2])!r}, a loss over each sequence, but a "
                "rank would have only a part of each sequence; model.balance='switch' would do"
            )


def _check_fp8(config: "TrainConfig") -> Iterator[str]:
    run = config.train
    if run.dtype != "fp8":
        for name in _changed(run, ("fp8_recipe", "fp8_leave_out")):
            given = f"train.{name} is {getattr(run, name)!r}"
            yield f"{given}, but train.dtype is {run.dtype!r}; train.dtype='fp8' would do"
        return
    try:
        Fp8(cast(Fp8Recipe, run.fp8_recipe), tuple(run.fp8_leave_out))
    except ValueError as error:
        yield f"train.fp8_{error}"
    if run.sparsity:
        yield (
            f"train.dtype is 'fp8' and train.sparsity is {run.sparsity}, but pruned weights are not gathered in fp8; "
            "train.dtype='bf16' would do"
        )


def _changed(run: "RunConfig", names: Iterable[str]) -> list[str]:
    """The options that are not the default."""
    return [name for name in names if getattr(run, name) != type(run).model_fields[name].default]


def _check_ramp(config: "TrainConfig") -> Iterator[str]:
    run, before = config.train, 0
    each = config.grid.batch_parts * (run.micro_batch or 1)
    for last, batch in run.batch_ramp or ():
        if last <= before:
            yield f"train.batch_ramp has step {last} after {before}, but steps rise; {before + 1} would do"
        before = max(before, last)
        if not 1 <= batch < 1 << 31 or batch % each:
            yield (
                f"train.batch_ramp has a batch of {batch}, but must have multiples of grid.data x grid.z (x "
                f"train.micro_batch) = {each}; {nearest_multiple(min(batch, 1 << 30), each)} would do"
            )
    if run.batch_ramp and run.cuda_graph:
        yield "train.cuda_graph is on, and its steps have one batch; train.batch_ramp=none would do"
    if run.batch_ramp and config.is_pipelined and run.micro_batch is None:
        yield (
            "train.batch_ramp changes the number of a pipeline's micro-batches, and train.micro_batch does not say how "
            f"large these are; train.micro_batch={max(1, run.batch_ramp[0][1] // config.grid.batch_parts)} would do"
        )


def _check_invariance(config: "TrainConfig") -> Iterator[str]:
    """`parallelize` checks the model itself, and x."""
    grid, model = config.grid, config.model
    reasons = {
        "the model is a GPT of stretto's: a Hugging Face model (model.path, or a public model's name) would do": (
            model.path is None and model.name not in PUBLIC_MODELS
        ),
        "train.dtype is 'fp8': 'bf16' would do": config.train.dtype == "fp8",
        **{f"grid.{axis} is {getattr(grid, axis)}: 1 would do": getattr(grid, axis) > 1 for axis in ("y", "context")},
        f"the model is cut into {grid.pipe * config.pipeline.stages.virtual_stages} stages: one would do": (
            config.is_pipelined
        ),
    }
    return (f"train.invariant is on, but {reason}" for reason in broken(reasons) if config.train.invariant)


def _check_copies(config: "TrainConfig") -> Iterator[str]:
    run = config.train
    reasons = {
        f"train.dtype is {run.dtype!r}, in which the weights are kept": run.dtype not in ("bf16", "fp8"),
        f"train.optimizer is {run.optimizer!r}, and only adamw writes them": run.optimizer != "adamw",
        "train.reshard is 'after_forward', so that no weight stays from one pass to another": (
            run.reshard == "after_forward"
        ),
    }
    for reason in broken(reasons) if run.writes_copies else ():
        yield f"train.writes_copies is on, but {reason}; train.writes_copies=false would do"


def _check_state(config: "TrainConfig") -> Iterator[str]:
    """The options of separate optimizer state."""
    run = config.train
    if run.optimizer_state == "fp32":
        would_do = "train.optimizer_state='device' or 'host' would do"
        if run.dtype == "fp16":
            yield f"train.dtype is 'fp16', which needs separate fp32 weights: {would_do}"
        for name in _changed(run, _STATE_OPTIONS):
            yield (
                f"train.{name} is {getattr(run, name)}, but train.optimizer_state is 'fp32', which has no such state; "
                f"{would_do}"
            )
        return
    reasons = {
        "train.dtype is 'fp64'; train.dtype='bf16', 'fp16' or 'fp32' would do": run.dtype == "fp64",
        "train.optimizer is 'muon'; train.optimizer='adamw' or 'sgd' would do": run.optimizer == "muon",
        "train.writes_copies is on, whose copies are the weights already; train.writes_copies=false would do": (
            run.writes_copies
        ),
        f"train.reshard is {run.reshard!r}, which keeps whole gradients in fp32; 'after_backward' would do": (
            ExecutionOptions(reshard=run.reshard).scatters_once
        ),
        "train.cuda_graph is on, and a graph cannot wait for the host; train.cuda_graph=false or "
        "train.optimizer_state='device' would do": run.cuda_graph and run.optimizer_state == "host",
    }
    for reason in broken(reasons):
        yield f"train.optimizer_state is {run.optimizer_state!r}, but {reason}"


_STATE_OPTIONS = (
    "state_bucket", "state_buffers", "reduce_buckets", "split_weights", "accumulate_fp32", "step_on", "host_memory",
    "sparsity",
)  # fmt: skip
_PRUNE_OPTIONS = ("sparse_index", "prune_scope", "prune_at", "prune_method")


def _check_pruning(config: "TrainConfig") -> Iterator[str]:
    run = config.train
    if not run.sparsity:
        for name in _changed(run, _PRUNE_OPTIONS):
            yield (
                f"train.{name} is {getattr(run, name)!r}, but train.sparsity is 0, which prunes nothing; "
                "train.sparsity=0.9 would do"
            )
        return
    yield from broken(
        {
            "train.prune_method is 'early-bird', which draws masks every train.prune_at steps, and that is 0; "
            "train.prune_at=100 would do": run.prune_method == "early-bird" and not run.prune_at,
            f"train.prune_at is {run.prune_at} and train.cuda_graph is on, but a graph's steps cannot change; "
            "train.prune_at=0 or train.cuda_graph=false would do": run.prune_at and run.cuda_graph,
        }
    )


def _check_pipeline(config: "TrainConfig") -> Iterator[str]:
    grid, run, options = config.grid, config.train, config.pipeline
    for name, needed in (("limit", "message-driven"), ("serve_first", "message-driven"), ("extra_warm_up", "1f1b")):
        if getattr(options, name) and options.schedule != needed:
            yield (
                f"pipeline.{name} is {getattr(options, name)!r}, but pipeline.schedule is {options.schedule!r}, which "
                f"has no such option; pipeline.schedule={needed!r} would do"
            )
    try:
        stages = options.stages
    except ValueError as error:
        yield f"pipeline.{error}"
        return
    if not config.is_pipelined:
        if options.cuts is not None:
            yield f"pipeline.cuts is {options.cuts}, but grid.pipe is 1, so that there is one stage"
        return
    if run.cuda_graph:
        yield (
            "train.cuda_graph is on and the model has pipeline stages, but a graph cannot wait for messages that the "
            "host receives; train.cuda_graph=false would do"
        )
    rows = run.batch // grid.batch_parts
    if run.batch % grid.batch_parts or rows % (run.micro_batch or rows):
        return
    number = rows // (run.micro_batch or rows)
    if options.schedule == "message-driven":
        if stages.virtual_stages > 1:
            yield f"pipeline.virtual_stages is {stages.virtual_stages}, but message-driven order takes one stage a rank"
        return
    try:
        build_schedule(options.schedule, grid.pipe, number, stages.virtual_stages, options.extra_warm_up)
    except ValueError as error:
        yield (
            f"pipeline.schedule is {options.schedule!r}, with {number} micro-batches of a rank (train.batch / (data x "
            f"z) / train.micro_batch): {error}"
        )


def _check_reshard(config: "TrainConfig") -> Iterator[str]:
    grid, run = config.grid, config.train
    whole = run.batch // grid.batch_parts
    reasons = {
        f"grid.z is {grid.z}, so that z divides no gradient": GridSizes(**grid.sizes()).shards == 1,
        "a rank's whole part of the batch is one micro-batch": run.micro_batch in (None, whole),
    }
    for reason in broken(reasons) if ExecutionOptions(reshard=run.reshard).scatters_once else ():
        yield f"train.reshard is {run.reshard!r}, but {reason}; 'after_backward' would do"


def _check_graph(config: "TrainConfig") -> Iterator[str]:
    """Yield what a step that is one CUDA graph cannot do."""
    grid, run, dropout = config.grid, config.train, config.model.dropout
    rules = {
        "train.cuda_graph and train.trace are both on, but the kernels of a graph cannot be attributed in a trace; "
        "train.cuda_graph=false would do": run.trace,
        "train.cuda_graph and train.recompute are both on, but recomputation restores the state of random number "
        "generators, which a graph cannot do; train.cuda_graph=false would do": run.recompute != "none",
        f"train.cuda_graph is on and grid.expert is {grid.expert}, but a graph cannot wait for the number of rows "
        "of a rank's experts; train.expert_rows=(a capacity), grid.expert=1 or train.cuda_graph=false would do": (
            grid.expert > 1 and run.expert_rows is None
        ),
        f"train.cuda_graph is on and model.dropout is {dropout}, but a graph would draw the same masks in every step; "
        "train.cuda_graph=false or model.dropout=0 would do": dropout,
    }
    return broken(rules if run.cuda_graph else {})


def _check_data(config: "TrainConfig") -> Iterator[str]:
    data, every = config.data, config.train.evaluate_every
    for name in ("path", "evaluation_path"):
        if getattr(data, name) == []:
            yield f"data.{name} is [], but must name at least one file or folder"
    if data.weights is not None:
        paths = len(data.path) if isinstance(data.path, list) else 1
        if len(data.weights) != paths or min(data.weights) <= 0:
            near = [weight if weight > 0 else 1.0 for weight in [*data.weights, *[1.0] * paths][:paths]]
            rule = "must be a number above 0 for each path of data.path"
            yield f"data.weights is {data.weights}, but {rule}; {near} would do"
        if data.evaluation_sequences is not None and data.evaluation_path is None:
            yield (
                f"data.evaluation_sequences is {data.evaluation_sequences} and data.weights is set, but the last "
                "sequences of a mixture are of its last path alone: give data.evaluation_path"
            )
    if every is not None and data.evaluation_path is data.evaluation_sequences is None:
        yield (
            f"train.evaluate_every is {every}, but nothing is held out to evaluate on: give "
            "data.evaluation_path, or data.evaluation_sequences for a part of data.path"
        )


def nearest_grid(
    grid: GridConfig, ranks: int, suits: Callable[[GridSizes], bool] = lambda sizes: True
) -> GridConfig | None:
    """Find the grid of `ranks` that changes the fewest axes of `grid`, and these by the smallest ratios.

    suits: whether a grid is valid; None if no grid is. The pipeline stages are kept if they divide the ranks; and so
    does expert, where the grid has the ranks for it.
    """
    wanted = GridSizes(**grid.sizes())
    words = {name: size for name, size in grid.sizes().items() if name not in NAMES}

    def distance(sizes: GridSizes) -> tuple[float, ...]:
        ratios = [abs(math.log2(sizes[axis] / wanted[axis])) for axis in NAMES]
        # Of grids that are equally close, the one with the smallest sizes inside data.
        return sum(ratio > 0 for ratio in ratios), sum(ratios), *(sizes[axis] for axis in STAGE_AXES[1:])

    def fitting(sizes: Mapping[str, int]) -> GridSizes | None:
        """A grid that suits, of these sizes of a stage: with the experts' sizes, or else without."""
        for more in (words, words | {EXPERT: 1, "expert_tensor": "cut"}):
            with suppress(ValueError):
                if suits(found := check_sizes({**sizes, "pipe": kept, **more})):
                    return found
        return None

    kept = grid.pipe if ranks % grid.pipe == 0 else 1
    suitable = filter(None, map(fitting, every_grid(ranks // kept, contexts=divisors(grid.context))))
    nearest = min(suitable, key=distance, default=None)
    return None if nearest is None else GridConfig(**nearest.sizes())

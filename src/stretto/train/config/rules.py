# SPDX-License-Identifier: Apache-2.0
"""The rules between the options of a GPT's training run, and the grid nearest to one that breaks them. No torch."""

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, cast

from stretto.axes import NAMES, STAGE_AXES, GridSizes, check_sizes
from stretto.execution import ExecutionOptions, Fp8, Fp8Recipe
from stretto.huggingface.public_models import PUBLIC_MODELS
from stretto.planner.grids import divisors, every_grid
from stretto.schedules import build_schedule
from stretto.train.config.options import GridConfig, contradictions_of_run, nearest_multiple

if TYPE_CHECKING:
    from stretto.train.config.gpt import TrainConfig


def contradictions(config: "TrainConfig") -> list[str]:
    """Check the rules between options. Returns a message for each rule that is broken."""
    grid, run, problems = config.grid, config.train, []
    parts = grid.batch_parts
    if grid.ranks != config.ranks:
        problems.append(
            f"ranks is {config.ranks}, but the grid {grid} has {grid.ranks}; "
            f"the grid {nearest_grid(grid, config.ranks)} would do, or ranks={grid.ranks}"
        )
    if run.batch % parts:
        problems.append(
            f"train.batch is {run.batch}, but grid.data x grid.z = {parts} must divide it; "
            f"the nearest batch that would do is {nearest_multiple(run.batch, parts)}"
        )
    elif run.micro_batch is not None and run.batch // parts % run.micro_batch:
        local, wanted = run.batch // parts, run.micro_batch
        problems.append(
            f"train.micro_batch is {wanted}, but must divide a rank's {local} sequences "
            f"(train.batch {run.batch} / (grid.data x grid.z = {parts})); the nearest that would do is "
            f"{min(divisors(local), key=lambda n: abs(n - wanted))}, "
            f"or a train.batch of {nearest_multiple(run.batch, parts * wanted)}"
        )
    else:
        tokens = (run.micro_batch or run.batch // parts) * run.seq_len // grid.context
        if run.shard_sequence and tokens % grid.x:
            near = nearest_multiple(run.seq_len, grid.x * grid.context)
            problems.append(
                f"train.shard_sequence is on, but grid.x = {grid.x} must divide a rank's {tokens} tokens at once "
                f"(its micro-batch x train.seq_len); train.seq_len={near} would do"
            )
    if grid.context > 1 and run.seq_len % (2 * grid.context):
        problems.append(
            f"train.seq_len is {run.seq_len}, but 2 x grid.context = {2 * grid.context}, the number of parts that a "
            f"sequence is cut into, must divide it; {nearest_multiple(run.seq_len, 2 * grid.context)} would do"
        )
    model = config.model
    options = {"train.shard_sequence is on": run.shard_sequence, f"grid.context is {grid.context}": grid.context > 1}
    if model.balance == "sequence" or (model.balance == "bias" and model.balance_loss):
        loss = "model.balance" if model.balance == "sequence" else "model.balance_loss"
        problems += [
            f"{option} and {loss} is {getattr(model, loss.partition('.')[2])!r}, a loss over each sequence, but a rank "
            "would have only a part of each sequence; model.balance='switch' would do"
            for option, is_on in options.items()
            if is_on
        ]
    problems += contradictions_of_run(run)
    problems += _contradictions_of_fp8(config)
    problems += _contradictions_of_ramp(config)
    problems += _contradictions_of_invariance(config)
    problems += _contradictions_of_copies(config)
    problems += _contradictions_of_state(config)
    problems += _contradictions_of_pruning(config)
    problems += _contradictions_of_pipeline(config)
    if ExecutionOptions(reshard=run.reshard).scatters_once:
        reasons = {
            f"grid.z is {grid.z}, so that z divides no gradient": grid.z == 1,
            "a rank's whole part of the batch is one micro-batch": run.micro_batch in (None, run.batch // parts),
        }
        problems += [
            f"train.reshard is {run.reshard!r}, but {reason}; 'after_backward' would do"
            for reason, is_so in reasons.items()
            if is_so
        ]
    if run.cuda_graph and run.trace:
        problems.append(
            "train.cuda_graph and train.trace are both on, but the kernels of a graph cannot be attributed in a trace; "
            "train.cuda_graph=false would do"
        )
    if run.cuda_graph and run.recompute != "none":
        problems.append(
            "train.cuda_graph and train.recompute are both on, but recomputation restores the state of random number "
            "generators, which a graph cannot do; train.cuda_graph=false would do"
        )
    if run.cuda_graph and grid.expert > 1 and run.expert_rows is None:
        problems.append(
            f"train.cuda_graph is on and grid.expert is {grid.expert}, but a graph cannot wait for the number of rows "
            "of a rank's experts; train.expert_rows=(a capacity), grid.expert=1 or train.cuda_graph=false would do"
        )
    if run.cuda_graph and config.model.dropout:
        problems.append(
            f"train.cuda_graph is on and model.dropout is {config.model.dropout}, but a graph would draw the same "
            "masks in every step; train.cuda_graph=false or model.dropout=0 would do"
        )
    for name in ("path", "evaluation_path"):
        if getattr(config.data, name) == []:
            problems.append(f"data.{name} is [], but must name at least one file or folder")
    problems += _contradictions_of_mixture(config)
    if run.evaluate_every is not None and config.data.evaluation_path is config.data.evaluation_sequences is None:
        problems.append(
            f"train.evaluate_every is {run.evaluate_every}, but nothing is held out to evaluate on: give "
            "data.evaluation_path, or data.evaluation_sequences for a part of data.path"
        )
    return problems


def _contradictions_of_fp8(config: "TrainConfig") -> list[str]:
    """Check the options of float8 training. Returns a message for each rule that is broken."""
    run, fields = config.train, type(config.train).model_fields
    if run.dtype != "fp8":
        return [
            f"train.{name} is {getattr(run, name)!r}, but train.dtype is {run.dtype!r}; train.dtype='fp8' would do"
            for name in ("fp8_recipe", "fp8_leave_out")
            if getattr(run, name) != fields[name].default
        ]
    problems = []
    try:
        Fp8(cast(Fp8Recipe, run.fp8_recipe), tuple(run.fp8_leave_out))
    except ValueError as error:
        problems.append(f"train.fp8_{error}")
    if run.sparsity:
        problems.append(
            f"train.dtype is 'fp8' and train.sparsity is {run.sparsity}, but pruned weights are not gathered in fp8; "
            "train.dtype='bf16' would do"
        )
    return problems


def _contradictions_of_ramp(config: "TrainConfig") -> list[str]:
    """Check the batches of a ramp. Returns a message for each rule that is broken."""
    run, problems, before = config.train, [], 0
    if run.batch_ramp is None:
        return []
    each = config.grid.batch_parts * (run.micro_batch or 1)
    for last, batch in run.batch_ramp:
        if last <= before:
            problems.append(f"train.batch_ramp has step {last} after {before}, but steps rise; {before + 1} would do")
        before = max(before, last)
        if not 1 <= batch < 1 << 31 or batch % each:
            problems.append(
                f"train.batch_ramp has a batch of {batch}, but must have multiples of grid.data x grid.z (x "
                f"train.micro_batch) = {each}; {nearest_multiple(min(batch, 1 << 30), each)} would do"
            )
    if run.cuda_graph:
        problems.append("train.cuda_graph is on, and its steps have one batch; train.batch_ramp=none would do")
    if config.is_pipelined and run.micro_batch is None:
        problems.append(
            "train.batch_ramp changes the number of a pipeline's micro-batches, and train.micro_batch does not say how "
            f"large these are; train.micro_batch={max(1, run.batch_ramp[0][1] // config.grid.batch_parts)} would do"
        )
    return problems


def _contradictions_of_mixture(config: "TrainConfig") -> list[str]:
    """Check the weights of mixed data. Returns a message for each rule that is broken."""
    data, problems = config.data, []
    if data.weights is None:
        return []
    paths = len(data.path) if isinstance(data.path, list) else 1
    if len(data.weights) != paths or min(data.weights) <= 0:
        near = [weight if weight > 0 else 1.0 for weight in [*data.weights, *[1.0] * paths][:paths]]
        problems.append(
            f"data.weights is {data.weights}, but must be a number above 0 for each path of data.path; {near} would do"
        )
    if data.evaluation_sequences is not None and data.evaluation_path is None:
        problems.append(
            f"data.evaluation_sequences is {data.evaluation_sequences} and data.weights is set, but the last sequences "
            "of a mixture are of its last path alone: give data.evaluation_path"
        )
    return problems


def _contradictions_of_invariance(config: "TrainConfig") -> list[str]:
    """Check that train.invariant has an invariant form. Returns a message for each reason why it has none.

    `parallelize` checks the model itself, and x.
    """
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
    return [
        f"train.invariant is on, but {reason}" for reason, is_so in reasons.items() if config.train.invariant and is_so
    ]


def _contradictions_of_copies(config: "TrainConfig") -> list[str]:
    """Check that train.writes_copies has weights to write. Returns a message for each reason why it has none."""
    run = config.train
    reasons = {
        f"train.dtype is {run.dtype!r}, in which the weights are kept": run.dtype not in ("bf16", "fp8"),
        f"train.optimizer is {run.optimizer!r}, and only adamw writes them": run.optimizer != "adamw",
        "train.reshard is 'after_forward', so that no weight stays from one pass to another": (
            run.reshard == "after_forward"
        ),
    }
    return [
        f"train.writes_copies is on, but {reason}; train.writes_copies=false would do"
        for reason, is_so in reasons.items()
        if run.writes_copies and is_so
    ]


def _contradictions_of_state(config: "TrainConfig") -> list[str]:
    """Check the options of separate optimizer state. Returns a message for each rule that is broken."""
    run, problems = config.train, []
    if run.optimizer_state == "fp32":
        if run.dtype == "fp16":
            problems.append(
                "train.dtype is 'fp16', which needs separate fp32 weights: train.optimizer_state='device' or 'host' "
                "would do"
            )
        changed = [name for name in _STATE_OPTIONS if getattr(run, name) != type(run).model_fields[name].default]
        problems += [
            f"train.{name} is {getattr(run, name)}, but train.optimizer_state is 'fp32', which has no such state; "
            "train.optimizer_state='device' or 'host' would do"
            for name in changed
        ]
        return problems
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
    return [
        f"train.optimizer_state is {run.optimizer_state!r}, but {reason}" for reason, is_so in reasons.items() if is_so
    ]


_STATE_OPTIONS = (
    "state_bucket",
    "state_buffers",
    "reduce_buckets",
    "split_weights",
    "accumulate_fp32",
    "step_on",
    "host_memory",
    "sparsity",
)


def _contradictions_of_pruning(config: "TrainConfig") -> list[str]:
    """Check when and how the model is pruned. Returns a message for each rule that is broken."""
    run, fields = config.train, type(config.train).model_fields
    changed = [name for name in _PRUNE_OPTIONS if getattr(run, name) != fields[name].default]
    if not run.sparsity:
        return [
            f"train.{name} is {getattr(run, name)!r}, but train.sparsity is 0, which prunes nothing; "
            "train.sparsity=0.9 would do"
            for name in changed
        ]
    problems = []
    if run.prune_method == "early-bird" and not run.prune_at:
        problems.append(
            "train.prune_method is 'early-bird', which draws masks every train.prune_at steps, and that is 0; "
            "train.prune_at=100 would do"
        )
    if run.prune_at and run.cuda_graph:
        problems.append(
            f"train.prune_at is {run.prune_at} and train.cuda_graph is on, but a graph's steps cannot change; "
            "train.prune_at=0 or train.cuda_graph=false would do"
        )
    return problems


_PRUNE_OPTIONS = ("sparse_index", "prune_scope", "prune_at", "prune_method")


def _contradictions_of_pipeline(config: "TrainConfig") -> list[str]:
    """Check the options of pipeline stages. Returns a message for each rule that is broken."""
    grid, run, options = config.grid, config.train, config.pipeline
    changed = [
        name
        for name, needed in (("limit", "message-driven"), ("serve_first", "message-driven"), ("extra_warm_up", "1f1b"))
        if getattr(options, name) and options.schedule != needed
    ]
    problems = [
        f"pipeline.{name} is {getattr(options, name)!r}, but pipeline.schedule is {options.schedule!r}, which has no "
        f"such option; pipeline.schedule={'1f1b' if name == 'extra_warm_up' else 'message-driven'!r} would do"
        for name in changed
    ]
    try:
        stages = options.stages
    except ValueError as error:
        return [*problems, f"pipeline.{error}"]
    if not config.is_pipelined:
        if options.cuts is not None:
            problems.append(f"pipeline.cuts is {options.cuts}, but grid.pipe is 1, so that there is one stage")
        return problems
    if run.cuda_graph:
        problems.append(
            "train.cuda_graph is on and the model has pipeline stages, but a graph cannot wait for messages that the "
            "host receives; train.cuda_graph=false would do"
        )
    rows = run.batch // grid.batch_parts
    if run.batch % grid.batch_parts or rows % (run.micro_batch or rows):
        return problems
    number = rows // (run.micro_batch or rows)
    if options.schedule == "message-driven":
        if stages.virtual_stages > 1:
            problems.append(
                f"pipeline.virtual_stages is {stages.virtual_stages}, but message-driven order takes one stage a rank"
            )
        return problems
    try:
        build_schedule(options.schedule, grid.pipe, number, stages.virtual_stages, options.extra_warm_up)
    except ValueError as error:
        problems.append(
            f"pipeline.schedule is {options.schedule!r}, with {number} micro-batches of a rank (train.batch / (data x "
            f"z) / train.micro_batch): {error}"
        )
    return problems


def nearest_grid(
    grid: GridConfig, ranks: int, suits: Callable[[GridSizes], bool] = lambda sizes: True
) -> GridConfig | None:
    """Find the grid of `ranks` that changes the fewest axes of `grid`, and these by the smallest ratios.

    suits: whether a grid is valid; None if no grid is. The pipeline stages are kept if they divide the ranks; and so
    does expert, where the grid has the ranks for it.
    """
    wanted = GridSizes(**grid.sizes())
    of_experts = {name: size for name, size in grid.sizes().items() if name not in NAMES}

    def distance(sizes: GridSizes) -> tuple[float, ...]:
        ratios = [abs(math.log2(sizes[axis] / wanted[axis])) for axis in NAMES]
        # Of grids that are equally close, the one with the smallest sizes inside data.
        return sum(ratio > 0 for ratio in ratios), sum(ratios), *(sizes[axis] for axis in STAGE_AXES[1:])

    def fitting(sizes: Mapping[str, int]) -> GridSizes | None:
        """A grid that suits, of these sizes of a stage: with the experts' sizes, or else without."""
        for more in (of_experts, {}):
            with suppress(ValueError):
                if suits(found := check_sizes({**sizes, "pipe": kept, **more})):
                    return found
        return None

    kept = grid.pipe if ranks % grid.pipe == 0 else 1
    suitable = filter(None, map(fitting, every_grid(ranks // kept, contexts=divisors(grid.context))))
    nearest = min(suitable, key=distance, default=None)
    return None if nearest is None else GridConfig(**nearest.sizes())

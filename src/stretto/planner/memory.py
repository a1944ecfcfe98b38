# SPDX-License-Identifier: Apache-2.0
"""Predicts the memory that a rank needs, by component, at its peak.

Moments compete. After the last micro-batch's forward pass every block's activations are there, and the loss takes its
slice of logits. Then the last block's backward pass adds gradients of its activations, while all other blocks'
activations are still there. At the end of the backward pass all activations are freed and all gradients allocated. With
recomputation, a recomputed block is in memory together with what is kept of all others (`recomputed_blocks`).
Components are given at the worst moment, so that their sum is the peak of what is allocated.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from stretto.axes import GridSizes
from stretto.execution import (
    BUCKET_BYTES,
    LOGITS_ROW_MULTIPLE,
    LOGITS_SLICE,
    MIN_COPIED_BYTES,
    MIN_WORKSPACE_BYTES,
    SCATTER_RING_BYTES,
    SCATTERS_IN_FLIGHT,
    TWO_SLOTS_BYTES,
)
from stretto.planner.activations import activations_of_a_block, recomputed_blocks
from stretto.planner.architecture import Architecture
from stretto.planner.communication import sends_latents
from stretto.planner.experts.cost import group_of_shards, local_expert_parameters
from stretto.planner.experts.layers import expert_parts
from stretto.planner.optimizer_state import number_bytes, parameters_and_optimizer, take_over
from stretto.planner.workload import StepConfig, StepWorkload

# By how much what torch's allocator reserves exceeds what is allocated at the peak: from 0 to 5% were measured
# (lab/results/memory).
RESERVED = 1.02
# The fraction of a GPU's memory that a plan may take: the rest covers errors of the prediction.
USABLE = 0.95
_OUTSIDE = 1.4e9  # bytes of a process outside of the allocator (lab/results/memory): CUDA's context and kernels' code
_MAX_OUTSIDE = 0.02  # of the GPU's memory; a core of a CPU takes less


def local_parameters(model: Architecture, grid: GridSizes) -> float:
    if model.is_sharded_by_blocks:
        return model.parameters / grid.shards
    embedding = -(-model.embedding_rows // grid.x) * model.hidden / grid.y / grid.shards
    outputs = -(-model.head_outputs // grid.x)
    head = outputs * (model.hidden / grid.y / grid.shards * model.has_own_head + model.has_head_bias)
    blocks = sum(kind.blocks * _local_parameters_of_a_block(kind.model, grid) for kind in model.kinds)
    positions = model.position_rows * model.hidden / grid.y
    return blocks + embedding + head + model.norm_parameters / grid.y + positions + local_expert_parameters(model, grid)


def _local_parameters_of_a_block(model: Architecture, grid: GridSizes) -> float:
    """Those of one block of a model with equal blocks, except for norms of hidden features, and routed experts."""
    if (key := ("parameters", grid.x, grid.y, grid.shards)) in model.memo:
        return model.memo[key]
    weights = sum(linear.local_weights(grid) for linear in model.linears) / grid.shards
    biases = sum(
        linear.outputs * linear.copies(grid) / linear.output_shards(grid) for linear in model.linears if linear.has_bias
    )
    whole = model.head_norm_weights + model.latent_norm_weights + model.whole_parameters
    model.memo[key] = weights + biases + whole + model.sinks / grid.x
    return _local_parameters_of_a_block(model, grid)


def _logits(workload: StepWorkload, grid: GridSizes, tokens: int, *, keeps_head_weight: bool) -> float:
    """Bytes of the loss's logits, and of the head's weight and its gradient, as the loss is computed."""
    model, element, master = workload.model, workload.element, workload.master
    outputs = -(-model.head_outputs // grid.x)
    weight = outputs * model.hidden / grid.y
    match model.logits:
        case "sliced":  # a slice is in dtype; slices are sized such that a copy in fp32 would fit, too
            logits = min(outputs * tokens * element, LOGITS_SLICE * (master + element))
            copies = 2 if keeps_head_weight and outputs % LOGITS_ROW_MULTIPLE else 1  # gathered, and padded
            # After the last slice the gradient, summed in fp32, is cast.
            return weight * (master + copies * element) + max(logits, weight * element)
        case _:
            return whole_logits(workload, tokens) + 2 * weight * element


def whole_logits(workload: StepWorkload, tokens: int) -> float:
    """Bytes of a loss's logits where no rank has a part of them alone."""
    model, element = workload.model, workload.element
    if model.logits == "pooled":  # and their gradient, zero except for the rows that were taken
        return 2 * model.head_outputs * tokens * element
    # And wide three times: softmax, its gradient, and the gradient before it.
    return model.head_outputs * tokens * (element + 3 * workload.master)


# Above so many bytes of all keys and values of a layer, attention over context receives one rank's at a time
# (`stretto.ops.attention`).
RING_BYTES = 4 << 30


def exchanged_keys(workload: StepWorkload, config: StepConfig, *, has_nvlink: bool = False) -> tuple[float, float]:
    """Bytes of other ranks' keys and values that attention over context holds in a block's forward pass; and in its
    backward pass, with their gradients, and of a ring, or of packed documents, in fp32 those of its own. Of latents
    that travel in their place, with these and what is made on the way. has_nvlink: whether it joins the ranks of
    context."""
    model, element, others = workload.model, workload.element, config.grid.context - 1
    if not others:
        return 0.0, 0.0
    grid, tokens, wide = model.splitting_sizes(config.grid), config.tokens(workload), max(4, workload.element)
    of_rank = tokens * max(sum(layer.exchanged_keys(grid) for layer in kind.model.block) for kind in model.kinds)
    packed = None if workload.documents is None else workload.documents.over_context(config.grid.context)
    come = float(others) if packed is None else packed.held  # rows, for each of a rank's
    if sends_latents(workload, config, has_nvlink=has_nvlink):
        sent, made = map(sum, zip(*(layer.latents(grid) for layer in workload.model.kinds[0].model.block), strict=True))
        held = come * (of_rank + tokens * (sent + made))
        return held * element, 2 * held * element + tokens * sent * wide
    if config.attention_way == "ulysses":  # of fewer heads and more tokens, beside what was sent
        heads = max(sum(layer.exchanged_heads(grid) for layer in kind.model.block) for kind in model.kinds)
        return tokens * heads * element, 2 * tokens * heads * element
    rings = config.attention_way == "ring" or config.grid.context * of_rank * element > RING_BYTES
    held = of_rank * (min(2 * (1 if packed is None else packed.held_of_step), come) if rings else come)
    return held * element, 2 * held * element + (rings or packed is not None) * of_rank * wide


def memory(
    workload: StepWorkload, config: StepConfig, *, has_nvlink: bool = False, joins_context: bool = False
) -> dict[str, float]:
    """Bytes by component at the peak, on the rank that needs most: `step_memory`, or, with separate optimizer state
    and this is more, those of the moment before the first step when fp32 parameters are taken over (as temporary).

    has_nvlink, joins_context: as in `step_memory`.
    """
    grid = workload.model.splitting_sizes(config.grid)
    beginning = take_over(workload, config.state, local_parameters(workload.model, grid))
    in_step = step_memory(workload, config, has_nvlink=has_nvlink, joins_context=joins_context)
    return in_step if beginning is None else max(in_step, beginning, key=peak)


def step_memory(
    workload: StepWorkload, config: StepConfig, *, has_nvlink: bool = False, joins_context: bool = False
) -> dict[str, float]:
    """Bytes by component at the peak of a step, on the rank that needs most.

    parameters, gradients, optimizer, gathered_weights (copies in dtype, whole over z), activations, logits (the loss's
    slice and the head's weight gradient), temporary (of one linear's backward pass).

    has_nvlink: NVLink reaches all ranks of z, and so those of x: copy engines may send what goes over z.
    Their buffers are kept all the time: those of gradients (`stretto.parallel.comm.copy_engine_scatter`), and, if
    collectives are hidden, those of weights that stay gathered (`stretto.parallel.comm.copy_engine_gather`). So are the
    workspaces of products that gather sharded tokens, and of those that scatter them. joins_context: whether it reaches
    all ranks of context.
    """
    if workload.model.is_sharded_by_blocks:
        return _memory_of_blocks(workload, config, has_nvlink=has_nvlink, joins_context=joins_context)
    workload = workload.as_sharded(config)
    model, grid, element = workload.model, config.grid, workload.element
    parameters = local_parameters(model, grid)
    of_number = number_bytes(workload, config.state)
    fixed = parameters_and_optimizer(workload, config.state, parameters, grid.shards)
    tokens = config.tokens(workload)
    sizes = [_whole_weights(kind.model, grid) for kind in model.kinds]
    # Of the largest block, and of all of them.
    of_linears, largest_linear = max(each.linears for each in sizes), max(each.largest_linear for each in sizes)
    block_weights, largest = max(each.all for each in sizes), max(each.largest for each in sizes)
    all_weights = sum(kind.blocks * each.all for kind, each in zip(model.kinds, sizes, strict=True))
    # In the parameters' own dtype, and not cut over z, the parameter itself is multiplied with.
    is_copied = grid.shards > 1 or element < of_number.weight
    kept, own_input, growth = activations_of_a_block(workload, grid, config.token_parts)
    recomputes = config.options.recomputation.is_on
    blocks = recomputed_blocks(workload, grid, config.options.recomputation, config.token_parts)
    uses_copy_engines = has_nvlink and config.options.overlap.copy_engines and grid.shards > 1 and grid.pipe == 1
    keeps_gathered_weights = (
        uses_copy_engines
        and config.options.overlap.hides_any
        and (config.gathers_once or (config.options.keeps_weights and not recomputes))
    )
    gathered_at_once = (2 if config.options.overlap.hides_any else 1) * largest  # the next one is gathered ahead
    table = -(-model.embedding_rows // grid.x) * model.hidden / grid.y
    head = -(-model.head_outputs // grid.x) * model.hidden / grid.y
    stay = all_weights if keeps_gathered_weights and not model.gathers_blocks else block_weights * blocks.blocks
    gathered_in_backward = (
        stay + keeps_gathered_weights * table / grid.shards if config.options.keeps_weights else gathered_at_once
    )
    # Gradients are pushed into a ring (`stretto.parallel.comm.copy_engine_scatter`), of all ranks but this one.
    pushes = uses_copy_engines and not model.gathers_blocks
    pushed = min(
        (SCATTERS_IN_FLIGHT + 1) * largest_linear, max(3 * largest_linear, SCATTER_RING_BYTES / workload.element)
    )
    ring = pushed * (1 - 1 / grid.shards) * workload.element if pushes else 0.0
    if has_nvlink and config.token_parts > 1 and config.options.overlap.all_reduce:
        ring += workspaces(model.hidden / grid.y * tokens * element, grid.x)
    activations = blocks.between * tokens
    keeps_gathered = config.options.keeps_weights and not recomputes
    gathered = all_weights if keeps_gathered else gathered_at_once
    keeps_head_weight = keeps_gathered_weights or (config.gathers_once and is_copied)
    if config.gathers_once:  # and kept to the end of the step
        gathered = gathered_in_backward = all_weights + table
    # The last norm's input and output, and the gradient by the latter; of sharded tokens the output is gathered too.
    parts = 1 if model.shards_tokens_of_blocks else config.token_parts
    edges = (3 if parts == 1 else 2 + 2 / parts) * model.hidden / grid.y * tokens * model.is_last
    gradients = parameters * of_number.gradient
    # With several micro-batches, the gradients of the earlier ones are there all the time, as shards (of zeros, if the
    # sums are kept whole beside them). With separate optimizer state they always are.
    accumulates = config.micro_batches(workload) > 1 or config.state.is_separate
    unsharded = 0.0
    if accumulates and config.options.scatters_once and grid.shards > 1:
        unsharded = (all_weights + table + head * model.has_own_head) * workload.master
    earlier = gradients + unsharded if accumulates else 0.0
    of_head = head / grid.shards * of_number.gradient
    widest = max(layer.widest(grid) for kind in model.kinds for layer in kind.model.block) * tokens
    growth *= tokens
    keys, keys_and_gradients = exchanged_keys(workload, config, has_nvlink=joins_context)
    # Beside the gradients of activations: a linear's weight gradient and what is next to it, or that of experts, whose
    # activations have been freed by then.
    of_products = max(2 * largest_linear, largest)
    # Gradients that are on their way over z (`stretto.parallel.comm.gradient_reducer`), whole and as the shards that
    # they become.
    in_flight = 1 if model.gathers_blocks else SCATTERS_IN_FLIGHT
    on_their_way = in_flight / max(each.tensors for each in sizes) * of_linears
    if pushes:
        on_their_way = min(on_their_way, pushed)
    scattered = on_their_way * (1 + 1 / grid.shards) if grid.shards > 1 else 0.0
    shards = group_of_shards(grid).size
    if shards > 1:  # those of a block's divided experts go in one message
        scattered += max(each.experts for each in sizes) * (1 + 1 / shards)
    # Separate state has its gradients reduced in place.
    bucket = min(parameters * element, BUCKET_BYTES) if grid.replicas > 1 and not config.state.is_separate else 0.0
    moments = [
        {  # the loss
            "gradients": earlier,
            "gathered_weights": gathered * element if is_copied else 0.0,
            "activations": (activations + edges) * element,
            "logits": _logits(workload, grid, tokens, keeps_head_weight=keeps_head_weight),
            "temporary": ring,
        },
        {  # the last block's backward pass; while the head's gradient is reduced, it is there in dtype, too
            "gradients": max(earlier, of_head),
            "gathered_weights": gathered * element if is_copied else 0.0,
            "activations": activations * element,
            "logits": (head * element if keeps_head_weight else 0.0)
            + (2 * head * element if model.has_own_head and grid.replicas * grid.shards > 1 else 0.0),
            "temporary": (growth + of_products) * element + keys_and_gradients + ring,
        },
        {  # the end of the backward pass
            "gradients": gradients,
            "gathered_weights": gathered_in_backward * element if is_copied else 0.0,
            "activations": kept * tokens * element,
            "logits": head * element if keeps_head_weight else 0.0,
            "temporary": (widest + max(2 * largest, table) + scattered) * element + bucket + ring,
        },
    ]
    freed = min((min(kind.model.expert_tensors, default=0) for kind in model.kinds), default=0) / grid.expert
    if freed and grid.shards * grid.x == 1 and not accumulates and not config.gathers_once:
        # The gradient of experts' first product is made in dtype when the second one's weight is freed, and the
        # embedding's gradient, if it is not the head's too, is still to come.
        moments[2]["gathered_weights"] = (gathered_in_backward - freed) * element if is_copied else 0.0
        moments[2]["temporary"] = (widest + largest) * element + bucket
        if model.has_own_head:
            moments[2]["gradients"] -= table * of_number.gradient
            rest = {"gradients": gradients, "temporary": table * element + bucket}
            moments.append(dict.fromkeys(moments[0], 0.0) | rest)
    if unsharded:
        moments.append(
            {  # the end of an earlier micro-batch's backward pass, which sends nothing
                "gradients": gradients + unsharded,
                "gathered_weights": gathered_in_backward * element,
                "activations": kept * tokens * element,
                "logits": head * element if keeps_head_weight else 0.0,
                "temporary": (widest + max(2 * largest, table)) * element + ring,
            }
        )
    if recomputes:
        moments.append(
            {  # the last block, or blocks, computed again
                "gradients": max(earlier, of_head),
                "gathered_weights": gathered_in_backward * element if is_copied else 0.0,
                "activations": (activations + blocks.again * tokens) * element,
                "logits": head * element if config.gathers_once and is_copied else 0.0,
                "temporary": (widest + 2 * largest + scattered) * element + keys + ring,
            }
        )
    if blocks.blocks > 1:
        of_later = max(0, model.layers - blocks.blocks) * block_weights / grid.shards * workload.master
        moments.append(
            {  # the first blocks, computed again, and the backward pass of the last one of them
                "gradients": max(earlier, of_head + of_later),
                "gathered_weights": gathered_in_backward * element if is_copied else 0.0,
                "activations": (own_input + blocks.again) * tokens * element,
                "logits": head * element if config.gathers_once and is_copied else 0.0,
                "temporary": (growth + of_products + scattered) * element + keys_and_gradients + ring,
            }
        )
    return fixed | max(moments, key=lambda parts: sum(parts.values()))


class _WholeWeights(NamedTuple):
    """Numbers of one block's weights as a rank computes with them, whole over z: of its linears, the largest of these,
    and how many there are; of divided experts; the largest of either; and of all that is gathered."""

    linears: float
    largest_linear: float
    tensors: int
    experts: float
    largest: float
    all: float


def _whole_weights(model: Architecture, grid: GridSizes) -> _WholeWeights:
    key = "weights", grid.x, grid.y, grid.expert, grid.expert_x
    if key in model.memo:
        return model.memo[key]
    divided = grid.expert * expert_parts(grid)
    linears = [linear.local_weights(grid) for linear in model.linears]
    linears = [sum(linears)] if model.gathers_blocks else linears  # one message, of their gradients, too
    experts = [count / divided for count in model.expert_tensors]
    of_linears, of_experts = sum(linears), sum(experts)
    made = _WholeWeights(
        of_linears, max(linears), len(linears), of_experts, max([*linears, *experts]), of_linears + of_experts
    )
    model.memo[key] = made
    return made


def workspaces(gathered: float, ranks: int) -> float:
    """Bytes of the workspaces of products that overlap with gathers of tokens over x, and scatters of their sums.

    gathered: bytes of the tokens of all ranks. Of the sums each rank receives those of the others. As `stretto.ops`
    allocates: a power of two, twice up to `TWO_SLOTS_BYTES`.
    """
    total = 0.0
    for sent in (gathered, gathered * (ranks - 1) / ranks):
        size = max(1 << (max(math.ceil(sent), 1) - 1).bit_length(), MIN_WORKSPACE_BYTES)
        total += size if size > TWO_SLOTS_BYTES else 2 * size
    return total


def gathered_by_copy_engines(workload: StepWorkload, config: StepConfig, *, has_nvlink: bool) -> tuple[int, int]:
    """Parameters of each block, and of modules in none, that copy engines gather into separate buffers.

    All large ones, where a model is sharded by blocks. has_nvlink: as in `memory`.
    """
    model, options = workload.model, config.options
    keeps = config.gathers_once or (options.keeps_weights and not options.recomputation.is_on)
    by_engines = options.overlap.copy_engines and options.overlap.hides_any and config.grid.pipe == 1
    if not (model.is_sharded_by_blocks and keeps and has_nvlink and by_engines and config.grid.shards > 1):
        return 0, 0
    least = MIN_COPIED_BYTES / workload.element
    own_head = model.head_outputs * model.hidden * model.has_own_head
    tables = [model.embedding_rows * model.hidden, model.position_rows * model.hidden, own_head]
    of_block = [*(linear.weights for linear in model.linears), *model.expert_tensors]
    return sum(weight for weight in of_block if weight >= least), sum(table for table in tables if table >= least)


def _memory_of_blocks(
    workload: StepWorkload, config: StepConfig, *, has_nvlink: bool, joins_context: bool
) -> dict[str, float]:
    """`step_memory` of a model that is sharded block by block over z; ranks of x and y hold the same.

    A block's parameters are gathered as one message and copied out of it. Its gradients are there whole, and are copied
    into a message; one message at a time is on its way (`stretto.parallel.layers.block_shard`). What is in no block is
    gathered for the whole forward pass, and its gradients, of which the head's come first, are there whole to the end.
    Copy engines gather large parameters that are kept into memory that is there all the time, without a message.
    """
    model, options, element = workload.model, config.options, workload.element
    grid = model.splitting_sizes(config.grid)
    layers, parameters = model.layers, local_parameters(model, grid)
    tokens = config.tokens(workload)
    is_sent, recomputes = grid.shards > 1, options.recomputation.is_on
    keeps = config.gathers_once or (options.keeps_weights and not recomputes)
    # Whole parameters in dtype are copies, unless the parameters themselves are computed with.
    of_number = number_bytes(workload, config.state)
    is_copied = is_sent or element < of_number.weight
    by_engines, outside_by_engines = gathered_by_copy_engines(workload, config, has_nvlink=has_nvlink)
    resident = layers * by_engines + outside_by_engines
    block = (model.block_parameters - by_engines) * is_copied
    outside = (model.outside_parameters - outside_by_engines) * is_copied
    largest = max(*(linear.weights for linear in model.linears), *model.expert_tensors)
    recomputed = recomputed_blocks(workload, grid, options.recomputation)
    message = model.block_parameters * is_sent  # of gradients
    in_flight = message * (1 + 1 / grid.shards)  # and the shard that it becomes
    gathered_message = block * is_sent
    ahead = gathered_message * (1 + 1 / grid.shards) if options.overlap.hides_any else 0.0  # and the shard that is sent
    head = model.head_outputs * model.hidden
    shards = parameters * of_number.gradient
    unsharded = model.parameters * workload.master if is_sent and options.scatters_once else 0.0
    earlier = shards + unsharded if config.micro_batches(workload) > 1 or config.state.is_separate else 0.0
    of_block = model.block_parameters / grid.shards * of_number.gradient
    kept, _, growth = activations_of_a_block(workload, grid)
    kept_by_each, hidden = recomputed.between / layers, model.hidden
    length = recomputed.blocks
    of_each = recomputed.again / length if recomputes else kept  # a block whose backward pass is to come, or runs
    moments = []

    def note(gathered: float, activations: float, *, reduced: float = 0.0, temporary: float = 0.0) -> None:
        """Numbers: of parameters, of activations a token, of gradients in a rank's shard, and of others."""
        moments.append(
            {
                "gradients": max(earlier, reduced),
                "gathered_weights": (gathered + resident) * element,
                "activations": activations * tokens * element,
                "logits": 0.0,
                "temporary": temporary * element,
            }
        )

    note((layers if keeps else 0) * block + outside, layers * kept_by_each + 3 * hidden * model.is_last)  # the loss
    moments[0]["logits"] = whole_logits(workload, tokens)
    for number in {layers, max(1, layers - 1)}:  # of the block whose forward pass begins
        following = ahead if number < layers else 0.0
        gathered = (number if keeps else 1) * block + outside + gathered_message + following
        note(gathered, (number - 1) * kept_by_each + hidden)
    last = {layers, layers - 1, layers - length, length, 1}
    for number in {min(max(1, number), layers) for number in last}:  # of the block whose backward pass runs
        computed = (number - 1) % length + 1  # blocks of its segment that are there
        again = block * computed
        following = ahead if number > length and not keeps else 0.0
        sent = in_flight if number < layers else 0.0
        earlier_blocks, reduced = (number - 1) * kept_by_each, max(0, layers - number - 1) * of_block
        if not keeps:  # it is gathered again
            gathered = again + gathered_message + following
            note(gathered, earlier_blocks + kept_by_each + hidden, reduced=reduced, temporary=head + sent)
        gathered = number * block if keeps else again + following
        keys = exchanged_keys(workload, config, has_nvlink=joins_context)[1] / element
        temporary = head + sent + 2 * largest + keys
        note(gathered, earlier_blocks + computed * of_each + growth, reduced=reduced, temporary=temporary)
        # All of its gradients are there; then as a message, too, for which its weights are freed.
        note(gathered, earlier_blocks + 2 * hidden, reduced=reduced, temporary=head + sent + message)
        whole = message + in_flight if is_sent else 2 * largest
        reduced += of_block if sent else 0.0
        note(gathered - block, earlier_blocks + 2 * hidden, reduced=reduced, temporary=head + whole)
    # The end of the backward pass: gradients of what is in no block, then as a message, too; then buckets over data.
    table = model.embedding_rows * model.hidden
    note(0.0, hidden, reduced=(layers - 1) * of_block, temporary=head + table + in_flight)
    note(0.0, 0.0, reduced=layers * of_block, temporary=model.outside_parameters * (2 + 1 / grid.shards) * is_sent)
    is_packed = grid.replicas > 1 and not config.state.is_separate
    note(0.0, 0.0, reduced=shards, temporary=min(parameters, BUCKET_BYTES / element) if is_packed else 0.0)
    return parameters_and_optimizer(workload, config.state, parameters, grid.shards) | max(moments, key=peak)


def peak(components: Mapping[str, float]) -> float:
    return sum(components.values())


def reserved(allocated: float) -> float:
    """Bytes that torch's allocator takes from the device if so many are allocated at the peak."""
    return RESERVED * allocated


def outside_of_allocator(capacity: float) -> float:
    """Bytes of a device with this capacity that a process takes outside of the allocator."""
    return min(_OUTSIDE, _MAX_OUTSIDE * capacity)


def max_allocated(capacity: float) -> float:
    """Bytes that may be allocated at the peak of a plan that fits a device of so many."""
    return (USABLE * capacity - outside_of_allocator(capacity)) / RESERVED

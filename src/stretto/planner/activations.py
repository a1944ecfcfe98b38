# SPDX-License-Identifier: Apache-2.0
"""Activations that blocks keep for the backward pass of a micro-batch, in every mode of recomputation."""

from dataclasses import dataclass

from stretto.axes import GridSizes
from stretto.execution import Recomputation
from stretto.planner.architecture import Architecture
from stretto.planner.layers import STATISTIC
from stretto.planner.workload import StepConfig, StepWorkload


def activations_of_a_block(workload: StepWorkload, grid: GridSizes, token_parts: int = 1) -> tuple[float, float, float]:
    """Numbers a token that one block keeps for its backward pass, how many of them are its input, and the most that its
    backward pass holds beyond them. Of blocks of several kinds, those of the one that keeps most.

    token_parts: over how many ranks of x activations between blocks are sharded.
    """
    kinds = [_activations(kind.model, workload.seq_len, grid, token_parts) for kind in workload.model.kinds]
    return max(kinds)


def _activations(model: Architecture, seq_len: int, grid: GridSizes, token_parts: int) -> tuple[float, float, float]:
    key = "activations", seq_len, grid.context == 1, grid.x, grid.y, grid.expert, grid.expert_x, token_parts
    if key in model.memo:
        return model.memo[key]
    scores = [layer.scores(grid) * seq_len for layer in model.block]
    kept = sum(layer.kept(grid, token_parts) for layer in model.block) + sum(scores)
    # Gradients of plain attention's scores, before and after the softmax, and what one is made from.
    growth = max(layer.growth(grid) + 3 * score for layer, score in zip(model.block, scores, strict=True))
    model.memo[key] = kept, model.hidden / grid.y / token_parts, growth
    return _activations(model, seq_len, grid, token_parts)


@dataclass(frozen=True)
class RecomputedBlocks:
    """Activations that a mode of recomputation keeps of a model's blocks. Numbers are of elements, a token.

    between: all blocks, from their forward passes to the backward pass. on_host: of all blocks, in host memory.
    again: what stands beside `between` once blocks have been computed again. blocks: how many of them are, at once.
    """

    between: float
    on_host: float
    again: float
    blocks: int


def recomputed_blocks(
    workload: StepWorkload, grid: GridSizes, recomputation: Recomputation, token_parts: int = 1
) -> RecomputedBlocks:
    """Count what a mode keeps: `RecomputedBlocks`, by these formulas for each of L blocks.

    none: all that its layers keep, A. full: its input, I. every:k: I of one in k. host: I in host memory, and on the
    GPU that of two blocks, one in use and one on its way. products: I, and every linear's output. communication: I, the
    output of every linear that is summed over ranks, what is gathered of sharded tokens, two fp32 statistics of each
    norm over y, and what collectives bring of experts' rows. Of what is kept, outputs that A has too are not there
    twice.
    """
    model = workload.model
    kept, own_input, _ = activations_of_a_block(workload, grid, token_parts)
    layers, together = model.layers, recomputation.blocks
    match recomputation.kind:
        case "none":
            of_kinds = (
                kind.blocks * _activations(kind.model, workload.seq_len, grid, token_parts)[0] for kind in model.kinds
            )
            return RecomputedBlocks(sum(of_kinds), 0.0, 0.0, 1)
        case "every":
            return RecomputedBlocks(-(-layers // together) * own_input, 0.0, together * kept, together)
        case "host":
            return RecomputedBlocks(min(2, layers) * own_input, layers * own_input, kept, 1)
    kept_between = again = 0.0
    for count, kind in model.kinds:
        of_kind, of_kind_again = _kept_of_a_block(workload, kind, grid, recomputation, token_parts)
        kept_between, again = kept_between + count * of_kind, max(again, of_kind_again)
    return RecomputedBlocks(kept_between, 0.0, again, 1)


def _kept_of_a_block(
    workload: StepWorkload, model: Architecture, grid: GridSizes, recomputation: Recomputation, token_parts: int
) -> tuple[float, float]:
    """Return what "products" or "communication" keeps of a block between the passes, and what is recomputed."""
    kept, own_input, _ = _activations(model, workload.seq_len, grid, token_parts)
    only_summed = recomputation.kind == "communication"
    linears = [linear for linear in model.linears if recomputation.keeps_product(linear.input_shards(grid))]
    colwise, rowwise = (
        sum(linear.local_outputs(grid) for linear in linears if linear.is_rowwise == is_rowwise)
        for is_rowwise in (False, True)
    )
    exchanged = 0.0
    if only_summed and token_parts > 1:  # the inputs of attention and MLP
        exchanged += 2 * model.hidden / grid.y
    if only_summed and grid.y > 1:
        exchanged += 2 * 2 * STATISTIC / token_parts
    exchanged_again = exchanged
    if only_summed and (layer := model.moe_layer) is not None:
        of_rows, of_rows_again = layer.exchanged(grid, token_parts)
        exchanged, exchanged_again = exchanged + of_rows, exchanged_again + of_rows_again
    return own_input + colwise + rowwise / token_parts + exchanged, kept - colwise - exchanged_again


def kept_activations(workload: StepWorkload, config: StepConfig) -> tuple[float, float]:
    """Bytes of what all blocks keep between the passes of a micro-batch, and how many of them are in host memory."""
    grid = workload.model.splitting_sizes(config.grid)
    blocks = recomputed_blocks(workload, grid, config.options.recomputation, config.token_parts)
    num_bytes = config.tokens(workload) * workload.element
    return (blocks.on_host or blocks.between) * num_bytes, blocks.on_host * num_bytes

# SPDX-License-Identifier: Apache-2.0
"""Enumerate all grids of a number of ranks, and explain why a model cannot run on one."""

import math
from collections.abc import Collection, Iterator

from stretto.axes import SHARDS, STAGE_AXES, ExpertTensor, GridSizes
from stretto.planner.architecture import Architecture


def divisors(number: int) -> list[int]:
    """All whole numbers that divide `number`, in order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


_SEARCHED = tuple(axis for axis in STAGE_AXES if axis != "context")


def every_grid(ranks: int, pipe: int = 1, contexts: Collection[int] = (1,)) -> Iterator[GridSizes]:
    """Yield every factorization of `ranks` into sizes of axes with so many pipeline stages; context is each of
    `contexts` that divides what these leave."""
    for context in contexts:
        if ranks // pipe % context == 0:
            for sizes in _factorize(ranks // pipe // context, _SEARCHED):
                yield GridSizes(pipe=pipe, context=context, **sizes)


def list_expert_grids(
    model: Architecture, grid: GridSizes, expert: int | None = None, expert_tensor: ExpertTensor | None = None
) -> list[GridSizes]:
    """A grid with every number of ranks that may divide a model's experts, and each use of x; alone for dense models.

    expert, expert_tensor: fixed where given.
    """
    if model.moe is None or model.is_sharded_by_blocks:
        return [grid]
    found = []
    for tensor in (expert_tensor,) if expert_tensor is not None else ("cut", "fold"):
        folds = tensor == "fold" and grid.x > 1
        if tensor == "fold" and not folds and expert_tensor is None:
            continue
        ranks = grid.data * grid.z * (grid.x if folds else 1)
        sizes = [expert] if expert is not None else divisors(math.gcd(model.moe.experts, ranks))
        for size in sizes:
            if folds and size % grid.x and expert is None:
                continue
            found.append(GridSizes(**grid.sizes() | {"expert": size, "expert_tensor": tensor}))
    return found or [grid]


def _factorize(ranks: int, axes: tuple[str, ...]) -> Iterator[dict[str, int]]:
    axis, *inner = axes
    if not inner:
        yield {axis: ranks}
        return
    for size in divisors(ranks):
        for rest in _factorize(ranks // size, tuple(inner)):
            yield {axis: size, **rest}


def why_impossible(model: Architecture, grid: GridSizes, batch: int) -> str | None:
    """The first rule of `parallelize` and `train` that the grid breaks, with what would do; None if it can run."""
    if batch % grid.batch_parts:
        return f"data x z = {grid.batch_parts} does not divide a batch of {batch}"
    if model.is_sharded_by_blocks:
        copies = model.copies(grid)
        if model.refuses_copies and copies > 1:
            return f"x * y = {copies}, but parallelize takes attention dropout where x = y = 1 alone"
        return None
    if model.hidden % grid.y:
        return f"y={grid.y} does not divide the hidden size {model.hidden}"
    if model.labels == 0 and grid.y > 1:
        return f"y={grid.y} splits the hidden features, which a model without a head returns; y=1 would do"
    for linear in (linear for kind in model.kinds for linear in kind.model.linears):
        cut, by_input = linear.output_shards(grid), linear.input_shards(grid)
        if linear.units % cut and linear.copies(grid) == 1:
            what = {model.kv_heads: "KV heads", model.heads: "heads"}.get(linear.units, f"features of {linear.name}")
            nor = ", nor is it a multiple of it" if linear.shared else ""
            return f"{linear.output_axis}={cut} does not divide {linear.units} {what}{nor}"
        if model.heads % cut and linear.copies(grid) > 1:
            return f"x={cut} does not divide {model.heads} heads"
        if linear.inputs % by_input:
            return f"{linear.input_axis}={by_input} does not divide the {linear.inputs} inputs of {linear.name}"
        rows = linear.inputs // by_input
        if not linear.stores_inputs_first:
            rows = linear.outputs * linear.copies(grid) // cut
        if rows % grid.shards:
            over = " x ".join(grid.axes_of(SHARDS))
            return f"{over}={grid.shards} does not divide the {rows} rows of {linear.name} that a rank has"
    if model.moe is not None and (why := why_no_experts(model, grid)):
        return why
    for count, what in ((model.vocab, "a vocabulary"), (model.labels, "a head")):
        if count and -(-count // grid.x) * (grid.x - 1) >= count:
            return f"{what} of {count} leaves some of x={grid.x} ranks without any of it"
    return None


def why_no_experts(model: Architecture, grid: GridSizes) -> str | None:
    """The first rule of experts that the grid breaks, with what would do; None if it can run."""
    assert model.moe is not None
    experts, ffn = model.moe.experts, model.moe.ffn
    try:
        _ = grid.expert_taken
    except ValueError as error:
        return str(error)
    if experts % grid.expert:
        near = max(n for n in divisors(experts) if n <= grid.expert)
        return f"expert={grid.expert} does not divide {experts} experts; {near} would do"
    if ffn % grid.expert_x:
        return f"x={grid.x} does not divide the inner width of an expert, {ffn}"
    return None

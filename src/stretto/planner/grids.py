# SPDX-License-Identifier: Apache-2.0
"""Enumerate every way to lay ranks out over the axes, and say why a model cannot run on one."""

import math
from collections.abc import Iterator

from stretto.axes import STAGE_AXES, GridSizes
from stretto.planner.architecture import Architecture


def divisors(number: int) -> list[int]:
    """All whole numbers that divide `number`, in order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def every_grid(ranks: int) -> Iterator[GridSizes]:
    """Every factorization of `ranks` into sizes of the axes of one pipeline stage."""
    return (GridSizes(**sizes) for sizes in _factorize(ranks, STAGE_AXES))


def grids_of_stages(ranks: int, pipe: int) -> Iterator[GridSizes]:
    """Every factorization of `ranks` with so many pipeline stages."""
    return (GridSizes(pipe=pipe, **sizes) for sizes in _factorize(ranks // pipe, STAGE_AXES))


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
    for linear in model.linears:
        cut, by_input = grid[linear.output_axis], grid[linear.input_axis]
        if linear.units % cut:
            what = {model.kv_heads: "KV heads", model.heads: "heads"}.get(linear.units, f"features of {linear.name}")
            return f"{linear.output_axis}={cut} does not divide {linear.units} {what}"
        if linear.inputs % by_input:
            return f"{linear.input_axis}={by_input} does not divide the {linear.inputs} inputs of {linear.name}"
        rows = linear.inputs // by_input if linear.stores_inputs_first else linear.outputs // cut
        if rows % grid.z:
            return f"z={grid.z} does not divide the {rows} rows of {linear.name} that a rank has"
    for count, what in ((model.vocab, "a vocabulary"), (model.labels, "a head")):
        if count and -(-count // grid.x) * (grid.x - 1) >= count:
            return f"{what} of {count} leaves some of x={grid.x} ranks without any of it"
    return None

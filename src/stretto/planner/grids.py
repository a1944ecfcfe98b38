"""Every way to lay ranks out over data, x, y and z, and which of them a model can run on."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from stretto.cluster import name_grid
from stretto.planner.architecture import Architecture


@dataclass(frozen=True)
class GridSizes:
    """The sizes of a grid's axes; x is innermost, then y, z and data (Singh, section 5.1.2)."""

    data: int
    x: int
    y: int
    z: int

    @cached_property
    def ranks(self) -> int:
        return self.data * self.x * self.y * self.z

    @property
    def batch_parts(self) -> int:
        """How many parts the global batch is cut into: data and z both split it."""
        return self.data * self.z

    def sizes(self) -> dict[str, int]:
        return {"data": self.data, "x": self.x, "y": self.y, "z": self.z}

    def preceding(self, axis: str) -> int:
        """The product of the sizes of the axes inside this one: how far apart its ranks lie."""
        match axis:
            case "x":
                return 1
            case "y":
                return self.x
            case "z":
                return self.x * self.y
            case "data":
                return self.x * self.y * self.z
        raise ValueError(f"{axis!r} is not an axis of a grid")

    def __str__(self) -> str:
        return name_grid(self.sizes())


def divisors(number: int) -> list[int]:
    """All whole numbers that divide `number`, in order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def every_grid(ranks: int) -> Iterator[GridSizes]:
    """Every factorization of `ranks` into (data, x, y, z)."""
    for data in divisors(ranks):
        for z in divisors(ranks // data):
            for y in divisors(ranks // data // z):
                yield GridSizes(data, ranks // (data * z * y), y, z)


def why_impossible(model: Architecture, grid: GridSizes, batch: int) -> str | None:
    """The first rule of `parallelize` and `train` that the grid breaks, with what would do; None if it can run."""
    if batch % grid.batch_parts:
        return f"data x z = {grid.batch_parts} does not divide a batch of {batch}"
    if model.hidden % grid.y:
        return f"y={grid.y} does not divide the hidden size {model.hidden}"
    for linear in model.linears:
        cut, by_input = (grid.y, grid.x) if linear.is_rowwise else (grid.x, grid.y)
        axes = ("y", "x") if linear.is_rowwise else ("x", "y")
        if linear.units % cut:
            what = {model.kv_heads: "KV heads", model.heads: "heads"}.get(linear.units, f"features of {linear.name}")
            return f"{axes[0]}={cut} does not divide {linear.units} {what}"
        if linear.inputs % by_input:
            return f"{axes[1]}={by_input} does not divide the {linear.inputs} inputs of {linear.name}"
        rows = linear.inputs // by_input if linear.stores_inputs_first else linear.outputs // cut
        if rows % grid.z:
            return f"z={grid.z} does not divide the {rows} rows of {linear.name} that a rank has"
    for count, what in ((model.vocab, "a vocabulary"), (model.labels, "a head")):
        if count and -(-count // grid.x) * (grid.x - 1) >= count:
            return f"{what} of {count} leaves some of x={grid.x} ranks without any of it"
    return None

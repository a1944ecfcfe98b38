"""How each role cuts a module's weight and bias, and over which ranks' gradients of them are summed."""

from collections.abc import Mapping
from dataclasses import dataclass

from stretto.parallel.layout import Split
from stretto.parallel.plan import Role


@dataclass(frozen=True)
class Cut:
    """How one parameter is cut. `is_weight`: it is gathered over z before use (and z is one of its splits)."""

    splits: tuple[Split, ...]
    sum_axes: tuple[str, ...]
    is_weight: bool = False

    def on(self, sizes: Mapping[str, int]) -> "Cut":
        """The same without axes of one rank, which cut nothing."""
        data, z = sizes["data"], sizes["z"]
        ranks = {**sizes, "batch": data * z}
        return Cut(
            tuple(split for split in self.splits if sizes[split.axis] > 1),
            tuple(axis for axis in self.sum_axes if ranks[axis] > 1),
            self.is_weight,
        )


def linear_axes(role: Role) -> tuple[str, str]:
    """Over which axes a linear's output and input features are split."""
    return ("y", "x") if role.role == "swapped" else ("x", "y")


def cut_of(role: Role, part: str, *, is_transposed: bool = False) -> Cut:
    """How a module of this role has its `part` ("weight" or "bias") cut. `is_transposed`: it is stored [in, out]."""
    match role.role:
        case "normal" | "swapped" | "head":
            output_axis, input_axis = linear_axes(role)
            if part == "bias":
                return Cut((Split(0, output_axis, role.segments),), ("batch",))
            dim = 1 if is_transposed else 0
            splits = (Split(dim, output_axis, role.segments), Split(1 - dim, input_axis), Split(0, "z"))
            return Cut(splits, ("data",), is_weight=True)
        case "embedding":
            return Cut((Split(0, "x"), Split(1, "y"), Split(0, "z")), ("data",), is_weight=True)
        case "positions":
            return Cut((Split(1, "y"),), ("batch",))
        case "norm":
            return Cut((Split(0, "y"),), ("batch",))
        case "head_norm":  # it sees only the heads of its x rank
            return Cut((), ("batch", "x"))
        case _:
            raise AssertionError(f"a {role.role} has no parameters")

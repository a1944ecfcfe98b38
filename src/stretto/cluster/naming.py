"""How the layout of ranks is named in tables, plots and messages; here, since every layer may import it."""

from collections.abc import Mapping


def name_grid(sizes: Mapping[str, int]) -> str:
    """A grid's short name, "x=2 z=2": axes in the order given, those of size 1 left out; "one rank" if all are."""
    return " ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "one rank"

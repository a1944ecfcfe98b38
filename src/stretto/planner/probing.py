"""Which matrix products a probe should measure for a model, so that its plans need no interpolation."""

from collections.abc import Iterator, Sequence

from stretto.planner.architecture import Architecture
from stretto.planner.grids import every_grid, why_impossible
from stretto.planner.reading import read_architecture


def shapes_of(models: Sequence[str], batches: Sequence[int], seq_len: int, gpus: int) -> list[tuple[int, int, int]]:
    """(m, n, k) of every product of these models at these global batches, on every grid of `gpus`, without repeats.

    Raises ValueError for an unknown model, or models without batches.
    """
    if bool(models) != bool(batches):
        raise ValueError("--model and --batch go together: the products' sizes follow from both")
    shapes: set[tuple[int, int, int]] = set()
    for name in models:
        model = read_architecture(name, seq_len)
        for batch in batches:
            if batch < 1:
                raise ValueError(f"--batch is {batch}, but must be at least 1")
            shapes.update(_shapes(model, batch, seq_len, gpus))
    return sorted(shapes)


def _shapes(model: Architecture, batch: int, seq_len: int, gpus: int) -> Iterator[tuple[int, int, int]]:
    for grid in every_grid(gpus):
        if why_impossible(model, grid, batch) is not None:
            continue
        tokens = batch // grid.batch_parts * seq_len
        for linear in model.linears:
            over, into = (grid.y, grid.x) if linear.is_swapped else (grid.x, grid.y)
            k, n = linear.inputs // into, linear.outputs // over
            yield from ((tokens, n, k), (tokens, k, n), (n, k, tokens))

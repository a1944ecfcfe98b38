"""A run whose numbers are no longer finite: what says so, and what keeps such weights out of checkpoints."""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from stretto.train.checkpoint_storage import ShardedState


class DivergenceError(ArithmeticError):
    """The loss, the gradient's norm or a weight is no longer a finite number."""


def require_finite_weights(state: Mapping[str, ShardedState], step: int) -> None:
    """DivergenceError, on all ranks, if a weight (`model.<name>`) is not finite after `step` on any. Collective.

    A step's loss and norm are of the weights before it, so they do not tell.
    """
    pieces = [(name, piece.values) for name, whole in state.items() for piece in whole.pieces]
    weights = [(name, values) for name, values in pieces if name.startswith("model.") and values.numel()]
    # The least and the largest number, which NaN passes through: no copy of a weight is made.
    bounds = [torch.stack(torch.aminmax(values)).isfinite().all() for _, values in weights]
    are_finite = torch.stack(bounds).tolist() if bounds else []
    own = next((name for (name, _), is_finite in zip(weights, are_finite, strict=True) if not is_finite), None)
    of_ranks: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    for name in of_ranks:
        if name is not None:
            raise DivergenceError(f"{name.removeprefix('model.')} is not finite after step {step}, which is not saved")

# SPDX-License-Identifier: Apache-2.0
"""Numbers that are not finite: weights to start from are refused, and the batch of a step with such a loss is saved.

What a step does then is decided where it is computed (`train.on_nonfinite`): by the optimizers, on the device, so that
the host does not wait. The host learns of it when it reads the step's loss (`observe.recorder`).
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.atomic_files import write_atomically
from stretto.memory.plain_data import all_gather_data
from stretto.train.optimizer import local_shard
from stretto.train.task import TrainTask

FOLDER = "nonfinite"  # of the run's folder
MAX_BATCHES = 100  # that a run saves: weeks of skipped steps must not fill the disk


def require_finite_start(task: TrainTask, source: Path) -> None:
    """Raise ValueError, on all ranks, if a weight that training would start from is NaN or infinite. Collective.

    source: the file or checkpoint that the weights are of, for the message. One pass over the weights, on their device.
    """
    weights = {name: local_shard(weight) for name, weight in task.weights().items()}
    own = _first_nonfinite(weights)
    mine = None if own is None else (task.grid.coordinate("pipe"), *own)
    found = all_gather_data(mine, kind=tuple[int, int, str] | None)
    if faults := [fault for fault in found if fault is not None]:
        *_, text = min(faults)  # the first in the model's order, whichever rank has it
        raise ValueError(f"{source}: {text}; nothing can be trained from it: start from weights that are finite")


def _first_nonfinite(weights: dict[str, Tensor]) -> tuple[int, str] | None:
    """Find the first weight that is not finite: its position, its name, and how many of its numbers are not."""
    numbers = {name: weight for name, weight in weights.items() if weight.numel()}
    if not numbers:
        return None
    # Minimum and maximum propagate NaN and need no copy of the weight. The host waits once for all of them.
    are_finite = torch.stack([torch.stack(torch.aminmax(weight)).isfinite().all() for weight in numbers.values()])
    for (name, weight), is_finite in zip(numbers.items(), are_finite.tolist(), strict=True):
        if not is_finite:
            nans, infinities = int(weight.isnan().sum()), int(weight.isinf().sum())
            counts = [f"{count} {kind}" for count, kind in ((nans, "NaN"), (infinities, "infinite")) if count]
            text = f"{name} is not finite: of {weight.numel()} numbers, {' and '.join(counts)}"
            return list(weights).index(name), text
    return None


def save_batch(task: TrainTask, step: int) -> str:
    """Save this rank's part of a step's batch to `out/nonfinite/step-N/rank-R.safetensors`.

    Batches are not kept in normal steps: this one is read again. Returns the end of a message about the step:
    the folder, or why there is none.
    """
    folder = task.config.out / FOLDER / f"step-{step:08d}"
    rank = dist.get_rank()
    try:
        if folder.parent.is_dir() and sum(1 for other in folder.parent.iterdir() if other != folder) >= MAX_BATCHES:
            return f"; its batch is not saved, since {folder.parent} has those of {MAX_BATCHES} steps"
        from safetensors.numpy import save

        content = save(task.read_batch(step), {"step": str(step), "rank": str(rank)})
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / f"rank-{rank}.safetensors", content)
    except (OSError, ValueError) as error:  # a full disk or a damaged data file must not hide the step's own fault
        return f"; its batch could not be saved: {error}"
    return f"; its batch is saved in {folder}"

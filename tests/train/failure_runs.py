# SPDX-License-Identifier: Apache-2.0
"""Functions of ranks whose waits for another rank fail: in a module, so that a pool can import them."""

from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tests.train import runs

from stretto.memory import PeerError, failures
from stretto.train.data import Sampler
from stretto.train.trainer import train


class Workspace:
    """Owner of a failure."""

    def __init__(self) -> None:
        self.record = failures.register(
            self, lambda words: f"rank 0 of 4: waited in vain for rank {words[1]}", torch.device("cpu")
        )


def save_after_failure(out: Path, failing: int) -> str | None:
    """Save two checkpoints, the second after a wait of rank `failing` has failed; this rank's error."""
    model, optimizer, _ = runs.sharded(runs.make_gpt, {"data": dist.get_world_size()}, seed=1)
    runs.save(model, optimizer, out, 1)
    workspace = Workspace()
    if dist.get_rank() == failing:
        workspace.record.mark([1, 3])
    try:
        runs.save(model, optimizer, out, 2)
    except (PeerError, RuntimeError) as error:
        return str(error)
    finally:
        workspace.record.close()
    return None


def train_until_failure(out: Path, step: int) -> str | None:
    """Train with a checkpoint every two steps; a wait fails while the batch of `step` is drawn."""
    workspace = Workspace()
    indices = Sampler.indices

    def fail_and_draw(sampler: Sampler, number: int) -> Any:
        if number == step - 1:
            workspace.record.mark([1, 3])
        return indices(sampler, number)

    try:
        with mock.patch.object(Sampler, "indices", fail_and_draw):
            train(runs.configure(out, "train.checkpoint_every=2"), display="none")
    except PeerError as error:
        return str(error)
    finally:
        workspace.record.close()
    return None

# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a model and its optimizer in one call, as tests write and check them. A run's own are `Saver`'s."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from stretto.memory import exchange, group_timeout
from stretto.models import GPT, GPTConfig
from stretto.train.checkpoint.folders import checkpoint_path
from stretto.train.checkpoint.metadata import CheckpointMetadata, check_description, read_metadata
from stretto.train.checkpoint.retention import Retention, remove_surplus
from stretto.train.checkpoint.staging import Key, sizes_of
from stretto.train.checkpoint.state import check_shapes, find_failure, find_not_finite, raise_first, training_state
from stretto.train.checkpoint.storage import ShardedState
from stretto.train.checkpoint.writing import CheckpointWriter, bytes_on_disk, write_checkpoint
from stretto.train.optimizer import ShardOptimizer


def check_checkpoint(path: Path, model: GPTConfig, optimizer: str | None = None) -> CheckpointMetadata:
    """Check that this GPT, and this optimizer ("adamw" or "sgd"), can resume a checkpoint. Returns the index.

    Needs no process group and allocates no weights. Raises ValueError that names the missing or truncated file, or the
    first option or parameter of the model that differs.
    """
    metadata = read_metadata(path)
    check_description(path, metadata, asdict(model), optimizer)
    with torch.device("meta"):
        check_shapes(path, metadata, GPT(model))
    return metadata


def save_checkpoint(
    out: Path,
    step: int,
    model: nn.Module,
    optimizer: ShardOptimizer,
    *,
    model_config: GPTConfig,
    run: dict[str, Any],
    data: dict[str, Any],
    keep: int,
) -> Path:
    """Write the state after `step`, delete all but the `keep` newest checkpoints, and return the path. Collective.

    On return the checkpoint is on the disk. `run` and `data` describe the run's configuration and its data in JSON's
    types. Raises DivergenceError, on all ranks, if a weight is not finite; nothing is written or deleted then.
    """
    description = {"optimizer": optimizer.name, "model": asdict(model_config), "run": run, "data": data}
    return save_state(out, step, training_state(model, optimizer), description, keep=keep)


def save_state(out: Path, step: int, state: dict[str, ShardedState], description: dict[str, Any], *, keep: int) -> Path:
    """Write a training state, `model.<name>` and `optimizer.<name>.<key>`, as `save_checkpoint` does. Collective.

    state: may omit tensors of which this rank holds nothing. description: CheckpointMetadata's optimizer, model, run
    and data. Raises PeerError, on all ranks, if a wait for another rank has failed on any of them, and NoSpaceError if
    the disk is full; nothing is left of the checkpoint then. A run's own saves are `saver.Saver`'s.
    """
    failure = find_failure()
    found = _exchange((failure, "" if failure else find_not_finite(state)), tuple[str, str])
    raise_first([one[0] for one in found], [one[1] for one in found], step)
    path = checkpoint_path(out, step)
    sizes = dict(size for of_rank in _exchange(sizes_of(state), dict[Key, int]) for size in of_rank.items())
    needed = bytes_on_disk(sum(sizes.values()), len(sizes))
    write_checkpoint(state, CheckpointWriter(path, {"step": step, **description}), needed=needed)
    if dist.get_rank() == 0:
        remove_surplus(out, Retention(keep))
    return path


def _exchange(value: Any, kind: Any) -> list[Any]:
    return [value] if dist.get_world_size() == 1 else exchange(value, None, group_timeout(None), kind)

# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: the whole training state in `out/checkpoints/step-<step>/`, for any grid and number of ranks."""

from stretto.train.checkpoint.folders import (
    checkpoint_path,
    find_checkpoint,
    newest_checkpoint,
    prepare_folder,
    resolve_checkpoint,
)
from stretto.train.checkpoint.state import (
    allocate_slots,
    check_checkpoint,
    load_checkpoint,
    load_state,
    save_checkpoint,
    save_state,
    training_state,
    unreadable,
)

__all__ = [
    "allocate_slots",
    "check_checkpoint",
    "checkpoint_path",
    "find_checkpoint",
    "load_checkpoint",
    "load_state",
    "newest_checkpoint",
    "prepare_folder",
    "resolve_checkpoint",
    "save_checkpoint",
    "save_state",
    "training_state",
    "unreadable",
]

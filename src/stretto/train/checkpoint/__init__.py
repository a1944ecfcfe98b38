# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: the whole training state in `out/checkpoints/step-<step>/`, for any grid and number of ranks.

`folders` and `metadata` need no torch; `state` is imported on first use.
"""

from typing import TYPE_CHECKING

from stretto.lazy import attach
from stretto.train.checkpoint.folders import (
    checkpoint_path,
    find_checkpoint,
    newest_checkpoint,
    prepare_folder,
    resolve_checkpoint,
    unreadable,
)

if TYPE_CHECKING:
    from stretto.train.checkpoint.state import (
        allocate_slots,
        load_checkpoint,
        load_masks,
        load_optimizer_state,
        load_state,
        training_state,
    )

__all__ = [
    "allocate_slots",
    "checkpoint_path",
    "find_checkpoint",
    "load_checkpoint",
    "load_masks",
    "load_optimizer_state",
    "load_state",
    "newest_checkpoint",
    "prepare_folder",
    "resolve_checkpoint",
    "training_state",
    "unreadable",
]

__getattr__, __dir__ = attach(__name__)

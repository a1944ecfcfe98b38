# SPDX-License-Identifier: Apache-2.0
"""Choices of overlapped operators in a checkpoint: a resumed run makes those of the run that was stopped.

Times decide between kernels whose sums may differ in their last bits, and times differ between two runs.
"""

import logging
import sys
from typing import Any

import torch
import torch.distributed as dist

from stretto.memory.plain_data import all_gather_data
from stretto.train.checkpoint.metadata import CheckpointMetadata

logger = logging.getLogger(__name__)

_OPERATORS = "stretto.ops.choices"  # imports Triton: only where a model has called operators, or may call them


def gather_choices() -> dict[str, dict[str, Any]]:
    """All groups' choices, as `CheckpointMetadata.operators` has them. Collective."""
    module = sys.modules.get(_OPERATORS)
    own = {} if module is None else module.list_choices()
    kind = dict[str, tuple[dict[str, str], dict[str, dict[str, float]]]]
    everyone = all_gather_data(own, None, kind) if dist.get_world_size() > 1 else [own]
    return {
        ranks: {"choices": choices, "confirmed": confirmed}
        for of_rank in everyone
        for ranks, (choices, confirmed) in of_rank.items()
    }


def restore_choices(metadata: CheckpointMetadata | None, device: torch.device) -> None:
    """Have operators make a checkpoint's choices; None for a run from the start. All ranks call it."""
    if device.type != "cuda" and _OPERATORS not in sys.modules:
        return
    from stretto.ops import choices

    stored = {} if metadata is None else metadata.operators
    try:
        choices.restore_choices({ranks: choices.SavedChoices(**one.model_dump()) for ranks, one in stored.items()})
    except ValueError as error:  # of another version
        logger.warning("operators choose anew, and sums may differ in their last bits: %s", error)

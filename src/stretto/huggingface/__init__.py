# SPDX-License-Identifier: Apache-2.0
"""Trains parallelized models in the loops of Hugging Face's libraries.

Neither transformers nor accelerate nor trl is imported before it is used.
"""

from typing import TYPE_CHECKING

from stretto.lazy import attach

if TYPE_CHECKING:
    from stretto.huggingface.accelerator import follow_grid
    from stretto.huggingface.trainer import trainer_plugin

__all__ = ["follow_grid", "trainer_plugin"]

_HOMES = {"follow_grid": "stretto.huggingface.accelerator", "trainer_plugin": "stretto.huggingface.trainer"}
__getattr__, __dir__ = attach(__name__, _HOMES)

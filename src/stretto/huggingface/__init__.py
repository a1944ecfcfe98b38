# SPDX-License-Identifier: Apache-2.0
"""Trains parallelized models in the loops of Hugging Face's libraries.

Neither transformers nor accelerate nor trl is imported before it is used.
"""

from typing import TYPE_CHECKING

from stretto.lazy import attach

if TYPE_CHECKING:
    from stretto.huggingface.trainer import follow_grid, trainer_plugin

__all__ = ["follow_grid", "trainer_plugin"]

__getattr__, __dir__ = attach(__name__, dict.fromkeys(__all__, "stretto.huggingface.trainer"))

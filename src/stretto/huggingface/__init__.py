# SPDX-License-Identifier: Apache-2.0
"""Trains parallelized models in the loops of Hugging Face's libraries.

Neither transformers nor accelerate nor trl is imported before it is used.
"""

from typing import TYPE_CHECKING

from stretto.lazy import attach

if TYPE_CHECKING:
    from stretto.huggingface.trainer import trainer_plugin

__all__ = ["trainer_plugin"]

__getattr__, __dir__ = attach(__name__, {"trainer_plugin": "stretto.huggingface.trainer"})

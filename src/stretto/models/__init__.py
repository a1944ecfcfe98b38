# SPDX-License-Identifier: Apache-2.0
"""The GPT in plain PyTorch, without parallel code.

`stretto.parallelize` puts a `GPT`, as any other model, on a grid. It is imported on first use: its configuration also
works on a machine without torch.
"""

from typing import TYPE_CHECKING

from stretto.lazy import attach
from stretto.models.gpt_config import GPTConfig

if TYPE_CHECKING:
    from stretto.models.gpt import GPT

__all__ = ["GPT", "GPTConfig"]

__getattr__, __dir__ = attach(__name__)

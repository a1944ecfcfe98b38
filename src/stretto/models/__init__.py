# SPDX-License-Identifier: Apache-2.0
"""Models in plain PyTorch, without parallel code.

`stretto.parallelize` puts a `GPT`, as any other model, on a grid; `stretto.parallel.distribute_tables` distributes the
tables of a `DLRM`. Both are imported on first use: their configurations also work on a machine without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from stretto.models.dlrm_config import DLRMConfig
from stretto.models.gpt_config import GPTConfig

if TYPE_CHECKING:
    from stretto.models.dlrm import DLRM
    from stretto.models.gpt import GPT

__all__ = ["DLRM", "GPT", "DLRMConfig", "GPTConfig"]

_HOMES = {"DLRM": "stretto.models.dlrm", "GPT": "stretto.models.gpt"}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'stretto.models' has no attribute {name!r}")

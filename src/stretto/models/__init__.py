"""Models in plain PyTorch, with no parallel code in them: `parallelize` puts any of them on a grid.

`GPT` is imported on first use: their configurations are of use on a machine without torch too.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from stretto.models.config import GPTConfig

if TYPE_CHECKING:
    from stretto.models.gpt import GPT

__all__ = ["GPT", "GPTConfig"]


def __getattr__(name: str) -> object:
    if name == "GPT":
        return import_module("stretto.models.gpt").GPT
    raise AttributeError(f"module 'stretto.models' has no attribute {name!r}")

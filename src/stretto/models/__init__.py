"""Models in plain PyTorch, with no parallel code in them: `parallelize` puts any of them on a grid."""

from stretto.models.gpt import GPT, GPTConfig

__all__ = ["GPT", "GPTConfig"]

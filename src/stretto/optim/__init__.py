"""Optimizers for large models."""

from stretto.optim.adamw import AdamW

__all__ = ["AdamW"]

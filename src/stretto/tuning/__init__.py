"""Measured choices, kept between runs: one store for all of Stretto."""

from stretto.tuning.store import Store

__all__ = ["Store"]

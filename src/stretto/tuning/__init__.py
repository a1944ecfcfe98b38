"""Measured choices, kept between runs: one store for all of Stretto."""

from stretto.tuning.store import Store, read_times

__all__ = ["Store", "read_times"]

"""Measured choices, kept between runs: one store for all of Stretto."""

from stretto.deprecated import alias
from stretto.tuning.store import TuningStore, read_times

__all__ = ["TuningStore", "read_times"]

__getattr__ = alias(__name__, {"Store": "TuningStore"})

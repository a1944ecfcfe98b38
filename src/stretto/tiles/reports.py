"""Who to ask what a report says: a kernel knows only where in memory its report lies."""

import weakref
from typing import Protocol


class Reporter(Protocol):
    """What owns a report."""

    def check(self) -> None:
        """Raise what the report says."""

    def require_own(self, address: int) -> None:
        """ValueError for an address that is not in the own memory."""


_reporters: weakref.WeakValueDictionary[int, Reporter] = weakref.WeakValueDictionary()


def register(address: int, reporter: Reporter) -> None:
    """The report at this address is this one's, as long as it lives."""
    _reporters[address] = reporter


def raise_reported(address: int) -> None:
    """Raise what the report at this address says."""
    _reporters[address].check()
    raise AssertionError("a wait was given up and nothing was reported")


def require_own(report: int, address: int) -> None:
    """ValueError for an address that is not in the own memory of whose report is at `report`."""
    reporter = _reporters.get(report)
    if reporter is not None:
        reporter.require_own(address)

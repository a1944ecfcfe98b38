"""What each call ran as: counted, and said at debug level."""

import threading
from collections import Counter

from stretto.collectives.backend.calls import Call
from stretto.collectives.said import SaidOnce


class CallCounter:
    """Counts calls by (operation, what ran it); several threads may."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._counts: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()
        self._said = SaidOnce()

    def count(self, call: Call, ran_as: str, why: str) -> None:
        """Count a call, and say what ran it at debug level, once for calls that are alike."""
        with self._lock:
            self._counts[call.operation, ran_as] += 1
        if self._said.is_heard:
            self._said.say(f"group {self._group}: {call.describe()} runs as {ran_as}: {why}")

    def read(self) -> dict[tuple[str, str], int]:
        """The counts so far."""
        with self._lock:
            return dict(self._counts)

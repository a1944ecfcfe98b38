"""What each call ran as: counted, and said at debug level."""

import logging
import threading
from collections import Counter

from stretto.collectives.backend.calls import Call

logger = logging.getLogger("stretto.collectives")


class CallCounter:
    """Counts calls by (operation, what ran it); several threads may."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._counts: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def count(self, call: Call, ran_as: str, why: str) -> None:
        """Count a call, and say so at debug level."""
        with self._lock:
            self._counts[call.operation, ran_as] += 1
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("group %s: %s runs as %s: %s", self._group, call.describe(), ran_as, why)

    def read(self) -> dict[tuple[str, str], int]:
        """The counts so far."""
        with self._lock:
            return dict(self._counts)

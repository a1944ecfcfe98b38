# SPDX-License-Identifier: Apache-2.0
"""Logs each distinct debug line once."""

import logging

logger = logging.getLogger("stretto.collectives")
_MAX_LINES = 65536


class LogOnce:
    """Logs each line once, to the logger `stretto.collectives`. With several threads a line may appear twice."""

    def __init__(self) -> None:
        self._lines: set[str] = set()

    @property
    def is_enabled(self) -> bool:
        """True if debug lines are logged at all: callers format them only then."""
        return logger.isEnabledFor(logging.DEBUG)

    def log(self, line: str) -> None:
        """Log a line, unless it was logged before."""
        if line in self._lines:
            return
        if len(self._lines) == _MAX_LINES:  # of a job whose every call is another size
            self._lines.clear()
        self._lines.add(line)
        logger.debug("%s", line)

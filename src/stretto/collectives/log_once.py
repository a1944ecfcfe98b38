"""What is said at debug level once, and not at every call."""

import logging

logger = logging.getLogger("stretto.collectives")
_MOST = 65536


class LogOnce:
    """Says each line once, to the logger `stretto.collectives`; several threads may (a line may then come twice)."""

    def __init__(self) -> None:
        self._lines: set[str] = set()

    @property
    def is_enabled(self) -> bool:
        """Whether anybody listens: lines are made only then."""
        return logger.isEnabledFor(logging.DEBUG)

    def log(self, line: str) -> None:
        """Say it, unless it was said before."""
        if line in self._lines:
            return
        if len(self._lines) == _MOST:  # of a job whose every call is another size
            self._lines.clear()
        self._lines.add(line)
        logger.debug("%s", line)

"""How this process waits for another one without taking its core."""

import time

MASK = 0xFFFFFFFF
_SIGN = 0x80000000
_LOOKS_AT_ONCE = 4
_FIRST_PAUSE = 20e-6
_LONGEST_PAUSE = 1e-3


class PeerError(RuntimeError):
    """Another rank did not do in time what this one waited for; the message names both."""


def has_reached(seen: int, target: int) -> bool:
    """Whether a counter that shows `seen` has got to `target`, also around 2^32: (int32)(seen - target) >= 0."""
    return not (seen - target) & _SIGN


class Backoff:
    """Pauses that grow from none to a millisecond, until `reset`: whoever is waited for may need this core."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """What was waited for has come."""
        self._looks = 0
        self._pause = _FIRST_PAUSE
        self._since: float | None = None

    def pause(self) -> float:
        """Pause, and return for how many seconds nothing has come."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        self._looks += 1
        if self._looks <= _LOOKS_AT_ONCE:
            time.sleep(0)
        else:
            time.sleep(self._pause)
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        return now - self._since

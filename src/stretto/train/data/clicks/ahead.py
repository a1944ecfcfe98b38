"""Reads the next step's samples while this one's are trained on."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from stretto.train.data.clicks.batch import ClickBatch


class Ahead:
    """`read(step)` returns what `make(step)` does, and has a thread make the next step's, up to step `last`."""

    def __init__(self, make: Callable[[int], ClickBatch], *, last: int) -> None:
        self._make, self._last = make, last
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="stretto-samples")
        self._next: tuple[int, Future[ClickBatch]] | None = None

    def read(self, step: int) -> ClickBatch:
        """A step's samples. Raises what making them did."""
        expected, self._next = self._next, None
        batch = expected[1].result() if expected is not None and expected[0] == step else self._make(step)
        if step < self._last:
            self._next = step + 1, self._thread.submit(self._make, step + 1)
        return batch

    def close(self) -> None:
        """End the thread, once it has made what it is at."""
        self._thread.shutdown(cancel_futures=True)

"""A thread that does jobs one after another, in the order in which they came."""

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

import torch

Job = Callable[[], None]
_GRACE = 5.0  # seconds for a job to end when nobody has closed the worker


class Worker:
    """Starts with its first job; ends with `close`, when nobody holds it any more, or when the interpreter ends."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self.is_closed = False

    @property
    def has_begun(self) -> bool:
        """Whether there was any job yet."""
        return self._thread is not None

    def submit(self, job: Job) -> None:
        """Have a job done, which must not raise. RuntimeError once the worker is closed."""
        with self._lock:
            if self.is_closed:
                raise RuntimeError(f"{self._name} is closed: its process group was destroyed or aborted")
            if self._thread is None:
                self._thread = threading.Thread(target=_work, args=(self._jobs,), name=self._name, daemon=True)
                weakref.finalize(self, _end, self._jobs, self._thread, _GRACE)
                self._thread.start()
            self._jobs.put(job)

    def drain(self) -> None:
        """Wait until all jobs so far are done."""
        if self._thread is not None and not self.is_closed:
            done = threading.Event()
            self.submit(done.set)
            done.wait()

    def close(self, seconds: float) -> None:
        """Take no more jobs, and wait up to so many seconds for those so far."""
        with self._lock:
            self.is_closed = True
        if self._thread is not None:
            _end(self._jobs, self._thread, seconds)


def _work(jobs: SimpleQueue[Job | None]) -> None:
    with torch.inference_mode():  # of this thread: elsewhere nothing may be written into a caller's inference tensors
        while (job := jobs.get()) is not None:
            job()
            del job  # or it would keep its tensors until the next one


def _end(jobs: SimpleQueue[Job | None], thread: threading.Thread, seconds: float) -> None:
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join(seconds)

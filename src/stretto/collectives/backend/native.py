"""The classes that torch's C++ calls, for the torch at hand: compiled ones, or Python's where there is no compiler."""

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from stretto.collectives.backend.extension import CompilerError, load_extension
from stretto.memory import failures

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend, Work

logger = logging.getLogger("stretto.collectives")


def make_backend(
    rank: int,
    size: int,
    cpu: "Backend",
    cuda: "Backend | None",
    dispatch: Callable[..., "Work | None"],
    split: Callable[..., "Backend | None"],
    milliseconds: int,
) -> "Backend":
    """The c10d backend over these inner ones. See `StrettoBackend` in native/backend.hpp.

    CompilerError where it cannot be compiled and this torch allows no backend in Python.
    """
    module = _find_extension()
    if module is None:
        from stretto.collectives.backend.python_backend import PythonBackend

        return PythonBackend(rank, size, cpu, cuda, dispatch, split, milliseconds)
    return module.StrettoBackend(rank, size, cpu, cuda, dispatch, split, module.StrettoOptions(milliseconds))


def make_work(rank: int, operation: str, outputs: Sequence[Tensor]) -> Any:
    """A Work to be ended by `succeed()` or `fail(error)`; operation: as profiles are to show it."""
    module = _find_extension()
    if module is None:
        from stretto.collectives.backend.python_backend import PythonWork

        return PythonWork(outputs)
    return module.ScheduledWork(rank, operation, list(outputs))


def make_enqueued_work(rank: int, operation: str, outputs: Sequence[Tensor]) -> Any:
    """A Work of kernels that were enqueued on the current stream: a stream waits for it, and the host may ask."""
    module = _find_extension()
    if module is None:
        from stretto.collectives.backend.python_backend import PythonEnqueuedWork

        return PythonEnqueuedWork(outputs)
    return module.EnqueuedWork(rank, operation, list(outputs))


def profiled(operation: str, tensors: Sequence[Tensor]) -> contextlib.AbstractContextManager[object]:
    """A context that profiles show as a range `stretto:operation` with these tensors' shapes, as c10d shows its own."""
    if not torch.autograd._profiler_enabled():
        return _NO_RANGE
    module = _find_extension()
    name = f"stretto:{operation}"
    return torch.profiler.record_function(name) if module is None else module.Range(name, list(tensors))


_NO_RANGE = contextlib.nullcontext()


@functools.cache
def _find_extension() -> ModuleType | None:
    """The compiled classes; None where there is no compiler and torch can do without."""
    try:
        module = load_extension()
        failures.when_used(lambda summary: module.set_failure_check(summary, failures.check))
        return module
    except CompilerError as error:
        if TorchVersion(torch.__version__) < "2.15":
            raise
        logger.warning(
            "the backend runs in Python, where no Work knows that it has ended before it is awaited: %s", error
        )
        return None

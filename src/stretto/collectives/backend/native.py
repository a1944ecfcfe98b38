"""The classes that torch's C++ calls, for the torch at hand."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from stretto.collectives.backend.extension import load_extension

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend, Work


def make_backend(
    rank: int,
    size: int,
    cpu: "Backend",
    cuda: "Backend | None",
    dispatch: Callable[..., "Work | None"],
    split: Callable[..., "Backend | None"],
    milliseconds: int,
) -> "Backend":
    """The c10d backend over these inner ones. See `StrettoBackend` in native/backend.hpp."""
    module = load_extension()
    return module.StrettoBackend(rank, size, cpu, cuda, dispatch, split, module.StrettoOptions(milliseconds))


def make_work(rank: int, operation: str, outputs: Sequence[Tensor]) -> Any:
    """A Work to be ended by `succeed()` or `fail(error)`."""
    return load_extension().ScheduledWork(rank, operation, list(outputs))


def is_stretto(backend: object) -> bool:
    """Whether this is a backend that `make_backend` has made."""
    return isinstance(backend, load_extension().StrettoBackend)

"""Weights in the dtype that is computed in, which an optimizer may write beside the parameters.

Casting a weight before each forward pass reads 4 bytes and writes 2. An optimizer that has the new weight in registers
writes the 2, and the next passes find it (`stretto.optim.AdamW` with writes_copies).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from stretto.parallel.layout import local
from stretto.parallel.overlap import Version, version_of

Followed = list[tuple["ref[Tensor]", "ComputeCopy"]]
_followed: list[Followed] = []


class ComputeCopy:
    """A parameter's shard in another dtype, for as long as the parameter is as it was when the copy was written.

    It hangs at the parameter, as `stretto_copy`. Who writes the parameter otherwise makes it stale, as its version
    tells; it is then cast anew, until an optimizer writes it again.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._kept: Tensor | None = None
        self._version: Version | None = None

    def take(self, parameter: Tensor) -> Tensor:
        """The shard in the dtype; not to be written to."""
        kept = self._kept
        if kept is None or self._version != version_of(parameter):
            return local(parameter).to(self.dtype)
        if parameter.is_cuda and torch.cuda.is_current_stream_capturing():
            if not _followed:  # a graph that nobody follows may be replayed when the parameter was changed
                return local(parameter).to(self.dtype)
            _followed[-1].append((ref(parameter), self))
        return kept

    def open(self, parameter: Tensor) -> Tensor:
        """Where an optimizer writes all of the shard, in the pass in which it writes the parameter; `close` it then."""
        shard = local(parameter)
        if self._kept is None or (self._kept.shape, self._kept.device) != (shard.shape, shard.device):
            self._kept = torch.empty_like(shard, dtype=self.dtype)
        return self._kept

    def close(self, parameter: Tensor) -> None:
        """It is written, and so is the parameter, whose version says so."""
        assert self._kept is not None
        torch.autograd.graph.increment_version(self._kept)  # an earlier pass that has kept it must not go on with it
        self._version = version_of(parameter)

    def refresh(self, parameter: Tensor) -> None:
        """Cast the parameter into the copy if it was changed by others."""
        if self._kept is not None and self._version != version_of(parameter):
            self._kept.copy_(local(parameter))
            self._version = version_of(parameter)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return ComputeCopy, (self.dtype,)  # of a parameter that is copied, a copy is not this one's


def keep_copy(parameter: nn.Parameter, dtype: torch.dtype | None) -> None:
    """Have an optimizer that can write a copy in the dtype; None, or the parameter's own: there is none."""
    if dtype not in (None, parameter.dtype):
        assert dtype is not None
        parameter.stretto_copy = ComputeCopy(dtype)  # type: ignore[attr-defined]


def cast(parameter: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The shard of a parameter in the dtype (None: its own): a copy that was kept, or a new one."""
    copy = getattr(parameter, "stretto_copy", None)
    if copy is not None and copy.dtype == dtype:
        found: Tensor = copy.take(parameter)
        return found
    shard = local(parameter)
    return shard if dtype is None else shard.to(dtype)


@contextmanager
def following_copies() -> Iterator[Followed]:
    """Inside, copies may be taken into a CUDA graph; whoever replays it calls `refresh_copies` before with these."""
    found: Followed = []
    _followed.append(found)
    try:
        yield found
    finally:
        _followed.pop()


@torch.no_grad()
def refresh_copies(found: Followed) -> None:
    """Cast parameters that were changed outside of the graph, a checkpoint's for one, into the copies that it reads."""
    for parameter, copy in found:
        there = parameter()
        if there is not None:
            copy.refresh(there)

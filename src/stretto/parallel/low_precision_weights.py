"""Weights in the dtype that is computed in, which an optimizer may write beside the parameters.

Casting a weight before each forward pass reads 4 bytes and writes 2. An optimizer that has the new weight in registers
writes the 2, and the next passes find it (`stretto.optim.AdamW` with writes_copies).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from stretto.parallel.layout import Version, local, version_of


class ComputeCopy:
    """A parameter's shard in another dtype, for as long as the parameter is as it was when the copy was written.

    It hangs at the parameter, as `stretto_copy`. Who writes the parameter otherwise makes it stale, as its version
    tells, and any step of an optimizer of torch's; it is then cast anew, until an optimizer writes it again.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._kept: Tensor | None = None
        self._version: Version | None = None
        self._is_outrun = False  # a graph that nobody follows changes the parameter whenever it is replayed

    def take(self, parameter: Tensor) -> Tensor:
        """The shard in the dtype; not to be written to."""
        if not self.is_current(parameter):
            return local(parameter).to(self.dtype)
        if _is_captured(parameter):
            if not _followed:  # a graph that nobody follows may be replayed when the parameter was changed
                return local(parameter).to(self.dtype)
            _followed[-1].taken[self] = parameter
        assert self._kept is not None
        return self._kept

    def open(self, parameter: Tensor) -> Tensor | None:
        """Where an optimizer writes all of the shard, in the pass in which it writes the parameter; `close` it then.

        None where that is in a graph that nobody follows: nobody would know when it has been written.
        """
        _watch_optimizers()
        self.expect_write(parameter)
        if self._is_outrun:
            return None
        shard = local(parameter)
        if self._kept is None or (self._kept.shape, self._kept.device) != (shard.shape, shard.device):
            self._kept = torch.empty_like(shard, dtype=self.dtype)
        return self._kept

    def close(self, parameter: Tensor) -> None:
        """It is written, and so is the parameter, whose version says so."""
        assert self._kept is not None
        torch.autograd.graph.increment_version(self._kept)  # an earlier pass that has kept it must not go on with it
        self._version = version_of(parameter)

    def expect_write(self, parameter: Tensor) -> None:
        """The parameter is about to be written, perhaps by what does not count versions."""
        self.forget()
        if _is_captured(parameter):
            if _followed:
                _followed[-1].written[self] = parameter
            else:
                self._is_outrun = True

    def forget(self) -> None:
        """It is stale, whatever the parameter's version."""
        self._version = None

    def is_current(self, parameter: Tensor) -> bool:
        """Whether it is the parameter as it is."""
        return self._version is not None and not self._is_outrun and self._version == version_of(parameter)

    def move(self, parameter: Tensor) -> None:
        """Hang at this one: a conversion (`.to`, `.double`) has put it in the place of the parameter it was at."""
        self.forget()
        parameter.stretto_copy = self  # type: ignore[attr-defined]

    def refresh(self, parameter: Tensor) -> None:
        """Cast the parameter into the copy if it was changed by others."""
        if self._kept is not None and not self.is_current(parameter):
            self._kept.copy_(local(parameter))
            self._version = version_of(parameter)

    def note_replay(self) -> None:
        """A graph has written it, of which its version knows nothing."""
        if self._kept is not None:
            torch.autograd.graph.increment_version(self._kept)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return ComputeCopy, (self.dtype,)  # of a parameter that is copied, a copy is not this one's


class CopyOfShard:
    """A parameter's copy for an optimizer that has its shard alone, as a plain tensor that shares its memory."""

    def __init__(self, parameter: Tensor) -> None:
        self._parameter = parameter

    def open(self, _: Tensor) -> Tensor | None:
        """See `ComputeCopy`."""
        return self._copy.open(self._parameter)

    def close(self, _: Tensor) -> None:
        """See `ComputeCopy`."""
        self._copy.close(self._parameter)

    def expect_write(self, _: Tensor) -> None:
        """See `ComputeCopy`."""
        self._copy.expect_write(self._parameter)

    @property
    def _copy(self) -> ComputeCopy:
        copy = copy_of(self._parameter)
        assert copy is not None
        return copy


class FollowedCopies:
    """The copies that a CUDA graph takes and those that it writes, with their parameters.

    Whoever replays it calls `refresh` before and `note_replay` after.
    """

    def __init__(self) -> None:
        self.taken: dict[ComputeCopy, Tensor] = {}
        self.written: dict[ComputeCopy, Tensor] = {}
        self._left_stale: list[ComputeCopy] = []

    def end(self) -> None:
        """The capture has ended. A replay leaves stale what is stale now: it changes parameters after their copies."""
        both = self.taken | self.written
        self._left_stale = [copy for copy, parameter in both.items() if not copy.is_current(parameter)]

    def forget(self) -> None:
        """The capture has failed: nothing of it was done."""
        for copy in self.taken | self.written:
            copy.forget()

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast parameters that were changed outside of the graph, a checkpoint's for one, into what it reads."""
        for copy, parameter in self.taken.items():
            copy.refresh(parameter)

    def note_replay(self) -> None:
        """The graph was replayed: what the host knows of its copies follows."""
        for copy in self.written:
            copy.note_replay()
        for copy in self._left_stale:
            copy.forget()


_followed: list[FollowedCopies] = []


def keep_copy(parameter: nn.Parameter, dtype: torch.dtype | None) -> None:
    """Have an optimizer that can write a copy in the dtype; None, or the parameter's own: there is none."""
    if dtype not in (None, parameter.dtype):
        assert dtype is not None
        ComputeCopy(dtype).move(parameter)


def share_copy(parameter: Tensor, shard: Tensor) -> None:
    """Have an optimizer of this shard write the parameter's copy, if it has one."""
    if copy_of(parameter) is not None:
        shard.stretto_copy = CopyOfShard(parameter)  # type: ignore[attr-defined]


def copy_of(parameter: Tensor) -> ComputeCopy | None:
    """What `keep_copy` has hung there."""
    copy: ComputeCopy | None = getattr(parameter, "stretto_copy", None)
    return copy


def cast(parameter: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The shard of a parameter in the dtype (None: its own): a copy that was kept, or a new one."""
    copy = copy_of(parameter)
    if copy is not None and copy.dtype == dtype:
        return copy.take(parameter)
    shard = local(parameter)
    return shard if dtype is None else shard.to(dtype)


@contextmanager
def following_copies() -> Iterator[FollowedCopies]:
    """Inside, copies may be taken into a CUDA graph and written by it."""
    found = FollowedCopies()
    _followed.append(found)
    try:
        yield found
        found.end()
    except BaseException:
        found.forget()
        raise
    finally:
        _followed.remove(found)


def _is_captured(parameter: Tensor) -> bool:
    return parameter.is_cuda and torch.cuda.is_current_stream_capturing()


@cache
def _watch_optimizers() -> None:
    """Have every optimizer's step say that it comes.

    Versions do not tell of all: torch's fused kernels and, of DTensors, its _foreach functions leave them as they are.
    """
    register_optimizer_step_pre_hook(_expect_writes)


def _expect_writes(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            copy = copy_of(parameter)
            if copy is not None:
                copy.expect_write(parameter)

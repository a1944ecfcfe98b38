# SPDX-License-Identifier: Apache-2.0
"""Low-precision weights: copies of parameters in the compute dtype, which an optimizer writes along with them.

Casting a weight before each forward pass reads 4 bytes a number and writes 2. An optimizer that has the new weight in
registers writes the 2 bytes itself, and the next passes use them (`stretto.optim.AdamW` with writes_copies).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from stretto.parallel.layout import TensorOnGrid, Version, local, version_of
from stretto.parallel.sharded_parameter import ParameterShard


class LowPrecisionWeight:
    """A copy of a parameter's shard in another dtype, valid while the parameter is as it was when the copy was written.

    It is the attribute `low_precision_weight` of Stretto's own parameters, where `stretto.optim.AdamW` finds it. Any
    other write to the parameter, seen by its version counter, invalidates it, and so does a step of any optimizer of
    torch. The shard is then cast in each pass, until an optimizer writes the copy again. One that no pass has asked
    for yet is not written: an fp8 weight may be cast from the parameter itself.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._is_asked_for = False
        self._kept: Tensor | None = None
        self._version: Version | None = None
        self._is_outrun = False  # a graph whose replays are not tracked writes the parameter

    def take(self, parameter: Tensor) -> Tensor:
        """The shard in the dtype: the copy, or a new cast. Do not write to it."""
        self._is_asked_for = True
        if not self.holds(parameter):
            return local(parameter).to(self.dtype)
        assert self._kept is not None
        return self._kept

    def holds(self, parameter: Tensor) -> bool:
        """True if the copy is of the parameter's present state; notes for a captured graph that it reads the copy."""
        if not self.is_current(parameter):
            return False
        if _is_captured(parameter):
            if not _captures:  # a graph whose replays are not tracked may run after the parameter was changed
                return False
            _captures[-1].taken[self] = parameter
        return True

    def open(self, parameter: Tensor) -> Tensor | None:
        """The tensor into which an optimizer writes the whole shard, along with the parameter; it calls `close` then.

        None where nothing asks for the copy, and inside the capture of a graph whose replays are not tracked: the host
        would not know of its writes.
        """
        _watch_optimizers()
        self.expect_write(parameter)
        if self._is_outrun or not self._is_asked_for:
            return None
        shard = local(parameter)
        if self._kept is None or (self._kept.shape, self._kept.device) != (shard.shape, shard.device):
            self._kept = torch.empty_like(shard, dtype=self.dtype)
        return self._kept

    def close(self, parameter: Tensor) -> None:
        """Note that the copy and the parameter are written: the copy is valid for the parameter's new version."""
        assert self._kept is not None
        torch.autograd.graph.increment_version(self._kept)  # autograd then refuses an earlier pass that has saved it
        self._version = version_of(parameter)

    def expect_write(self, parameter: Tensor) -> None:
        """Invalidate the copy before the parameter is written, perhaps by code that does not count versions."""
        self.forget()
        if _is_captured(parameter):
            if _captures:
                _captures[-1].written[self] = parameter
            else:
                self._is_outrun = True

    def forget(self) -> None:
        """Invalidate the copy, whatever the parameter's version."""
        self._version = None

    def is_current(self, parameter: Tensor) -> bool:
        """True if the copy is of the parameter's present state."""
        return self._version is not None and not self._is_outrun and self._version == version_of(parameter)

    def move(self, parameter: Tensor) -> None:
        """Store the copy at this parameter, which a conversion (`.to`, `.double`) has put in place of the old one."""
        self.forget()
        assert isinstance(parameter, TensorOnGrid)
        parameter.low_precision_weight = self

    def refresh(self, parameter: Tensor) -> None:
        """Cast the parameter into the copy if the copy is stale."""
        if self._kept is not None and not self.is_current(parameter):
            self._kept.copy_(local(parameter))
            self._version = version_of(parameter)

    def note_replay(self) -> None:
        """Count a write by a replayed graph, which the version counter does not see."""
        if self._kept is not None:
            torch.autograd.graph.increment_version(self._kept)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return LowPrecisionWeight, (self.dtype,)  # a copied parameter gets its own, empty copy


class PlacedWeight(LowPrecisionWeight):
    """A copy in memory of its owner's, such as this rank's part of a gathered weight.

    note_write: called before an optimizer writes it.
    """

    def __init__(self, place: Tensor, note_write: Callable[[], None]) -> None:
        super().__init__(place.dtype)
        self._kept: Tensor | None = place
        self._note_write = note_write

    def open(self, parameter: Tensor) -> Tensor | None:
        """Open it as a `LowPrecisionWeight`; None also if the parameter has another shape now, or the place is gone."""
        _watch_optimizers()
        self.expect_write(parameter)
        place = self._kept
        if self._is_outrun or place is None or place.shape != local(parameter).shape:
            return None
        self._note_write()
        return place

    def withdraw(self) -> None:
        """Take the place back: the copy is valid no more, and no optimizer writes it."""
        self.forget()
        self._kept = None

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return type(None), ()  # a copied parameter has no such place


class LowPrecisionShard:
    """Forwards to a parameter's `LowPrecisionWeight`, for an optimizer of its shard: a plain tensor in its memory."""

    def __init__(self, parameter: Tensor) -> None:
        self._parameter = parameter

    def open(self, _: Tensor) -> Tensor | None:
        """The tensor into which the optimizer writes the whole shard; None if it must not."""
        return self._copy.open(self._parameter)

    def close(self, _: Tensor) -> None:
        """Note that the copy and the parameter are written."""
        self._copy.close(self._parameter)

    def expect_write(self, _: Tensor) -> None:
        """Invalidate the copy before the parameter is written."""
        self._copy.expect_write(self._parameter)

    @property
    def _copy(self) -> LowPrecisionWeight:
        copy = copy_of(self._parameter)
        assert copy is not None
        return copy


class CapturedWeights:
    """The low-precision weights that a CUDA graph reads and those that it writes, with their parameters.

    The code that replays the graph calls `refresh` before and `note_replay` after it.
    """

    def __init__(self) -> None:
        self.taken: dict[LowPrecisionWeight, Tensor] = {}
        self.written: dict[LowPrecisionWeight, Tensor] = {}
        self._left_stale: list[LowPrecisionWeight] = []

    def end(self) -> None:
        """End the capture. What is stale now is stale after a replay too: the graph writes parameters after copies."""
        both = self.taken | self.written
        self._left_stale = [copy for copy, parameter in both.items() if not copy.is_current(parameter)]

    def forget(self) -> None:
        """Invalidate all copies: the capture has failed, so none of its writes was executed."""
        for copy in self.taken | self.written:
            copy.forget()

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast parameters that were changed outside of the graph (by a checkpoint, say) into copies that it reads."""
        for copy, parameter in self.taken.items():
            copy.refresh(parameter)

    def note_replay(self) -> None:
        """Update the host's state of the copies after a replay."""
        for copy in self.written:
            copy.note_replay()
        for copy in self._left_stale:
            copy.forget()


# The captures that are running, innermost last.
_captures: list[CapturedWeights] = []


def keep_copy(parameter: nn.Parameter, dtype: torch.dtype | None) -> None:
    """Let optimizers write a copy of the parameter in `dtype`. None, or the parameter's own dtype: there is no copy."""
    if dtype not in (None, parameter.dtype):
        assert dtype is not None
        LowPrecisionWeight(dtype).move(parameter)


def share_copy(parameter: Tensor, shard: ParameterShard) -> None:
    """Let an optimizer of this shard write the parameter's copy, if it has one."""
    if copy_of(parameter) is not None:
        shard.low_precision_weight = LowPrecisionShard(parameter)


def copy_of(parameter: Tensor) -> LowPrecisionWeight | None:
    return parameter.low_precision_weight if isinstance(parameter, TensorOnGrid) else None


def cast(parameter: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The shard of a parameter in `dtype` (None: its own): its low-precision copy, or a new cast."""
    copy = copy_of(parameter)
    if copy is not None and copy.dtype == dtype:
        return copy.take(parameter)
    shard = local(parameter)
    return shard if dtype is None else shard.to(dtype)


@contextmanager
def capturing_weights() -> Iterator[CapturedWeights]:
    """Track which low-precision weights a CUDA graph that is captured inside reads and writes."""
    found = CapturedWeights()
    _captures.append(found)
    try:
        yield found
        found.end()
    except BaseException:
        found.forget()
        raise
    finally:
        _captures.remove(found)


def _is_captured(parameter: Tensor) -> bool:
    return parameter.is_cuda and torch.cuda.is_current_stream_capturing()


@cache
def _watch_optimizers() -> None:
    """Invalidate copies before every optimizer's step.

    Versions do not show all writes: torch's fused kernels, and its _foreach functions on DTensors, do not count them.
    """
    register_optimizer_step_pre_hook(_expect_writes)


def _expect_writes(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, TensorOnGrid | ParameterShard) and parameter.low_precision_weight is not None:
                parameter.low_precision_weight.expect_write(parameter)

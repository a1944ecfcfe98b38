"""Prefetches weights: all-gathers each over z while the one before it computes (Singh, section 5.1.4, "OAG")."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stretto.parallel.comm.autograd import in_backward
from stretto.parallel.comm.collectives import Pending
from stretto.parallel.layout import Version

if TYPE_CHECKING:
    from stretto.parallel.comm.copy_engine_gather import CopyEngineAllGather

# How many weights are on their way besides the one in use: one is enough while it takes less time than a product.
PREFETCH_DEPTH = 1


@dataclass(frozen=True)
class _Gathering:
    """A weight on its way, and what it was gathered from: it is stale if that has changed since."""

    key: object
    version: Version
    pending: Pending


@dataclass
class _Chain:
    """The order in which one kind of pass gathers weights, as it was seen; `position` is the next one in it."""

    order: list[object] = field(default_factory=list)
    position: int = 0
    ahead: list[_Gathering] = field(default_factory=list)

    def restart(self) -> None:
        self.position = 0
        self.drop()

    def drop(self) -> None:
        for gathering in self.ahead:
            gathering.pending.wait()
        self.ahead.clear()


class WeightPrefetcher:
    """Gathers each weight while the one before it computes, in the order that the first pass showed.

    Forward passes have one order and backward passes another: with activation checkpointing or weights that are not
    kept, these gather again. An order that turns out wrong is learned anew, and costs only what it would have hidden.

    pushed: gathers those weights that were registered with it in its own way, and they have no place in these orders.
    """

    def __init__(self, is_on: bool, pushed: "CopyEngineAllGather | None" = None) -> None:
        self.is_on = is_on
        self.pushed = pushed
        self._forward, self._backward = _Chain(), _Chain()
        self._weights: dict[object, Callable[[], tuple[Tensor, Version, Callable[[Tensor], Pending]]]] = {}
        self._graph_task = -1

    def begin_forward(self) -> None:
        """A forward pass of the whole model begins."""
        if not in_backward():
            self._forward.restart()
            if self.pushed is not None:
                self.pushed.begin()

    def end_forward(self) -> None:
        """It has ended, by an exception perhaps."""
        if self.pushed is not None and not in_backward():
            self.pushed.end()

    def register(self, key: object, weight: Callable[[], tuple[Tensor, Version, Callable[[Tensor], Pending]]]) -> None:
        """`weight()` returns the shard as it is now, its version, and what starts to gather it."""
        self._weights[key] = weight

    def gather(self, key: object, shard: Tensor, version: Version, start: Callable[[Tensor], Pending]) -> Tensor:
        """The whole weight of `shard`: what was gathered ahead, or gathered now."""
        if self.pushed is not None:
            whole = self.pushed.take(key, version, in_backward=in_backward())
            if whole is not None:
                return whole
        if not self.is_on:
            return start(shard).wait()
        chain = self._current_chain()
        self._follow(chain, key)
        ahead = chain.ahead.pop(0) if chain.ahead and chain.ahead[0].key == key else None
        if ahead is not None and ahead.version != version:
            ahead.pending.wait()
            ahead = None
        pending = start(shard) if ahead is None else ahead.pending
        whole = pending.wait()
        self._start_next(chain)
        return whole

    def _current_chain(self) -> _Chain:
        if not in_backward():
            return self._forward
        task = torch._C._current_graph_task_id()
        if task != self._graph_task:  # a new backward pass; the one before may have ended in an exception
            self._graph_task = task
            self._backward.restart()
        return self._backward

    def _follow(self, chain: _Chain, key: object) -> None:
        """Advance in the order; where it does not go on with `key`, learn the rest anew."""
        if chain.position >= len(chain.order) or chain.order[chain.position] != key:
            chain.drop()
            del chain.order[chain.position :]
            if chain.position > 64 * len(self._weights):  # never restarted: someone calls submodules of their own
                self.is_on = False
            chain.order.append(key)
        chain.position += 1

    def _start_next(self, chain: _Chain) -> None:
        while len(chain.ahead) < PREFETCH_DEPTH and chain.position + len(chain.ahead) < len(chain.order):
            key = chain.order[chain.position + len(chain.ahead)]
            shard, version, start = self._weights[key]()
            chain.ahead.append(_Gathering(key, version, start(shard)))

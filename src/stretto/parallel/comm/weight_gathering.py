# SPDX-License-Identifier: Apache-2.0
"""Gathers weights over z: the interface `WeightGatherer`, and its implementation by prefetched all-gathers.

Singh, section 5.1.4, "OAG". The other implementation is `stretto.parallel.comm.copy_engine_gather`. `Builder`
(`stretto.parallel.builder`) chooses one for the model; layers do not know which one they use.

In FSDP2's words: `gather` is unshard. A weight that is kept gathered from the forward to the backward pass
(`ExecutionOptions.keeps_weights`) has reshard_after_forward=False; one that is gathered again there has
reshard_after_forward=True.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.parallel.comm.autograd import in_backward
from stretto.parallel.comm.collectives import Pending, start_gather_rows
from stretto.parallel.comm.rank_order import Event, RankOrder
from stretto.parallel.comm.streams import current_stream, use_here
from stretto.parallel.comm.two_level import TwoLevels
from stretto.parallel.layout import TensorOnGrid, Version, local, version_of
from stretto.parallel.state import require_state

if TYPE_CHECKING:
    from stretto.parallel.fp8.weights import WeightScales, WeightScaling

# How many weights are gathered ahead of the one in use: one is enough while gathering takes less time than a product.
PREFETCH_DEPTH = 1


class GatherSource(Protocol):
    """Input of one all-gather: a weight, or all parameters of a block.

    current: the registered parameter, or what has replaced it (for a block, the tuple of its parameters).
    """

    @property
    def parameter(self) -> Any:
        """The registered parameters."""

    def start(self, current: Any, group: dist.ProcessGroup, levels: TwoLevels | None) -> Pending:
        """Begin to all-gather over the group, in two levels if it has any."""

    def version(self, current: Any) -> Any:
        """The version of the shard: weights gathered from another version are stale."""


@dataclass(frozen=True)
class WeightToGather:
    """A weight: this rank's shard [local rows, ...] is a DTensor parameter's; the whole has `rows` rows, of `dtype`.

    dtype None: the parameter's own. Of experts' weights, group: over which they are gathered, if not over the
    gatherer's; dim: 1 if these are rows of dim 1, which comes first in what is gathered. scaling: of a weight that is
    gathered in fp8. is_table: each rank looks up a few rows, which may be read where they are (`find_parts`).
    """

    parameter: Tensor
    rows: int
    dtype: torch.dtype | None
    group: dist.ProcessGroup | None = None
    dim: int = 0
    scaling: "WeightScaling | None" = None
    is_table: bool = False

    @property
    def sent_dtype(self) -> torch.dtype | None:
        """The dtype in which it is sent (None: the parameter's own)."""
        return self.dtype if self.scaling is None else torch.float8_e4m3fn

    def start(self, current: Tensor, group: dist.ProcessGroup, levels: TwoLevels | None) -> Pending:
        """Begin to all-gather the rows of the parameter, or of the tensor that has replaced it."""
        if isinstance(current, TensorOnGrid) and current.pruned is not None:
            return cast(Pending, current.pruned.start_gather(self.dtype, levels))
        if self.scaling is not None:
            own, scale = self.scaling.cast(current)
            bits = own.view(torch.uint8).transpose(0, self.dim)  # not all backends send fp8
            pending = start_gather_rows(bits, self.rows, self.group or group, levels)
            return replace(pending, result=pending.result.view(own.dtype), fp8_scale=scale)
        shard = local(current) if not self.dim else local(current).transpose(0, self.dim)
        shard = shard if self.dtype in (None, shard.dtype) else shard.to(self.dtype)
        return start_gather_rows(shard, self.rows, self.group or group, levels)

    def version(self, current: Tensor) -> Version:
        """The state of this rank's shard."""
        return version_of(current)


class GatheredWeight(NamedTuple):
    """A weight's whole rows.

    version: that of the shard, if they are in memory that the next forward pass overwrites. scale: of rows in fp8.
    """

    rows: Tensor
    version: Version | None = None
    scale: Tensor | None = None


class WeightGatherer(ABC):
    """Gathers the weights of one model over z, and may start before they are asked for.

    Attributes: `keeps_rows`, whether it gathers weights that may be kept into its own memory, one by one;
    `is_in_forward`, whether the whole model's forward runs.
    """

    keeps_rows = False
    is_in_forward = False

    @abstractmethod
    def register(self, key: object, weight: GatherSource, *, may_keep: bool) -> None:
        """Gather this weight from now on. may_keep: its whole rows may be kept for as long as the model lives."""

    @abstractmethod
    def gather(self, key: object, parameter: Any) -> GatheredWeight:
        """Return the whole rows of `parameter`, which is the registered one or has replaced it.

        On a GPU the current stream waits for them, and the host does not.
        """

    @abstractmethod
    def begin_forward(self) -> None:
        """Begin a forward pass of the whole model; does nothing inside a backward pass."""

    def end_forward(self) -> None:  # noqa: B027
        """End a forward pass, perhaps one that has raised; does nothing inside a backward pass."""

    def begin_step(self) -> None:  # noqa: B027
        """Weights do not change from now on: later passes need not gather again what a pass has gathered."""

    def end_step(self) -> None:  # noqa: B027
        """Weights may change again."""

    def stop_keeping(self) -> None:  # noqa: B027
        """Stop keeping whole rows between passes, and free those that are kept."""

    def send_pruned(self) -> None:  # noqa: B027
        """Gather by messages the weights that have been pruned, of which these carry what is left."""

    def was_overwritten(self, key: object, version: Version | None) -> bool:
        """True if rows of `GatheredWeight.version` have been overwritten with other numbers since."""
        return False

    def find_parts(self, key: object, parameter: Tensor) -> "TableParts | None":
        """The parts of a table, for this forward pass to look rows up where they are; None: it is to be gathered."""
        return None


class TableParts(NamedTuple):
    """A table's parts: the ranks' addresses, int64 [ranks] on the device, and this rank's [rows, columns]."""

    addresses: Tensor
    own: Tensor


@dataclass(frozen=True)
class _Prefetch:
    """A started all-gather, and the state of the shard that it sends: it is stale once the shard has changed."""

    key: object
    version: Any
    pending: Pending
    stream: torch.cuda.Stream | None

    def wait(self) -> Tensor:
        """The whole rows, for the current stream. That of the start, which may use the memory next, waits as well."""
        if self.stream == current_stream(self.pending.result.device):
            return self.pending.wait()
        with torch.cuda.stream(self.stream):
            whole = self.pending.wait()
        use_here(whole, self.stream)
        return whole


@dataclass
class _GatherOrder:
    """The order in which forward, or backward, passes gather weights; `position` is the next one in it."""

    keys: list[object] = field(default_factory=list)
    position: int = 0
    began_alike: bool = False  # the last two passes, with the same weight
    started: list[_Prefetch] = field(default_factory=list)

    def restart(self) -> None:
        self.position = 0
        self.drop()

    def drop(self) -> None:
        for prefetch in self.started:
            prefetch.wait()
        self.started.clear()


class WeightPrefetcher(WeightGatherer):
    """All-gathers each weight while the one before it is multiplied, in the order that the first pass showed.

    Forward passes have one order and backward passes another: with activation checkpointing or weights that are not
    kept, backward passes gather again. Where an order turns out wrong, the rest of it is learned again; that costs only
    the overlap. is_on: False gathers each weight when it is asked for. ranks: compares the order with other ranks'.
    levels: of z's ranks on several nodes. scales: of weights in fp8.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: RankOrder,
        levels: TwoLevels | None = None,
        scales: "WeightScales | None" = None,
        *,
        is_on: bool,
    ) -> None:
        self.group = group
        self.scales = scales
        self.levels = levels
        self.ranks = ranks
        self.is_on = is_on
        self._events: dict[object, Event] = {}
        self._forward, self._backward = _GatherOrder(), _GatherOrder()
        self._weights: dict[object, GatherSource] = {}
        self._graph_task = -1
        self._is_step = False  # in which a later forward pass may gather nothing

    def register(self, key: object, weight: GatherSource, *, may_keep: bool) -> None:
        """Gather this weight from now on; nothing is kept between passes."""
        self._weights[key] = weight
        parameters = weight.parameter if isinstance(weight.parameter, tuple) else (weight.parameter,)
        self._events[key] = ("the gather of", *map(self.ranks.place, parameters))

    def begin_forward(self) -> None:
        """Go back to the beginning of the forward order, and start to gather the first weight."""
        if not in_backward():
            self.ranks.begin(("forward", torch.is_grad_enabled()))
            self._forward.restart()
            if self.scales is not None:
                self.scales.measure()
            if self.is_on and self._forward.began_alike and not self._is_step:
                with torch.no_grad():
                    self._start_next(self._forward)

    def end_forward(self) -> None:
        """Compare that all ranks end here, and drop what was gathered ahead: it may be changed before its use, by fused
        optimizers without a new version."""
        if not in_backward():
            self._forward.began_alike &= self._forward.position > 0  # else others have gathered all of it
            self._forward.drop()
            self.ranks.end()

    def gather(self, key: object, parameter: Any) -> GatheredWeight:
        """Wait for the prefetched rows, or gather them now; then start to gather the next weight in the order."""
        order, weight = self._current_order(), self._weights[key]
        self.ranks.follow(self._events[key])
        if not self.is_on:
            pending = weight.start(parameter, self.group, self.levels)
            return GatheredWeight(pending.wait(), scale=pending.fp8_scale)
        self._follow(order, key)
        prefetch = order.started.pop(0) if order.started and order.started[0].key == key else None
        if prefetch is not None and prefetch.version != weight.version(parameter):
            prefetch.wait()
            prefetch = None
        if prefetch is None:
            pending = weight.start(parameter, self.group, self.levels)
            whole = pending.wait()
        else:
            pending, whole = prefetch.pending, prefetch.wait()
        self._start_next(order)
        return GatheredWeight(whole, scale=pending.fp8_scale)

    def begin_step(self) -> None:
        """Begin forward passes without a gather: a pass before may have gathered all weights."""
        self._is_step = True
        if self.scales is not None:
            self.scales.begin_step()

    def end_step(self) -> None:
        """Begin them with the first weight's again."""
        self._is_step = False
        if self.scales is not None:
            self.scales.end_step()

    def _current_order(self) -> _GatherOrder:
        task = torch._C._current_graph_task_id()
        if task == -1:
            return self._forward
        self.ranks.begin_backward()
        if task != self._graph_task:  # a new backward pass; the one before may have ended in an exception
            self._graph_task = task
            self._backward.restart()
        return self._backward

    def _follow(self, order: _GatherOrder, key: object) -> None:
        """Advance in the order; if `key` is not next, drop the rest of it."""
        if order.position == 0:
            order.began_alike = bool(order.keys) and order.keys[0] is key
        if order.position >= len(order.keys) or order.keys[order.position] != key:
            order.drop()
            del order.keys[order.position :]
            if order.position > 64 * len(self._weights):  # never restarted: the user calls submodules on their own
                self.is_on = False
            order.keys.append(key)
        order.position += 1

    def _start_next(self, order: _GatherOrder) -> None:
        while len(order.started) < PREFETCH_DEPTH:
            place = order.position + len(order.started)
            if place >= len(order.keys):
                return
            key = order.keys[place]
            weight = self._weights[key]
            version = weight.version(weight.parameter)
            pending = weight.start(weight.parameter, self.group, self.levels)
            order.started.append(_Prefetch(key, version, pending, current_stream(pending.result.device)))


class StepGatherer(WeightGatherer):
    """Gathers each weight once a step, for all its micro-batches (`gather_once`, and the stages of a pipeline).

    Between `begin_step` and `end_step` the whole rows of a weight are kept after their first use; `release` frees those
    of one stage earlier. At other times `inner` does all. The attribute `stage` says which stage runs.
    """

    def __init__(self, inner: WeightGatherer) -> None:
        self.inner = inner
        self.keeps_rows = inner.keeps_rows
        self.stage = 0
        self._used: dict[int, dict[object, None]] = {}  # by stage, in the order of use
        self._sources: dict[object, GatherSource] = {}
        self._held: dict[object, tuple[Any, GatheredWeight, torch.cuda.Stream | None]] | None = None

    @property
    def is_keeping(self) -> bool:
        """True if a step has begun and not ended."""
        return self._held is not None

    def register(self, key: object, weight: GatherSource, *, may_keep: bool) -> None:
        """Gather this weight from now on."""
        self._sources[key] = weight
        self.inner.register(key, weight, may_keep=may_keep)

    def gather(self, key: object, parameter: Any) -> GatheredWeight:
        """Return the rows that were gathered in this step, or gather them."""
        if self._held is None:
            return self.inner.gather(key, parameter)
        self._used.setdefault(self.stage, {})[key] = None
        return self.keep(key, self._sources[key].version(parameter), lambda: self.inner.gather(key, parameter))

    def keep(self, key: object, version: Any, make: Callable[[], GatheredWeight]) -> GatheredWeight:
        """Return what `make` has made in this step of the same state of the shard, or have it made."""
        if self._held is None:
            return make()
        known = self._held.get(key)
        if known is None or known[0] != version:
            made = make()
            known = self._held[key] = version, made, current_stream(made.rows.device)
        use_here(known[1].rows, known[2])
        return known[1]

    def find_parts(self, key: object, parameter: Tensor) -> TableParts | None:
        """The parts of a table, of which nothing is kept."""
        return self.inner.find_parts(key, parameter)

    def begin_step(self) -> None:
        """Keep from now on what is gathered."""
        self._held = {}
        self.inner.begin_step()

    def gather_all(self, stage: int) -> None:
        """Gather the weights that a stage has used in earlier steps."""
        for key in list(self._used.get(stage, {})):
            self.gather(key, self._sources[key].parameter)

    def release(self, stage: int) -> None:
        for key in self._used.get(stage, {}):
            if self._held is not None:
                self._held.pop(key, None)

    def end_step(self) -> None:
        self._held = None
        self.inner.end_step()

    def begin_forward(self) -> None:
        """Begin a forward pass of the whole model, or of one of its stages."""
        self.inner.begin_forward()

    def end_forward(self) -> None:
        self.inner.end_forward()

    def stop_keeping(self) -> None:
        """Keep no whole rows between passes outside of a step."""
        self.inner.stop_keeping()

    def send_pruned(self) -> None:
        self.inner.send_pruned()

    def was_overwritten(self, key: object, version: Version | None) -> bool:
        """True if rows have been overwritten with other numbers since."""
        return self.inner.was_overwritten(key, version)


@contextmanager
def gather_once(model: nn.Module) -> Iterator[None]:
    """Gather each weight over z once inside, for all forward and backward passes, and keep it whole until the end.

    Use it around the micro-batches of a step. Without it every micro-batch gathers, and with activation checkpointing
    its backward pass gathers again. Takes memory for all weights of the model in the compute dtype without their
    division by z, which models without checkpointing take in any case. Parameters must not change inside: the
    optimizer's step comes after it. All ranks enter and leave alike. In FSDP2's words: blocks are unsharded by the
    first micro-batch, and resharded by the last.

    ValueError for a model that is not on a grid, and for one of `parallelize(reshard="after_forward")`.
    """
    gatherer = require_state(model, "gather_once").weight_gatherer
    if not isinstance(gatherer, StepGatherer):
        raise ValueError(
            "gather_once keeps gathered weights, which reshard='after_forward' frees; 'after_backward' would do"
        )
    if gatherer.is_keeping:
        raise ValueError("gather_once is entered already: a step has one")
    gatherer.begin_step()
    try:
        yield
    finally:
        gatherer.end_step()

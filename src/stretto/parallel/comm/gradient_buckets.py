# SPDX-License-Identifier: Apache-2.0
"""Buckets of gradients, of which a message sums one over the ranks that share parameters; gradients that ranks lack."""

import math
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stretto.execution import BUCKET_BYTES
from stretto.parallel.comm.collectives import Pending, all_reduce, can_average, start_all_reduce
from stretto.parallel.comm.rank_order import RULE, RankOrder
from stretto.parallel.comm.two_level import TwoLevels
from stretto.parallel.layout import GRAD, local
from stretto.parallel.precision import Precision


class GradientSink(Protocol):
    """Takes gradients in place of `.grad`, and sums them over the ranks that saw other tokens.

    The reducer calls it on autograd's thread. A gradient of a step comes in parts: one of each micro-batch, and of a
    tied weight two.
    """

    def add(self, parameter: nn.Parameter, shard: Tensor) -> None:
        """Take a part of a gradient: this rank's shard of it, which is summed over z and no other axis."""

    def complete(self, parameter: nn.Parameter) -> None:
        """Take note that a parameter's gradient gets no further part in this step. Called in one order on all ranks."""

    def end_pass(self) -> None:
        """Take note that a backward pass has ended."""

    def finish(self) -> None:
        """Take note that it was the last one of the step."""


class GradientListener(Protocol):
    """Learns when gradients of a step are final. The reducer calls it on autograd's thread, but for `begin_forward`."""

    def final(self, parameter: nn.Parameter) -> None:
        """`.grad` has all that is expected of this step. Called again if more has come. Of parameters whose gradient
        ranks reduce; others are final at the end. Called in one order on all ranks."""

    def finish(self) -> None:
        """The last backward pass of the step has ended: all gradients are final."""

    def begin_forward(self) -> None:
        """A forward pass of the model begins. A backward pass that has not finished has raised."""


class GradientBucket:
    """Gradients that one message sums, or averages, over the same ranks.

    Calls come in this order: `pack`, `start`, `add_to_grad`. The message ends with a number a gradient, 0 where a rank
    has none: what no rank has a gradient of keeps its `.grad`. Only a rank that lacks one reads these.
    """

    def __init__(
        self, groups: tuple[dist.ProcessGroup, ...], levels: TwoLevels | None = None, *, averages: bool
    ) -> None:
        self.groups = groups
        self._levels = levels
        self._averages = averages
        self._op = dist.ReduceOp.SUM
        self.parameters: Sequence[nn.Parameter] = ()
        self._missing: Sequence[int] = ()
        self._flat: Tensor | None = None
        self._pending: Pending | None = None

    def pack(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor], missing: Sequence[int]) -> None:
        """Copy gradients into one flat tensor, to be added to their parameters' `.grad` once they are summed.

        missing: numbers of those for which zeros stand.
        """
        self.parameters, self._missing = parameters, missing
        present = gradients[-1].new_ones(len(gradients))
        if missing:
            present[missing] = 0
        self._flat = torch._C._nn.flatten_dense_tensors([*gradients, present])
        if self._averages and all(can_average(self._flat, group) for group in self.groups):
            self._op = dist.ReduceOp.AVG  # NCCL multiplies before it adds
        elif self._averages:  # before it is sent, so that no sum overflows in fp16
            self._flat *= 1 / math.prod(group.size() for group in self.groups)

    def start(self) -> None:
        """Begin to sum the flat tensor over the first group."""
        assert self._flat is not None
        self._pending, self._flat = start_all_reduce(self._flat, self.groups[0], self._op, self._levels), None

    def add_to_grad(self, absent: set[nn.Parameter]) -> list[nn.Parameter]:
        """Wait for the sum, sum over the other groups, and add the result to the parameters' `.grad`.

        Returns the parameters of which other ranks alone had a gradient.
        absent: in a pass that captures a CUDA graph, what no rank had a gradient of in the last one; is else written.
        """
        assert self._pending is not None
        flat = self._pending.wait()
        for group in self.groups[1:]:
            start_all_reduce(flat, group, self._op, self._levels).wait()
        parameters = self.parameters
        if not (flat.is_cuda and torch.cuda.is_current_stream_capturing()):
            absent.difference_update(parameters)
            if self._missing:
                present = flat[-len(parameters) :].tolist()
                absent.update(parameters[index] for index in self._missing if not present[index])
        with torch._C.DisableTorchFunctionSubclass():  # 2.11 calls Python for each attribute of a parameter
            parts = torch._C._nn.unflatten_dense_tensors(flat, [each._local_tensor for each in parameters])  # type: ignore[attr-defined]
            found = zip(parameters, parts, strict=True)
            _accumulate_parts([pair for pair in found if pair[0] not in absent] if absent else [*found])
        return [parameters[index] for index in self._missing if parameters[index] not in absent]


@dataclass(frozen=True)
class BucketPlan:
    """The gradients that each message of a pass sums, and the order in which messages start: the same on all ranks.

    buckets: groups and parameters of each. place: the bucket of a parameter.
    """

    buckets: tuple[tuple[tuple[dist.ProcessGroup, ...], tuple[nn.Parameter, ...]], ...]
    place: dict[nn.Parameter, int]

    @classmethod
    def of(
        cls,
        order: Sequence[nn.Parameter],
        groups: Mapping[nn.Parameter, tuple[dist.ProcessGroup, ...]],
        wire: Callable[[nn.Parameter], torch.dtype],
        limit: int,
    ) -> "BucketPlan":
        """Fill buckets of `limit` bytes with gradients of the same groups and dtype, in this order."""
        open_ones: dict[Any, list[nn.Parameter]] = {}
        sizes: dict[Any, int] = {}
        buckets = []
        for parameter in order:
            key = groups[parameter], parameter.dtype
            open_ones.setdefault(key, []).append(parameter)
            sizes[key] = sizes.get(key, 0) + local(parameter).numel() * wire(parameter).itemsize
            if sizes[key] >= limit:
                buckets.append((key[0], tuple(open_ones.pop(key))))
                del sizes[key]
        buckets += [(of, tuple(parameters)) for (of, _), parameters in open_ones.items()]
        place = {parameter: number for number, (_, held) in enumerate(buckets) for parameter in held}
        return cls(tuple(buckets), place)


@dataclass
class BucketsOfPass:
    """The buckets of one backward pass.

    totals: gradients whose buckets lack others; late: those whose buckets have started. plan: of the buckets, from the
    first gradient that goes into one; closed: those that have started. left: how many gradients each bucket lacks.
    """

    totals: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    late: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    plan: BucketPlan | None = None
    left: list[int] = field(default_factory=list)
    started: int = 0
    closed: deque[GradientBucket] = field(default_factory=deque)


class BucketedSums:
    """Sums gradients over the ranks that share their parameters, also where some ranks have none of a parameter.

    The first pass shows in which order gradients come (`agree_on_order`). Buckets are filled in that order, so they are
    the same whatever is overlapped, and so are the bits of their sums. Each pass sums the gradients of all trained
    parameters, with zeros for those that this rank has none of: ranks of data may run different submodules (`RankOrder`
    compares what must be the same). What no rank has a gradient of keeps its `.grad`.

    groups: over which a parameter's gradient is summed; all parameters, in one order on all ranks. group: all ranks of
    these. levels: of groups on several nodes. averages: sums are divided by their ranks. overlaps: buckets start while
    the backward pass runs.
    """

    def __init__(
        self,
        groups: Mapping[nn.Parameter, tuple[dist.ProcessGroup, ...]],
        group: dist.ProcessGroup,
        device: torch.device,
        precision: Precision,
        levels: TwoLevels | None = None,
        *,
        averages: bool,
        overlaps: bool,
    ) -> None:
        self.ranks = RankOrder(group, "gradients over data")
        self._groups = groups
        self._group = group
        self._device = device
        self._precision = precision
        self._levels = levels
        self._averages = averages
        self._overlaps = overlaps
        self._order: list[nn.Parameter] | None = None  # in which gradients came in the first pass, on the first rank
        self._plans: dict[tuple[int, ...], BucketPlan] = {}  # by what is frozen
        self.at_final: Callable[[nn.Parameter], None] = lambda parameter: None
        self._absent: set[nn.Parameter] = set()  # no rank had a gradient of them in the last pass

    @property
    def has_order(self) -> bool:
        """True if ranks have agreed on the order of gradients, in a pass before."""
        return self._order is not None

    def agree_on_order(self, arrived: Iterable[nn.Parameter]) -> None:
        """Have gradients be summed in the order in which they came on the group's first rank; the others come last.

        RuntimeError where ranks train different parameters. Called once, in the first pass.
        """
        order = [*dict.fromkeys([*arrived, *(parameter for parameter, groups in self._groups.items() if groups)])]
        if self._group.size() == 1 or not order:
            self._order = order
            return
        frozen = [self.ranks.place(parameter) for parameter in order if not parameter.requires_grad]
        digest = zlib.crc32(repr(sorted(frozen)).encode())
        places = [self.ranks.place(parameter) if self._group.rank() == 0 else -1 for parameter in order]
        mine = torch.tensor([digest, -digest, *places], device=self._device)
        highest, lowest, *places = all_reduce(mine, self._group, dist.ReduceOp.MAX).tolist()
        if highest != -lowest:
            raise RuntimeError(
                f"ranks train different parameters: rank {dist.get_rank()} has frozen "
                f"{', '.join(self.ranks.names[place] for place in frozen) or 'none'}, and another rank others: {RULE}"
            )
        parameters = list(self._groups)
        self._order = [parameters[place] for place in places]

    def put(self, current: BucketsOfPass, parameter: nn.Parameter, total: Tensor) -> None:
        """Put a gradient into its bucket; start the buckets that are full, in the plan's order."""
        plan = current.plan or self._plan_of(current)
        wire = self._precision.reduce or self._precision.compute or parameter.dtype  # as `_wire`, without a call
        if total.dtype != wire:  # else a call of torch's for each bias
            total = total.to(wire)
        place = plan.place.get(parameter)
        if place is None or place < current.started:
            current.late[parameter] = total if parameter not in current.late else current.late[parameter] + total
        elif parameter in current.totals:
            current.totals[parameter] = current.totals[parameter] + total
        else:
            current.totals[parameter] = total
            current.left[place] -= 1
            while current.started < len(plan.buckets) and not current.left[current.started]:
                self._start(current, *plan.buckets[current.started])

    def finish(self, current: BucketsOfPass, *, is_first: bool) -> Iterator[nn.Parameter]:
        """Send the last buckets, and add all sums to `.grad`; yields parameters of which other ranks alone had some."""
        if self._order:
            self._start_rest(current)
            self.ranks.end(compares=not is_first)  # `agree_on_order` has compared the first
        if not self._overlaps:
            for bucket in current.closed:
                bucket.start()
        while current.closed:  # each bucket is freed before the next one's gradients are made
            bucket = current.closed.popleft()
            parameters = bucket.parameters
            yield from bucket.add_to_grad(self._absent)
            del bucket
            for parameter in parameters:
                self.at_final(parameter)

    def _plan_of(self, current: BucketsOfPass) -> BucketPlan:
        """The buckets of this pass: the gradients of all trained parameters, which all ranks reduce."""
        if current.plan is None:
            assert self._order is not None
            with torch._C.DisableTorchFunctionSubclass():
                frozen = tuple(self.ranks.place(each) for each in self._order if not each.requires_grad)
            self.ranks.begin_backward()
            self.ranks.follow(("a pass in which these are frozen:", *frozen))
            if frozen not in self._plans:
                trained = [parameter for parameter in self._order if parameter.requires_grad]
                self._plans[frozen] = BucketPlan.of(trained, self._groups, self._wire, BUCKET_BYTES)
            current.plan = self._plans[frozen]
            current.left = [len(held) for _, held in current.plan.buckets]
        return current.plan

    def _start(
        self, current: BucketsOfPass, groups: tuple[dist.ProcessGroup, ...], held: Sequence[nn.Parameter]
    ) -> None:
        """Send a bucket, with zeros for what this rank has no gradient of."""
        current.started += 1
        bucket, totals = GradientBucket(groups, self._levels, averages=self._averages), current.totals
        missing = [number for number, parameter in enumerate(held) if parameter not in totals]
        for parameter in map(held.__getitem__, missing):
            totals[parameter] = torch.zeros_like(local(parameter), dtype=self._wire(parameter), requires_grad=False)
        bucket.pack(held, [totals.pop(parameter) for parameter in held], missing)
        current.closed.append(bucket)
        if self._overlaps:
            bucket.start()

    def _start_rest(self, current: BucketsOfPass) -> None:
        """Start the buckets that lack gradients here, and new ones for gradients that came too late for theirs."""
        plan = self._plan_of(current)
        while current.started < len(plan.buckets):
            self._start(current, *plan.buckets[current.started])
        if current.late:  # a module ran more often than before, or its parameters were frozen since its forward pass
            assert self._order is not None
            late = [parameter for parameter in self._order if parameter in current.late]
            self.ranks.follow(("further gradients, from a module that runs again, of", *map(self.ranks.place, late)))
            current.totals = current.late
            for groups, held in BucketPlan.of(late, self._groups, self._wire, BUCKET_BYTES).buckets:
                self._start(current, groups, held)

    def _wire(self, parameter: nn.Parameter) -> torch.dtype:
        return self._precision.reduce or self._precision.compute or parameter.dtype


def accumulate(parameter: nn.Parameter, mine: Tensor) -> None:
    """Add this rank's shard of a gradient to `parameter.grad`."""
    if torch.is_grad_enabled():
        with torch.no_grad():
            accumulate(parameter, mine)
        return
    with torch._C.DisableTorchFunctionSubclass():
        if GRAD.__get__(parameter) is not None:
            local_gradient(parameter).add_(mine)
            return
        if mine.dtype != parameter.dtype:
            [mine] = _copies([mine], [parameter.dtype])
        GRAD.__set__(parameter, as_gradient(mine, parameter._spec, requires_grad=False))  # type: ignore[attr-defined]


def _accumulate_parts(found: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
    """`accumulate` parts of one tensor, of which each new `.grad` gets its own copy."""
    new = [pair for pair in found if GRAD.__get__(pair[0]) is None]
    for parameter, part in found if len(new) < len(found) else ():
        if GRAD.__get__(parameter) is not None:
            accumulate(parameter, part)
    copies = _copies([part for _, part in new], [parameter.dtype for parameter, _ in new])
    for (parameter, _), copy in zip(new, copies, strict=True):
        GRAD.__set__(parameter, as_gradient(copy, parameter._spec, requires_grad=False))  # type: ignore[attr-defined]


# As in FSDP2: `from_local` would take 50 us to derive again what is known from the parameter. DTensor's own `__init__`
# does nothing, in ten calls.
as_gradient = partial(DTensor.__new__, DTensor)


def _copies(tensors: list[Tensor], dtypes: list[torch.dtype]) -> list[Tensor]:
    """New tensors of these dtypes, with the numbers of others."""
    if [each.dtype for each in tensors] == dtypes:
        return list(torch._foreach_mul(tensors, 1.0)) if tensors else []  # allocates in one call
    made = [torch.empty_like(each, dtype=dtype) for each, dtype in zip(tensors, dtypes, strict=True)]
    torch._foreach_copy_(made, tensors)  # twice as fast as `to`, whose kernel does not read 16 bytes at a time
    return made


def local_gradient(parameter: Tensor) -> Tensor:
    """This rank's shard of `parameter.grad`, sharing its memory."""
    gradient = parameter.grad
    assert isinstance(gradient, DTensor)
    return gradient.to_local()


StartedScatter = tuple[nn.Parameter, Pending]
"""A weight, and its started reduce-scatter over z."""


@dataclass
class BackwardPass:
    """The gradients of one backward pass that are not in `.grad` yet, by state (see the diagram of `gradient_reducer`).

    scatters: started reduce-scatters, each of one weight or of a block's parameters. arrived: the parts that have come
    of gradients that lack others. counts: how many parts each gradient had.
    """

    scatters: deque[list[StartedScatter]] = field(default_factory=deque)
    arrived: dict[nn.Parameter, list[Tensor]] = field(default_factory=dict)
    counts: dict[nn.Parameter, int] = field(default_factory=dict)
    buckets: BucketsOfPass = field(default_factory=BucketsOfPass)

# SPDX-License-Identifier: Apache-2.0
"""Where gradients are before they are in `.grad`: buckets, of which a message sums one, and other states; sinks."""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stretto.parallel.comm.collectives import Pending, all_reduce, start_all_reduce
from stretto.parallel.layout import local


class GradientSink(Protocol):
    """Takes gradients in place of `.grad`, and sums them over the ranks that saw other tokens.

    The reducer calls it on autograd's thread. A gradient of a step comes in parts: one of each micro-batch, and of a
    tied weight two.
    """

    def add(self, parameter: nn.Parameter, shard: Tensor) -> None:
        """Take a part of a gradient: this rank's shard of it, which is summed over z and no other axis."""

    def complete(self, parameter: nn.Parameter) -> None:
        """In this step, no further part of the parameter's gradient is expected. Called in one order on all ranks."""

    def finish(self) -> None:
        """The last backward pass of the step has ended."""


class GradientBucket:
    """Gradients that one message sums, or averages, over the same ranks.

    Calls come in this order: `add` for each gradient, `pack`, `start`, `add_to_grad`. The message ends with a number a
    gradient, 0 where a rank has none: what no rank has a gradient of keeps its `.grad`. Only a rank that lacks one
    reads these.
    """

    def __init__(self, groups: tuple[dist.ProcessGroup, ...], *, averages: bool) -> None:
        self.groups = groups
        self._scale = 1 / math.prod(group.size() for group in groups) if averages else 1.0
        self.num_bytes = 0
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []
        self._missing: list[int] = []
        self._shapes: list[tuple[nn.Parameter, torch.Size]] = []
        self._flat: Tensor | None = None
        self._pending: Pending | None = None

    def add(self, parameter: nn.Parameter, gradient: Tensor, *, is_missing: bool = False) -> None:
        """Put a gradient in, to be added to `parameter.grad` once it is summed. is_missing: zeros stand for none."""
        if is_missing:
            self._missing.append(len(self._gradients))
        self._gradients.append((parameter, gradient))
        self.num_bytes += gradient.numel() * gradient.element_size()

    def pack(self) -> None:
        """Copy the gradients into one flat tensor, and free them."""
        self._shapes = [(parameter, gradient.shape) for parameter, gradient in self._gradients]
        last = self._gradients[-1][1]
        present = last.new_ones(len(self._gradients))
        if self._missing:
            present[self._missing] = 0
        self._flat = torch.cat([*(gradient.reshape(-1) for _, gradient in self._gradients), present])
        if self._scale != 1:
            self._flat *= self._scale  # before it is sent, so that no sum overflows in fp16
        self._gradients = []

    def start(self) -> None:
        """Begin to sum the flat tensor over the first group."""
        assert self._flat is not None
        self._pending, self._flat = start_all_reduce(self._flat, self.groups[0]), None

    def add_to_grad(self, absent: set[nn.Parameter]) -> list[nn.Parameter]:
        """Wait for the sum, sum over the other groups, and add the result to the parameters' `.grad`.

        Returns the parameters of which other ranks alone had a gradient.
        absent: in a pass that captures a CUDA graph, what no rank had a gradient of in the last one; is else written.
        """
        assert self._pending is not None
        flat = self._pending.wait()
        for group in self.groups[1:]:
            all_reduce(flat, group)
        parameters = [parameter for parameter, _ in self._shapes]
        if not (flat.is_cuda and torch.cuda.is_current_stream_capturing()):
            absent.difference_update(parameters)
            if self._missing:
                present = flat[-len(parameters) :].tolist()
                absent.update(parameters[index] for index in self._missing if not present[index])
        offset = 0
        for parameter, shape in self._shapes:
            if parameter not in absent:
                accumulate(parameter, flat[offset : offset + shape.numel()].view(shape), is_shared=True)
            offset += shape.numel()
        return [parameters[index] for index in self._missing if parameters[index] not in absent]


@dataclass(frozen=True)
class BucketPlan:
    """Which gradients each message of a pass sums, and in which order messages start: the same on all ranks.

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


def accumulate(parameter: nn.Parameter, mine: Tensor, *, is_shared: bool = False) -> None:
    """Add this rank's shard of a gradient to `parameter.grad`.

    is_shared: the shard is a view of a larger tensor, so that `.grad` needs its own memory.
    """
    with torch.no_grad():
        if parameter.grad is not None:
            local_gradient(parameter).add_(mine)
            return
        assert isinstance(parameter, DTensor)
        # As in FSDP2: `from_local` would take 50 us to derive again what is known from the parameter.
        parameter.grad = DTensor(
            _converted(mine, parameter.dtype, copies=is_shared), parameter._spec, requires_grad=False
        )


def _converted(tensor: Tensor, dtype: torch.dtype, *, copies: bool) -> Tensor:
    """Convert to `dtype`; with `copies`, always into new memory."""
    if tensor.dtype == dtype or not tensor.is_cuda:
        return tensor.to(dtype, copy=copies)
    result = torch.empty_like(tensor, dtype=dtype)
    torch._foreach_copy_([result], [tensor])  # twice as fast as `to`, whose kernel does not read 16 bytes at a time
    return result


def local_gradient(parameter: Tensor) -> Tensor:
    """This rank's shard of `parameter.grad`, sharing its memory."""
    gradient = parameter.grad
    assert isinstance(gradient, DTensor)
    return gradient.to_local()


@dataclass(frozen=True)
class UnshardedGradient:
    """A weight's whole gradient over several micro-batches, before the reduce-scatter over z.

    total: in the parameter's dtype, or a wider one in which gradients are reduced. dtype: in which it is sent. start:
    begins the reduce-scatter. shown, versions: see `note_state`.
    """

    total: Tensor
    dtype: torch.dtype
    start: Callable[[Tensor], Pending]
    shown: Tensor
    versions: tuple[int, int]


StartedScatter = tuple[nn.Parameter, Pending, float]
"""A weight, its started reduce-scatter over z, and the factor of what comes of that."""


@dataclass
class BackwardPass:
    """The gradients of one backward pass that are not in `.grad` yet, by state (see the diagram above).

    scatters: started reduce-scatters, each of one weight or of a block's parameters. held: what `.grad` held before.
    counts: how many parts each gradient had. totals: gradients whose buckets lack others; late: those whose buckets
    have started. plan: of its buckets, from the first gradient that goes into one; closed: those that have started.
    left: how many gradients each bucket lacks.
    """

    scatters: deque[list[StartedScatter]] = field(default_factory=deque)
    held: dict[nn.Parameter, Tensor | None] = field(default_factory=dict)
    arrived: dict[nn.Parameter, list[Tensor]] = field(default_factory=dict)
    counts: dict[nn.Parameter, int] = field(default_factory=dict)
    totals: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    late: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    plan: BucketPlan | None = None
    left: list[int] = field(default_factory=list)
    started: int = 0
    closed: deque[GradientBucket] = field(default_factory=deque)


def note_state(parameter: nn.Parameter) -> tuple[Tensor, tuple[int, int]]:
    """`.grad`, and numbers that change when it is written to: as a DTensor, and as this rank's shard."""
    gradient = parameter.grad
    assert gradient is not None
    return gradient, (gradient._version, local_gradient(parameter)._version)

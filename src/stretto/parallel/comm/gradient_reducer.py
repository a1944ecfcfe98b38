"""Gradients: summed where ranks saw different tokens, deferred while micro-batches accumulate, clipped by one norm."""

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from stretto.parallel.comm.autograd import at_end_of_backward
from stretto.parallel.comm.collectives import Pending, all_reduce, start_all_reduce
from stretto.parallel.grid import Grid
from stretto.parallel.layout import layout_of
from stretto.parallel.options import Overlap, Precision

if TYPE_CHECKING:
    from stretto.parallel.comm.copy_engine_scatter import ScatterRing

# A bucket's size: large enough for the links' full bandwidth, small enough that the last one is not long in the way.
BUCKET_BYTES = 64 * 2**20
# Weight gradients that may be on their way over z at once: about two blocks'. It bounds the memory that they hold.
SCATTERS_IN_FLIGHT = 8


class GradientReducer:
    """Brings each parameter's gradient together: over z to its shard, then over the axes that saw different tokens.

    Weights come by `scatter`, in the order in which the backward pass makes them; norms, biases and positions through
    autograd (`watch`). What is to be summed fills buckets, which are sent as they fill; all of it is in `.grad` when
    `backward()` returns. While `is_deferred`, gradients accumulate unsummed; the next pass sums them, all of them.

    A backward pass inside another (reentrant activation checkpointing) sums what it has made by its own end.

    The first backward pass shows in which order gradients come, and how often each (a tied weight: twice). Buckets
    are filled by that order, so that they are the same whatever is hidden, and so are the bits of their sums.

    `at_end` is called at the end of each backward pass.
    """

    def __init__(self, grid: Grid, precision: Precision, overlap: Overlap, *, at_end: Callable[[], None]) -> None:
        self.grid = grid
        self.precision = precision
        self.overlap = overlap
        self.at_end = at_end
        self.ring: ScatterRing | None = None  # through which weights' gradients come
        self.is_deferred = False
        self._groups: dict[nn.Parameter, tuple[dist.ProcessGroup, ...]] = {}
        self._weights: set[nn.Parameter] = set()
        self._hooks: dict[nn.Parameter, list[RemovableHandle]] = {}
        self._unsummed: dict[nn.Parameter, None] = {}  # a set that every rank goes through in one order
        self._expected: dict[nn.Parameter, int] = {}
        self._passes: dict[int, _Pass] = {}  # those that are running, by autograd's graph task
        self._was_compared = False  # whether ranks have compared what they sum

    def watch(self, parameter: nn.Parameter, axes: Sequence[str], *, is_weight: bool) -> None:
        """Sum this parameter's gradients over `axes` from now on. A weight's are brought by `scatter`."""
        self._groups[parameter] = tuple(self.grid.group(axis) for axis in axes if self.grid.size(axis) > 1)
        if is_weight:
            self._weights.add(parameter)
        elif self._groups[parameter]:
            self._hooks[parameter] = []
            self.restore_hooks(parameter)

    def is_summed(self, parameter: nn.Parameter) -> bool:
        """Whether ranks along data, or another axis than z, have parts of this parameter's gradient."""
        return bool(self._groups[parameter])

    def refuse_hook(self, name: str, parameter: nn.Parameter) -> None:
        """Raise ValueError if somebody has hooked a weight, of which autograd sees no gradient."""
        if parameter in self._weights and (parameter._backward_hooks or parameter._post_accumulate_grad_hooks):
            raise ValueError(
                f"{name} has a hook, which would be called before there is a gradient: those of weights reach .grad "
                "beside autograd, when backward() returns. Remove the hook, and do its work then"
            )

    def restore_hooks(self, parameter: nn.Parameter) -> None:
        """Hook a watched parameter anew: converting a module (`.to`, `.double`) swaps its tensors and loses hooks."""
        if parameter not in self._hooks:
            return
        for hook in self._hooks[parameter]:
            hook.remove()
        # After torch.utils.swap_tensors the hooks are listed here, and another tensor calls them: set, they are linked.
        parameter._backward_hooks = parameter._backward_hooks
        parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
        # Python's garbage collector does not see what the second kind of hook refers to: a cycle would stay.
        this = ref(self)
        is_trainable = parameter.requires_grad
        parameter.requires_grad_(True)  # frozen ones have hooks too, for they may be trained later
        self._hooks[parameter] = [
            parameter.register_hook(lambda _: self._before_accumulation(parameter)),
            parameter.register_post_accumulate_grad_hook(lambda done: _alive(this)._after_accumulation(done)),
        ]
        parameter.requires_grad_(is_trainable)

    def drop_failed_passes(self) -> None:
        """Forget the passes that an exception has ended. No backward pass may be running."""
        if self._passes and self.ring is not None:
            self.ring.drop()
        self._passes.clear()

    def scatter(self, parameter: nn.Parameter, start: Callable[[], Pending]) -> None:
        """Take a weight's gradient: `start` begins the reduce-scatter over z that makes it this rank's shard's."""
        current = self._enter()
        pending = start()
        if pending.work is None:  # z has one rank
            self._settle(current, parameter, pending)
            return
        if not self.overlap.reduce_scatter:
            pending.wait()
        current.scatters.append((parameter, pending))
        while len(current.scatters) > SCATTERS_IN_FLIGHT:
            self._settle(current, *current.scatters.popleft())

    def _enter(self) -> "_Pass":
        """The state of the backward pass that is running."""
        task = torch._C._current_graph_task_id()
        if task not in self._passes:
            self._passes[task] = _Pass()
            at_end_of_backward(lambda: self._finish(task))
        return self._passes[task]

    def _before_accumulation(self, parameter: nn.Parameter) -> None:
        """Put aside what `.grad` holds already, so that autograd adds nothing to it before the sum over ranks."""
        if self.is_deferred:
            self._note_unsummed(parameter)
            return
        self._enter().held[parameter] = parameter.grad
        parameter.grad = None

    def _after_accumulation(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        if self.is_deferred:
            return
        mine = _local_gradient(parameter)
        current = self._enter()
        parameter.grad = current.held.pop(parameter)
        self._arrive(current, parameter, mine)

    def _note_unsummed(self, parameter: nn.Parameter) -> None:
        if parameter not in self._unsummed and parameter.grad is not None:
            _check_zero(_local_gradient(parameter))
        self._unsummed[parameter] = None

    def _settle(self, current: "_Pass", parameter: nn.Parameter, pending: Pending) -> None:
        mine = pending.wait()
        if not self._groups[parameter]:
            _accumulate(parameter, mine)
        elif self.is_deferred:
            self._note_unsummed(parameter)
            _accumulate(parameter, mine)
        else:
            self._arrive(current, parameter, mine)

    def _arrive(self, current: "_Pass", parameter: nn.Parameter, mine: Tensor) -> None:
        """One part of a gradient is here; with the last one it goes into its bucket."""
        parts = current.arrived.pop(parameter, [])  # taken out and put in again: the order is that of the last parts
        current.arrived[parameter] = [*parts, mine]
        if len(current.arrived[parameter]) == self._expected.get(parameter):
            self._put(current, parameter)

    def _put(self, current: "_Pass", parameter: nn.Parameter) -> None:
        parts = current.arrived.pop(parameter)
        current.counts[parameter] = len(parts)
        total = parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
        earlier = self._take_unsummed(parameter)
        if earlier is not None:
            total = total.to(parameter.dtype) + earlier
        self._fill(current, parameter, total)

    def _take_unsummed(self, parameter: nn.Parameter) -> Tensor | None:
        """What earlier micro-batches have left in `.grad`; None if nothing, or if that step was given up."""
        if parameter not in self._unsummed:
            return None
        del self._unsummed[parameter]
        earlier = None if parameter.grad is None else _local_gradient(parameter)
        parameter.grad = None
        return earlier

    def _fill(self, current: "_Pass", parameter: nn.Parameter, total: Tensor) -> None:
        groups = self._groups[parameter]
        bucket = current.open.setdefault((groups, parameter.dtype), _Bucket(groups))
        bucket.add(parameter, total.to(self.precision.wire(total)))
        if bucket.num_bytes >= BUCKET_BYTES:
            self._close(current, (groups, parameter.dtype))

    def _close(self, current: "_Pass", key: Any) -> None:
        bucket = current.open.pop(key)
        bucket.pack()
        current.closed.append(bucket)
        if self.overlap.data:
            bucket.start()

    def _finish(self, task: int) -> None:
        """The end of a backward pass: everything that is on its way arrives."""
        current = self._passes[task]
        while current.scatters:
            self._settle(current, *current.scatters.popleft())
        if current.arrived and not self._was_compared:
            self._was_compared = True
            self._check_ranks_agree(list(current.arrived))
        for parameter in list(current.arrived):
            self._put(current, parameter)
        for parameter in [] if self.is_deferred else list(self._unsummed):  # no part of it in the last micro-batch
            earlier = self._take_unsummed(parameter)
            if earlier is not None:
                self._fill(current, parameter, earlier)
        for key in list(current.open):
            self._close(current, key)
        if not self.overlap.data:
            for bucket in current.closed:
                bucket.start()
        while current.closed:  # each is freed before the next one's gradients are made
            current.closed.popleft().deliver()
        self._expected |= current.counts
        del self._passes[task]
        self.at_end()

    def _check_ranks_agree(self, arrived: Sequence[nn.Parameter]) -> None:
        """Raise RuntimeError unless the ranks of each mesh sum the same gradients in the same order.

        Once, in the first pass; each mesh that watched parameters live on is compared by itself.

        Buckets do not say what is in them: where ranks of data went through different layers of one size, sums of one
        layer's gradient and another's would come out.
        """
        places = {parameter: place for place, parameter in enumerate(self._groups)}
        for mesh in dict.fromkeys(map(self._mesh_of, self._groups)):
            group = self.grid.group_of_mesh(mesh)
            order = [places[parameter] for parameter in arrived if self._mesh_of(parameter) == mesh]
            digest = zlib.crc32(repr(order).encode())
            total = all_reduce(torch.tensor(digest, dtype=torch.float64, device=self.grid.device), group)
            if float(total) != digest * group.size():
                raise RuntimeError(
                    "ranks have gradients of different parameters, or in another order: every rank must go through the "
                    "same submodules in the same order, and freeze the same parameters"
                )

    def _mesh_of(self, parameter: nn.Parameter) -> DeviceMesh:
        return parameter.device_mesh if isinstance(parameter, DTensor) else self.grid.parameter_mesh


@dataclass
class _Pass:
    """What one backward pass has on its way."""

    scatters: deque[tuple[nn.Parameter, Pending]] = field(default_factory=deque)
    held: dict[nn.Parameter, Tensor | None] = field(default_factory=dict)
    arrived: dict[nn.Parameter, list[Tensor]] = field(default_factory=dict)
    counts: dict[nn.Parameter, int] = field(default_factory=dict)
    open: dict[Any, "_Bucket"] = field(default_factory=dict)
    closed: deque["_Bucket"] = field(default_factory=deque)


class _Bucket:
    """Gradients that are summed over the same ranks in one message."""

    def __init__(self, groups: tuple[dist.ProcessGroup, ...]) -> None:
        self.groups = groups
        self.num_bytes = 0
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []
        self._shapes: list[tuple[nn.Parameter, torch.Size]] = []
        self._flat: Tensor | None = None
        self._pending: Pending | None = None

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        self._gradients.append((parameter, gradient))
        self.num_bytes += gradient.numel() * gradient.element_size()

    def pack(self) -> None:
        """One flat copy; the gradients themselves are freed."""
        self._shapes = [(parameter, gradient.shape) for parameter, gradient in self._gradients]
        self._flat = torch.cat([gradient.reshape(-1) for _, gradient in self._gradients])
        self._gradients = []

    def start(self) -> None:
        assert self._flat is not None
        self._pending, self._flat = start_all_reduce(self._flat, self.groups[0]), None

    def deliver(self) -> None:
        """Wait for the sum and add it to the parameters' gradients."""
        assert self._pending is not None
        flat = self._pending.wait()
        for group in self.groups[1:]:
            all_reduce(flat, group)
        offset = 0
        for parameter, shape in self._shapes:
            _accumulate(parameter, flat[offset : offset + shape.numel()].view(shape), is_shared=True)
            offset += shape.numel()


def _alive(sums: "ref[GradientReducer]") -> GradientReducer:
    alive = sums()
    if alive is None:
        raise RuntimeError("this parameter's model is gone: keep what stretto.parallelize has returned")
    return alive


def _check_zero(gradient: Tensor) -> None:
    """Raise RuntimeError (on CUDA: fail the kernel that asserts it, later) unless a gradient is zero."""
    message = "no_sync: zero the gradients before the first micro-batch of a step"
    if gradient.device.type == "cuda":
        torch._assert_async(~gradient.any(), message)  # no .item() here: the host would wait for the device
    elif gradient.any():
        raise RuntimeError(message)


def _accumulate(parameter: nn.Parameter, mine: Tensor, *, is_shared: bool = False) -> None:
    """Add this rank's shard of a gradient to `.grad`. `is_shared`: its memory belongs to something larger."""
    with torch.no_grad():
        if parameter.grad is not None:
            _local_gradient(parameter).add_(mine)
            return
        assert isinstance(parameter, DTensor)
        parameter.grad = DTensor.from_local(
            _converted(mine, parameter.dtype, copies=is_shared),
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )


def _converted(tensor: Tensor, dtype: torch.dtype, *, copies: bool) -> Tensor:
    """The tensor in `dtype`, and in memory of its own if it `copies`."""
    if tensor.dtype == dtype or not tensor.is_cuda:
        return tensor.to(dtype, copy=copies)
    result = torch.empty_like(tensor, dtype=dtype)
    torch._foreach_copy_([result], [tensor])  # twice as fast as `to`, whose kernel does not read 16 bytes at a time
    return result


def _local_gradient(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    assert isinstance(gradient, DTensor)
    return gradient.to_local()


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """For all but the last micro-batch of a step: gradients stay on each rank until the last backward sums them.

    Without it every backward pass sums its own, which is right as well, and sends more.
    """
    gradient_reducer = getattr(model, "gradient_reducer", None)
    if not isinstance(gradient_reducer, GradientReducer):
        raise ValueError("no_sync takes a model that stretto.parallelize has returned")
    before, gradient_reducer.is_deferred = gradient_reducer.is_deferred, True
    try:
        yield
    finally:
        gradient_reducer.is_deferred = before


@torch.no_grad()
def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float | None, grid: Grid) -> Tensor:
    """Scale the gradients in place so that their global 2-norm is at most `max_norm`; returns the norm before that.

    `max_norm=None` only measures. `gradient_norm` and `clip_scale` are its two halves, for an optimizer that scales
    as it goes (`stretto.optim.AdamW`). ValueError for a max_norm that is not positive.
    """
    if max_norm is not None:
        _check_max_norm(max_norm)
    with_gradient = _with_gradient(parameters)
    norm = gradient_norm(with_gradient, grid)
    if max_norm is not None:
        scale = clip_scale(norm, max_norm)
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for parameter in with_gradient:
            shard = _local_gradient(parameter)
            by_dtype.setdefault(shard.dtype, []).append(shard)
        for shards in by_dtype.values():
            # Rounded to bf16, the factor would be wrong by up to 0.4%: the same way for every gradient.
            torch._foreach_mul_(shards, scale.to(_wide(shards[0])))
    return norm


def _with_gradient(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """Those that have a gradient, of one parameter or many. Iterating over one would give its rows, which have none."""
    return [p for p in ([parameters] if isinstance(parameters, Tensor) else parameters) if p.grad is not None]


def clip_scale(norm: Tensor, max_norm: float) -> Tensor:
    """What gradients of the global norm `norm` (0-dim) are multiplied by so that it is at most `max_norm`.

    0-dim, on norm's device. ValueError for a max_norm that is not positive.
    """
    _check_max_norm(max_norm)
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def _check_max_norm(max_norm: float) -> None:
    if not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm}, but must be positive (None only measures)")


@torch.no_grad()
def gradient_norm(parameters: Tensor | Iterable[Tensor], grid: Grid) -> Tensor:
    """The global 2-norm of the gradients, fp64, 0-dim. Collective.

    Every number is counted once, whatever the grid: a shard's squares are divided by the number of its replicas, and
    summed over all ranks in fp64. The host never waits for the device.
    """
    with_gradient = _with_gradient(parameters)
    shards = [p.grad.to_local() for p in with_gradient if isinstance(p.grad, DTensor)]
    if len(shards) != len(with_gradient):
        raise ValueError("clip_grad_norm_ takes the parameters of a model that stretto.parallelize has returned")
    # A handful of kernels for all of them: a large model has hundreds of parameters.
    alike: dict[tuple[torch.dtype, int], list[Tensor]] = {}
    for parameter, shard in zip(with_gradient, shards, strict=True):
        alike.setdefault((_wide(shard), layout_of(parameter).replicas(grid.sizes)), []).append(shard)
    squares = torch.zeros((), dtype=torch.float64, device=grid.device)
    for (dtype, replicas), some in alike.items():
        norms = torch.stack(torch._foreach_norm(some, 2, dtype=dtype))
        squares += norms.double().square().sum() / replicas
    return all_reduce(squares, grid.group("world")).sqrt()


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32

# SPDX-License-Identifier: Apache-2.0
"""Reduces gradients: averages each over the ranks that share its parameter, into `.grad`, by the end of `backward()`.

The states of one gradient, from where the backward pass makes it to `.grad`:

    a linear's, an embedding's or the head's weight         a norm, a bias, positions, a replicated module
    WeightShard.start_reduction calls                       autograd's hooks: `_before_accumulation`,
    `reduce_scatter_gradient`, and BlockShard               `_after_accumulation`
    `reduce_scatter_block` for a block's parameters              |
        |                                                        |
    does `no_sync` accumulate unsharded? -- yes --> UNSHARDED: whole over z, until a pass that scatters adds it to its
        | no                                             own gradient: `UnshardedGradients`
        | starts a reduce-scatter over z   [S]                   |
    SCATTERING  at most SCATTERS_IN_FLIGHT; waited               |
        | for in the order of starts: `_settle`                  |
        v                                                        v
    is it summed over another axis than z? -- no --> added to .grad: DONE
        | yes
    is `no_sync` on? -- yes --> UNSUMMED: is kept in .grad, and the next pass that syncs adds it: `_take_unsummed`
        | no
    ARRIVED  until all of its parts have come (a tied weight has two): `_arrive`, `_put`
        |
    BUCKETED  until all gradients of its bucket have come, or until the pass ends, with zeros for those that this rank
        |     has none of: `BucketedSums`. Buckets, and the order of their starts, are its plan's
        | starts an all-reduce over data, or over all that saw other tokens   [S]
    REDUCING  until the end of the backward pass: `BucketedSums.finish`
        |
    added to .grad: DONE

Threads: all of this code runs on autograd's thread for the grid's device (without a GPU, the thread that has called
`backward()`), which runs hooks, backward functions and `_finish` one after another; so there are no locks. The thread
that has called `backward()` waits. `no_sync` and `drop_failed_passes` run on the caller's thread while no
backward pass runs. Operations marked [S] only start there: NCCL runs them on its own stream, gloo in its own thread,
a copy engine on a side stream.

Streams: all of it runs on one (`GradientReducer.stream`), whichever one a gradient was made on.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from stretto.axes import LOSS, STAGE
from stretto.execution import SCATTERS_IN_FLIGHT, Overlap
from stretto.parallel.comm.autograd import REFUSED_GRAD, at_end_of_backward
from stretto.parallel.comm.collectives import Pending
from stretto.parallel.comm.gradient_buckets import (
    BackwardPass,
    BucketedSums,
    GradientListener,
    GradientSink,
    StartedScatter,
    accumulate,
    as_gradient,
    local_gradient,
)
from stretto.parallel.comm.rank_order import RankOrder
from stretto.parallel.comm.streams import ReductionStream, bound_to_stream
from stretto.parallel.comm.two_level import TwoLevels
from stretto.parallel.comm.unsharded_gradients import UnshardedGradients
from stretto.parallel.comm.users_hooks import UsersHooks, alive
from stretto.parallel.comm.weight_gathering import WeightToGather
from stretto.parallel.grid import Grid
from stretto.parallel.layout import GRAD
from stretto.parallel.precision import Precision
from stretto.parallel.state import require_state
from stretto.suggestions import require_type

if TYPE_CHECKING:
    from stretto.parallel.comm.copy_engine_scatter import ScatterRing


@dataclass(slots=True)
class _Watched:
    """A parameter of the model.

    scattered_over: the ranks over which its gradient is scattered first. scale: of that gradient, which is summed over
    z. place, place_over_z: its numbers in the orders of gradients. hooks: of both kinds, by which autograd's gradients
    come; None where these are final. expected: how many parts its gradient had in the last pass.
    """

    groups: tuple[dist.ProcessGroup, ...]
    scattered_over: int
    scale: float
    place: int
    place_over_z: int
    is_weight: bool
    hooks: list[RemovableHandle] | None = None
    expected: int = 0


class GradientReducer:
    """Reduces the gradients of one model's parameters, over z to shards and over the other axes in buckets.

    Weights come by `reduce_scatter_gradient`, in the order in which the backward pass makes their gradients; norms,
    biases and positions come through autograd's hooks (`watch`). While `is_syncing` is False, gradients accumulate
    unsummed; the next pass that syncs sums all of them. Those of weights are reduce-scattered over z all the same, so
    that each rank keeps its shard alone; while `keeps_unsharded` is True, they are kept whole until a pass that syncs.
    accumulates_unsharded: the default of `no_sync`'s `unsharded`, which sets `keeps_unsharded`. has_kept_unsharded:
    whether that was ever True, which is so on all ranks alike.

    The first backward pass shows how many parts each gradient has (a tied weight: two). `BucketedSums` sums gradients
    over the axes other than z, also those that some ranks lack.

    `at_end` is called at the end of each backward pass; `at_failure` before the next forward pass or state dict, for
    one that has raised on another thread, as on GPUs. `ring` reduce-scatters by copy engines, if they are used. `sink`
    takes gradients in place of `.grad` once `send_to` was called (`stretto.optim.state`); `listener` learns when those
    in `.grad` are final. `after_sync` is called once a pass has summed all gradients. While `deferred` is a list,
    linears leave the products that make their weights' gradients there, by `defer` (`stretto.parallel.pipeline`).
    `is_in_forward`: the whole model's forward runs, which has looked at all parameters.
    `has_synced`: a backward pass that syncs has ended since a caller set this to False. A pass through frozen
    parameters alone is none: the reducer does not see it. `averages`: reductions over ranks average, so that a loss of
    the global batch has its gradient multiplied by the number of ranks (docs/decisions/030); else they sum.
    `loss_covers_own_rows`: each rank's loss is of its own rows, and not of the global batch. `levels`: of groups on
    several nodes.
    """

    def __init__(
        self,
        grid: Grid,
        precision: Precision,
        overlap: Overlap,
        order: RankOrder,
        levels: TwoLevels | None = None,
        *,
        averages: bool,
        at_end: Callable[[], None],
    ) -> None:
        self.grid = grid
        self.precision = precision
        self.overlap = overlap
        self.levels = levels
        self.averages = averages
        self.at_end = at_end
        self.stream = ReductionStream(grid.device)
        self.ring: ScatterRing | None = None
        self.sink: GradientSink | None = None
        self.listener: GradientListener | None = None
        self.after_sync: Callable[[], None] | None = None
        self.loss_covers_own_rows = False
        self.deferred: list[Callable[[], None]] | None = None
        self.is_syncing = True
        self.has_synced = False
        self.is_in_forward = False
        self.accumulates_unsharded = self.keeps_unsharded = self.has_kept_unsharded = False
        self._unsharded = UnshardedGradients(precision)
        self._users_hooks = UsersHooks(self._enter)
        self._watched: dict[nn.Parameter, _Watched] = {}
        self._groups: dict[nn.Parameter, tuple[dist.ProcessGroup, ...]] = {}
        self._unsummed: dict[nn.Parameter, None] = {}  # an ordered set: all ranks go through it in one order
        self.at_failure: list[Callable[[], None]] = []
        self.sharded: dict[nn.Parameter, WeightToGather] = {}  # how z shards weights
        self._passes: dict[int, BackwardPass] = {}  # the running ones, by autograd's number of the graph task
        self._held: dict[nn.Parameter, Tensor | None] = {}  # what `.grad` held of those that autograd accumulates now
        self.order = order  # over z
        stage = grid.communicator(STAGE)
        how = {"averages": averages, "overlaps": overlap.data}
        self._sums = BucketedSums(self._groups, stage, grid.device, precision, levels, **how)
        self._reductions = self._sums.ranks
        self._sums.at_final = self._note_final
        self._given: set[int] = set()  # to the sink, in this step

    def watch(
        self,
        parameter: nn.Parameter,
        axes: Sequence[str],
        *,
        scattered_over: int | None,
        others: Sequence[dist.ProcessGroup] = (),
    ) -> None:
        """Reduce this parameter's gradients over `axes`, and over the groups `others`, from now on.

        scattered_over: the ranks over which a weight's gradient, which comes by `reduce_scatter_gradient`, is scattered
        first; None for other parameters.
        """
        groups = (*(self.grid.group(axis) for axis in axes if self.grid.size(axis) > 1), *others)
        places = self._reductions.place(parameter), self.order.place(parameter)
        watched = _Watched(groups, scattered_over or 1, 1.0, *places, is_weight=scattered_over is not None)
        self._watched[parameter], self._groups[parameter] = watched, groups
        if self.averages:  # what is in `.grad` is an average over z
            watched.scale = self.forward_scale(parameter) / watched.scattered_over
        if groups:  # of weights, too: terms outside of forward give them gradients by autograd
            watched.hooks = []
            self.restore_hooks(parameter)

    def name(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Say what parameters are called, for messages."""
        named = list(named)
        self.order.name(named)
        self._reductions.name(named)

    def send_to(self, sink: GradientSink) -> None:
        """Give all gradients to `sink` from now on, and none to `.grad`."""
        if self.accumulates_unsharded:
            raise ValueError(
                "reshard='gradients_after_step' keeps unsharded gradients, which optimizer_state 'device' and 'host' "
                "do not"
            )
        self.sink = sink
        for parameter, watched in self._watched.items():
            if watched.hooks is None:
                watched.hooks = []
                self.restore_hooks(parameter)

    def sum_groups(self, parameter: nn.Parameter) -> tuple[dist.ProcessGroup, ...]:
        """The groups of ranks over which a parameter's gradient is all-reduced, in addition to z's reduce-scatter."""
        return self._groups[parameter]

    def is_summed(self, parameter: nn.Parameter) -> bool:
        """True if ranks along data, or along another axis than z, hold parts of this parameter's gradient."""
        return bool(self._groups[parameter])

    def is_watched(self, parameter: nn.Parameter) -> bool:
        """True if hooks of this reducer take what autograd accumulates in the parameter."""
        return self._watched[parameter].hooks is not None

    def forward_scale(self, parameter: nn.Parameter) -> float:
        """The factor of the gradient that reaches a parameter through the model's forward pass, before reductions
        average it.

        1 where a gradient is reduced over the ranks of the loss. More where other ranks have further parts (of their
        heads or tokens along x, or another stage's of a tied weight), less where all-to-alls have brought parts already
        (experts').
        """
        if not self.averages:
            return 1.0
        watched = self._watched[parameter]
        ranks = watched.scattered_over * math.prod(group.size() for group in watched.groups)
        return ranks / self.grid.size(LOSS)

    def scale_over_z(self, parameter: nn.Parameter) -> float:
        """The factor of a weight's gradient that is summed over z, or that `take` takes, since z does not shard it."""
        return self._watched[parameter].scale

    def defer_hooks(self, parameter: nn.Parameter, name: str = "") -> None:
        """Have a user's hooks be called once `.grad` is final (`UsersHooks.defer`). name: for errors."""
        before, after = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
        if not (before or after) or parameter not in self._watched:
            return
        own, is_weight = self._watched[parameter].hooks, self._watched[parameter].is_weight
        if own is None or len(before or ()) > 1 or len(after or ()) > 1:
            # Else autograd's gradient is final in its pass.
            is_reduced = own is not None or is_weight
            self._users_hooks.defer(parameter, name, own, is_reduced=is_reduced, has_sink=self.sink is not None)

    def restore_hooks(self, parameter: nn.Parameter) -> None:
        """Register a parameter's hooks again: conversions (`.to`, `.double`) swap tensors and lose hooks."""
        if not parameter.is_floating_point():  # integers have no gradient
            return
        watched = self._watched.get(parameter)
        for hook in (watched.hooks or ()) if watched is not None else ():
            hook.remove()
        # After torch.utils.swap_tensors this tensor lists the hooks, but another one calls them: so assign them.
        parameter._backward_hooks = parameter._backward_hooks
        parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
        if watched is None or watched.hooks is None:
            return
        # A weak reference: Python's garbage collector does not see what the second kind of hook refers to, so that a
        # cycle would never be freed.
        this, held = ref(self), self._held

        def after(done: nn.Parameter) -> None:
            if done in held:
                alive(this)._after_accumulation(done)

        is_trainable = parameter.requires_grad
        parameter.requires_grad_(True)  # frozen parameters get hooks too: they may be trained later
        watched.hooks = [
            parameter.register_hook(partial(self._before_accumulation, parameter)),
            parameter.register_post_accumulate_grad_hook(after),
        ]
        parameter.requires_grad_(is_trainable)

    def run_pass(self, work: Sequence[Callable[[], None]] = ()) -> None:
        """Call the functions of `work`, which pass gradients to this reducer, as a separate backward pass.

        What earlier micro-batches have left unsummed is summed at its end, unless it runs under `no_sync`.
        """

        def run() -> None:
            self._enter()
            for make in work:
                make()

        root = torch.zeros((), device=self.grid.device, requires_grad=True)
        _RunInBackward.apply(root, run).backward()

    def defer(self, make: Callable[[], None]) -> None:
        """Leave a product that makes a weight's gradient to `run_pass`. Its operands are of the current stream."""
        assert self.deferred is not None
        self.deferred.append(bound_to_stream(make, self.grid.device))

    def drop_failed_passes(self) -> None:
        """Forget backward passes that an exception has ended. No backward pass may be running."""
        if self._passes and self.ring is not None:
            self.ring.drop()
        self._passes.clear()
        self._held.clear()
        for drop in self.at_failure:
            drop()

    def reduce_scatter_gradient(
        self, parameter: nn.Parameter, gradient: Tensor, start: Callable[[Tensor, float], Pending], *, is_sharded: bool
    ) -> None:
        """Take a weight's gradient of whole rows. `start` begins the reduce-scatter over z that leaves this rank's
        shard of it, times a factor; is_sharded: whether z has several ranks."""
        if self.stream.is_elsewhere():
            with self.stream.enter(gradient):
                self.reduce_scatter_gradient(parameter, gradient, start, is_sharded=is_sharded)
            return
        current = self._enter()
        if self._watched[parameter].hooks is None:  # else autograd comes to them, with no gradient
            self.defer_hooks(parameter)
        if is_sharded:
            if self.keeps_unsharded and not self.is_syncing:
                self._unsharded.keep(parameter, gradient, start)
                return
            if self.has_kept_unsharded:
                gradient = self._unsharded.add_to(parameter, gradient)
            self._follow_scatter(parameter)
            ring, wire = self.ring, self.precision.wire(gradient)
            while current.scatters and ring is not None and ring.is_full(gradient, wire):
                self._settle(current, current.scatters.popleft())
        scale, gradient = self._scale_first(parameter, gradient)
        pending = start(gradient, scale)
        if pending.work is None:  # z has one rank
            mine = pending.result if pending.factor == 1 else pending.result.mul_(pending.factor)
            self._settle_one(current, parameter, mine)
            return
        self._add_scatter(current, [(parameter, pending)])
        # For the next one already, which begins once all ranks have room for it: none may wait for a slower one's sum.
        while current.scatters and self.ring is not None and not self.ring.has_room():
            self._settle(current, current.scatters.popleft())

    def take(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Take a gradient of this rank's shard, in place of autograd's accumulation."""
        stream = self.stream
        if stream.index is not None and stream.is_elsewhere():
            with stream.enter(gradient):
                self.take(parameter, gradient)
            return
        current = self._passes.get(torch._C._current_graph_task_id()) or self._enter()
        if self._watched[parameter].hooks is None:
            self.defer_hooks(parameter)
        if self.sink is None and self.is_syncing and self._groups[parameter]:  # most, without a call
            self._arrive(current, parameter, gradient)
        else:
            self._settle_one(current, parameter, gradient)

    def take_final(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """`take` of a parameter whose gradient no rank shares, in a few calls."""
        has_others = self.sink is not None or parameter._backward_hooks or parameter._post_accumulate_grad_hooks
        stream = self.stream
        if has_others or (  # as `is_elsewhere`, without a call
            stream.index is not None and torch._C._cuda_getCurrentRawStream(stream.index) != stream.handle
        ):
            self.take(parameter, gradient)
            return
        if torch._C._current_graph_task_id() not in self._passes:
            self._enter()
        if GRAD.__get__(parameter) is None and gradient.dtype == parameter.dtype:
            GRAD.__set__(parameter, as_gradient(gradient, parameter._spec, requires_grad=False))  # type: ignore[attr-defined]
        else:
            accumulate(parameter, gradient)

    def reduce_scatter_block(
        self,
        gradients: Sequence[tuple[nn.Parameter, Tensor]],
        start: Callable[[Sequence[Tensor], Sequence[float]], Sequence[Pending]],
        start_one: Callable[[Tensor, float], Pending],
    ) -> None:
        """Take the gradients of a block's whole parameters, of which z has several ranks.

        `start` begins one reduce-scatter over z for all of them, each times its factor, and returns what leaves this
        rank's shard of each; `start_one` begins one for a single gradient, which `no_sync` has kept whole.
        """
        if self.stream.is_elsewhere():
            with self.stream.enter(*[gradient for _, gradient in gradients]):
                self.reduce_scatter_block(gradients, start, start_one)
            return
        current = self._enter()
        for parameter, _ in gradients:
            if self._watched[parameter].hooks is None:
                self.defer_hooks(parameter)
        if self.keeps_unsharded and not self.is_syncing:
            for parameter, gradient in gradients:
                self._unsharded.keep(parameter, gradient, start_one)
            return
        while current.scatters:  # one block is on its way at a time: its whole gradients take as much as many weights'
            self._settle(current, current.scatters.popleft())
        parameters = [parameter for parameter, _ in gradients]
        self._follow_scatter(*parameters)
        if self.has_kept_unsharded:
            gradients = [(parameter, self._unsharded.add_to(parameter, whole)) for parameter, whole in gradients]
        scaled = [self._scale_first(parameter, whole) for parameter, whole in gradients]
        pending = start([gradient for _, gradient in scaled], [scale for scale, _ in scaled])
        self._add_scatter(current, list(zip(parameters, pending, strict=True)))

    def _follow_scatter(self, *parameters: nn.Parameter) -> None:
        self.order.begin_backward()
        self.order.follow(("the gradient of", *[self._watched[parameter].place_over_z for parameter in parameters]))

    def _scale_first(self, parameter: nn.Parameter, gradient: Tensor) -> tuple[float, Tensor]:
        """The factor of a gradient's sum over z, and the gradient: fp16 is multiplied now, so that no sum overflows."""
        scale = self.scale_over_z(parameter)
        is_narrow = scale != 1 and self.precision.wire(gradient) is torch.float16
        return (1.0, gradient * scale) if is_narrow else (scale, gradient)

    def _add_scatter(self, current: BackwardPass, scatter: list[StartedScatter]) -> None:
        if not self.overlap.reduce_scatter:
            scatter[0][1].wait()
        current.scatters.append(scatter)
        while len(current.scatters) > SCATTERS_IN_FLIGHT:
            self._settle(current, current.scatters.popleft())

    def _enter(self) -> BackwardPass:
        """The state of the running backward pass; a new one schedules its `_finish`."""
        task = torch._C._current_graph_task_id()
        if task not in self._passes:
            self._passes[task] = BackwardPass()
            at_end_of_backward(lambda: self._finish(task))
        return self._passes[task]

    def _before_accumulation(self, parameter: nn.Parameter, made: Tensor | None) -> None:
        """Set aside what `.grad` holds, so that autograd does not add to it before the sum over ranks.

        made: by autograd; None where all of the gradient has come by `reduce_scatter_gradient` or `take`.
        """
        with torch._C.DisableTorchFunctionSubclass():  # 2.11 calls Python for each attribute of a parameter
            before, after = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
            is_own = before is not None and after is not None and len(before) == len(after) == 1
            if made is None and is_own and torch._C._current_graph_task_id() in self._passes:
                return  # most, without a call
            self.defer_hooks(parameter)
        self._enter()
        if made is None:
            return
        self._held[parameter] = parameter.grad
        if self.is_syncing or self.sink is not None:
            parameter.grad = None
        else:
            self.stream.join()  # autograd adds to what was taken there
            self._note_unsummed(parameter)

    def _after_accumulation(self, parameter: nn.Parameter) -> None:
        if self.stream.is_elsewhere() and parameter.grad is not None:
            with self.stream.enter(local_gradient(parameter)):
                self._after_accumulation(parameter)
            return
        current, before = self._enter(), self._held.pop(parameter)
        if not self.is_syncing and self.sink is None:
            return
        made, parameter.grad = parameter.grad, before
        if made is None:  # the parameter was frozen after the forward pass
            return
        assert isinstance(made, DTensor)
        assert isinstance(parameter, DTensor)
        if made.placements != parameter.placements:  # of a user's own DTensor operations
            made = made.redistribute(placements=parameter.placements)
        mine = made.to_local()
        if self.sink is None:
            self._arrive(current, parameter, mine)
        else:
            self._give(current, self.sink, parameter, mine)

    def _give(self, current: BackwardPass, sink: GradientSink, parameter: nn.Parameter, mine: Tensor) -> None:
        """Give a part of a gradient to the sink, and notify it after the last one of the step."""
        sink.add(parameter, mine)
        watched = self._watched[parameter]
        self._given.add(watched.place)
        count = current.counts[parameter] = current.counts.get(parameter, 0) + 1
        if self.is_syncing and count == watched.expected:
            self._reductions.begin_backward()
            self._reductions.follow(("the gradient of", watched.place))
            sink.complete(parameter)

    def _note_unsummed(self, parameter: nn.Parameter) -> None:
        # An average leaves what ranks already share as it is; a sum would multiply it.
        if not self.averages and parameter not in self._unsummed and parameter.grad is not None:
            _check_zero(local_gradient(parameter))
        self._unsummed[parameter] = None

    def _settle(self, current: BackwardPass, scatter: list[StartedScatter]) -> None:
        shards = [pending.wait() for _, pending in scatter]
        factors = [pending.factor for _, pending in scatter]
        if set(factors) != {1}:
            torch._foreach_mul_(shards, factors)
        for (parameter, _), mine in zip(scatter, shards, strict=True):
            self._settle_one(current, parameter, mine)

    def _settle_one(self, current: BackwardPass, parameter: nn.Parameter, mine: Tensor) -> None:
        if self.sink is not None:
            self._give(current, self.sink, parameter, mine)
        elif not self._groups[parameter]:
            accumulate(parameter, mine)
            count = current.counts[parameter] = current.counts.get(parameter, 0) + 1
            if self.is_syncing and count >= (self._watched[parameter].expected or count + 1):
                self._note_final(parameter)
        elif not self.is_syncing:
            self._note_unsummed(parameter)
            accumulate(parameter, mine)
        else:
            self._arrive(current, parameter, mine)

    def _note_final(self, parameter: nn.Parameter) -> None:
        if self.listener is not None:
            self.listener.final(parameter)

    def _arrive(self, current: BackwardPass, parameter: nn.Parameter, mine: Tensor) -> None:
        """Keep one part of a gradient; with the last part, put the gradient into its bucket.

        Those of a pass within another one (reentrant activation checkpointing) are put with the outermost one's.
        """
        if len(self._passes) > 1:
            current = next(iter(self._passes.values()))
        expected = self._watched[parameter].expected
        if expected == 1 and not (parameter in current.arrived or self._unsummed):  # most: no list of parts
            self._sums.put(current.buckets, parameter, mine)
            return
        parts = current.arrived.pop(parameter, [])  # popped and put in again: the order is that of the last parts
        current.arrived[parameter] = [*parts, mine]
        if len(current.arrived[parameter]) == expected:
            self._put(current, parameter)

    def _put(self, current: BackwardPass, parameter: nn.Parameter) -> None:
        parts = current.arrived.pop(parameter)
        current.counts[parameter] = len(parts)
        total = parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
        earlier = self._take_unsummed(parameter)
        if earlier is not None:
            total = total.to(parameter.dtype) + earlier
        self._sums.put(current.buckets, parameter, total)

    def _take_unsummed(self, parameter: nn.Parameter) -> Tensor | None:
        """Take what earlier micro-batches left in `.grad`; None if nothing, or if `.grad` was dropped since."""
        if parameter not in self._unsummed:
            return None
        del self._unsummed[parameter]
        earlier = None if parameter.grad is None else local_gradient(parameter)
        parameter.grad = None
        return earlier

    def _finish(self, task: int) -> None:
        """End a backward pass: wait for the reduce-scatters, send the last buckets, and add all sums to `.grad`."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True is not supported for the gradients of a parallelized model's parameters, which are "
                "reduced outside of autograd: terms that depend on .grad would have no gradient. Leave it out"
            )
        if self.stream.is_elsewhere():
            with self.stream.enter():
                self._finish(task)
            self.stream.join()
            return
        current, outermost = self._passes[task], next(iter(self._passes.values()))
        while current.scatters:
            self._settle(current, current.scatters.popleft())
        if self.sink is not None:
            self.sink.end_pass()
        if current is outermost and self.is_syncing:
            if self.sink is not None:
                self._reductions.begin_backward()
                # The sink trains what it was given: else some ranks alone would train a module that others did not run.
                self._reductions.follow(("all gradients, which are of", *sorted(self._given)))
                self._given.clear()
                self._reductions.end(compares=True)
                self.sink.finish()
            else:
                self._reduce(current)
            self.has_synced = True
            if self.after_sync is not None:
                self.after_sync()
        if current is outermost:
            self.order.end(compares=True)
        for parameter, count in current.counts.items():
            self._watched[parameter].expected = count
        del self._passes[task]
        self.at_end()
        if self._held:  # autograd has made these gradients, and accumulated none
            for parameter, gradient in self._held.items():
                parameter.grad = gradient
            self._held.clear()
            raise RuntimeError(REFUSED_GRAD)
        if self.is_syncing and current is outermost and self.listener is not None:
            self.listener.finish()
        if self.is_syncing and current is outermost:
            self._users_hooks.call(self._reductions.place)

    def _reduce(self, current: BackwardPass) -> None:
        """Put all gradients that this rank has into buckets, send these, and add all sums to `.grad`."""
        if is_first := not self._sums.has_order:
            self._sums.agree_on_order([*current.arrived, *self._unsummed])
        for parameter in list(current.arrived):
            self._put(current, parameter)
        self._scatter_unsharded(current)
        for parameter in list(self._unsummed):  # the last micro-batch has no gradient of it
            earlier = self._take_unsummed(parameter)
            if earlier is not None:
                self._sums.put(current.buckets, parameter, earlier)
        for parameter in self._sums.finish(current.buckets, is_first=is_first):
            self._users_hooks.note(parameter)  # else an optimizer in backward would train it on some ranks alone

    def _scatter_unsharded(self, current: BackwardPass) -> None:
        """Reduce the whole gradients of weights that the last micro-batch has no gradient of."""
        for parameter in self._unsharded.parameters():
            kept = self._unsharded.take(parameter)
            if kept is None:
                continue
            self._follow_scatter(parameter)
            scale, total = self._scale_first(parameter, kept.total.to(kept.dtype))
            pending = kept.start(total, scale)
            mine = pending.wait()
            if pending.factor != 1:
                mine *= pending.factor
            if self._groups[parameter]:
                self._sums.put(current.buckets, parameter, mine)
            else:
                accumulate(parameter, mine)


class _RunInBackward(torch.autograd.Function):
    """Calls a function in its backward pass."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, run: Callable[[], None]) -> Tensor:
        ctx.run = run
        return root.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        with torch.no_grad():
            ctx.run()
        return None, None


def _check_zero(gradient: Tensor) -> None:
    """Raise RuntimeError (on CUDA: fail the kernel that asserts it, later) unless a gradient is zero."""
    message = (
        "no_sync: zero the gradients before the first micro-batch of a step, and run those under no_sync before others"
    )
    if gradient.device.type == "cuda":
        torch._assert_async(~gradient.any(), message)  # no .item() here: the host would wait for the device
    elif gradient.any():
        raise RuntimeError(message)


@contextmanager
def no_sync(model: nn.Module, *, unsharded: bool | None = None) -> Iterator[None]:
    """Accumulate gradients without summing them over all ranks that saw other tokens.

    Use it for all but the last micro-batch of a step; the first backward pass outside sums them over data (and over the
    other axes that share a parameter). Without it every backward pass sums its own, which is right as well, and sends
    more.

    What goes over z depends on `unsharded`:

    - False: every backward pass reduce-scatters its weights' gradients, so that a rank keeps its shard of them, 1 / z:
      as many reduce-scatters a weight as micro-batches.
    - True: gradients are added up whole, in the parameters' dtype, and reduce-scattered once, in the backward pass
      outside, as `no_sync` of torch's FSDP does. Takes memory for all weights' gradients without their division by z,
      from the first micro-batch to the last. Until then `.grad` of these weights does not have them: drop gradients
      with `zero_grad(set_to_none=True)`, and change them after the last micro-batch only (RuntimeError).
    - None (default): as `parallelize(reshard=...)` was given: False for "after_backward", the default.

    ValueError for a model that is not on a grid.
    """
    require_type(unsharded, bool | None, "unsharded")
    reducer = require_state(model, "no_sync").gradient_reducer
    if unsharded and reducer.sink is not None:
        raise ValueError(
            "no_sync(unsharded=True) keeps unsharded gradients, which optimizer_state 'device' and "
            "'host' do not support"
        )
    before = reducer.is_syncing, reducer.keeps_unsharded, reducer.order.kind
    reducer.is_syncing = False
    reducer.keeps_unsharded = reducer.accumulates_unsharded if unsharded is None else unsharded
    reducer.has_kept_unsharded |= reducer.keeps_unsharded
    reducer.order.kind = "no_sync", reducer.keeps_unsharded
    try:
        yield
    finally:
        reducer.is_syncing, reducer.keeps_unsharded, reducer.order.kind = before

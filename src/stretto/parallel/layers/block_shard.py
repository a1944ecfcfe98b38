# SPDX-License-Identifier: Apache-2.0
"""A block whose parameters are sharded over z: gathered for its forward pass by one all-gather, as FSDP2 does.

It takes any module. While its forward runs, its parameters are replaced by plain tensors, whole and in the compute
dtype; the module's code reads them by their names. Their gradients go to the shards by one reduce-scatter.

A rank's shards are stored one after another in one message, each padded to ceil(rows / z) rows of dim 0; the
all-gathered message is [z, sum of padded shards], from which each parameter is copied to a separate tensor:

    rank 0: | weight, rows 0-3 | bias, 0-3 |                    weight = message[:, :w] as [z * 4, ...], rows 0 to 6
    rank 1: | weight, rows 4-6, padding | bias, 4-6, padding |  bias = message[:, w:] as [z * 4], 0 to 6

If copy engines gather, and blocks are kept for the backward pass, they gather each large parameter separately, and
the message has the small ones.
"""

import copy
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial, wraps
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map

from stretto.execution import MIN_COPIED_BYTES
from stretto.parallel.comm.autograd import (
    apply,
    at_end_of_backward,
    compiled_within,
    directly_called,
    in_backward,
    is_asked_for,
    once_differentiable,
    set_compiler,
    with_gradient_of_its_own,
)
from stretto.parallel.comm.collectives import Pending, start_gather_rows, start_scatter_rows
from stretto.parallel.comm.gradient_reducer import GradientReducer
from stretto.parallel.comm.recorded_code import MODIFIED, SavedView
from stretto.parallel.comm.two_level import TwoLevels
from stretto.parallel.comm.weight_gathering import WeightGatherer, WeightToGather
from stretto.parallel.layers.held_tensors import ParameterPlace, check_places, hold_and_check, put
from stretto.parallel.layers.local_tensors import LocalTensors
from stretto.parallel.layout import TensorOnGrid, Version, layout_of, local, shard_of, writes_of
from stretto.parallel.precision import Precision


class _ParameterSlot(NamedTuple):
    """A parameter in a message: numbers of a padded shard, whole shape, rows of a padded shard, and rows here."""

    size: int
    shape: torch.Size
    padded_rows: int
    local_rows: int


@dataclass(frozen=True, eq=False)
class _BlockMessage:
    """The shards of a block's parameters of one dtype, as one message. parameter: all of these.

    sizes: of the slots, in numbers; size: their sum. dtype: in which they are sent (None: their own).
    """

    parameter: tuple[nn.Parameter, ...]
    slots: tuple[_ParameterSlot, ...]
    sizes: list[int]
    size: int
    dtype: torch.dtype | None

    @classmethod
    def of(cls, parameters: Sequence[nn.Parameter], dtype: torch.dtype | None, ranks: int) -> "_BlockMessage":
        slots = []
        for parameter in parameters:
            shape = torch.Size(layout_of(parameter).shape)
            rows = -(-shape[0] // ranks)
            size = rows * shape[1:].numel()
            slots.append(_ParameterSlot(size, shape, rows, local(parameter).shape[0]))
        sizes = [slot.size for slot in slots]
        return cls(tuple(parameters), tuple(slots), sizes, sum(sizes), dtype)

    def version(self, current: tuple[TensorOnGrid, ...]) -> tuple[Version, ...]:
        """The states of this rank's shards, as `version_of` has them, without its calls."""
        for parameter in current:
            if parameter.late_write is not None:
                parameter.late_write()
        return tuple([(p._local_tensor.data_ptr(), p._local_tensor._version, p._version) for p in current])

    def start(self, current: tuple[TensorOnGrid, ...], group: dist.ProcessGroup, levels: TwoLevels | None) -> Pending:
        """Begin to all-gather the message: [z x size]."""
        shards = [shard_of(parameter).flatten() for parameter in current]
        message = shards[0].new_empty(self.size, dtype=self.dtype or shards[0].dtype)
        places = [
            place if shard.shape == place.shape else place[: shard.numel()]
            for place, shard in zip(message.split(self.sizes), shards, strict=True)
        ]
        torch._foreach_copy_(places, shards)  # rows of padding are arbitrary: they are not read
        return start_gather_rows(message, group.size() * self.size, group, levels)

    def unpack(self, message: Tensor) -> list[Tensor]:
        """Copy each whole parameter out of the gathered message."""
        ranks = message.numel() // self.size
        whole = [message.new_empty(ranks * slot.padded_rows, *slot.shape[1:]) for slot in self.slots]
        out = [tensor.view(ranks, -1) for tensor in whole]
        torch.split_with_sizes_copy(message.view(ranks, -1), self.sizes, dim=1, out=out)  # one kernel
        return [
            tensor if tensor.shape == slot.shape else tensor[: slot.shape[0]]
            for tensor, slot in zip(whole, self.slots, strict=True)
        ]

    def start_scatter(
        self,
        gradients: Sequence[Tensor],
        chosen: Sequence[int],
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        factors: Sequence[float],
        levels: TwoLevels | None,
    ) -> list[Pending]:
        """Begin to reduce-scatter the gradients of the `chosen` slots in this dtype, each times its factor; returns
        this rank's shards."""
        slots = [self.slots[index] for index in chosen]
        ranks, size = group.size(), sum(slot.size for slot in slots)
        message = gradients[0].new_empty(ranks, size, dtype=dtype)
        rows = [each.reshape(slot.shape[0], -1) for each, slot in zip(gradients, slots, strict=True)]
        torch._chunk_cat(rows, dim=0, num_chunks=ranks, out=message)  # one kernel, which casts and pads
        common = factors[0] if len(set(factors)) == 1 else 1.0
        sent = start_scatter_rows(message.view(-1), size, group, common, levels)
        if sent.factor != common:
            factors = [1.0] * len(factors)
        parts = [
            part[: slot.local_rows * slot.shape[1:].numel()].view(slot.local_rows, *slot.shape[1:])
            for slot, part in zip(slots, sent.result.split([slot.size for slot in slots]), strict=True)
        ]
        # Only the first is waited for; the others come after it.
        first, *others = [Pending(part, factor=factor) for part, factor in zip(parts, factors, strict=True)]
        return [replace(first, work=sent.work, source=sent.source), *others]


class BlockShard:
    """Gathers a block's parameters for its forward pass, and reduces their gradients.

    places: where the block's modules hold its parameters, owners and names, in one order on all ranks. Parameters are
    sharded over z by dim 0, or whole on every rank (`gathered_sharding`). frees: gather (and cast) the parameters
    again for the backward pass, in place of keeping them (FSDP2's reshard_after_forward).

    From where a backward pass enters the block to where its gradients are reduced, its modules hold whole tensors
    again, for code that computes parts of the block again (torch.utils.checkpoint in its forward). The attribute
    `not_held`: numbers of parameters that such code finds in another way, and that nothing else would keep so long.
    `parametrized`: numbers of those that the forward parametrizes, which writes to them (nothing, but as no view may).
    """

    def __init__(
        self,
        name: str,
        places: Sequence[tuple[nn.Module, str]],
        group: dist.ProcessGroup,
        precision: Precision,
        gatherer: WeightGatherer,
        gradients: GradientReducer,
        *,
        frees: bool,
    ) -> None:
        self.name = name
        self.group = group
        self.precision = precision
        self.gatherer = gatherer
        self.gradients = gradients
        gradients.at_failure.append(self._free)
        self.frees = frees
        held = list(dict.fromkeys(owner.get_parameter(key) for owner, key in places))
        parameters = [parameter for parameter in held if layout_of(parameter).splits]
        self.parameters = (*parameters, *(parameter for parameter in held if not layout_of(parameter).splits))
        self._sharded = len(parameters)
        number = {parameter: index for index, parameter in enumerate(self.parameters)}
        self.places = tuple(ParameterPlace(owner, key, number[owner.get_parameter(key)]) for owner, key in places)
        self._is_running = False
        self._was_run = False
        self._again: list[Tensor] | None = None
        self.not_held: frozenset[int] = frozenset()
        self.parametrized: frozenset[int] = frozenset()
        self._held: tuple[Sequence[ParameterPlace], list[Tensor | None]] | None = None  # and what to put back
        self._awaited = 0  # gradients of casts, whose last one frees a block that is not sharded
        self._held_in = -1  # the backward pass
        self._holds_all = True
        self._holds_next = False  # what is gathered next, to compute the block again
        self._own = {str(number): parameter for number, parameter in enumerate(held) if not layout_of(parameter).splits}
        self._followed: LocalTensors | None = None
        self._copied: dict[int, WeightToGather] = {}
        self._pruned: dict[int, WeightToGather] = {}
        self._kept: list[_KeptRows] = []
        for parameter in parameters:
            gradients.sharded[parameter] = self._to_gather(parameter)
        self.fill_messages()

    def _to_gather(self, parameter: nn.Parameter) -> WeightToGather:
        rows, dtype = layout_of(parameter).shape[0], self.precision.sent(parameter.dtype)
        return WeightToGather(parameter, rows, dtype, self.group)

    def fill_messages(self) -> None:
        """Choose which parameters messages hold, and which are gathered one by one: large ones by copy engines, and
        pruned ones, of which a message carries what is left. Called again once parameters have been pruned."""
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index, parameter in enumerate(self.parameters[: self._sharded]):
            if isinstance(parameter, TensorOnGrid) and parameter.pruned is not None:
                self._pruned[index] = self._to_gather(parameter)
            else:
                by_dtype.setdefault(parameter.dtype, []).append(index)
        self._copied = {}
        self._gathered = self._make_messages(by_dtype.values(), self.gatherer.keeps_rows and not self.frees)
        self._scattered = self._make_messages(by_dtype.values(), False)
        for message, _ in self._gathered:
            self.gatherer.register(message, message, may_keep=False)
        for weight in self._copied.values():
            self.gatherer.register(weight, weight, may_keep=True)
        for weight in self._pruned.values():
            self.gatherer.register(weight, weight, may_keep=False)

    def _make_messages(
        self, groups: Iterable[Sequence[int]], copies: bool
    ) -> list[tuple[_BlockMessage, tuple[int, ...]]]:
        """The messages of parameters that are alike; copies: without those that copy engines gather."""
        made = []
        for indices in groups:
            left = []
            for index in indices:
                parameter = self.parameters[index]
                shape, dtype = layout_of(parameter).shape, self.precision.sent(parameter.dtype)
                if copies and torch.Size(shape).numel() * (dtype or parameter.dtype).itemsize >= MIN_COPIED_BYTES:
                    self._copied[index] = self._to_gather(parameter)
                else:
                    left.append(index)
            if left:
                parameters = [self.parameters[index] for index in left]
                dtype = self.precision.sent(parameters[0].dtype)
                made.append((_BlockMessage.of(parameters, dtype, self.group.size()), tuple(left)))
        return made

    def gather(self) -> list[Tensor]:
        """Gather the sharded parameters, in order."""
        if self._again is not None:
            return [whole.detach() for whole in self._again]
        found: dict[int, Tensor] = {}
        self._kept = []
        for message, indices in self._gathered:
            rows = self.gatherer.gather(message, message.parameter).rows
            found |= zip(indices, message.unpack(rows), strict=True)
        for index, weight in self._copied.items():
            rows, version, _ = self.gatherer.gather(weight, weight.parameter)
            found[index] = rows.detach()  # autograd marks the outputs of a Function
            if version is not None:
                begin = rows.data_ptr()
                self._kept.append(_KeptRows(begin, begin + rows.numel() * rows.element_size(), weight, version))
        for index, weight in self._pruned.items():
            found[index] = self.gatherer.gather(weight, weight.parameter).rows.detach()
        return [found[index] for index in range(self._sharded)]

    def _get_again(self, index: int) -> Tensor:
        """Return a parameter in the backward pass, for which the block was freed: all are gathered at the first.

        One that is not sharded is cast again at each use.
        """
        if index >= self._sharded:
            return self.precision.cast(local(self.parameters[index]).detach())
        if self._again is None:
            with torch.no_grad():
                self._again = self.gather()
            # Of a frozen block nothing is reduced, which frees it earlier.
            at_end_of_backward(self._free, also_if_it_raises=True)
        return self._again[index]

    def _free(self) -> None:
        self._again, self._holds_next, self._held_in = None, False, -1
        if self._held is not None:
            held, self._held = self._held, None
            put(*held)

    def start_reduction(self, gradients: Sequence[Tensor | None]) -> None:
        """Start to reduce the gradients of the sharded parameters; those of parameters without one are not changed."""
        if self._held_in in (-1, torch._C._current_graph_task_id()):  # else this is a backward pass within another one
            self._free()
        for message, indices in self._scattered:
            chosen = [place for place, index in enumerate(indices) if gradients[index] is not None]
            if not chosen:
                continue
            found = [(message.parameter[place], gradients[indices[place]]) for place in chosen]
            pairs = [(parameter, gradient) for parameter, gradient in found if gradient is not None]
            self.gradients.reduce_scatter_block(pairs, partial(self._start_all, message, chosen), self._start_one)
        for index in self._pruned:
            if (gradient := gradients[index]) is not None:
                self.gradients.reduce_scatter_gradient(
                    self.parameters[index], gradient, partial(self._start_pruned, index), is_sharded=True
                )

    def _start_pruned(self, index: int, gradient: Tensor, factor: float) -> Pending:
        pruned = self.parameters[index].pruned  # type: ignore[attr-defined]
        wire, levels = self.precision.wire(gradient), self.gradients.levels
        return cast(Pending, pruned.start_scatter(gradient, wire, factor, levels))

    def _start_all(
        self, message: _BlockMessage, chosen: Sequence[int], gradients: Sequence[Tensor], factors: Sequence[float]
    ) -> list[Pending]:
        wire, levels = self.precision.wire(gradients[0]), self.gradients.levels
        return message.start_scatter(gradients, chosen, self.group, wire, factors, levels)

    def _start_one(self, gradient: Tensor, factor: float) -> Pending:
        ranks, place = self.group.size(), self.group.rank()
        padded = -(-gradient.shape[0] // ranks)
        rows = max(min(padded, gradient.shape[0] - place * padded), 0)
        wire, levels = self.precision.wire(gradient), self.gradients.levels
        return start_scatter_rows(gradient.to(wire), rows, self.group, factor, levels)

    def _make_whole(self) -> list[Tensor]:
        """Whole tensors of the parameters, through which gradients flow to these."""
        sharded = self.parameters[: self._sharded]
        wholes = list(apply(_GatherBlock, self, *sharded)) if sharded else []
        for mine in self._local_tensors() if self._own else ():
            wholes.append(self.precision.cast(with_gradient_of_its_own(mine) if mine.shape[:1] == (1,) else mine))
        for index in self.parametrized:
            if wholes[index].requires_grad:
                wholes[index] = torch.ops.aten._unsafe_view(wholes[index], wholes[index].shape)
        return wholes

    def _local_tensors(self) -> Sequence[Tensor]:
        """Plain tensors of the parameters that are not sharded, for any number of passes."""
        followed, stream = self._followed, self.gradients.stream.handle
        if followed is None or followed.stream != stream or followed.is_outdated(self._own):
            followed = self._followed = LocalTensors(self._own, stream)
            followed.take(dict.fromkeys(self._own), self.gradients)
        assert followed.tensors is not None
        return followed.tensors

    @contextmanager
    def running(self) -> Iterator[list[Tensor] | None]:
        """While the block's forward runs: its modules hold whole tensors in place of parameters.

        Gives these tensors, or None where the block holds them already.
        """
        if self._held is not None and in_backward() and not self._holds_all:
            self._hold(self.places, self._make_whole())
        if self._is_running or (self._held is not None and in_backward()):  # a module that calls itself
            yield None
            return
        if not in_backward():
            self._free()  # a backward pass that raised has left it
        check_places(self.name, self.places, self.parameters)
        wholes = self._make_whole()
        frees = self.frees and torch.is_grad_enabled() and not _are_saved_tensors_packed()
        copies = [
            index
            for index, whole in enumerate(wholes)
            if index not in self._copied and (index < self._sharded or whole.dtype != self.parameters[index].dtype)
        ]
        sums, self._was_run = not self._was_run, True
        self._is_running = True
        try:
            with (
                hold_and_check(self.name, self.places, wholes, copies, sums=sums),
                self._freeing(wholes) if frees else self._checking_kept(),
            ):
                yield wholes
        finally:  # also where torch's checkpoint ends a recomputation that has saved all, by an exception
            self._is_running = False
            # A later block of its segment may have had it computed again before the backward pass comes to it.
            if (self._holds_next or self.frees) and in_backward():
                if not self._holds_next:
                    at_end_of_backward(self._free, also_if_it_raises=True)
                self._hold(self.places, wholes)

    def _hold(self, places: Sequence[ParameterPlace], wholes: Sequence[Tensor]) -> None:
        if self._held is not None:
            put(*self._held)
        self._held = places, put(places, [wholes[number] for _, _, number in places])
        self._holds_all = len(places) == len(self.places)

    def _hold_in_backward(self, found: Any, wholes: Sequence[Tensor]) -> None:
        """Hold whole tensors from where a backward pass comes to what the block has returned.

        Those of the forward pass, if they are kept; else they are gathered then, or with the block's recomputation.
        """
        is_recomputed = _are_saved_tensors_packed()
        kept = None if self.frees or is_recomputed else wholes

        def begin(_: Tensor) -> None:
            nonlocal kept
            self._awaited = awaited
            if self._held is not None or self._holds_next:
                return
            at_end_of_backward(self._free, also_if_it_raises=True)
            self._held_in = torch._C._current_graph_task_id()
            if is_recomputed:
                self._holds_next = True
                return
            if kept is not None:
                self._hold([place for place in self.places if place.number not in self.not_held], kept)
                kept = None  # the hook outlives this pass; another one through this graph gathers them
                return
            with torch.no_grad():
                self._again = self.gather()
            with torch.enable_grad():
                self._hold(self.places, self._make_whole())

        def arrived(_: Tensor) -> None:
            self._awaited -= 1
            if not self._awaited:
                self._free()

        def watch(value: Any) -> Any:
            if isinstance(value, Tensor) and value.grad_fn is not None:
                value.register_hook(begin)
            return value

        awaited = 0
        if torch.is_grad_enabled():
            _map_leaves(watch, found)
            # A block that is sharded is freed when its gradients are reduced.
            for whole, parameter in () if self._sharded else zip(wholes, self.parameters, strict=True):
                if whole.requires_grad and whole.dtype != parameter.dtype:
                    whole.register_hook(arrived)
                    awaited += 1

    def _freeing(self, wholes: Sequence[Tensor]) -> saved_tensors_hooks:
        """Have autograd save which parameter it needs, and not the whole tensor.

        A parameter that no rank shares with another one is freed only where it has been cast.
        """
        numbers = {
            whole.untyped_storage().data_ptr(): index
            for index, whole in enumerate(wholes)
            if index < self._sharded or whole.dtype != self.parameters[index].dtype
        }

        def pack(saved: Tensor) -> Any:
            index = numbers.get(saved.untyped_storage().data_ptr())
            if index is None or saved.dtype != dtypes[index]:
                return saved
            return SavedView(index, saved.size(), saved.stride(), int(saved.storage_offset()))

        def unpack(saved: Any) -> Tensor:
            if not isinstance(saved, SavedView):
                assert isinstance(saved, Tensor)
                return saved
            whole = self._get_again(saved.number)
            if writes[saved.number] != writes_of(self.parameters[saved.number]):
                raise RuntimeError(MODIFIED)
            return whole.as_strided(saved.size, saved.stride, saved.offset)

        dtypes, writes = [whole.dtype for whole in wholes], list(map(writes_of, self.parameters))
        return saved_tensors_hooks(pack, unpack)

    def _checking_kept(self) -> AbstractContextManager[Any]:
        """Have the backward pass raise RuntimeError if copy engines have overwritten what autograd saves here."""
        kept = sorted(self._kept)
        if not kept or not torch.is_grad_enabled() or _are_saved_tensors_packed():
            return nullcontext()
        self._kept = []

        def pack(saved: Tensor) -> Any:
            place = bisect_right(kept, saved.data_ptr(), key=lambda rows: rows.begin) - 1
            return (saved, kept[place]) if place >= 0 and saved.data_ptr() < kept[place].end else saved

        def unpack(saved: Any) -> Tensor:
            if isinstance(saved, Tensor):
                return saved
            tensor, rows = saved
            if self.gatherer.was_overwritten(rows.weight, rows.version):
                raise RuntimeError(
                    f"a parameter of {self.name} was changed, and written over by a forward pass or an optimizer's "
                    "copy, before the backward pass of an earlier one: take that first, or parallelize with "
                    "overlap=Overlap(copy_engines=False)"
                )
            return tensor

        return saved_tensors_hooks(pack, unpack)

    def wrap(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The block's forward, with whole parameters, and floating-point inputs in the compute dtype."""

        # A compiler sees the forward alone: it would trace what else is called, with a graph for each block and state.
        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            compiler = set_compiler(None)
            try:
                running, wholes, args, kwargs = self._enter(args, kwargs)
                try:
                    set_compiler(compiler)
                    found = forward(*args, **kwargs)
                except BaseException as error:
                    set_compiler(None)
                    self._leave(running, error, (*args, *kwargs.values()), wholes)
                    raise
                set_compiler(None)
                return self._leave(running, None, found, wholes)
            finally:
                set_compiler(compiler)

        return compiled_within(run)

    def _enter(self, args: Any, kwargs: Any) -> tuple[Any, ...]:
        """Begin a forward: `running`, entered, and what it gives, and the inputs, cast."""
        if self.precision.compute is not None:
            args, kwargs = _map_leaves(self._cast, args), _map_leaves(self._cast, kwargs)
        running = self.running()
        return running, running.__enter__(), args, kwargs

    def _leave(self, running: Any, error: BaseException | None, found: Any, wholes: Sequence[Tensor] | None) -> Any:
        """End a forward that has returned `found`, or has raised `error`, given `found`."""
        if isinstance(error, RuntimeError):
            self._explain_dtypes(error, found)
        running.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)
        if wholes is not None and error is None:
            self._hold_in_backward(found, wholes)
        return found

    def wrap_submodule(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The forward of a submodule, which gathers all of the block where it is called outside of the block's."""
        outside = self.wrap(forward)

        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs) if self._is_running else outside(*args, **kwargs)

        return run

    def _explain_dtypes(self, error: RuntimeError, inputs: Sequence[Any]) -> None:
        """Add the cause to an error about dtypes: an input whose tensors `_map_leaves` does not find."""
        known = (Tensor, int, float, str, list, tuple, dict, type(None))
        other = next((type(value).__name__ for value in inputs if not isinstance(value, known)), None)
        if self.precision.compute is not None and other is not None and "dtype" in str(error):
            error.add_note(
                f"{self.name} computes in {self.precision.compute}, to which tensors are cast that it is given alone "
                f"or in lists, tuples, dicts and dataclasses: cast those in its {other} yourself, or make it one"
            )

    def _cast(self, value: Any) -> Any:
        is_number = isinstance(value, Tensor) and value.is_floating_point()
        return self.precision.cast(value) if is_number else value


_LEAVES = frozenset({Tensor, type(None), bool, int, float, str})


def _map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to what lists, dicts, (named) tuples and dataclasses hold."""
    kind = type(value)
    if kind in _LEAVES:  # `tree_map` takes dozens of calls for these
        return function(value)
    if kind is tuple or kind is list:
        return kind([_map_leaves(function, each) for each in value])
    if kind is dict:
        return {key: _map_leaves(function, each) for key, each in value.items()}

    def apply(leaf: Any) -> Any:
        if isinstance(leaf, PackedSequence):
            return leaf._replace(data=function(leaf.data))
        if not is_dataclass(leaf) or isinstance(leaf, type):
            return function(leaf)
        copied = copy.copy(leaf)
        for each in fields(leaf):
            object.__setattr__(copied, each.name, _map_leaves(function, getattr(leaf, each.name)))  # frozen ones, too
        return copied

    return tree_map(apply, value)


def _are_saved_tensors_packed() -> bool:
    """True if something packs what autograd saves: activation checkpointing, whose place our own hooks would take.

    It keeps nothing of the block, which is gathered again when it is recomputed.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


class _KeptRows(NamedTuple):
    """The addresses of a parameter's whole rows in the gatherer's memory, and which state of the shard they are of."""

    begin: int
    end: int
    weight: WeightToGather
    version: Version


@directly_called
class _GatherBlock(torch.autograd.Function):
    """Shards to whole parameters; whole gradients to the shards' `.grad`, bypassing autograd."""

    @staticmethod
    def forward(ctx: Any, block: BlockShard, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.block = block
        with torch._C.DisableTorchFunctionSubclass():  # 2.11 calls Python for each attribute of a parameter
            wholes = block.gather()
            frozen = [whole for whole, parameter in zip(wholes, parameters, strict=True) if not parameter.requires_grad]
        if frozen:
            ctx.mark_non_differentiable(*frozen)
        return tuple(wholes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        with torch._C.DisableTorchFunctionSubclass():
            asked = [each if is_asked_for(ctx, place) else None for place, each in enumerate(gradients)]
            ctx.block.start_reduction(asked)
        return (None,) * (1 + len(gradients))

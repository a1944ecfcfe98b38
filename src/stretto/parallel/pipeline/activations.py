# SPDX-License-Identifier: Apache-2.0
"""Messages from one pipeline stage to the next: activations, and the layouts of earlier modules' outputs.

A stage runs the model's whole code, and modules that earlier stages have return stand-ins there: tensors of NaN (or
of zeros, of integers) of the shapes and dtypes that the modules have returned on their own stages. The model's code
reads sizes off them, as for a padding or a mask. `OutputLayouts` records these, and is sent with each micro-batch.
"""

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import SUPPORTED_NODES, tree_leaves, tree_map

from stretto.memory.plain_data import pack, unpack

MAX_NUMBERS = 1 << 36
"""The most bytes of a stand-in: a damaged description must not allocate a machine's memory."""
_PACKED = tuple[list[Any], list[tuple[int | str, list[int]]]]


@dataclass(frozen=True)
class _StandInLayout:
    """A tensor's shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class OutputLayouts:
    """Outputs of modules in one micro-batch, with layouts in the place of tensors.

    calls: by module, in the order of its calls.
    """

    calls: dict[int | str, list[Any]] = field(default_factory=dict)

    def note(self, module: int | str, output: Any) -> None:
        noted = _layout_of(output) if isinstance(output, Tensor) else tree_map(_layout_of, output)
        last = next(reversed(self.calls.values()), None)
        if last is not None and last[-1] == noted:
            noted = last[-1]  # blocks are often alike, and one object is sent once
        self.calls.setdefault(module, []).append(noted)

    def packed(self) -> Tensor:
        """Write it as bytes, uint8 [any]. ValueError for an output of a class that a receiver could not find."""
        outputs = {id(noted): noted for of_module in self.calls.values() for noted in of_module}
        numbers = {identity: number for number, identity in enumerate(outputs)}
        calls = [(module, [numbers[id(noted)] for noted in of_module]) for module, of_module in self.calls.items()]
        return pack(([_as_plain(noted) for noted in outputs.values()], calls))

    @classmethod
    def unpacked(cls, packed: Tensor) -> "OutputLayouts":
        """Read what `packed` has written. ValueError for anything else."""
        plain, calls = unpack(packed, _PACKED)
        outputs = dict(enumerate(map(_from_plain, plain)))
        try:
            return cls({module: [outputs[number] for number in numbers] for module, numbers in calls})
        except KeyError as error:
            raise ValueError(f"output {error} is described by nothing") from error


def _layout_of(leaf: Any) -> Any:
    """A tensor's layout; other values as they are, and None for those that are not plain."""
    if isinstance(leaf, Tensor):
        return _StandInLayout(tuple(leaf.shape), leaf.dtype)
    return leaf if isinstance(leaf, bool | int | float | str) else None


def _as_plain(noted: Any) -> Any:
    """A tree of layouts as plain data: a tuple that begins with what stands there."""
    kind = type(noted)
    if kind is _StandInLayout:
        return "tensor", noted.shape, noted.dtype
    if kind in (tuple, list):
        return kind.__name__, list(map(_as_plain, noted))
    if kind is dict:
        return "dict", [(key, _as_plain(value)) for key, value in noted.items()]
    if not _is_named_tuple(kind) and kind not in SUPPORTED_NODES:
        return "value", noted
    parts, context = (noted, None) if _is_named_tuple(kind) else SUPPORTED_NODES[kind].flatten_fn(noted)
    name = _name_class(kind)
    try:
        pack(context)
        if _find_class(name) is not kind:
            raise ValueError("other ranks could not find the class by its name")
    except ValueError as error:
        raise ValueError(
            f"a module before the last pipeline stage returns a {kind.__qualname__}, of which later stages cannot be "
            f"told ({error}): return a tuple or a dict, or a NamedTuple that is defined at a module's top"
        ) from error
    return "object", name, context, list(map(_as_plain, parts))


def _from_plain(plain: Any) -> Any:
    """Read what `_as_plain` has made. ValueError for anything else."""
    try:
        match plain:
            case "tensor", tuple() as shape, torch.dtype() as dtype if all(type(size) is int for size in shape):
                if min(shape, default=0) >= 0 and prod(shape) <= MAX_NUMBERS:
                    return _StandInLayout(shape, dtype)
            case ("tuple" | "list") as kind, list() as parts:
                made = list(map(_from_plain, parts))
                return tuple(made) if kind == "tuple" else made
            case "dict", list() as items:
                return {key: _from_plain(value) for key, value in items}
            case "object", str() as name, context, list() as parts:
                return _make_object(name, context, list(map(_from_plain, parts)))
            case "value", (None | bool() | int() | float() | str()) as value:
                return value
    except TypeError as error:  # a key that cannot be one, say
        raise ValueError(f"{repr(plain)[:100]} describes no output of a module: {error}") from error
    raise ValueError(f"{repr(plain)[:100]} describes no output of a module")


def _make_object(name: str, context: Any, parts: list[Any]) -> Any:
    kind = _find_class(name)
    if kind is None:
        raise ValueError(f"a module of an earlier stage has returned a {name[:100]}, which this rank has not imported")
    try:
        return kind._make(parts) if _is_named_tuple(kind) else SUPPORTED_NODES[kind].unflatten_fn(parts, context)
    except Exception as error:  # of the class, which may be anybody's
        raise ValueError(f"{repr(parts)[:100]} are not the parts of a {name}: {error}") from error


def _is_named_tuple(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple) and isinstance(getattr(kind, "_fields", None), tuple)


def _name_class(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _find_class(name: str) -> Any:
    """The class of this name among those that pytrees know, and named tuples of modules that are already imported.

    A peer gives the name, so nothing is imported for it, and no other class is found.
    """
    for kind in SUPPORTED_NODES:
        if isinstance(kind, type) and _name_class(kind) == name:
            return kind
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, "__dict__", {}).get(part)  # getattr(found, part) could import what a module loads late
    return found if _is_named_tuple(found) else None


@dataclass
class StandIns:
    """Makes stand-ins, in a later stage's forward pass, for what modules of earlier stages return.

    device: of the stand-ins. leaves: where the pass looks for connections across the cut, the tensors that stand-ins
    are made from; a result that depends on one shows a connection. refusal: the error of a backward pass of any other
    pass that reaches a stand-in. Without gradients what depends on one is NaN.
    """

    layouts: OutputLayouts
    device: torch.device
    refusal: str = ""
    leaves: list[Tensor] | None = None
    _made: dict[_StandInLayout, Tensor] = field(default_factory=dict)
    _calls: dict[int | str, int] = field(default_factory=dict)

    def make(self, module: int | str) -> Any:
        """The output of the module's next call. KeyError if it was not called on its own stage."""
        calls = self.layouts.calls[module]
        number = self._calls.get(module, 0)
        self._calls[module] = number + 1
        noted = calls[min(number, len(calls) - 1)]
        return self._stand_in(noted) if isinstance(noted, _StandInLayout) else tree_map(self._stand_in, noted)

    def _stand_in(self, layout: Any) -> Any:
        if not isinstance(layout, _StandInLayout):
            return layout
        if layout not in self._made:
            value = math.nan if layout.dtype.is_floating_point else 0
            made = torch.full(layout.shape, value, dtype=layout.dtype, device=self.device)
            if self.leaves is not None and made.is_floating_point():
                self.leaves.append(made.requires_grad_())
                made = made.clone()  # the model's code may write to it in place
            elif made.is_floating_point():
                made = _StandIn.apply(torch.zeros((), requires_grad=True, device="cpu"), [made], self.refusal)
            self._made[layout] = made
        return self._made[layout]


@dataclass
class Activations:
    """Message from one stage to the next: tensors, and which arguments of the next block they are.

    places: of each tensor, the number of the block's parameter. layouts: of what modules before have returned.
    micro_batches: of the sender's step; others have as many. batch_shape: with sequence sharding, batch and seq of the
    tokens that ranks of x divide. random_state: of the generators of the CPU and of this rank's GPU (None without
    dropout).
    """

    tensors: list[Tensor]
    places: list[int]
    layouts: OutputLayouts
    micro_batches: int = 1
    batch_shape: tuple[int, int] = (0, 0)
    random_state: tuple[Tensor, Tensor | None] | None = None

    def as_message(self) -> list[Tensor | None]:
        """The tensors to send: a header, layouts, the states of random generators, and the activations."""
        header = torch.tensor([self.micro_batches, *self.batch_shape, *self.places], dtype=torch.int64, device="cpu")
        cpu, gpu = self.random_state or (None, None)
        return [header, self.layouts.packed(), cpu, gpu, *self.tensors]

    @classmethod
    def from_message(cls, message: Sequence[Tensor | None]) -> "Activations":
        """Read what `as_message` has made. ValueError for anything else."""
        header, layouts, cpu, gpu, *received = message
        for part, dtype in ((header, torch.int64), (layouts, torch.uint8)):
            if part is None or part.dim() != 1 or part.dtype != dtype:
                raise ValueError("it does not begin with a header and descriptions of outputs")
        assert header is not None
        assert layouts is not None
        micro_batches, batch, seq, *places = header.tolist()
        tensors = [tensor for tensor in received if tensor is not None]
        random_state = None if cpu is None else (cpu, gpu)
        return cls(tensors, places, OutputLayouts.unpacked(layouts), micro_batches, (batch, seq), random_state)

    def record(self) -> list[Tensor | None]:
        """Have autograd record what is done with the tensors. A backward pass puts their gradients into the list."""
        gradients: list[Tensor | None] = [None] * len(self.tensors)
        root = torch.zeros((), requires_grad=True, device="cpu")
        self.tensors = [
            _Enter.apply(root, [tensor], gradients, number) if tensor.is_floating_point() else tensor
            for number, tensor in enumerate(self.tensors)
        ]
        return gradients


class _StandIn(torch.autograd.Function):
    """Refuses a backward pass that reaches a stand-in."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, made: list[Tensor], refusal: str) -> Tensor:
        ctx.refusal = refusal
        return made.pop()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> NoReturn:
        raise ValueError(ctx.refusal)


class _Enter(torch.autograd.Function):
    """Makes a received tensor the output of an operation: a block may write to that in place, and to no leaf."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, received: list[Tensor], gradients: list[Tensor | None], number: int) -> Tensor:
        ctx.gradients, ctx.number = gradients, number
        return received.pop()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        ctx.gradients[ctx.number] = gradient.detach()
        return None, None, None, None


def depend_on(outputs: Iterable[Tensor], leaves: Sequence[Tensor]) -> bool:
    """True if autograd's graph of the outputs has any of the leaves."""
    wanted = set(map(id, leaves))
    waiting = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", None)) in wanted:
            return True
        waiting += [before for before, _ in node.next_functions if before is not None]
    return False


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in a tree, and in mappings that torch takes for leaves, such as transformers' KVSharingDict."""
    leaves = tree_leaves(value)
    inner = (tensors_of(dict(leaf)) for leaf in leaves if isinstance(leaf, Mapping))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)] + [each for found in inner for each in found]

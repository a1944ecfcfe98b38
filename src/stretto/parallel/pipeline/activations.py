# SPDX-License-Identifier: Apache-2.0
"""What one pipeline stage sends to the next: activations, and the layouts of what modules before have returned.

A stage runs the model's whole code, and modules that earlier stages have return stand-ins there: zeros of the shapes
and dtypes that the modules have returned on their own stages. The model's code reads sizes off them, as for a padding
or a mask. `OutputLayouts` records these, and is sent with each micro-batch.
"""

import pickle
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map


@dataclass(frozen=True)
class _StandInLayout:
    """A tensor's shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class OutputLayouts:
    """What modules have returned in one micro-batch, with layouts in the place of tensors.

    calls: by module, in the order of its calls.
    """

    calls: dict[Hashable, list[Any]] = field(default_factory=dict)

    def note(self, module: Hashable, output: Any) -> None:
        """Record a module's output."""
        noted = _layout_of(output) if isinstance(output, Tensor) else tree_map(_layout_of, output)
        last = next(reversed(self.calls.values()), None)
        if last is not None and last[-1] == noted:
            noted = last[-1]  # blocks are often alike, and pickle writes one object once
        self.calls.setdefault(module, []).append(noted)

    def packed(self) -> Tensor:
        """As bytes, uint8 [any]."""
        return torch.frombuffer(bytearray(pickle.dumps(self.calls)), dtype=torch.uint8)

    @classmethod
    def unpacked(cls, packed: Tensor) -> "OutputLayouts":
        """Of `packed`."""
        return cls(pickle.loads(packed.numpy().tobytes()))


def _layout_of(leaf: Any) -> Any:
    """A tensor's layout; other values as they are, and None for those that are not plain."""
    if isinstance(leaf, Tensor):
        return _StandInLayout(tuple(leaf.shape), leaf.dtype)
    return leaf if isinstance(leaf, bool | int | float | str) else None


@dataclass
class StandIns:
    """Makes what modules of earlier stages return in one forward pass of a later one.

    device: of the stand-ins. leaves: where the pass looks for connections across the cut, the tensors that stand-ins
    are made from; a result that depends on one shows a connection.
    """

    layouts: OutputLayouts
    device: torch.device
    leaves: list[Tensor] | None = None
    _made: dict[_StandInLayout, Tensor] = field(default_factory=dict)
    _calls: dict[Hashable, int] = field(default_factory=dict)

    def make(self, module: Hashable) -> Any:
        """What the module's next call returns. KeyError if it was not called on its own stage."""
        calls = self.layouts.calls[module]
        number = self._calls.get(module, 0)
        self._calls[module] = number + 1
        noted = calls[min(number, len(calls) - 1)]
        return self._stand_in(noted) if isinstance(noted, _StandInLayout) else tree_map(self._stand_in, noted)

    def _stand_in(self, layout: Any) -> Any:
        if not isinstance(layout, _StandInLayout):
            return layout
        if layout not in self._made:
            made = torch.zeros(layout.shape, dtype=layout.dtype, device=self.device)
            if self.leaves is not None and made.is_floating_point():
                self.leaves.append(made.requires_grad_())
                made = made.clone()  # the model's code may write to it in place
            self._made[layout] = made
        return self._made[layout]


@dataclass
class Activations:
    """What one stage sends to the next: tensors, and which arguments of the next block they are.

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
        header = torch.tensor([self.micro_batches, *self.batch_shape, *self.places], dtype=torch.int64)
        cpu, gpu = self.random_state or (None, None)
        return [header, self.layouts.packed(), cpu, gpu, *self.tensors]

    @classmethod
    def from_message(cls, message: Sequence[Tensor | None]) -> "Activations":
        """Read what `as_message` has made."""
        header, layouts, cpu, gpu, *received = message
        assert header is not None
        assert layouts is not None
        micro_batches, batch, seq, *places = header.tolist()
        tensors = [tensor for tensor in received if tensor is not None]
        random_state = None if cpu is None else (cpu, gpu)
        return cls(tensors, places, OutputLayouts.unpacked(layouts), micro_batches, (batch, seq), random_state)

    def record(self) -> list[Tensor | None]:
        """Have autograd record what is done with the tensors. A backward pass puts their gradients into the list."""
        gradients: list[Tensor | None] = [None] * len(self.tensors)
        root = torch.zeros((), requires_grad=True)
        self.tensors = [
            _Enter.apply(root, [tensor], gradients, number) if tensor.is_floating_point() else tensor
            for number, tensor in enumerate(self.tensors)
        ]
        return gradients


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
    """Whether autograd's graph of the outputs has any of the leaves."""
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
    """The tensors in a tree."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]

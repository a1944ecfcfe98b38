# SPDX-License-Identifier: Apache-2.0
"""Autograd's record of a module's own code, which is run backward node by node, inside of another backward pass.

`torch.autograd.grad` would run it as a backward pass of its own. What layers have begun in the outer one would end
with that: their sums of gradients, and the order in which they gather weights. And autograd would not say which
weights the outer one asks for.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

FREED = (
    "a second backward pass goes through a compiled module, whose first one has freed what it saved: pass "
    "retain_graph=True to the first"
)
MODIFIED = (
    "a weight has been modified by an inplace operation between its forward and its backward pass: take the backward "
    "pass first"
)


class SavedView(NamedTuple):
    """A view of a tensor that has a number, in place of which autograd saves where it lies."""

    number: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _SavedTensor(NamedTuple):
    """Another tensor that a node saves, and its version then."""

    tensor: Tensor
    version: int | None


class _SavingHooks:
    """Have nodes save of an input only which it is. inputs: a list that has them while a backward pass runs the nodes.

    addresses: of inputs, and of what nodes have saved.
    """

    def __init__(self, given: Sequence[Tensor], inputs: list[Tensor]) -> None:
        self._number = {_address(each): number for number, each in enumerate(given)}
        self._offsets = [int(each.storage_offset()) for each in given]
        self._number.pop(0, None)  # of empty tensors
        self._inputs = inputs
        self.addresses = set(self._number)

    def pack(self, saved: Tensor) -> SavedView | _SavedTensor:
        self.addresses.add(address := _address(saved))
        if (number := self._number.get(address)) is not None:
            offset = int(saved.storage_offset()) - self._offsets[number]
            return SavedView(number, saved.size(), saved.stride(), offset)
        # An output's own node would keep it, and be kept by it.
        kept = saved if saved.grad_fn is None else saved.detach()
        return _SavedTensor(kept, None if saved.is_inference() else saved._version)

    def unpack(self, saved: SavedView | _SavedTensor) -> Tensor:
        if isinstance(saved, SavedView):
            whole = self._inputs[saved.number]
            return whole.as_strided(saved.size, saved.stride, int(whole.storage_offset()) + saved.offset)
        if saved.version is not None and saved.tensor._version != saved.version:
            raise RuntimeError(MODIFIED)
        return saved.tensor


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class RecordedCode:
    """Autograd's record of a call of code that takes tensors and returns one.

    It keeps nothing of the memory of the inputs, which the backward pass is given again, and of the output.
    """

    def run(
        self, code: Callable[..., Tensor], inputs: Sequence[Tensor], needs: Sequence[bool], *, is_recorded: bool
    ) -> Tensor:
        """Call the code and record it. needs: whether each input needs a gradient; is_recorded: whether one does, or a
        parameter of which the code itself makes the gradient."""
        inputs = [each.contiguous() for each in inputs]
        leaves = [each.detach().requires_grad_(need) for each, need in zip(inputs, needs, strict=True)]
        self._nodes: list[Any] = []
        self._inputs: list[Tensor] = []  # a list of its own: nodes hold the hooks, and would hold this object
        hooks = _SavingHooks(inputs, self._inputs)
        # Below an operator, torch's own functions are not recorded without the second of these.
        with (
            torch.set_grad_enabled(is_recorded),
            torch._C._SetExcludeDispatchKeyGuard(DispatchKey.AutogradFunctionality, False),
            saved_tensors_hooks(hooks.pack, hooks.unpack),
        ):
            y = code(*leaves)
            # Python's object of an autograd function does not own its node in torch 2.11; a view's node does, and all
            # nodes that lead from it.
            y = y.view_as(y) if y.requires_grad else y
            if y.grad_fn is not None:
                self._place, self._nodes = y.output_nr, _sort(y.grad_fn)
                self._numbers = {
                    get_gradient_edge(leaf).node: number for number, leaf in enumerate(leaves) if leaf.requires_grad
                }
            y = y.detach()
        return y.clone() if _address(y) in hooks.addresses else y.contiguous()

    def differentiate(self, inputs: Sequence[Tensor], gradient: Tensor) -> list[Tensor | None]:
        """The inputs' gradients from the output's, None for what has none. Frees the record if autograd would."""
        if not self._nodes:
            raise RuntimeError(FREED)
        keeps = torch._C._autograd._get_current_graph_task_keep_graph()
        nodes = [*self._nodes] if keeps else self._nodes
        root = nodes[-1]  # owns the others while they run
        found: list[Tensor | None] = [None for _ in inputs]
        arrived: dict[Any, list[Tensor | None]] = {}
        _add(arrived, root, self._place, gradient)
        self._inputs[:] = [each.contiguous() for each in inputs]
        try:
            with torch.no_grad():
                while nodes:
                    node = nodes.pop()
                    if node not in arrived:
                        continue
                    for into, place, part in _run(node, arrived.pop(node)):
                        if (number := self._numbers.get(into)) is not None:
                            of_input = found[number]
                            found[number] = part if of_input is None else of_input + part
                        elif hasattr(into, "variable"):
                            raise RuntimeError(
                                "this code makes a parameter's gradient by autograd: give it as an input"
                            )
                        else:
                            _add(arrived, into, place, part)
        finally:
            self._inputs.clear()
        taken = {_address(gradient)}
        for number, each in enumerate(found):
            if each is not None:
                found[number] = each.clone() if _address(each) in taken else each
                taken.add(_address(each))
        return found


def _sort(root: Any) -> list[Any]:
    """The nodes of a recorded graph, but for those of its inputs and parameters, in the order of their recording."""
    found: dict[Any, None] = {}
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node not in found and not hasattr(node, "variable"):
            found[node] = None
            waiting += [into for into, _ in node.next_functions if into is not None]
    return sorted(found, key=lambda node: node._sequence_nr())


def _run(node: Any, gradients: list[Tensor | None]) -> Iterator[tuple[Any, int, Tensor]]:
    """Run a node, as autograd's engine does: yields gradients, and which node's output number each is of."""
    edges, outputs = node.next_functions, node._input_metadata
    if isinstance(node, BackwardCFunction):
        for place, (gradient, like) in enumerate(zip(gradients, outputs, strict=True)):
            if gradient is None:
                gradients[place] = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
        parts = node.apply(*gradients)
        needs = node.needs_input_grad  # of all arguments, where edges are of tensors alone
        parts = [
            part for part, need in zip(parts if isinstance(parts, tuple) else (parts,), needs, strict=False) if need
        ]
        edges = [edge for edge in edges if edge[0] is not None]
    else:
        parts = node(*gradients)
        parts = parts if isinstance(parts, tuple) else (parts,)
    for (into, place), part in zip(edges, parts, strict=True):
        if into is not None and part is not None:
            yield into, place, part


def _add(arrived: dict[Any, list[Tensor | None]], node: Any, place: int, part: Tensor) -> None:
    """Add a part of the gradient of a node's output, in the output's dtype and shape."""
    outputs = node._input_metadata
    gradients = arrived.setdefault(node, [None] * len(outputs))
    like = outputs[place]
    part = part.to(like.dtype).sum_to_size(like.shape)
    known = gradients[place]
    gradients[place] = part if known is None else known + part

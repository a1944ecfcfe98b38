# SPDX-License-Identifier: Apache-2.0
"""Keeps chosen outputs of a block's forward pass, and gives them back when the block is computed again.

Communication-aware activation checkpointing (Singh, section 7.3.2) keeps the outputs of collectives, in addition to the
block's input, so that recomputation sends nothing. Layers call `keep_output` around operations whose output a mode of
recomputation may keep, and `run_once` around what must not happen twice. The outputs of one forward pass are a list, in
the order of the calls; recomputation makes the same calls in the same order, and takes them from the list instead of
computing them.

Layers keep from inside autograd functions, where nothing is saved for the backward pass: a function that is skipped may
not save anything that autograd waits for.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from stretto.execution import Recomputation
from stretto.parallel.comm.autograd import SelectiveMode, input_chain

_COMMUNICATION, _PRODUCTS = frozenset({"communication"}), frozenset({"products"})
# What may be kept, and the modes of recomputation that keep it. A layer that sends something new within blocks adds a
# line here, and calls `keep_output` with its name.
KEPT_IN = {
    "product": _PRODUCTS,
    "summed product": _COMMUNICATION | _PRODUCTS,  # the product itself is not computed again then
    "gathered tokens": _COMMUNICATION,
    "gathered features": _COMMUNICATION,  # over y, of a router, and of a module that computes with whole ones
    "exchanged rows": _COMMUNICATION,  # of experts, as the next one
    "scattered sums": _COMMUNICATION,
    "router statistics": _COMMUNICATION,
    "norm statistics": _COMMUNICATION,
    "pooled exchange": _COMMUNICATION,
    "passed states": _COMMUNICATION,  # of linear attention
}
_ONCE = "run once"  # kept in every mode
# Products with weights, outside of Stretto's linears. Those of attention's scores have no weight, and are no outputs to
# keep: they grow with the square of the sequence.
_PRODUCT_OPERATORS = frozenset({torch.ops.aten.mm.default, torch.ops.aten.addmm.default})

T = TypeVar("T")


class _Output(NamedTuple):
    """A kept output: its name, leaves and structure, and of each tensor its version and whether it needs a gradient.

    versions: None where there are inference tensors, which have none. These are not kept: nothing would show that code
    has overwritten them.
    """

    name: str
    leaves: list[Any]
    structure: Any
    versions: list[int] | None
    need_gradients: list[bool]

    @classmethod
    def of(cls, name: str, value: Any) -> "_Output":
        leaves, structure = tree_flatten(value)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if any(tensor.is_inference() for tensor in tensors):
            return cls(name, [], structure, None, [])
        kept = [_detach(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return cls(name, kept, structure, [each._version for each in tensors], [each.requires_grad for each in tensors])

    @property
    def was_overwritten(self) -> bool:
        """True if code has written to a tensor since it was kept, or may have."""
        if self.versions is None:
            return True
        tensors = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        return any(tensor._version != version for tensor, version in zip(tensors, self.versions, strict=True))

    def get(self) -> Any:
        """The value, as new tensors on the same memory."""
        needs = iter(self.need_gradients)
        leaves = [
            _detach(leaf).requires_grad_(next(needs)) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves
        ]
        return tree_unflatten(leaves, self.structure)


def _detach(tensor: Tensor) -> Tensor:
    """The tensor without its graph, which would keep itself alive; with its version counter, below autograd too."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


class _RunningPass(threading.local):
    current: "_Pass | None" = None


_running = _RunningPass()


class _Pass(AbstractContextManager["_Pass"]):
    """A forward pass of a block: the first, which fills in `outputs`, or one that computes the block again."""

    def __init__(self, mode: Recomputation, outputs: list[_Output], *, is_again: bool) -> None:
        self.mode = mode
        self.outputs = outputs
        self.is_again = is_again
        self.position = 0

    def __enter__(self) -> "_Pass":
        self.position = 0
        self.run = object()
        input_chain.forget()
        self._before, _running.current = _running.current, self
        if self.mode.kind == "products":
            self._products = _KeepProducts().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.mode.kind == "products":
            self._products.__exit__(*error)
        input_chain.forget()
        _running.current = self._before

    def keep(self, name: str, make: Callable[[], T]) -> T:
        """Make and keep an output, or return it if it was kept."""
        if not self.is_again:
            value = self.make(make)
            self.outputs.append(_Output.of(name, value))
            return value
        kept = self.outputs[self.position] if self.position < len(self.outputs) else None
        if kept is None or kept.name != name:
            raise RuntimeError(
                f"a block that is computed again asks for the {name}, but its forward pass kept "
                f"{'no more outputs' if kept is None else f'the {kept.name} there'}: it must run the same code again"
            )
        self.position += 1
        if not kept.was_overwritten:
            return kept.get()
        if name == _ONCE:
            raise RuntimeError(
                "the result of run_once was overwritten in place, or is an inference tensor: return a copy of it, "
                "made outside of torch.inference_mode"
            )
        return self.make(make)  # on every rank: all run the same code

    def make(self, make: Callable[[], T]) -> T:
        """Call the function, and keep none of its outputs."""
        _running.current = None
        try:
            return make()
        finally:
            _running.current = self


class _KeepProducts(SelectiveMode):
    """Keeps the outputs of plain products with weights."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        running = _running.current
        if running is None or func not in _PRODUCT_OPERATORS:
            return func(*args, **(kwargs or {}))
        return running.keep("product", partial(func, *args, **(kwargs or {})))


def recomputation_contexts(mode: str) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts of a function's forward pass and of its recomputation, in a mode of `parallelize(recompute=...)`.

    For functions that you checkpoint yourself:
    `torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False, context_fn=partial(recomputation_contexts,
    "communication"))`. Raises ValueError for an unknown mode.
    """
    recomputation, outputs = Recomputation.parse(mode), list[_Output]()
    return _Pass(recomputation, outputs, is_again=False), _Pass(recomputation, outputs, is_again=True)


def is_recomputed() -> bool:
    """True while a block's forward pass runs that will be, or is, computed again."""
    return _running.current is not None


def current_run() -> object | None:
    """An object of the running pass of a block that will be, or is, computed again, another in each; None elsewhere."""
    return None if _running.current is None else _running.current.run


def is_given_back(name: str) -> bool:
    """True while a block is being computed again in a mode that keeps outputs of this name."""
    running = _running.current
    return running is not None and running.is_again and running.mode.kind in KEPT_IN[name]


def keep_output(name: str, make: Callable[[], T]) -> T:
    """Return the result of `make`; when a block is recomputed in a mode that keeps `name`, the kept result.

    name: one of `KEPT_IN`. make: makes tensors (or tuples, lists or dicts of some) outside of autograd. An output that
    code has overwritten in place is made again.
    """
    running = _running.current
    if running is None:
        return make()
    return running.keep(name, make) if running.mode.kind in KEPT_IN[name] else running.make(make)


def run_once(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call a function only in the forward pass of a block; the recomputation returns the same result again.

    Use it for side effects, such as counting or adding to a loss, which then happen once in every mode of
    `parallelize(recompute=...)`. The function must not save tensors for the backward pass: autograd would wait for
    them. Raises RuntimeError if the result is overwritten in place.
    """
    running = _running.current
    make = partial(function, *args, **kwargs)
    return make() if running is None else running.keep(_ONCE, make)

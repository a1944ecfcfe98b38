# SPDX-License-Identifier: Apache-2.0
"""Calls autograd functions as single operators of torch.compile's graphs, which do not look into them.

Functions of parallel modules gather weights ahead, keep them for the backward pass, and start to reduce gradients that
autograd does not see. A compiler could trace none of that, and would break its graph at each module. It traces
`stretto::call_function` and `stretto::differentiate_function` instead, which run such a function's `forward` and
`backward` as they are. A graph runs them once for each linear, so they are registered without the wrappers of
`torch.library.custom_op` and `register_autograd`, which cost the host more than a linear's own code does.

Of which module they run it, a tensor says: the module's key. Layers of one kind then share a graph, where a number
would be a constant of it, and each layer have its own. The key's graph leads to the weight, so that `backward(inputs=)`
finds it; and the key's gradient, zero, keeps a compiler from dropping a call that makes the weight's gradient alone.

Compilers write to a tensor's memory after its last use in a graph. So a function keeps none of its inputs and outputs
from its forward pass: the graph saves the inputs. What else it saves is in its `_GraphCall`, for as long as the graph
saves the call's token.
"""

import inspect
import itertools
import struct
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from stretto.parallel.comm.kept_outputs import is_recomputed
from stretto.parallel.comm.recorded_code import FREED, MODIFIED, RecordedCode

_functions: "WeakValueDictionary[int, GraphFunction]" = WeakValueDictionary()
_calls: "WeakValueDictionary[int, _GraphCall]" = WeakValueDictionary()
_numbers = itertools.count(1)  # float64 holds them exactly


class GraphFunction:
    """An autograd function of a module that compiled graphs call as one operator.

    It takes `arrange(x, *others)`: x, the weight (a parameter whose gradient the function makes itself, or None), the
    one of the others that may need a gradient or None, and constants. It returns one tensor of x's shape and dtype, but
    for the last dim.
    keeps_inputs: tells whether a backward pass now keeps what it is given for later.
    """

    def __init__(
        self,
        function: type[torch.autograd.Function],
        arrange: Callable[..., tuple[Any, ...]],
        weight: Tensor | None = None,
        keeps_inputs: Callable[[], bool] = lambda: False,
    ) -> None:
        # Without what `once_differentiable` adds: no graph is differentiated twice.
        self.forward, self.backward = function.forward, inspect.unwrap(function.backward)
        self.arrange = arrange
        self._register(keeps_inputs, weight)

    def _register(self, keeps_inputs: Callable[[], bool], *weights: Tensor | None) -> None:
        self.keeps_inputs = keeps_inputs
        self._number = next(_numbers)
        _functions[self._number] = self
        self.follow(*weights)

    def follow(self, *weights: Tensor | None) -> None:
        """Take these weights from now on: a conversion has replaced them, they were frozen or unfrozen, or the stream
        has changed: what autograd accumulates in a weight, it does on the stream on which its node was made."""
        self.key = torch.empty(0, device="cpu")  # frees the weights' nodes, which this may be all that keeps
        self.edges: tuple[tuple[Any, int], ...] = ()
        self.weights = tuple(weight for weight in weights if weight is not None)
        with torch.inference_mode(False), torch.enable_grad():
            self.key = _WeightKey.apply(float(self._number), *weights)
        if self.key.grad_fn is not None:
            self.edges = self.key.grad_fn.next_functions

    def __call__(self, shape: Sequence[int], x: Tensor, *others: Tensor, not_saved: int = 0) -> Tensor:
        """Call the function, which returns a tensor of this shape, in the graph that is being traced. not_saved: of so
        many inputs, x first, the backward pass needs nothing but x's shape."""
        is_on = torch.is_grad_enabled()
        needs = [is_on and each.requires_grad for each in (self.key, x, *others)]
        # Compilers make one call of two that are alike, but for what is empty: a new number is in no other call.
        this = torch.empty(1, dtype=torch.float64, device="cpu")
        found: Tensor = torch.ops.stretto.record_function(this, self.key, [x, *others], list(shape), needs, not_saved)
        return found


class GraphCode(GraphFunction):
    """A module's code, of any functions that autograd records, that compiled graphs call as one operator.

    It takes tensors, of which x is the first, and returns one of x's dtype. weights: parameters whose gradients it
    makes itself; it reads no other that needs a gradient, but as an input.
    """

    def __init__(
        self, code: Callable[..., Tensor], *weights: Tensor, keeps_inputs: Callable[[], bool] = lambda: False
    ) -> None:
        self.code = code
        self._register(keeps_inputs, *weights)

    def run(self, shape: Sequence[int], *inputs: Tensor) -> Tensor:
        """Run the code, which returns a tensor of this shape, as one operator of a graph if one is being traced."""
        return self(shape, *inputs) if torch.compiler.is_compiling() else self.code(*inputs)


def new_number() -> Tensor:
    """A number [1] that is made when a graph runs, and that is in no other call of one."""
    number: Tensor = torch.ops.stretto.new_number(torch.empty(1, dtype=torch.float64, device="cpu"))
    return number


class _WeightKey(torch.autograd.Function):
    """A number as a tensor whose graph leads to weights, to which it passes no gradient."""

    @staticmethod
    def forward(ctx: Any, number: float, *weights: Tensor | None) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.count = len(weights)
        # A compiler makes a constant of one without dims.
        return torch.tensor([number], dtype=torch.float64, device="cpu")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[None, ...]:
        return (None,) * (1 + ctx.count)


class _GraphCall(bytearray):
    """A call of a function; its bytes are its number, and the memory of its token."""

    function: Any

    @classmethod
    def of(cls, key: Tensor, needs: Sequence[bool]) -> "_GraphCall":
        """A new call. needs: whether the weights, and each input, need gradients."""
        number, function = next(_numbers), _functions[int(key)]
        if any(needs) and not needs[0] and any(weight.requires_grad for weight in function.weights):
            raise RuntimeError(
                "a weight of a compiled module was unfrozen after the last forward pass of the whole model, which "
                "sees that: call the model that stretto.parallelize has returned before you call a part of it"
            )
        call = (_CodeCall if isinstance(function, GraphCode) else _FunctionCall)(struct.pack("d", number))
        call.function = function
        _calls[number] = call
        return call

    def forward(self, inputs: Sequence[Tensor], needs: Sequence[bool]) -> Tensor:
        """Run the function."""
        raise NotImplementedError

    def backward(self, inputs: Sequence[Tensor], gradient: Tensor, needs: Sequence[bool]) -> Sequence[Tensor | None]:
        """The gradients of the inputs that need some."""
        raise NotImplementedError


class _CodeCall(_GraphCall):
    """A call of code, as autograd records it."""

    def forward(self, inputs: Sequence[Tensor], needs: Sequence[bool]) -> Tensor:
        self._record = RecordedCode()
        return self._record.run(self.function.code, inputs, needs[1:], is_recorded=any(needs))

    def backward(self, inputs: Sequence[Tensor], gradient: Tensor, needs: Sequence[bool]) -> Sequence[Tensor | None]:
        return self._record.differentiate(inputs, gradient)


class _FunctionCall(_GraphCall):
    """A call of an autograd function, to which it is the context."""

    next_functions: tuple[tuple[Any, int], ...] = ()
    _inputs: Sequence[Tensor] = ()
    needs_input_grad: tuple[bool, ...] = ()

    def forward(self, inputs: Sequence[Tensor], needs: Sequence[bool]) -> Tensor:
        if any(needs):
            self.next_functions = ((None, 0), *(self.function.edges or ((None, 0),)))
        self._inputs = inputs
        with torch._C.DisableTorchFunctionSubclass():  # 2.11 calls Python for each attribute of a parameter
            y: Tensor = self.function.forward(self, *self.function.arrange(*inputs))
        self._inputs = ()
        return y.contiguous()

    def backward(self, inputs: Sequence[Tensor], gradient: Tensor, needs: Sequence[bool]) -> Sequence[Tensor | None]:
        self.needs_input_grad = (needs[0], False, any(needs[1:]))
        self._inputs = inputs
        try:
            with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                of_x, _, of_other, *_ = self.function.backward(self, gradient)
        finally:
            self._inputs = ()
        return of_x, *(of_other if need else None for need in needs[1:])

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Save tensors: of inputs, which the graph saves, only which they are."""
        places = {id(each): place for place, each in enumerate(self._inputs)}
        self._saved = [places.get(id(each), each) for each in tensors]
        self._versions = _versions_of(self._saved)

    @property
    def saved_tensors(self) -> tuple[Tensor | None, ...]:
        """The saved tensors, until a backward pass frees the graph."""
        if len(self._saved) < len(self._versions):
            raise RuntimeError(FREED)
        if _versions_of(self._saved) != self._versions:
            raise RuntimeError(MODIFIED)
        found = tuple(self._inputs[each] if isinstance(each, int) else each for each in self._saved)
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            self._saved = []
        return found


def _versions_of(saved: Sequence[Tensor | int | None]) -> list[int | None]:
    return [each._version if isinstance(each, Tensor) and not each.is_inference() else None for each in saved]


def _call_function(
    this: Tensor, key: Tensor, inputs: Sequence[Tensor], shape: Sequence[int], needs: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    call = _GraphCall.of(key, needs)
    y = call.forward(inputs, needs)
    # A block's recomputation may keep y, whose memory the graph may use for another tensor.
    return y.clone() if is_recomputed() else y, torch.frombuffer(call, dtype=torch.float64)


def _differentiate_function(
    key: Tensor,
    token: Tensor,
    inputs: Sequence[Tensor],
    gradient: Tensor,
    shape: Sequence[int],
    needs: Sequence[bool],
) -> list[Tensor]:
    call = _calls[int(token)]
    if call.function.keeps_inputs():
        inputs, gradient = [each.clone() for each in inputs], gradient.clone()
    parts = call.backward(inputs, gradient, needs)
    found = [torch.zeros_like(key)]
    shapes = [shape, *(each.shape for each in inputs[1:])]
    for each, size, part, need in zip((gradient, *inputs[1:]), shapes, parts, needs, strict=True):
        if need:
            part = each.new_zeros(size) if part is None else part.to(each.dtype).contiguous()
        found.append(part if need and part is not None else each.new_empty(0))
    return found


class _RecordedFunction(torch.autograd.Function):
    """Calls a function, which the graph differentiates: a compiler traces this, and finds two operators."""

    @staticmethod
    def forward(
        ctx: Any,
        shape: Sequence[int],
        needs: Sequence[bool],
        not_saved: int,
        this: Tensor,
        key: Tensor,
        *inputs: Tensor,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.needs, ctx.shape, ctx.not_saved = needs, inputs[0].shape, not_saved
        y, token = torch.ops.stretto.call_function(this, key, inputs, shape, needs)
        ctx.save_for_backward(key, token, *inputs[not_saved:])
        found: Tensor = y
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        key, token, *inputs = ctx.saved_tensors
        inputs = [key] * ctx.not_saved + inputs
        if gradient is None:
            return (None,) * (5 + len(inputs))
        needs = ctx.needs[1:]
        of_key, *found = torch.ops.stretto.differentiate_function(key, token, inputs, gradient, ctx.shape, needs)
        parts = [part if need else None for part, need in zip(found, needs, strict=True)]
        return None, None, None, None, of_key if ctx.needs[0] else None, *parts


def _record_function(
    this: Tensor, key: Tensor, inputs: Sequence[Tensor], shape: Sequence[int], needs: Sequence[bool], not_saved: int
) -> Tensor:
    y: Tensor = _RecordedFunction.apply(shape, needs, not_saved, this, key, *inputs)
    return y


_operators = torch.library.Library("stretto", "FRAGMENT")  # registrations live as long as this


def _register(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any] | None = None) -> None:
    """Register an operator. fake: what it returns of tensors without data; None for one that calls other operators."""
    name = schema.partition("(")[0]
    _operators.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _operators.impl(name, kernel, "CompositeImplicitAutograd" if fake is None else "CompositeExplicitAutograd")
    if fake is not None:
        torch.library.register_fake(f"stretto::{name}", fake, lib=_operators)


_register(
    "new_number(Tensor this) -> Tensor",
    lambda this: torch.tensor([next(_numbers)], dtype=torch.float64, device="cpu"),
    torch.empty_like,
)
_register(
    "record_function(Tensor this, Tensor key, Tensor[] inputs, SymInt[] shape, bool[] needs, int not_saved) -> Tensor",
    _record_function,
)
_register(
    "call_function(Tensor this, Tensor key, Tensor[] inputs, SymInt[] shape, bool[] needs) -> (Tensor, Tensor)",
    _call_function,
    lambda this, key, inputs, shape, needs: (
        inputs[0].new_empty(shape),
        torch.empty(1, dtype=torch.float64, device="cpu"),
    ),
)
_register(
    "differentiate_function(Tensor key, Tensor token, Tensor[] inputs, Tensor gradient, SymInt[] shape, bool[] needs)"
    " -> Tensor[]",
    _differentiate_function,
    lambda key, token, inputs, gradient, shape, needs: [
        torch.empty_like(key),
        gradient.new_empty(shape if needs[0] else 0),
        *(each.new_empty(each.shape if need else 0) for each, need in zip(inputs[1:], needs[1:], strict=True)),
    ],
)

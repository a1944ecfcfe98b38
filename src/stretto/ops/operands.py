# SPDX-License-Identifier: Apache-2.0
"""Checks of operators' operands, before anything is allocated or launched: ValueErrors that say what will do.

`takes_tensors` refuses, for a public function, what is no dense tensor. `require_operands` is for a product's x, weight
and bias, `require_out` for its `out`, `require_like` for any other tensor, `require_place` for x's layout and device.
"""

import functools
import inspect
import reprlib
import types
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from typing import Any, ParamSpec, TypeVar, get_args, get_origin

import torch
from torch import Tensor
from torch.autograd import forward_ad

FP8 = torch.float8_e4m3fn
"""The dtype of 8 bits that products take: 4 of exponent, 3 of mantissa, up to 448."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_DENSE = {Tensor, torch.nn.Parameter}

_P = ParamSpec("_P")
_R = TypeVar("_R")


def takes_tensors(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Have a public function check the tensors among its arguments, before anything else, by `require_dense`.

    Those are its parameters annotated with Tensor, alone or in a union. What another operator returned, as a handle,
    is of the class that it is annotated with, or a ValueError. NotImplementedError for forward-mode derivatives, and,
    by the function's name, where torch.func transforms a call and torch has no rule for that.
    """
    parameters = inspect.signature(function).parameters
    kinds = {name: _list_kinds(one.annotation) for name, one in parameters.items()}
    places = [(name, Tensor in kind) for name, kind in kinds.items()]
    records = [(place, name) for place, name in enumerate(kinds) if _is_record(kinds[name][0])]
    operator = function.__name__

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        for (name, is_tensor), given in zip(places, args, strict=False):
            if is_tensor and not _is_dense(given):
                _require_kind(operator, name, kinds[name], given)
        for name, given in kwargs.items():
            if not _is_dense(given) and Tensor in kinds.get(name, ()):
                _require_kind(operator, name, kinds[name], given)
        for place, name in records:
            given = args[place] if place < len(args) else kwargs.get(name)
            if not isinstance(given, kinds[name]):  # a record, or where the annotation has it, None
                kind = kinds[name][0].__name__
                raise ValueError(f"{operator}: {name} must be a {kind}, not {reprlib.repr(given):.60}")
        if forward_ad._current_level >= 0:
            require_no_tangents(*(given for given in (*args, *kwargs.values()) if isinstance(given, Tensor)))
        if not torch._C._are_functorch_transforms_active():
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            if type(error) is not RuntimeError:
                raise
            raise NotImplementedError(
                f"{operator} does not support this transform of torch.func: differentiate by backward() or "
                f"torch.autograd.grad, and call it for one example after another ({error})"
            ) from error

    return call


def _list_kinds(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or an annotation alone."""
    return get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)


def _is_record(kind: Any) -> bool:
    return is_dataclass(kind) or hasattr(kind, "_fields")


def _is_dense(given: Any) -> bool:
    return type(given) in _DENSE and given.layout is torch.strided and not (given.is_nested or given.is_neg())


def _require_kind(operator: str, name: str, kinds: tuple[Any, ...], given: Any) -> None:
    """`require_dense` of an argument, unless it is of another kind that its annotation allows."""
    if given is None and types.NoneType in kinds:
        return
    for kind in kinds:
        origin = get_origin(kind)
        if origin is Callable and callable(given):
            return
        if origin is Sequence and isinstance(given, Sequence) and not isinstance(given, str):
            for place, one in enumerate(given):
                _require_kind(operator, f"{name}[{place}]", _list_kinds(*get_args(kind)), one)
            return
    require_dense(operator, name, given)


def require_dense(operator: str, name: str, given: object) -> None:
    """ValueError for what is no tensor, or a sparse, nested, lazily negated or uninitialized one."""
    if not isinstance(given, Tensor):
        hint = ": torch.as_tensor makes one of it" * isinstance(given, list | tuple)
        shown = f"{reprlib.repr(given):.60} of type {type(given).__name__}{hint}"
    elif torch.compiler.is_compiling():  # which traces dense tensors alone, and none of these questions
        return
    elif torch.nn.parameter.is_lazy(given):
        shown = "an uninitialized one: call its lazy module once before"
    elif given.is_nested:
        shown = "a nested one: pad it (to_padded_tensor), or give each of its tensors in a call"
    elif given.layout is not torch.strided:
        shown = f"one of layout {given.layout}: call to_dense() on it"
    elif given.is_neg():
        shown = "one that torch negates when it is read: call resolve_neg() on it"
    else:
        return
    raise ValueError(f"{operator}: {name} must be a dense tensor, not {shown}")


def is_differentiated(*tensors: Tensor | None) -> bool:
    """True if autograd must see a call: some of its tensors need gradients, or may have forward-mode tangents.

    No operator here has forward-mode derivatives, and autograd raises where one is asked for.
    """
    return forward_ad._current_level >= 0 or needs_gradients(*tensors)


def needs_gradients(*tensors: Tensor | None) -> bool:
    """True if some of a call's tensors need gradients."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def require_no_gradients(operator: str, *tensors: Tensor | None) -> None:
    """ValueError where gradients would be needed, of which the operator has none."""
    if needs_gradients(*tensors):
        raise ValueError(f"{operator} has no gradients: call it under torch.no_grad(), or detach its operands")


def require_no_tangents(*tensors: Tensor | None) -> None:
    """NotImplementedError for forward-mode derivatives, which torch.library would silently make zeros of."""
    if forward_ad._current_level < 0:
        return
    for tensor in tensors:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(
                "stretto's operators have no forward-mode derivatives (jvp): differentiate them backward"
            )


def require_operands(
    operator: str, x: Tensor, weight: Tensor, bias: Tensor | None, implementation: str = "auto"
) -> None:
    """ValueError unless x [., k], weight [n, k] and bias [n] have one dtype and device, and a supported layout.

    weight may also be the transpose of a contiguous tensor. fp64 is for implementation="library" alone.
    """
    require_matrices(operator, x, weight)
    if x.dtype == FP8:
        raise ValueError(
            f"{operator} does not support fp8; use the operators with scales: all_gather_scaled_matmul, "
            "scaled_matmul_reduce_scatter and scaled_matmul_all_reduce"
        )
    if x.dtype not in DTYPES and not (x.dtype == torch.float64 and implementation == "library"):
        names = ", ".join(str(dtype) for dtype in DTYPES)
        rest = ', or give implementation="library"' if x.dtype == torch.float64 else ""
        raise ValueError(f"{operator} takes {names}, not {x.dtype}: convert x, weight and bias{rest}")
    require_weight(operator, x, weight, bias)
    require_place(operator, x)


def require_weight(operator: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """ValueError unless weight [n, k] and bias [n] have x's dtype and device, and a supported layout."""
    require_like(operator, "weight", weight, weight.shape, x.dtype, x.device, may_have_gaps=True)
    if bias is not None:
        require_like(operator, "bias", bias, weight.shape[:1], x.dtype, x.device)
    if not (weight.is_contiguous() or weight.t().is_contiguous()):
        raise ValueError(
            f"{operator} takes a contiguous weight, or the transpose of one, not strides {weight.stride()}: call "
            "contiguous() on it"
        )


def require_out(operator: str, out: Tensor, shape: tuple[int, ...], dtype: torch.dtype, *others: Tensor | None) -> None:
    """ValueError unless a call can write its output to `out`.

    others: the call's operands and other outputs, whose first determines the device; none may share memory with it.
    """
    require_like(operator, "out", out, shape, dtype, next(one.device for one in others if one is not None))
    if out.requires_grad or (torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in others)):
        raise ValueError(
            f"{operator} with out= has no gradients, as torch's functions have none: call it under torch.no_grad() "
            "with an out that requires none, or without out="
        )
    if torch.compiler.is_compiling():  # which traces none of what follows
        return
    if out.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(f"{operator}: out was made in inference mode, and is written to only there: clone() it")
    if any(one is not None and _share_memory(out, one) for one in others):
        raise ValueError(f"{operator}: out shares memory with an operand or another out: give it memory of its own")


def _share_memory(one: Tensor, other: Tensor) -> bool:
    """True if the memory of two tensors overlaps, each of which has no gaps."""
    if type(one) is not Tensor or type(other) not in (Tensor, torch.nn.Parameter):
        return False  # subclasses, fake tensors among them, may have no address
    first, second = one.data_ptr(), other.data_ptr()
    return first < second + other.nbytes and second < first + one.nbytes


def require_like(
    operator: str,
    name: str,
    given: Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype | tuple[torch.dtype, ...],
    device: torch.device,
    *,
    may_have_gaps: bool = False,
) -> None:
    """ValueError unless a tensor has this shape, dtype (or one of these) and device, and is contiguous."""
    is_right = given.shape == shape and (given.dtype is dtype or (type(dtype) is tuple and given.dtype in dtype))
    if not (is_right and given.device == device and (may_have_gaps or given.is_contiguous())):
        kinds = " or ".join(map(str, dtype)) if isinstance(dtype, tuple) else dtype
        wanted = f"{list(shape)} of {kinds} on {device}{', contiguous' * (not may_have_gaps)}"
        raise ValueError(f"{operator}: {name} must be {wanted}, not {describe_tensor(given)}")


def describe_tensor(tensor: Tensor) -> str:
    return f"{show_shape(tensor)} of {tensor.dtype} on {tensor.device} with strides {tensor.stride()}"


def require_matrices(operator: str, x: Tensor, weight: Tensor) -> None:
    if x.dim() != 2 or weight.dim() != 2:
        raise ValueError(
            f"{operator} takes x [..., k] and weight [n, k], which has two dims, not {show_shape(x)} and "
            f"{show_shape(weight)}"
        )
    if x.shape[1] != weight.shape[1]:
        raise ValueError(f"{operator}: x {show_shape(x)} and weight {show_shape(weight)} differ in k, their last dim")


def _require_contiguous(operator: str, x: Tensor) -> None:
    if not x.is_contiguous():
        raise ValueError(f"{operator} takes a contiguous x, not strides {x.stride()}: call contiguous() on it")


def require_place(operator: str, x: Tensor) -> None:
    _require_contiguous(operator, x)
    require_device(operator, "x is", x)


def require_device(operator: str, what: str, tensor: Tensor) -> None:
    """ValueError for a tensor that is neither on a CPU nor on this rank's GPU. what: it and its verb, as "x is"."""
    device = tensor.device
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{operator} takes tensors on devices of type cpu or cuda, not {device}")
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        raise ValueError(
            f"{operator}: {what} on {device}, and this rank's current GPU is {torch.cuda.current_device()}: call "
            "torch.cuda.set_device first"
        )


def divide_first_dim(operator: str, x: Tensor, world: int) -> int:
    """A rank's part of x's first dim. ValueError where the ranks do not divide it."""
    if x.shape[0] % world:
        more = -(-x.shape[0] // world) * world
        raise ValueError(f"{operator}: {world} ranks do not divide x's first dim, {x.shape[0]}: {more} will do")
    return x.shape[0] // world


def flatten_rows(operator: str, x: Tensor) -> Tensor:
    """A view of x [..., k] as rows [rows, k]. ValueError for fewer than two dims, and where x is not contiguous."""
    if x.dim() == 2:
        return x
    if x.dim() < 2:
        raise ValueError(f"{operator} takes x [..., k], of two dims or more, not {show_shape(x)}")
    _require_contiguous(operator, x)
    return x.flatten(0, -2)


def restore_dims(rows: Tensor, x: Tensor, first: int) -> Tensor:
    """A view of a product's rows [., n] as [first, ..., n], with x's dims between the first and the last."""
    return rows if x.dim() == 2 else rows.view(first, *x.shape[1:-1], rows.shape[-1])


def show_shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))

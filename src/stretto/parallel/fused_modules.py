# SPDX-License-Identifier: Apache-2.0
"""Replaces what transformers' modules compute by fused kernels, where these compute the same (`fused="auto"`).

Modules, their parameters, names and hooks stay, and only their forward is replaced. torch.compile traces the module's
own forward instead: Inductor fuses a norm, a rotation or a gate with what is next to it, for which a kernel of
Stretto's would be a wall.
"""

import functools
import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stretto.huggingface.formulas import NormKind
from stretto.huggingface.known_modules import (
    ROTATE,
    cache_of_nothing,
    calls_rotation,
    is_gated_mlp,
    is_gelu_by_tanh,
    keeps_keys_and_values,
    rms_norm_of,
    rotates_halves,
)
from stretto.ops import rotary
from stretto.ops.moe.activation import is_silu
from stretto.ops.rms_norm import rms_norm
from stretto.parallel.layers.attention_backend import AttentionTuner
from stretto.parallel.layers.fused import swiglu
from stretto.parallel.state import ShardingRequest

_FUNCTIONS = "ALL_ATTENTION_FUNCTIONS"


def fuses(request: ShardingRequest, *, is_pretrained: bool) -> bool:
    """True if modules of this model are to be replaced: of a transformers model on GPUs, unless `fused` is False."""
    return request.options.fused == "auto" and is_pretrained and request.grid.device.type == "cuda"


def fuse_modules(model: nn.Module, tuner: AttentionTuner) -> None:
    """Replace the forward of each module whose computation is known. Its parameters are still those of the model.

    tuner: chooses the kernel of attention without a mask, where the model calls torch's (`attn_implementation="sdpa"`).
    """
    for name, module in model.named_modules():
        if (kind := rms_norm_of(module, name)) is not None:
            module.forward = _of_one(module.forward, _normalize(module, kind))
        elif is_gated_mlp(module):
            module.forward = _of_one(module.forward, _multiply_by_silu(module))
        elif is_gelu_by_tanh(module):
            module.forward = _of_one(module.forward, functools.partial(F.gelu, approximate="tanh"))
        elif rotates_halves(module):
            module.forward = _unless_compiled(module.forward, _rotate(module, tuner))
    if keeps_keys_and_values(model):
        _keep_no_cache(model)


def _keep_no_cache(model: nn.Module) -> None:
    """Pass, in training, a cache that keeps nothing, unless the caller wants one, or says where tokens are.

    With a cache, which transformers makes otherwise, torch.compile makes a graph for each layer, and none for those
    from the ninth on. Without any, transformers looks for packed sequences in positions: the host waits for the GPU.
    """
    nothing, layers = cache_of_nothing(), [one for one in model.modules() if hasattr(one, "gradient_checkpointing")]

    def pass_nothing(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("past_key_values") is nothing:
            raise ValueError(
                "past_key_values are of a training step, which kept none: have the step before keep them, by "
                "use_cache=True"
            )
        wants = kwargs.get("use_cache") or kwargs.get("past_key_values") is not None
        names_output = kwargs.get("return_dict", getattr(model.config, "return_dict", True)) is not False
        is_placed = kwargs.get("position_ids") is not None or len(args) > 2
        if not (model.training and torch.is_grad_enabled() and names_output) or wants or is_placed:
            return None
        if any(layer.gradient_checkpointing for layer in layers):  # these take none
            return None
        return args, kwargs | {"use_cache": False, "past_key_values": nothing}

    def name_nothing(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if kwargs.get("past_key_values") is nothing and getattr(output, "past_key_values", nothing) is None:
            output.past_key_values = nothing  # a later call that is given None would attend to nothing, in silence

    model.register_forward_pre_hook(pass_nothing, with_kwargs=True)
    model.register_forward_hook(name_nothing, with_kwargs=True)


def _unless_compiled(own: Callable[..., Any], fused: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs) if torch.compiler.is_compiling() else fused(*args, **kwargs)

    return forward


def _of_one(own: Callable[..., Any], fused: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """The fused computation of one tensor; the module's own if it is given more, as gated norms are, or by name."""

    def of_one(*args: Any, **kwargs: Any) -> Any:
        return fused(*args) if len(args) == 1 and not kwargs else own(*args, **kwargs)

    return _unless_compiled(own, of_one)


def _normalize(module: nn.Module, kind: NormKind) -> Callable[[Tensor], Tensor]:
    own, eps, offset = module.forward, kind.eps, kind.weight_offset
    assert eps is not None

    def normalize(x: Tensor) -> Tensor:
        weight = module.weight
        assert isinstance(weight, Tensor)
        # Of two dtypes, Llama's product has the wider one, and Gemma's x's own.
        return rms_norm(x, weight, eps, offset) if weight.dtype == x.dtype or offset else own(x)

    return normalize


def _multiply_by_silu(module: Any) -> Callable[[Tensor], Tensor]:
    own = module.forward

    def multiply(x: Tensor) -> Tensor:
        if not is_silu(module.act_fn):  # Gemma's is GELU, and a user may hook or replace one
            return own(x)
        return module.down_proj(swiglu(module.gate_proj(x), module.up_proj(x)))

    return multiply


class _Globals(dict[str, Any]):
    """The globals of a function, as they are when they are read, but for those that are given here."""

    def __init__(self, others: dict[str, Any], **given: Any) -> None:
        super().__init__(given, __builtins__=others["__builtins__"])
        self._others = others

    def __missing__(self, name: str) -> Any:
        return self._others[name]


class _Interfaces:
    """transformers' functions of attention by name, of which "sdpa" runs in the context of a tuner."""

    def __init__(self, others: Any, tuner: AttentionTuner) -> None:
        self._others = others
        self._tuner = tuner

    def get_interface(self, name: str, default: Any) -> Any:
        function = self._others.get_interface(name, default)
        return functools.partial(self._attend, function) if name == "sdpa" else function

    def _attend(
        self,
        function: Any,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **options: Any,
    ) -> Any:
        is_causal, is_decoding = bool(getattr(module, "is_causal", True)), query.shape[2] == 1
        whole = attention_mask is None and not is_decoding
        with self._tuner.select(query, key, value, is_causal=is_causal) if whole else nullcontext():
            return function(module, query, key, value, attention_mask, **options)


def _rotate(module: nn.Module, tuner: AttentionTuner) -> Callable[..., Any]:
    """The attention's own code, calling others in place of `apply_rotary_pos_emb` and of functions of attention.

    The module of transformers, whose other attentions may not be of a parallelized model, is not changed.
    """
    own: Any = type(module).forward
    given: dict[str, Any] = {ROTATE: _rotate_by(own, rotary.rotate_halves)}
    if "get_interface" in own.__code__.co_names and _FUNCTIONS in own.__globals__:
        given[_FUNCTIONS] = _Interfaces(own.__globals__[_FUNCTIONS], tuner)
    return _with_globals(module, given)


def defer_rotation(module: nn.Module, note: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
    """Have an attention call `note` with queries, keys, cosines and sines in place of a rotation of halves.

    If its class's code does that, and nobody but `fuse_modules` has replaced or wrapped it: a wrapper, which has
    parameters read as tensors, say, would be lost.
    """
    kind: Any = type(module)
    known = kind.forward.__code__, _unless_compiled(kind.forward, kind.forward).__code__
    if getattr(module.forward, "__code__", None) in known and calls_rotation(kind):
        module.forward = _with_globals(module, {ROTATE: _rotate_by(kind.forward, note)})


def _rotate_by(own: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function for calls of the rotation in an attention's own code; those that kernels do not take stay its own."""

    def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *more: Any, **options: Any) -> Any:
        heads = query, key, cos, sin
        if more or options or not rotary.suits_kernel(*heads):
            return own.__globals__[ROTATE](*heads, *more, **options)
        return function(*heads)

    return rotate


def _with_globals(module: nn.Module, given: dict[str, Any]) -> Callable[..., Any]:
    """The forward of a module's class, with other values of some globals."""
    own: Any = type(module).forward
    others = _Globals(own.__globals__, **given)
    code = types.FunctionType(own.__code__, others, own.__name__, own.__defaults__, own.__closure__)
    code.__kwdefaults__, code.__wrapped__ = own.__kwdefaults__, own  # type: ignore[attr-defined]
    return types.MethodType(code, module)

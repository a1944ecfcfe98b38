# SPDX-License-Identifier: Apache-2.0
"""Recognizes modules of transformers for whose computation there are fused kernels, by running them on random numbers.

Some 180 families copy Llama's modules, and a few change them under the same name: so neither names nor the text of a
forward decide, but what it computes. transformers is imported for a model of its own only.
"""

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from stretto.huggingface.families import DECODERS
from stretto.huggingface.formulas import NormKind, norm_kind

ROTATE = "apply_rotary_pos_emb"
"""The function by which transformers' attention rotates queries and keys."""

_FAILURES = (TypeError, ValueError, IndexError, AttributeError, RuntimeError)  # of a module that takes something else


def has_own_forward(module: nn.Module) -> bool:
    """True if this is a module of transformers whose forward is its class's, which nobody has wrapped or replaced."""
    return type(module).__module__.startswith("transformers.") and "forward" not in vars(module)


def rms_norm_of(module: nn.Module, name: str) -> NormKind | None:
    """The formula of a module that is an RMSNorm with a weight and nothing else; None for any other module."""
    if not has_own_forward(module) or [key for key, _ in module.named_parameters()] != ["weight"]:
        return None
    try:
        kind = norm_kind(module, name)
    except _FAILURES:
        return None
    return None if kind.is_centred or kind.eps is None else kind


def is_gated_mlp(module: nn.Module) -> bool:
    """True if a module computes down_proj(act_fn(gate_proj(x)) * up_proj(x)), whatever these four are."""
    return has_own_forward(module) and is_of_gated_mlps(module)


def is_of_gated_mlps(module: nn.Module) -> bool:
    """True if a module's class computes what `is_gated_mlp` says, whether or not this one's forward was replaced."""
    parts = ("gate_proj", "up_proj", "down_proj", "act_fn")
    return all(hasattr(module, part) for part in parts) and _is_gated(type(module).forward)


@functools.cache
def _is_gated(forward: Callable[..., Any]) -> bool:
    x = _draw(6, 5) * torch.tensor([0.1, 0.1, 1.0, 1.0, 50.0, 50.0], dtype=torch.float64, device="cpu")[:, None]
    stand_in = SimpleNamespace(
        gate_proj=lambda x: 2 * x + 1, up_proj=lambda x: x - 3, down_proj=lambda x: x.flip(-1), act_fn=torch.sin
    )
    return _computes(forward, (stand_in, x), (torch.sin(2 * x + 1) * (x - 3)).flip(-1))


def is_pre_norm_block(layer: nn.Module) -> bool:
    """True if a layer's class computes h = x + self_attn(input_layernorm(x)), and h + mlp(post_attention_layernorm(h)).

    Whatever these four are; it hands attention hidden_states and its other arguments by name, and takes the first of
    what attention returns.
    """
    parts = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
    # What transformers wraps around it checkpoints activations.
    return all(hasattr(layer, part) for part in parts) and _is_pre_norm(inspect.unwrap(type(layer).forward))


@functools.cache
def _is_pre_norm(forward: Callable[..., Any]) -> bool:
    x = _draw(2, 3, 4)
    stand_in = SimpleNamespace(
        input_layernorm=lambda x: 2 * x + 1,
        self_attn=lambda hidden_states, **_: (torch.sin(hidden_states), None),
        post_attention_layernorm=lambda x: x - 3,
        mlp=torch.cos,
        training=False,
    )
    inner = x + torch.sin(2 * x + 1)
    return _computes(forward, (stand_in, x), inner + torch.cos(inner - 3))


def is_gelu_by_tanh(module: nn.Module) -> bool:
    """True if an activation computes by several operators what `torch.nn.functional.gelu(approximate="tanh")` does."""
    is_activation = type(module).__module__ == "transformers.activations"
    return is_activation and has_own_forward(module) and _is_gelu(type(module).forward)


@functools.cache
def _is_gelu(forward: Callable[..., Any]) -> bool:
    x = 3 * _draw(64)
    return _computes(forward, (SimpleNamespace(), x), nn.functional.gelu(x, approximate="tanh"))


def rotates_halves(module: nn.Module) -> bool:
    """True if an attention calls, as `apply_rotary_pos_emb`, heads * cos + (-second halves, first halves) * sin."""
    return has_own_forward(module) and calls_rotation(type(module))


def computes_angles(module: nn.Module) -> bool:
    """True if this is a rotary embedding whose cosines and sines of a token depend on its position alone.

    It is run on positions that are not in order: forward(x, position_ids [1, n]) -> two of [1, n, features].
    """
    name = type(module).__name__
    if not type(module).__module__.startswith("transformers.") or not name.endswith("RotaryEmbedding"):
        return False
    places = torch.tensor([[5, 0, 3]], device=next((each.device for each in module.buffers()), None))
    x = torch.ones(1, 3, 8, device=places.device)
    try:
        pairs = [module.forward(x, places[:, some]) for some in (slice(None), slice(0, 1), slice(2, 3))]
        whole, *single = [torch.stack(tuple(pair)) for pair in pairs]
    except _FAILURES:
        return False
    return whole.shape[:3] == (2, 1, 3) and whole.dim() == 4 and torch.equal(whole[:, :, [0, 2]], torch.cat(single, 2))


def calls_rotation(kind: type[nn.Module]) -> bool:
    """True if the code of an attention's class does what `rotates_halves` says."""
    forward: Any = kind.forward
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    return ROTATE in names and _rotates(forward.__globals__.get(ROTATE))


@functools.cache
def _rotates(function: Callable[..., Any]) -> bool:
    query, key, cos, sin = _draw(2, 3, 4, 6), _draw(2, 1, 4, 6), _draw(2, 4, 6), _draw(2, 4, 6)

    def turn(heads: Tensor) -> Tensor:
        first, second = heads.chunk(2, -1)
        return heads * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]

    return _computes(function, (query, key, cos, sin), (turn(query), turn(key)))


def keeps_keys_and_values(model: nn.Module) -> bool:
    """True if a model of transformers has layers of attention alone, whose cache keeps keys and values alone."""
    names = inspect.signature(model.forward).parameters
    kind = getattr(getattr(model, "config", None), "model_type", None)
    return kind in DECODERS and "use_cache" in names and "past_key_values" in names


@functools.cache
def cache_of_nothing() -> Any:
    """Make a cache of transformers that returns the keys and values that it is given, and keeps none."""
    from transformers import DynamicCache

    class CacheOfNothing(DynamicCache):
        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            return key_states, value_states

    return CacheOfNothing()


def _draw(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")


def _computes(function: Callable[..., Any], arguments: tuple[Any, ...], expected: Tensor | tuple[Tensor, ...]) -> bool:
    try:
        with torch.no_grad():
            torch.testing.assert_close(function(*arguments), expected, rtol=1e-6, atol=1e-7, check_dtype=False)
    except (*_FAILURES, AssertionError):
        return False
    return True

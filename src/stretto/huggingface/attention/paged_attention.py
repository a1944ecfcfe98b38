# SPDX-License-Identifier: Apache-2.0
"""Decoding of transformers' models: their attention reads and writes a paged cache, by transformers' own interface
(`attn_implementation`). Nothing of transformers is changed."""

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from stretto.huggingface.attention.linear_attention import linear_attentions_of
from stretto.huggingface.context import DEPENDS_ON_LENGTH, attentions_of, is_causal, passes_window

NAME = "stretto_paged"
"""The `attn_implementation` of models that an engine runs."""

_LAYERS = ("full_attention", "sliding_attention", "attention", "moe", "mlp")


class AttendToPages(Protocol):
    """Attention of one layer: stores the keys and values of this step's tokens, and attends to all of each request.

    query [tokens, heads, head], key and value [tokens, KV heads, head] -> [tokens, heads, value's head].
    """

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, window: int | None) -> Tensor:
        """Attend. window: how many tokens, its own among them, each token sees; None for all."""
        ...


def refusal_of_decoding(model: Any, parameters: Sequence[str]) -> str | None:
    """Say why a model cannot decode from a paged cache; None if it can. parameters: the names of its forward's."""
    config, kind = model.config, type(model).__name__
    attentions = attentions_of(model)
    layers = Counter(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ())
    others = sorted(layers.keys() - set(_LAYERS))
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    ropes = {str(each.get("rope_type")) for each in (rope, *rope.values()) if isinstance(each, dict)}
    if getattr(config, "is_encoder_decoder", False) or config.get_text_config() is not config:
        return f"{kind} has several inputs (an encoder's, or pictures), of which the engine takes none"
    if others or linear_attentions_of(model):
        named = ", ".join(others) or "linear attention"
        return f"{kind} has layers ({named}) whose state is not a cache of keys and values"
    if not attentions or not model._can_set_attn_implementation():
        return f"the attention of {kind} does not go through transformers' attention interface"
    if any(isinstance(module, nn.Conv1d | nn.Conv2d) for module in model.modules()):
        return f"{kind} has convolutions over its sequences"
    if not is_causal(model):
        return f"{kind} lets tokens attend to later ones"
    if model.get_output_embeddings() is None:
        return f"{kind} has no head that predicts tokens"
    if any(getattr(module, "attn_logit_softcapping", None) is not None for module in attentions):
        return f"{kind} caps its attention's logits; attn_logit_softcapping=None would do"
    if any(isinstance(getattr(module, "sinks", None), Tensor) for module in attentions):
        return f"the attention of {kind} has sinks"
    if found := ropes & set(DEPENDS_ON_LENGTH):
        return f"{kind}'s rotary embedding, {', '.join(sorted(found))}, depends on the longest request of a step"
    if getattr(config, "sliding_window", None) and not all(passes_window(type(module)) for module in attentions):
        return f"the attention of {kind} has a sliding window by its mask alone; sliding_window=None would do"
    if "position_ids" not in parameters:
        return f"the forward of {kind} takes no position_ids"
    return None


def attend_to_pages(model: Any, layers: Sequence[AttendToPages]) -> None:
    """Have each of a model's `attentions_of` attend by its part of `layers`, from the next forward pass on."""
    _register()
    for module, layer in zip(attentions_of(model), layers, strict=True):
        module.attend_to_pages = layer  # type: ignore[assignment]
    if model.config._attn_implementation != NAME:
        model.set_attn_implementation(NAME)


@functools.cache
def _register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attend)  # without a mask of this name, transformers makes none


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    attend: AttendToPages | None = getattr(module, "attend_to_pages", None)
    if attend is None:
        raise ValueError(
            f"this {type(module).__name__} has the attn_implementation {NAME!r} of a model that an engine runs, and "
            "shares its configuration: build it from copy.deepcopy(config), with attn_implementation='sdpa'"
        )
    for name in ("position_bias", "softcap", "s_aux"):
        if others.get(name) is not None:
            raise ValueError(f"attention to a paged cache takes no {name}, which {type(module).__name__} has")
    if attention_mask is not None or query.shape[0] != 1:
        raise ValueError("the engine runs one row of tokens, without a mask: call its generate or step, not the model")
    tokens = (each[0].transpose(0, 1) for each in (query, key, value))
    return attend(*tokens, scale=scaling, window=sliding_window).unsqueeze(0), None

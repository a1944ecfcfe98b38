# SPDX-License-Identifier: Apache-2.0
"""Decoding of transformers' models: their attention reads and writes a paged cache, by transformers' own interface
(`attn_implementation`). Nothing of transformers is changed."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from stretto.huggingface.attention.linear_attention import linear_attentions_of
from stretto.huggingface.context import (
    LAYERS,
    attentions_of,
    count_layers,
    is_causal,
    refusal_of_attention,
    refusal_of_default_positions,
)

NAME = "stretto_paged"
"""The `attn_implementation` of models that an engine runs."""


_WARNS = "warn_if_padding_and_no_attention_mask"

AttendToPages = Callable[..., Tensor]
"""Attention of one layer: stores the keys and values of this step's tokens, and attends to all of each request.

query [tokens, heads, head], key and value [tokens, KV heads, head], scale, and window, how many tokens each token sees
(None: all) -> [tokens, heads, value's head].
"""


def refusal_of_decoding(model: Any, parameters: Sequence[str]) -> str | None:
    """Say why a model cannot decode from a paged cache; None if it can. parameters: the names of its forward's."""
    kind = type(model).__name__
    others = sorted(count_layers(model).keys() - set(LAYERS))
    if others or linear_attentions_of(model):
        named = ", ".join(others) or "linear attention"
        return f"{kind} has layers ({named}) whose state is not a cache of keys and values"
    if (why := refusal_of_attention(model, parameters)) is not None:
        return why
    if not is_causal(model):
        return f"{kind} lets tokens attend to later ones"
    if refusal_of_default_positions(model, {}) is not None:  # generate gives others, by which a trainer's logits differ
        return f"{kind} counts positions from padding, which a token that is decoded does not know"
    if model.get_output_embeddings() is None:
        return f"{kind} has no head that predicts tokens"
    if any(isinstance(getattr(module, "sinks", None), Tensor) for module in attentions_of(model)):
        return f"the attention of {kind} has sinks"
    return None


def attend_to_pages(model: Any, layers: Sequence[AttendToPages]) -> None:
    """Have each of a model's `attentions_of` attend by its part of `layers`, from the next forward pass on.

    Its forward pass no longer looks for padding in its ids, of which the host would wait for each step's.
    """
    _register()
    for module in model.modules():
        if hasattr(module, _WARNS):
            setattr(module, _WARNS, lambda *_: None)
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

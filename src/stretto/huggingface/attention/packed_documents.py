# SPDX-License-Identifier: Apache-2.0
"""Attention of transformers' models to packed documents and padded rows, whose sequences are whole: in memory linear in
the sequence, where transformers' own (`attn_implementation` "sdpa" or "eager") makes a mask of all pairs of tokens."""

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stretto.huggingface.context import (
    LAYERS,
    LINEAR_LAYERS,
    OWN_MASK,
    PaddingError,
    attentions_of,
    count_layers,
    drops_weights,
    find_documents,
    hands_arguments_on,
    ignores_positions,
    is_causal,
    makes_own_mask,
    passes,
    refusal_of_interface,
    register_attention,
)
from stretto.huggingface.known_modules import cache_of_nothing
from stretto.huggingface.pretrained_model import unwrap
from stretto.ops.attention import packed_attention

NAME = "stretto_packed"
"""The `attn_implementation` of a model while it runs on packed documents or padded rows."""

_MAKE_MASKS = ("sdpa", "eager")
_TELL = ("attention_mask", "position_ids", "cu_seq_lens_q")

_log = logging.getLogger(__name__)


def refusal_of_packed(model: Any) -> str | None:
    """Say why a transformers model's attention to packed rows stays transformers' own; None if it does not."""
    inner: Any = unwrap(model)
    kind, parameters = type(inner).__name__, inspect.signature(inner.forward).parameters
    if (why := refusal_of_interface(inner)) is not None:
        return why
    attentions = attentions_of(inner)
    if others := sorted(count_layers(inner).keys() - {*LAYERS, *LINEAR_LAYERS}):
        return f"{kind} has layers of the kind {', '.join(others)}"
    if "start_positions" in parameters:
        return f"{kind} compares positions of answers with all outputs of a row, padding's too"
    if not attentions or not is_causal(inner):
        return f"{kind} has no causal attention"
    if any(getattr(module, "config", None) is not inner.config for module in attentions):
        return f"the attention of {kind} has a configuration of its own"
    takes_more = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    if not takes_more or not all(
        _is_handed_on(inner, name) for name, each in inner.named_modules() if each in attentions
    ):
        return f"the code of {kind} hands attention no further arguments (**kwargs)"
    if any(makes_own_mask(inspect.unwrap(type(each).forward)) for each in attentions):
        return f"the attention of {kind} makes a mask of its own"
    if any(passes(type(module), "block_sequence_ids") for module in inner.modules()):
        return f"the code of {kind} makes masks of blocks"
    parts = {type(part) for each in attentions for part in each.modules() if part is not each}
    if masked := [each.__name__ for each in parts if "attention_mask" in inspect.signature(each.forward).parameters]:
        return f"{masked[0]} within the attention of {kind} reads its mask"
    return None


def _is_handed_on(model: nn.Module, attention: str) -> bool:
    owner, _, name = attention.rpartition(".")
    return hands_arguments_on(inspect.unwrap(type(model.get_submodule(owner)).forward), name)


class PackedPasses:
    """Has the attention of a model's forward passes on packed or padded rows computed by `packed_attention`.

    A pass hands documents to attention as an argument, with which a checkpoint computes it again. While such a pass, or
    attention that is computed again, runs, the configuration's `attn_implementation` is NAME.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._config, self._forward = model, model.config, model.forward
        self._signature = inspect.signature(model.forward)
        self._drops = any(map(drops_weights, attentions_of(model)))
        self._follows = False
        # What runs within is compiled, if anything is.
        model.forward = functools.wraps(self._forward)(torch.compiler.disable(self._run, recursive=False))

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        found, own = self._find(args, kwargs), self._config._attn_implementation
        if found is None:
            return self._forward(*args, **kwargs)
        self._follow_attention()
        self._config._attn_implementation = NAME
        try:
            return self._forward(*args, **kwargs, **found)
        finally:
            self._config._attn_implementation = own

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor] | None:
        if len(args) < 2 and all(kwargs.get(name) is None for name in _TELL):
            return None
        if self._config._attn_implementation not in _MAKE_MASKS or (self._drops and self._model.training):
            return None
        given = dict(self._signature.bind(*args, **kwargs).arguments)
        for parameter in self._signature.parameters.values():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                given |= given.pop(parameter.name, {})
        return _find(self._model, given)

    def _follow_attention(self) -> None:
        """From the first packed pass on, attention that is computed again is told of its documents, too."""
        if self._follows:
            return
        self._follows = True
        register_attention(NAME, _attend)
        for module in attentions_of(self._model):
            module.forward = self._wrap(module.forward)

    def _wrap(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            own = self._config._attn_implementation
            if kwargs.get("packed_documents") is None or own == NAME:
                return forward(*args, **kwargs)
            self._config._attn_implementation = NAME
            try:  # what is computed again may end within by an exception that no hook sees
                return forward(*args, **kwargs)
            finally:
                self._config._attn_implementation = own

        return run


def _find(model: nn.Module, given: Mapping[str, Any]) -> dict[str, Tensor] | None:
    """Arguments that tell attention of documents and padding; None for rows that have none, for passes that make or
    read a cache, and for masks and results that are transformers' own. For masks and positions on a GPU the host waits.
    """
    names = ("input_ids", "inputs_embeds")
    tokens = next((each for name in names if isinstance(each := given.get(name), Tensor)), None)
    cache, mask, positions = (given.get(name) for name in ("past_key_values", "attention_mask", "position_ids"))
    if type(tokens) is not Tensor or tokens.dim() < 2 or tokens.device.type not in ("cpu", "cuda"):
        return None
    if tokens.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    rows, length = tokens.shape[:2]
    is_plain = mask is None or (isinstance(mask, Tensor) and mask.shape == (rows, length))
    if not is_plain or (cache is not None and cache is not cache_of_nothing()):
        return None
    config: Any = model.config
    if mask is not None and type(model).__name__.endswith("ForSequenceClassification"):
        ids = () if tokens.is_floating_point() else tokens[mask == 0].unique().tolist()
        if ids != [config.pad_token_id]:  # it reads the output of each row's last token that has not this id
            return None
    if given.get("output_attentions", getattr(config, "output_attentions", False)):
        return None
    if isinstance(positions, Tensor) and (positions.dim() != 2 or ignores_positions(model, given)):
        given = {**given, "position_ids": None}
    try:
        documents = find_documents(model, given, rows, length).ends
    except PaddingError:
        return None
    if documents is None:
        return None
    return {"packed_documents": documents} | ({} if mask is None else {"packed_padding": mask == 0})


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    packed_documents: Tensor | None = None,
    packed_padding: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    if packed_documents is None:
        raise ValueError(
            f"{type(module).__name__} is not handed the documents of a pass by the code of its model, or shares the "
            "configuration of a model that runs: copy.deepcopy(config) would do, or rows of one document each"
        )
    if attention_mask is not None:
        raise ValueError(OWN_MASK)
    query, key = query.to(value.dtype), key.to(value.dtype)  # under autocast, of norms in fp32
    size = value.shape[-1]
    if query.is_cuda and size < query.shape[-1]:  # flash attention takes values of the keys' size
        value = F.pad(value, (0, query.shape[-1] - size))
    out = packed_attention(query, key, value, packed_documents, scale=scaling, window=sliding_window, sinks=s_aux)
    out = out[..., :size]
    if packed_padding is not None:
        out = out.masked_fill(packed_padding[:, None, :, None], 0)
    return out.transpose(1, 2).contiguous(), None


def install_packed(model: nn.Module) -> None:
    """Have a transformers model's attention to packed documents and padded rows take memory linear in the sequence,
    where it can; elsewhere transformers goes on to make masks, and the reason is logged."""
    if refusal := refusal_of_packed(model):
        _log.debug("packed rows take masks of all pairs of tokens: %s", refusal)
    else:
        PackedPasses(unwrap(model))

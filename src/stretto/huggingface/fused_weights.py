# SPDX-License-Identifier: Apache-2.0
"""Weights of transformers' models that fuse several matrices: queries, keys and values; gate and up."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from stretto.huggingface.experts import ExpertsKind, experts_kind
from stretto.huggingface.formulas import UnknownRolesError
from stretto.huggingface.pretrained_model import is_conv1d, unwrap

_HEADS_APART = "bloom", "gpt_neox", "gpt_neox_japanese", "persimmon"  # each head's query, key and value lie together
_OF_ATTENTION = "qkv", "qkv_proj", "query_key_value", "Wqkv", "wqkv", "W_pack", "c_attn"


class FusedMatrices(NamedTuple):
    """The matrices of a weight: of each its output features, those f with start <= f % period < stop.

    ranges: (start, stop, period) of each; () for one matrix. is_transposed: the weight is [.., in, out]. is_known: False
    if its name says that it is fused, and nothing how.
    """

    ranges: tuple[tuple[int, int, int], ...] = ()
    is_transposed: bool = False
    is_known: bool = True


def fused_matrices(model: nn.Module, name: str, shape: Sequence[int]) -> FusedMatrices:
    """The matrices that the weight `name`, of the whole shape [.., a, b], fuses. model: on a grid, or plain."""
    parts = name.split(".")
    if len(shape) == 3:
        return _of_experts(model, *name.rpartition(".")[::2], shape)
    module = model.get_submodule(".".join(parts[:-1]))
    is_transposed = is_conv1d(module) or bool(getattr(getattr(module, "plan", None), "is_transposed", False))
    outputs = shape[-1 if is_transposed else -2]
    if "lora_A" in parts:  # whose rows are the rank's
        return FusedMatrices()
    sizes: tuple[int, ...] = ()
    is_known = True
    if "gate_up_proj" in parts:
        sizes = (outputs // 2,) * 2
    elif parts[-1] == "in_proj_weight" and isinstance(module, nn.MultiheadAttention):
        sizes = (outputs // 3,) * 3
    elif found := next((part for part in parts if part in _OF_ATTENTION), None):
        sizes = _of_attention(getattr(unwrap(model), "config", None), found, outputs)
        is_known = sizes != ()
    return FusedMatrices(_ranges(sizes, outputs), is_transposed, is_known and not (sizes and outputs % sum(sizes)))


def _ranges(sizes: Sequence[int], outputs: int) -> tuple[tuple[int, int, int], ...]:
    period = sum(sizes)
    if not period or outputs % period:
        return ()
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    return tuple((end - size, end, period) for size, end in zip(sizes, ends, strict=True))


def _of_attention(config: Any, module: str, outputs: int) -> tuple[int, ...]:
    """Output features of queries, keys and values: of all heads, or of each group of heads. () if they are unknown."""
    heads, hidden = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    if not isinstance(heads, int) or not isinstance(hidden, int):
        return ()
    head = getattr(config, "head_dim", None) or hidden // heads
    match config.model_type, module:
        case "gpt2", "c_attn":  # of cross attention, keys and values alone
            return (hidden,) * (outputs // hidden)
        case "gpt_bigcode", "c_attn" if config.multi_query:
            return hidden, head, head
        case ("phi3" | "phi4_multimodal"), "qkv_proj":
            keys = config.num_key_value_heads * head
            return heads * head, keys, keys
        case "mpt", "Wqkv":
            return hidden, hidden, hidden
        case "falcon", "query_key_value" if config.new_decoder_architecture:
            return heads // config.num_kv_heads * head, head, head
        case "falcon", "query_key_value" if config.multi_query:
            return heads * head, head, head
        case "falcon", "query_key_value":
            return head, head, head
        case family, "query_key_value" if family in _HEADS_APART:
            return head, head, head
    return ()


def _of_experts(model: nn.Module, name: str, part: str, shape: Sequence[int]) -> FusedMatrices:
    module = model.get_submodule(name)
    kind = getattr(module, "kind", None)
    if not isinstance(kind, ExpertsKind):
        try:
            kind = experts_kind(model, name)
        except (UnknownRolesError, AttributeError, KeyError):
            return FusedMatrices(is_known=not part.startswith("gate_up"))
    outputs = shape[-1 if kind.is_transposed else -2]
    if part != "gate_up_proj":
        return FusedMatrices(is_transposed=kind.is_transposed)
    sizes = (1, 1) if kind.is_interleaved else (outputs // 2, outputs // 2)
    return FusedMatrices(_ranges(sizes, outputs), kind.is_transposed)

# SPDX-License-Identifier: Apache-2.0
"""Weights of transformers' models that fuse several matrices: queries, keys and values; gate and up; experts."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from torch import nn

from stretto.huggingface.experts import ExpertsKind, experts_kind
from stretto.huggingface.formulas import UnknownRolesError
from stretto.huggingface.pretrained_model import is_conv1d, unwrap

_HEADS_APART = "bloom", "gpt_neox", "gpt_neox_japanese", "persimmon"  # each head's query, key and value lie together
_OF_ATTENTION = "qkv", "qkv_proj", "query_key_value", "Wqkv", "wqkv", "W_pack", "c_attn", "att_proj", "qkv_linear"
# By the beginning of a module's class: of its linear of this name, two matrices.
_HALVES: dict[str, str | tuple[str, ...]] = {
    "Wi": "ModernBert",
    "input_linear": "GraniteMoe",
    "kv_proj": "JetMoeAttention",
    "to_kv": ("GraniteSpeech", "Evolla"),
    "fc1": ("MoonshineDecoderMLP", "MoonshineStreamingDecoderMLP"),
}


class FusedMatrices(NamedTuple):
    """The matrices of a weight: of each its output features, those f with start <= f % period < stop.

    ranges: (start, stop, period) of each; () for one matrix. is_transposed: the weight is [.., in, out]. is_known:
    False if its name says that it is fused, and nothing how.
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
    outputs, inputs = shape[:-3:-1] if is_transposed else shape[-2:]
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
        if found == "qkv" and not sizes and _is_transformers(model, parts, found) and outputs == 3 * inputs:
            sizes = (inputs,) * 3  # of image encoders, all of which reshape to [3, heads, head_dim]
        is_known = sizes != ()
    elif type(module).__name__ == "DbrxExpertGLU":  # the rows of one expert after another's
        experts = int(cast(Any, module).moe_num_experts)
        sizes = (outputs // experts,) * experts
    else:
        sizes, is_known = _of_others(model, parts, outputs)
    return FusedMatrices(_ranges(sizes, outputs), is_transposed, is_known and not (sizes and outputs % sum(sizes)))


def _ranges(sizes: Sequence[int], outputs: int) -> tuple[tuple[int, int, int], ...]:
    period = sum(sizes)
    if not period or outputs % period:
        return ()
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    return tuple((end - size, end, period) for size, end in zip(sizes, ends, strict=True))


def _is_transformers(model: nn.Module, parts: Sequence[str], part: str) -> bool:
    owner = model.get_submodule(".".join(parts[: parts.index(part)]))
    return type(owner).__module__.startswith("transformers.")


def _of_others(model: nn.Module, parts: Sequence[str], outputs: int) -> tuple[tuple[int, ...], bool]:
    """Output features of the matrices of gates, and of state-space and linear-attention mixers, by the sizes that their
    modules have; and whether they add up."""
    for number, part in enumerate(parts[1:], 1):
        owner: Any = model.get_submodule(".".join(parts[:number]))
        kind = type(owner).__name__
        if part in _HALVES and kind.startswith(_HALVES[part]):
            return (outputs // 2,) * 2, True
        match part:
            case "in_proj" if hasattr(owner, "conv_dim") and hasattr(owner, "n_groups"):  # gate, x, B, C, dt
                of_state, inner = owner.n_groups * owner.ssm_state_size, owner.intermediate_size
                sizes: tuple[int, ...] = (inner, inner, of_state, of_state, owner.num_heads)
            case "in_proj" if kind.startswith("Lfm") and kind.endswith("ShortConv"):
                return (outputs // 3,) * 3, True
            case "in_proj" if kind == "DisentangledSelfAttention":  # of each head
                return (outputs // owner.num_attention_heads // 3,) * 3, True
            case "in_proj" if kind.endswith("MambaMixer"):
                return (outputs // 2,) * 2, True
            case "in_proj_qkv":
                sizes = owner.key_dim, owner.key_dim, owner.value_dim
            case "in_proj_qkvz":  # of each key's head
                values = owner.num_v_heads // owner.num_k_heads * owner.head_v_dim
                sizes = owner.head_k_dim, owner.head_k_dim, values, values
            case "in_proj_ba":
                sizes = (owner.num_v_heads // owner.num_k_heads,) * 2
            case _:
                continue
        return sizes, outputs % sum(sizes) == 0
    return (), True


def _of_attention(config: Any, module: str, outputs: int) -> tuple[int, ...]:
    """Output features of queries, keys and values: of all heads, or of each group of heads. () if they are unknown."""
    heads, hidden = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    if not isinstance(heads, int) or not isinstance(hidden, int):
        return ()
    head = getattr(config, "head_dim", None) or hidden // heads
    match config.model_type, module:
        case (("gpt2" | "openai-gpt" | "imagegpt" | "decision_transformer"), "c_attn"):
            return (hidden,) * (outputs // hidden)  # of cross attention, keys and values alone
        case "codegen", "qkv_proj":  # of each quarter of the heads: queries, values and keys
            return (hidden // 4,) * 3
        case "minimax", "qkv_proj":
            return head, head, head
        case "dbrx", "Wqkv":
            keys = config.attn_config.kv_n_heads * head
            return hidden, keys, keys
        case _, ("att_proj" | "qkv_linear"):
            return (outputs // 3,) * 3
        case "gpt_bigcode", "c_attn" if config.multi_query:
            return hidden, head, head
        case "gpt_bigcode", "c_attn" if outputs == 3 * hidden:
            return head, head, head
        case (("phi3" | "phi4_multimodal"), "qkv_proj"):
            keys = config.num_key_value_heads * head
            return heads * head, keys, keys
        case (("mpt" | "modernbert"), "Wqkv"):
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

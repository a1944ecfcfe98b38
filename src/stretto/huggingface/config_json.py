# SPDX-License-Identifier: Apache-2.0
"""Reads the sizes of a language model from its config.json: its family, its head, and what has no roles.

A configuration is read as data: no torch, no transformers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from stretto.huggingface.families import DECODERS, Decoder, ExpertEntries
from stretto.huggingface.refusals import (
    LANGUAGE_MODEL_HEAD,
    refusal_of_attention_dropout,
    refusal_of_sharded_sequence,
    refusal_of_style,
)
from stretto.quantities import check_count, require_whole

# Entries of a config.json that a resumed run may change, with any whose name has "drop" in it.
FREE_CONFIG_ENTRIES = (
    *("_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range"),
)
EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True)
class _Head:
    """The part after the last norm: the `submodule` and how its logits become a loss (see Architecture).

    `labels`: its outputs; None for the vocabulary, the name of the entry that counts them, or their number.
    """

    submodule: str = LANGUAGE_MODEL_HEAD
    labels: Literal["num_labels"] | int | None = None
    logits: Literal["sliced", "whole", "pooled"] = "sliced"
    has_bias: bool | str = False


_LATENT = {"kv_rank": "kv_lora_rank", "nope": "qk_nope_head_dim", "rope": "qk_rope_head_dim", "value": "v_head_dim"}
# By how the names of transformers' classes end.
_LANGUAGE_MODEL = _Head()
_HEADS = {
    "ForCausalLM": _LANGUAGE_MODEL,
    "LMHeadModel": _LANGUAGE_MODEL,
    "ForSequenceClassification": _Head("score", "num_labels", "pooled"),
    "ForTokenClassification": _Head("score", "num_labels", "whole", "token_classification_bias"),
    "ForQuestionAnswering": _Head("qa_outputs", 2, "whole", True),
}
_NO_HEAD = _Head("", 0, "pooled")


def read_sizes(name: str, config: Mapping[str, Any], classes: Sequence[str] = ()) -> dict[str, Any]:
    """Read the fields of the planner's Architecture from a configuration and the head that its `architectures` say.

    classes: names of a model's class and its bases, which say it in place of `architectures`. Raises ValueError
    for a model type whose blocks, or a class whose head, are not known here, and for a missing or impossible number.
    What `parallelize` has against the model stands in the architecture's `notes`.
    """
    kind = config.get("model_type")
    has_experts = any(config.get(key) for key in EXPERT_KEYS)
    known = [each for each, of in DECODERS.items() if of.experts]
    if has_experts and kind not in known:
        raise ValueError(
            f"{name}: model_type is {kind!r}, a mixture of experts that the planner does not support; supported: "
            + ", ".join(known)
        )
    if config.get("per_layer_config"):
        raise ValueError(f"{name}: layers of different sizes (per_layer_config) cannot be planned yet")
    if config.get("add_cross_attention"):
        raise ValueError(f"{name}: cross-attention cannot be planned yet")
    if not isinstance(kind, str) or kind not in DECODERS:
        hint = "; its text_config, saved as a file of its own, may be" if "text_config" in config else ""
        raise ValueError(
            f"{name}: model_type is {kind!r}, which the planner does not support; supported: {', '.join(DECODERS)}"
            + hint
        )
    family = DECODERS[kind]
    config = {**family.defaults, **config}
    class_name, head = _head_of(name, family, config, classes)
    refusals = tuple(_refusals(family, head, config))
    if refusals and family.experts is not None:
        raise ValueError(
            f"{name}: a mixture of experts that parallelize shards block by block cannot be planned: {refusals[0]}"
        )
    return dict(
        name=name,
        **(_gpt2_sizes if family.prefix == "GPT2" else _gated_sizes)(name, family, config),
        labels=_labels(head, config, name),
        has_head_bias=_has(head.has_bias, config, name, default=True),
        logits="whole" if head is _LANGUAGE_MODEL and family.changes_logits else head.logits,
        adds_output=not family.ends_with_norm and not config.get("resid_pdrop"),
        is_sharded_by_blocks=bool(refusals),
        takes_sharded_sequence=not refusals and refusal_of_sharded_sequence(class_name, config) is None,
        shards_tokens_of_blocks=True,
        refuses_copies=refusal_of_attention_dropout(config) is not None,
        notes=tuple(_notes(class_name, family, head, refusals, config)),
    )


def _head_of(name: str, family: Decoder, config: Mapping[str, Any], classes: Sequence[str]) -> tuple[str, _Head]:
    """The class that a model is of, and its head; a causal language model's where nothing says it."""
    if "PreTrainedModel" in classes:  # one of transformers'
        known = ((each, head) for each in classes if (head := _known_head(family, each)))
        if found := next(known, None):
            return found
        raise ValueError(_unknown_head(name, family, repr(classes[0])))
    declared = config.get("architectures") or [
        family.prefix + ("LMHeadModel" if family.prefix == "GPT2" else "ForCausalLM")
    ]
    if not isinstance(declared, list) or not all(isinstance(each, str) for each in declared):
        raise ValueError(f"{name}: architectures is {declared!r}, but must be a list of names")
    heads = [_known_head(family, each) for each in declared]
    first = heads[0]
    if first is None or any(head != first for head in heads):
        raise ValueError(_unknown_head(name, family, ", ".join(map(repr, declared))))
    return declared[0], first


def _known_head(family: Decoder, class_name: str) -> _Head | None:
    if not class_name.isidentifier():
        return None
    if class_name == f"{family.prefix}Model":
        return _NO_HEAD
    head = next((head for ending, head in _HEADS.items() if class_name.endswith(ending)), None)
    if family.prefix == "GPT2" and class_name.endswith("ForTokenClassification"):
        return _Head("classifier", "num_labels", "whole", True)
    return head


def _unknown_head(name: str, family: Decoder, declared: str) -> str:
    known = ", ".join(f"...{ending}" for ending in _HEADS)
    return f"{name}: the head of {declared} is not known to the planner; known: {known} and {family.prefix}Model"


def _labels(head: _Head, config: Mapping[str, Any], name: str) -> int | None:
    """A head's outputs; None for the vocabulary. Of labels a configuration has the names, if it does not say two."""
    if head.labels != "num_labels":
        return head.labels
    names = config.get("id2label")
    if names is not None and not isinstance(names, Mapping):
        raise ValueError(f"{name}: id2label is {names!r}, but must be a table of names")
    return _count(config, "num_labels", name, 2 if names is None else len(names))


def _notes(
    class_name: str, family: Decoder, head: _Head, refusals: Sequence[str], config: Mapping[str, Any]
) -> Iterator[str]:
    """The reasons why `parallelize` cannot shard this model, and the plan's assumptions."""
    if head is _NO_HEAD:
        yield f"{class_name} has no head: what your code puts there is not counted"
    if config.get("num_nextn_predict_layers") and family.experts is not None:
        yield f"{class_name}: its extra prediction layer (num_nextn_predict_layers) is not counted"
    if config.get("clip_qkv"):
        yield f"{class_name}: the time of clipping queries, keys and values (clip_qkv) is not counted"
    for refusal in refusals:
        yield (
            f"parallelize does not split {class_name} over x and y, but shards it block by block over z, and the plan "
            f"counts that: {refusal}"
        )
    if family.note and not refusals:
        yield f"{class_name}: {family.note}"
    if head is _LANGUAGE_MODEL and family.changes_logits and not refusals:
        yield (
            f"the logits of {class_name} change between head and loss, so parallelize makes whole ones, which are "
            "counted"
        )
    elif head.logits != "sliced" and head is not _NO_HEAD:
        yield (
            f"the loss of {class_name} is not one that parallelize replaces: where data x z > 1, compute it from the "
            "logits with stretto.parallel.mean_over_batch"
        )


def _is_read_into_bf16(config: Mapping[str, Any]) -> bool:
    """True if the files of a quantized model are read into whole weights: DeepSeek's, in blocks of fp8 with scales."""
    quantization = config["quantization_config"]
    is_fp8 = isinstance(quantization, Mapping) and quantization.get("quant_method") == "fp8"
    return is_fp8 and config.get("model_type") == "deepseek_v3"


def _refusals(family: Decoder, head: _Head, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield why `parallelize` finds no roles for a model as it is, on every grid."""
    if refusal := refusal_of_attention_dropout(config):
        yield refusal
    prefix = "" if head is _NO_HEAD else "model."
    if refusal := refusal_of_style(f"{family.prefix}Model", prefix, family.styles):
        yield refusal
    if family.refusal:
        yield family.refusal
    if family.head_norms == "use_qk_norm" and config.get("use_qk_norm"):
        yield "q_norm and k_norm have no role, because their weights differ from head to head"
    if config.get("quantization_config") and not _is_read_into_bf16(config):
        yield "quantization_config makes linears of other classes, where roles take exactly nn.Linear"
    if head.labels:
        roles = {head.submodule: "head"}
        if head.submodule in ("score", "classifier") and head.logits == "whole":
            roles["dropout"] = "dropout"
        yield f"these submodules have no role: {', '.join(roles)}. Pass roles={roles}"


def _gpt2_sizes(name: str, family: Decoder, config: Mapping[str, Any]) -> dict[str, Any]:
    hidden, heads = _count(config, "n_embd", name), _count(config, "n_head", name)
    return {
        "layers": _count(config, "n_layer", name),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": _divide(hidden, heads, name),
        "ffn": _count(config, "n_inner", name, 4 * hidden),
        "vocab": _count(config, "vocab_size", name),
        "is_tied": _is_set(config, "tie_word_embeddings", name, True),
        "positions": _count(config, "n_positions", name),
        "stores_inputs_first": True,
    }


def _gated_sizes(name: str, family: Decoder, config: Mapping[str, Any]) -> dict[str, Any]:
    hidden, heads = _count(config, "hidden_size", name), _count(config, "num_attention_heads", name)
    kv_heads = _count(config, "num_key_value_heads", name, heads)
    latent = _read_latent(name, config) if family.has_latent_attention else {}
    if latent:
        kv_heads, head_dim = latent["kv_heads"], latent["head_dim"]
    else:
        head_dim = _count(config, "head_dim", name) if config.get("head_dim") else _divide(hidden, heads, name)
    match family.head_norms:
        case "head":
            head_norm_weights = 2 * head_dim
        case "all":
            head_norm_weights = (heads + kv_heads) * head_dim
        case option:
            head_norm_weights = (heads + kv_heads) * head_dim if _is_set(config, option, name) else 0
    return {
        "layers": _count(config, "num_hidden_layers", name),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "ffn": _count(config, "intermediate_size", name),
        "vocab": _count(config, "vocab_size", name),
        "is_gated": True,
        "fuses_qkv": family.fuses_qkv,
        "has_qkv_bias": _has(family.qkv_bias, config, name),
        "has_out_bias": _has(family.out_bias, config, name),
        "has_mlp_bias": _has(family.mlp_bias, config, name),
        "has_norm_bias": False,
        "is_tied": _is_set(config, "tie_word_embeddings", name),
        "is_rotary": True,
        "block_norms": family.block_norms,
        "has_plain_norms": family.block_norms > 0,  # Olmo's are torch's
        "head_norm_weights": head_norm_weights,
        "has_sinks": family.has_sinks,
        "has_plain_attention": family.has_sinks,
        **({} if family.experts is None else _read_experts(name, family.experts, config)),
        **latent,
    }


def _read_experts(name: str, entries: ExpertEntries, config: Mapping[str, Any]) -> dict[str, Any]:
    """Find which blocks have which experts, by the fields of an Architecture; `moe` by those of a MoeShape."""
    # transformers writes the number of experts under one name for all families.
    named = next((key for key in (entries.count, *EXPERT_KEYS) if config.get(key) is not None), entries.count)
    config = {entries.count: entries.default_count, **config}
    count = partial(_count, config, where=name)
    shape = {
        "experts": count(named),
        "active": count("num_experts_per_tok"),
        "ffn": count(entries.ffn),
        "has_shared_gate": bool(entries.shared_ffn),
        "has_biases": entries.has_biases,
    }
    if entries.shared_ffn:
        shape["shared_ffn"] = count(entries.shared_ffn)
    elif entries.shared_count and config.get(entries.shared_count):
        shape["shared_ffn"] = shape["ffn"] * count(entries.shared_count)
    pattern = tuple(_has_experts(name, entries, config, block) for block in range(count("num_hidden_layers")))
    if not any(pattern):
        return {"moe": None}
    return {"moe": shape, "moe_pattern": () if all(pattern) else pattern}


def _has_experts(name: str, entries: ExpertEntries, config: Mapping[str, Any], block: int) -> bool:
    match entries.dense:
        case "first_k_dense_replace":
            first = config.get("first_k_dense_replace") or 0
            require_whole(f"{name}: first_k_dense_replace", first, 0)
            return block >= first
        case "mlp_only_layers":
            dense = config.get("mlp_only_layers") or []
            if not isinstance(dense, list) or not all(isinstance(each, int) for each in dense):
                raise ValueError(f"{name}: mlp_only_layers is {dense!r}, but must be a list of blocks")
            return block not in dense and (block + 1) % _count(config, "decoder_sparse_step", name) == 0
        case _:
            return True


def _read_latent(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSeek's latent attention by the fields of an Architecture; `latent` by those of a LatentShape."""
    latent = {"q_rank": 0 if config.get("q_lora_rank") is None else _count(config, "q_lora_rank", name)}
    for part, key in _LATENT.items():
        latent[part] = _count(config, key, name)
    return {"latent": latent, "head_dim": latent["nope"] + latent["rope"], "kv_heads": config["num_attention_heads"]}


def _has(bias: bool | str, config: Mapping[str, Any], where: str, *, default: bool = False) -> bool:
    return _is_set(config, bias, where, default) if isinstance(bias, str) else bias


def _count(config: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    check_count(f"{where}: {key}", value)
    assert value is not None
    return value


def _is_set(config: Mapping[str, Any], key: str, where: str, default: bool = False) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{where}: {key} is {value!r}, but must be a truth value")
    return default if value is None else value


def _divide(hidden: int, heads: int, where: str) -> int:
    if hidden % heads:
        raise ValueError(f"{where}: {heads} heads do not divide the hidden size {hidden}")
    return hidden // heads


def first_entry_that_differs(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """Describe the first entry in which a checkpoint's config.json (`found`) differs from a model's."""
    for name in sorted(found.keys() | wanted.keys()):
        if name not in FREE_CONFIG_ENTRIES and "drop" not in name and found.get(name) != wanted.get(name):
            return f"{name} of its config.json is {found.get(name)!r} there and {wanted.get(name)!r} here"
    return None

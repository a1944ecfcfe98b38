# SPDX-License-Identifier: Apache-2.0
"""Converts a Hugging Face configuration to an architecture: known families and heads, and what has no roles.

A configuration is read as data: no torch, no transformers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from stretto.planner.architecture import Architecture, check_count
from stretto.planner.experts.hugging_face import EXPERT_KEYS, read_experts, read_latent
from stretto.pretrained import LANGUAGE_MODEL_HEAD, refusal_of_attention_dropout, refusal_of_style

_FUSED_MLP = {"layers.*.mlp.gate_up_proj": "colwise_gather_output", "layers.*.mlp.down_proj": "rowwise_split_input"}
_WHOLE_ATTENTION = "every rank of x computes all of its attention, which is counted as split over x"
_EXPERTS = (
    "every rank of x and y computes its router and all of its experts, which z alone shards; attention is counted as "
    "plain operations make it, which keep heads x seq_len scores of each token where a kernel for sinks would keep none"
)
_OLMO_NORM = "its norms (input_layernorm, say) have no weights, and a formula that Stretto does not know how to split"


@dataclass(frozen=True)
class _Family:
    """What a model_type adds to Llama's block: attention of four linears (q, k, v, o), then a gated MLP, and norms.

    Biases are there always (True), never, or as the entry of this name in the configuration says. `block_norms` counts
    a block's norms of hidden features that have weights. `head_norms`: whether queries and keys are normalized, over
    one head ("head") or all of them ("all", or as the entry of this name says). `defaults`: what transformers takes
    where a configuration is silent.

    `has_experts`: the MLP is a router and experts, whose every rank of x and y computes all. `divides_experts`: some
    blocks have a router and experts that ranks divide among them (`read_experts`). `ends_with_norm`: what the MLP
    returns passes a norm before it is added. `has_sinks`: its attention has a sink for each head, and is made of plain
    operations.

    For `parallelize`: the entries of its tensor-parallel plan that are of unknown `styles`, a submodule of a class that
    is not taken (`refusal`), what a plan does not count (`note`), and whether logits change between head and loss.
    """

    prefix: str  # of its classes' names
    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    block_norms: int = 2
    head_norms: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    styles: Mapping[str, str] = field(default_factory=dict)
    refusal: str = ""
    note: str = ""
    changes_logits: bool = False
    has_experts: bool = False
    divides_experts: bool = False
    has_sinks: bool = False
    ends_with_norm: bool = False


_GPT2 = _Family("GPT2", defaults={"attn_pdrop": 0.1, "resid_pdrop": 0.1})
_GATED = {
    "llama": _Family("Llama", "attention_bias", "attention_bias", "mlp_bias"),
    "mistral": _Family("Mistral", defaults={"num_key_value_heads": 8}),
    "qwen2": _Family("Qwen2", True, defaults={"num_key_value_heads": 32}),
    "qwen3": _Family(
        "Qwen3",
        "attention_bias",
        "attention_bias",
        head_norms="head",
        defaults={"num_key_value_heads": 32, "head_dim": 128},
    ),
    "gemma": _Family(
        "Gemma",
        "attention_bias",
        "attention_bias",
        defaults={"num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True},
    ),
    "gemma2": _Family(
        "Gemma2",
        "attention_bias",
        "attention_bias",
        block_norms=4,
        defaults={"num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True},
        changes_logits=True,
        ends_with_norm=True,
    ),
    "phi3": _Family("Phi3", note=_WHOLE_ATTENTION),
    "olmo": _Family("Olmo", "attention_bias", "attention_bias", block_norms=0, refusal=_OLMO_NORM),
    "olmo2": _Family("Olmo2", "attention_bias", "attention_bias", head_norms="all", ends_with_norm=True),
    "granite": _Family("Granite", "attention_bias", "attention_bias", "mlp_bias", changes_logits=True),
    "cohere": _Family(
        "Cohere",
        "attention_bias",
        "attention_bias",
        block_norms=1,
        head_norms="use_qk_norm",
        defaults={"tie_word_embeddings": True},
        changes_logits=True,
    ),
    "glm": _Family(
        "Glm",
        "attention_bias",
        defaults={"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True},
        styles=_FUSED_MLP,
    ),
}
_GATED["gpt_oss"] = _Family(
    "GptOss",
    "attention_bias",
    "attention_bias",
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 64,
        "attention_bias": True,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
    },
    note=_EXPERTS,
    has_experts=True,
    has_sinks=True,
)
_GATED |= {
    "mixtral": _Family("Mixtral", defaults={"num_key_value_heads": 8}, divides_experts=True),
    "qwen2_moe": _Family(
        "Qwen2Moe",
        "qkv_bias",
        defaults={"num_key_value_heads": 16, "qkv_bias": True, "intermediate_size": 5632},
        divides_experts=True,
    ),
    "qwen3_moe": _Family(
        "Qwen3Moe",
        "attention_bias",
        "attention_bias",
        head_norms="head",
        defaults={"num_key_value_heads": 4, "intermediate_size": 6144},
        divides_experts=True,
    ),
    "olmoe": _Family("Olmoe", "attention_bias", "attention_bias", head_norms="all", divides_experts=True),
    "deepseek_v3": _Family(
        "DeepseekV3",
        "attention_bias",
        "attention_bias",
        defaults={"intermediate_size": 18432},
        divides_experts=True,
    ),
}
FAMILIES = {"gpt2": _GPT2, **_GATED}


@dataclass(frozen=True)
class _Head:
    """What stands after the last norm: the `submodule` and how its logits become a loss (see Architecture).

    `labels`: its outputs; None for the vocabulary, the name of the entry that counts them, or their number.
    """

    submodule: str = LANGUAGE_MODEL_HEAD
    labels: Literal["num_labels"] | int | None = None
    logits: Literal["sliced", "whole", "pooled"] = "sliced"
    has_bias: bool | str = False


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


def from_hugging_face(name: str, config: Mapping[str, Any], classes: Sequence[str] = ()) -> Architecture:
    """A transformers configuration, as its config.json has it, and the head that its `architectures` say.

    classes: names of a model's class and those that it is derived from, which say it in their place. Raises ValueError
    for a model type whose blocks, or a class whose head, are not known here, and for a missing or impossible number.
    What `parallelize` has against the model stands in the architecture's `notes`.
    """
    kind = config.get("model_type")
    has_experts = any(config.get(key) for key in EXPERT_KEYS)
    known = [each for each, of in FAMILIES.items() if of.has_experts or of.divides_experts]
    if has_experts and kind not in known:
        raise ValueError(
            f"{name}: model_type is {kind!r}, a mixture of experts that the planner does not support; supported: "
            + ", ".join(known)
        )
    if config.get("per_layer_config"):
        raise ValueError(f"{name}: layers of different sizes (per_layer_config) cannot be planned yet")
    if config.get("add_cross_attention"):
        raise ValueError(f"{name}: cross-attention cannot be planned yet")
    if not isinstance(kind, str) or kind not in FAMILIES:
        hint = "; its text_config, saved as a file of its own, may be" if "text_config" in config else ""
        raise ValueError(
            f"{name}: model_type is {kind!r}, which the planner does not support; supported: {', '.join(FAMILIES)}"
            + hint
        )
    family = FAMILIES[kind]
    config = {**family.defaults, **config}
    class_name, head = _head_of(name, family, config, classes)
    refusals = tuple(_refusals(family, head, config))
    if refusals and family.divides_experts:
        raise ValueError(
            f"{name}: a mixture of experts that parallelize shards block by block cannot be planned: {refusals[0]}"
        )
    return Architecture(
        name=name,
        **(_gpt2_sizes if family is _GPT2 else _gated_sizes)(name, family, config),
        labels=_labels(head, config, name),
        has_head_bias=_has(head.has_bias, config, name, default=True),
        logits="whole" if head is _LANGUAGE_MODEL and family.changes_logits else head.logits,
        adds_output=not family.ends_with_norm and not config.get("resid_pdrop"),
        is_sharded_by_blocks=bool(refusals),
        refuses_copies=refusal_of_attention_dropout(config) is not None,
        notes=tuple(_notes(class_name, family, head, refusals, config)),
    )


def _head_of(name: str, family: _Family, config: Mapping[str, Any], classes: Sequence[str]) -> tuple[str, _Head]:
    """The class that a model is of, and its head; a causal language model's where nothing says it."""
    if "PreTrainedModel" in classes:  # one of transformers'
        known = ((each, head) for each in classes if (head := _known_head(family, each)))
        if found := next(known, None):
            return found
        raise ValueError(_unknown_head(name, family, repr(classes[0])))
    declared = config.get("architectures") or [family.prefix + ("LMHeadModel" if family is _GPT2 else "ForCausalLM")]
    if not isinstance(declared, list) or not all(isinstance(each, str) for each in declared):
        raise ValueError(f"{name}: architectures is {declared!r}, but must be a list of names")
    heads = [_known_head(family, each) for each in declared]
    first = heads[0]
    if first is None or any(head != first for head in heads):
        raise ValueError(_unknown_head(name, family, ", ".join(map(repr, declared))))
    return declared[0], first


def _known_head(family: _Family, class_name: str) -> _Head | None:
    if not class_name.isidentifier():
        return None
    if class_name == f"{family.prefix}Model":
        return _NO_HEAD
    head = next((head for ending, head in _HEADS.items() if class_name.endswith(ending)), None)
    if family is _GPT2 and class_name.endswith("ForTokenClassification"):
        return _Head("classifier", "num_labels", "whole", True)
    return head


def _unknown_head(name: str, family: _Family, declared: str) -> str:
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
    class_name: str, family: _Family, head: _Head, refusals: Sequence[str], config: Mapping[str, Any]
) -> Iterator[str]:
    """The reasons why `parallelize` cannot shard this model, and the plan's assumptions."""
    if head is _NO_HEAD:
        yield f"{class_name} has no head: what your code puts there is not counted"
    if config.get("num_nextn_predict_layers") and family.divides_experts:
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
    """Whether the files of a quantized model are read into whole weights: DeepSeek's, in blocks of fp8 with scales."""
    quantization = config["quantization_config"]
    is_fp8 = isinstance(quantization, Mapping) and quantization.get("quant_method") == "fp8"
    return is_fp8 and config.get("model_type") == "deepseek_v3"


def _refusals(family: _Family, head: _Head, config: Mapping[str, Any]) -> Iterator[str]:
    """Why `parallelize` finds no roles for a model as it is, on every grid."""
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


def _gpt2_sizes(name: str, family: _Family, config: Mapping[str, Any]) -> dict[str, Any]:
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


def _gated_sizes(name: str, family: _Family, config: Mapping[str, Any]) -> dict[str, Any]:
    hidden, heads = _count(config, "hidden_size", name), _count(config, "num_attention_heads", name)
    kv_heads = _count(config, "num_key_value_heads", name, heads)
    kind = config["model_type"]
    latent = read_latent(name, kind, config)
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
        "fuses_qkv": False,
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
        **(read_experts(name, kind, config) if family.divides_experts else {}),
        **latent,
        "experts": _count(config, "num_local_experts", name) if family.has_experts else 0,
        "active_experts": _count(config, "num_experts_per_tok", name) if family.has_experts else 0,
    }


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

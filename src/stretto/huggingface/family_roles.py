# SPDX-License-Identifier: Apache-2.0
"""Roles of families that publish no tensor-parallel plan, or one that many ranks cannot follow.

Names are those within the model, with its head; a pattern that a model of the family has no submodule for says nothing.
Where a family's code takes numbers of heads from what a rank cannot divide (its configuration, biases of all heads),
every rank of x computes its attention on x > 1, and x splits its MLP alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Roles = dict[str, Any]
Sizes = Mapping[str, int]


@dataclass(frozen=True)
class FamilyPlan:
    """Roles by pattern, and the integer attributes that count a rank's share of an axis."""

    roles: Roles
    local_attributes: Mapping[str, str] = field(default_factory=dict)

    def without(self, known: Mapping[str, str]) -> "FamilyPlan":
        """The same without whole modules in which the user has split a linear (known: roles by name)."""
        split = [wildcard(name) for name, role in known.items() if role in ("colwise", "rowwise", "expand")]
        kept = {
            pattern: role
            for pattern, role in self.roles.items()
            if role not in ("replicated", "gathered") or not any(name.startswith(f"{pattern}.") for name in split)
        }
        return FamilyPlan(kept, self.local_attributes)


def wildcard(name: str) -> str:
    """The pattern that stands for a submodule's name in every layer: "h.*.attn" for "h.0.attn"."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _whole(sizes: Sizes) -> str:
    """The role of attention that every rank of x computes. It takes more than hidden features, which y may not cut."""
    return "gathered" if sizes["y"] == 1 else "replicated"


def _heads(features: int) -> Roles:
    """A colwise linear that keeps `features` output features, a head's, on one rank."""
    return {"role": "colwise", "unit": features, "unit_name": "attention heads"}


def kv_heads(features: int) -> Roles:
    """The same of keys or values, of which several ranks may use one."""
    shared_by = "num_key_value_groups"  # transformers' own name of how many queries do
    return _heads(features) | {"unit_name": "KV heads", "shared": features, "shared_by": shared_by}


def _under(prefix: str, roles: Mapping[str, Any]) -> dict[str, Any]:
    return {prefix + pattern: role for pattern, role in roles.items()}


def _separate(attention: str, config: Any, queries: str, keys: str, values: str, output: str) -> Roles:
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    roles: Roles = {attention + queries: _heads(head)}
    roles |= dict.fromkeys((attention + keys, attention + values), kv_heads(head))
    return roles | {attention + output: "rowwise"}


def gpt2(config: Any, sizes: Sizes) -> FamilyPlan:
    # Conv1D stores [in, out] and fuses queries, keys and values one after another: three segments.
    heads = _heads(config.hidden_size // config.num_attention_heads) | {"segments": 3}
    block = {
        "ln_1": "norm",
        "ln_2": "norm",
        "attn.c_attn": heads,
        "attn.c_proj": "rowwise",
        "attn.resid_dropout": "dropout",
        "mlp.c_fc": "colwise",
        "mlp.c_proj": "rowwise",
        "mlp.dropout": "dropout",
    }
    roles = {"wte": "embedding", "wpe": "positions", "drop": "dropout", "ln_f": "norm", **_under("h.*.", block)}
    return FamilyPlan(roles, {"h.*.attn.split_size": "x", "h.*.attn.num_heads": "x"})


def gptj(config: Any, sizes: Sizes) -> FamilyPlan:
    block = {
        "ln_1": "norm",
        **_separate("attn.", config, "q_proj", "k_proj", "v_proj", "out_proj"),
        "attn.resid_dropout": "dropout",
        "mlp.fc_in": "colwise",
        "mlp.fc_out": "rowwise",
        "mlp.dropout": "dropout",
    }
    return FamilyPlan(
        {"drop": "dropout", "ln_f": "norm", **_under("h.*.", block)}, {"h.*.attn.num_attention_heads": "x"}
    )


def opt(config: Any, sizes: Sizes) -> FamilyPlan:
    layer = {
        **_separate("self_attn.", config, "q_proj", "k_proj", "v_proj", "out_proj"),
        "self_attn_layer_norm": "norm",
        "final_layer_norm": "norm",
        "fc1": "colwise",
        "fc2": "rowwise",
    }
    roles = {
        "decoder.embed_positions": "replicated",  # a subclass of nn.Embedding that shifts its rows
        "decoder.final_layer_norm": "norm",
        **_under("decoder.layers.*.", layer),
    }
    return FamilyPlan(roles, {"decoder.layers.*.self_attn.num_heads": "x"})


def bert(config: Any, sizes: Sizes) -> FamilyPlan:
    layer = {
        **_separate("attention.", config, "self.query", "self.key", "self.value", "output.dense"),
        "attention.output.dropout": "dropout",
        "attention.output.LayerNorm": "norm",
        "intermediate.dense": "colwise",
        "output.dense": "rowwise",
        "output.dropout": "dropout",
        "output.LayerNorm": "norm",
    }
    roles = {
        "embeddings.position_embeddings": "positions",
        "embeddings.token_type_embeddings": "positions",
        "embeddings.LayerNorm": "norm",
        "embeddings.dropout": "dropout",
        "pooler": "replicated",
        **_under("encoder.layer.*.", layer),
    }
    return FamilyPlan(roles)


def vit(config: Any, sizes: Sizes) -> FamilyPlan:
    layer = {
        **_separate("attention.", config, "q_proj", "k_proj", "v_proj", "o_proj"),
        "layernorm_before": "norm",
        "layernorm_after": "norm",
        "mlp.fc1": "colwise",
        "mlp.fc2": "rowwise",
        "dropout": "dropout",
    }
    roles = {
        "embeddings": "replicated",  # the convolution that makes patches, class token and positions
        "embeddings.dropout": "dropout",
        "layernorm": "norm",
        "pooler": "replicated",
        **_under("layers.*.", layer),
    }
    return FamilyPlan(roles)


def stablelm(config: Any, sizes: Sizes) -> FamilyPlan:
    layer: Roles = {"mlp.gate_proj": "colwise", "mlp.up_proj": "colwise", "mlp.down_proj": "rowwise"}
    layer |= {"input_layernorm": "norm", "post_attention_layernorm": "norm", "dropout": "dropout"}
    if config.qk_layernorm:  # a norm with separate weights for each head
        if sizes["x"] > 1:
            return FamilyPlan(_under("layers.*.", layer | {"self_attn": _whole(sizes)}))
        layer |= dict.fromkeys(("self_attn.q_layernorm", "self_attn.k_layernorm"), "replicated")
    layer |= _separate("self_attn.", config, "q_proj", "k_proj", "v_proj", "o_proj")
    counts = ("num_heads", "num_key_value_heads")
    return FamilyPlan(_under("layers.*.", layer), {f"layers.*.self_attn.{count}": "x" for count in counts})


def bloom(config: Any, sizes: Sizes) -> FamilyPlan:
    block: Roles = {"input_layernorm": "norm", "post_attention_layernorm": "norm"}
    block |= {"mlp.dense_h_to_4h": "colwise", "mlp.dense_4h_to_h": "rowwise"}
    if sizes["x"] > 1:  # biases of all heads, ALiBi
        block["self_attention"] = _whole(sizes)
    else:
        block["self_attention.query_key_value"] = _heads(3 * config.hidden_size // config.n_head)
        block["self_attention.dense"] = "rowwise"
    return FamilyPlan({"word_embeddings_layernorm": "norm", "ln_f": "norm", **_under("h.*.", block)})


def falcon(config: Any, sizes: Sizes) -> FamilyPlan:
    block: Roles = dict.fromkeys(("input_layernorm", "post_attention_layernorm", "ln_attn", "ln_mlp"), "norm")
    block |= {"mlp.dense_h_to_4h": "colwise", "mlp.dense_4h_to_h": "rowwise"}
    heads, head = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    counts: dict[str, str] = {}
    group: Roles | str
    shares_keys = config.multi_query and not config.new_decoder_architecture
    if sizes["x"] > 1 and (config.alibi or shares_keys):  # biases of all heads, or one key for all of them
        block["self_attention"] = _whole(sizes)
    else:
        if config.new_decoder_architecture:  # queries of a group, with its key and value
            group = _heads((heads // config.num_kv_heads + 2) * head) | {"unit_name": "KV heads", "shared": 2 * head}
        else:
            group = "colwise" if shares_keys else _heads(3 * head)
        block |= {"self_attention.query_key_value": group, "self_attention.dense": "rowwise"}
        counts = (
            {f"h.*.self_attention.{count}": "x" for count in ("num_heads", "num_kv_heads")} if sizes["x"] > 1 else {}
        )
    return FamilyPlan({"ln_f": "norm", **_under("h.*.", block)}, counts)


def phi3(config: Any, sizes: Sizes) -> FamilyPlan:
    layer: Roles = {
        "mlp.gate_up_proj": {"role": "colwise", "segments": 2},
        "mlp.down_proj": "rowwise",
        "resid_attn_dropout": "dropout",
        "resid_mlp_dropout": "dropout",
    }
    if sizes["x"] > 1:  # queries, keys and values are split by the configuration's numbers of heads
        layer["self_attn"] = _whole(sizes)
    else:
        layer |= {"self_attn.qkv_proj": "colwise", "self_attn.o_proj": "rowwise"}
    return FamilyPlan(_under("layers.*.", layer))


def gpt_oss(config: Any, sizes: Sizes) -> FamilyPlan:
    layer: Roles = {
        **_separate("self_attn.", config, "q_proj", "k_proj", "v_proj", "o_proj"),
        "self_attn.sinks": {"role": "inner_parameter", "unit_name": "attention heads"},  # a number for each
        "mlp.router": "router",
        "mlp.experts": "experts",
    }
    return FamilyPlan(_under("layers.*.", layer))


def _dense_mlp(name: str) -> Roles:
    """The roles of an MLP with a gate, whether layers have it or not."""
    return {f"{name}.gate_proj": "colwise", f"{name}.up_proj": "colwise", f"{name}.down_proj": "rowwise"}


def _experts(config: Any, sizes: Sizes) -> Roles:
    """The roles of a layer's router and experts."""
    if sizes["x"] * sizes["y"] > 1 and getattr(config, "router_jitter_noise", None):
        raise ValueError(
            f"config.router_jitter_noise is {config.router_jitter_noise}: ranks of x and y have the same tokens, but "
            "would draw different noise for them. Set it to 0.0"
        )
    return {"mlp.gate": "router", "mlp.experts": "experts"}


def mixtral(config: Any, sizes: Sizes) -> FamilyPlan:
    layer = _separate("self_attn.", config, "q_proj", "k_proj", "v_proj", "o_proj")
    return FamilyPlan(_under("layers.*.", layer | _experts(config, sizes)))


def qwen2_moe(config: Any, sizes: Sizes) -> FamilyPlan:
    layer = _separate("self_attn.", config, "q_proj", "k_proj", "v_proj", "o_proj")
    layer |= _experts(config, sizes) | _dense_mlp("mlp") | _dense_mlp("mlp.shared_expert")
    layer["mlp.shared_expert_gate"] = "router"
    return FamilyPlan(_under("layers.*.", layer))


def qwen3_moe(config: Any, sizes: Sizes) -> FamilyPlan:
    layer = _separate("self_attn.", config, "q_proj", "k_proj", "v_proj", "o_proj")
    layer |= dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), "head_norm")
    return FamilyPlan(_under("layers.*.", layer | _experts(config, sizes) | _dense_mlp("mlp")))


def _norms_of_all_heads(layer: Roles) -> Roles:
    """The roles of norms over the features of all queries, and of all keys."""
    return {"self_attn.q_norm": "inner_norm", "self_attn.k_norm": layer["self_attn.k_proj"] | {"role": "inner_norm"}}


def olmoe(config: Any, sizes: Sizes) -> FamilyPlan:
    layer = _separate("self_attn.", config, "q_proj", "k_proj", "v_proj", "o_proj")
    layer |= _norms_of_all_heads(layer)
    return FamilyPlan(_under("layers.*.", layer | _experts(config, sizes)))


def deepseek_v3(config: Any, sizes: Sizes) -> FamilyPlan:
    # Latent attention: queries, and keys with values, are compressed to few features; each head computes its own from
    # these.
    queries, keys = config.qk_nope_head_dim + config.qk_rope_head_dim, config.qk_nope_head_dim + config.v_head_dim
    attention: Roles = {
        "q_proj": _heads(queries),  # of models that do not compress queries
        "q_a_proj": "compress",
        "q_a_layernorm": "head_norm",
        "q_b_proj": _heads(queries) | {"role": "expand"},
        "kv_a_proj_with_mqa": "compress",  # and one key with rotary angles, which all heads share
        "kv_a_layernorm": "head_norm",
        "kv_b_proj": _heads(keys) | {"role": "expand"},
        "o_proj": "rowwise",
    }
    layer = _under("self_attn.", attention) | _experts(config, sizes)
    layer |= _dense_mlp("mlp") | _dense_mlp("mlp.shared_experts")
    return FamilyPlan(_under("layers.*.", layer), {"layers.*.self_attn.num_heads": "x"})


def olmo2(config: Any, sizes: Sizes) -> FamilyPlan:
    layer: Roles = {
        **_separate("self_attn.", config, "q_proj", "k_proj", "v_proj", "o_proj"),
        "mlp.gate_proj": "colwise",
        "mlp.up_proj": "colwise",
        "mlp.down_proj": "rowwise",
    }
    return FamilyPlan(_under("layers.*.", layer | _norms_of_all_heads(layer)))


def t5(config: Any, sizes: Sizes) -> FamilyPlan:
    layer: Roles = {"layer_norm": "norm", "DenseReluDense.wo": "rowwise"}
    layer |= dict.fromkeys(("DenseReluDense.wi", "DenseReluDense.wi_0", "DenseReluDense.wi_1"), "colwise")
    layer |= {"dropout": "dropout", "DenseReluDense.dropout": "inner_dropout"}
    for attention in ("SelfAttention", "EncDecAttention"):
        if sizes["x"] > 1:  # biases by position of all heads, which the first block makes for the others
            layer[attention] = _whole(sizes)
        else:
            layer |= dict.fromkeys((f"{attention}.{part}" for part in "qkv"), _heads(config.d_kv))
            layer |= {f"{attention}.o": "rowwise", f"{attention}.relative_attention_bias": "replicated"}
    roles: Roles = {"shared": "embedding"}
    for stack in ("encoder.", "decoder."):
        roles |= {stack + "final_layer_norm": "norm", stack + "dropout": "dropout", stack + "embed_tokens": "embedding"}
        roles |= _under(stack + "block.*.layer.*.", layer)
    return FamilyPlan(roles)

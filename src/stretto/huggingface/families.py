# SPDX-License-Identifier: Apache-2.0
"""The table of transformers' families: roles that Stretto has for them, and sizes of those that the planner knows.

Plain data, without imports of torch or transformers.

To add a family, add it to `FAMILIES`, and what it needs:

- For `parallelize`: `roles`, a function of family_roles.py, unless transformers has a tensor-parallel plan that ranks
  can follow; a case in tests/huggingface/test_families.py; its name in docs/hugging-face.md.
- For the planner: `decoder`, which tests/huggingface/test_config_json.py compares with transformers' model; its name
  in docs/planning.md.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from stretto.huggingface import family_roles
from stretto.huggingface.family_roles import FamilyPlan, Roles, Sizes


@dataclass(frozen=True)
class ExpertEntries:
    """The entries of a configuration that give a mixture of experts, which ranks divide among them.

    `count`: of experts, by default `default_count`. `ffn`: of an expert's inner width. `shared_ffn`: of the inner width
    of the MLP that computes every token, whose output one number a token scales; or `shared_count`: of experts like the
    others that do. `dense`: which blocks have an MLP in place of experts. `has_biases`: of router and experts.
    """

    count: str
    default_count: int
    ffn: str = "moe_intermediate_size"
    shared_ffn: str = ""
    shared_count: str = ""
    dense: Literal["", "first_k_dense_replace", "mlp_only_layers"] = ""
    has_biases: bool = False


@dataclass(frozen=True)
class Decoder:
    """Differences from Llama's block: attention of four linears (q, k, v, o), then a gated MLP, and norms.

    Biases are there always (True), never, or as the entry of this name in the configuration says. `block_norms` counts
    a block's norms of hidden features that have weights. `head_norms`: whether queries and keys are normalized, over
    one head ("head") or all of them ("all", or as the entry of this name says). `defaults`: what transformers takes
    where a configuration is silent.

    `experts`: some blocks have a router and experts that ranks divide among them. `has_latent_attention`: DeepSeek's.
    `ends_with_norm`: what the MLP returns passes a norm before it is added. `has_sinks`: its attention has a sink for
    each head, and is made of plain operations. `fuses_qkv`: one linear makes queries, keys and values.

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
    experts: ExpertEntries | None = None
    has_latent_attention: bool = False
    has_sinks: bool = False
    ends_with_norm: bool = False
    fuses_qkv: bool = False


@dataclass(frozen=True)
class Family:
    """`decoder`: for the planner; None for a family that it does not know. `roles`: makes the plan of a configuration
    on a grid of some sizes; None where `parallelize` reads transformers' tensor-parallel plan. `head_roles`: of modules
    outside of the base model, where these are not one linear `lm_head`.
    """

    decoder: Decoder | None = None
    roles: Callable[[Any, Sizes], FamilyPlan] | None = None
    head_roles: Roles = field(default_factory=dict)


_BIASED = ("attention_bias", "attention_bias")  # one entry for the biases of queries, keys and values, and the output's
_FUSED_MLP = {"layers.*.mlp.gate_up_proj": "colwise_gather_output", "layers.*.mlp.down_proj": "rowwise_split_input"}
_WHOLE_ATTENTION = "every rank of x computes all of its attention, which is counted as split over x"
_SINKS = (
    "attention is counted as plain operations make it, which keep heads x seq_len scores of each token where a kernel "
    "for sinks would keep none"
)
_OLMO_NORM = "its norms (input_layernorm, say) have no weights, and a formula that Stretto does not know how to split"

# By `config.model_type`.
FAMILIES: dict[str, Family] = {
    "gpt2": Family(Decoder("GPT2", defaults={"attn_pdrop": 0.1, "resid_pdrop": 0.1}), family_roles.gpt2),
    "llama": Family(Decoder("Llama", *_BIASED, "mlp_bias")),
    "mistral": Family(Decoder("Mistral", defaults={"num_key_value_heads": 8})),
    "qwen2": Family(Decoder("Qwen2", True, defaults={"num_key_value_heads": 32})),
    "qwen3": Family(
        Decoder("Qwen3", *_BIASED, head_norms="head", defaults={"num_key_value_heads": 32, "head_dim": 128})
    ),
    "gemma": Family(
        Decoder("Gemma", *_BIASED, defaults={"num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True})
    ),
    "gemma2": Family(
        Decoder(
            "Gemma2",
            *_BIASED,
            block_norms=4,
            defaults={"num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True},
            changes_logits=True,
            ends_with_norm=True,
        )
    ),
    "phi3": Family(Decoder("Phi3", note=_WHOLE_ATTENTION, fuses_qkv=True), family_roles.phi3),
    "olmo": Family(Decoder("Olmo", *_BIASED, block_norms=0, refusal=_OLMO_NORM)),
    "olmo2": Family(Decoder("Olmo2", *_BIASED, head_norms="all", ends_with_norm=True), family_roles.olmo2),
    "granite": Family(Decoder("Granite", *_BIASED, "mlp_bias", changes_logits=True)),
    "cohere": Family(
        Decoder(
            "Cohere",
            *_BIASED,
            block_norms=1,
            head_norms="use_qk_norm",
            defaults={"tie_word_embeddings": True},
            changes_logits=True,
        )
    ),
    "glm": Family(
        Decoder(
            "Glm",
            "attention_bias",
            defaults={"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True},
            styles=_FUSED_MLP,
        )
    ),
    "gpt_oss": Family(
        Decoder(
            "GptOss",
            *_BIASED,
            defaults={"num_key_value_heads": 8, "head_dim": 64, "attention_bias": True, "num_experts_per_tok": 4},
            note=_SINKS,
            experts=ExpertEntries("num_local_experts", 128, "intermediate_size", has_biases=True),
            has_sinks=True,
        ),
        family_roles.gpt_oss,
    ),
    "mixtral": Family(
        Decoder(
            "Mixtral",
            defaults={"num_key_value_heads": 8, "num_experts_per_tok": 2},
            experts=ExpertEntries("num_local_experts", 8, "intermediate_size"),
        ),
        family_roles.mixtral,
    ),
    "qwen2_moe": Family(
        Decoder(
            "Qwen2Moe",
            "qkv_bias",
            defaults={
                "num_key_value_heads": 16,
                "qkv_bias": True,
                "intermediate_size": 5632,
                "num_experts_per_tok": 4,
                "moe_intermediate_size": 1408,
                "shared_expert_intermediate_size": 5632,
                "decoder_sparse_step": 1,
            },
            experts=ExpertEntries(
                "num_experts", 60, shared_ffn="shared_expert_intermediate_size", dense="mlp_only_layers"
            ),
        ),
        family_roles.qwen2_moe,
    ),
    "qwen3_moe": Family(
        Decoder(
            "Qwen3Moe",
            *_BIASED,
            head_norms="head",
            defaults={
                "num_key_value_heads": 4,
                "intermediate_size": 6144,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 768,
                "decoder_sparse_step": 1,
            },
            experts=ExpertEntries("num_experts", 128, dense="mlp_only_layers"),
        ),
        family_roles.qwen3_moe,
    ),
    "olmoe": Family(
        Decoder(
            "Olmoe",
            *_BIASED,
            head_norms="all",
            defaults={"num_experts_per_tok": 8},
            experts=ExpertEntries("num_experts", 64, "intermediate_size"),
        ),
        family_roles.olmoe,
    ),
    "deepseek_v3": Family(
        Decoder(
            "DeepseekV3",
            *_BIASED,
            defaults={
                "intermediate_size": 18432,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 2048,
                "n_shared_experts": 1,
                "first_k_dense_replace": 3,
                "kv_lora_rank": 512,
                "q_lora_rank": 1536,
                "qk_nope_head_dim": 128,
                "qk_rope_head_dim": 64,
                "v_head_dim": 128,
            },
            experts=ExpertEntries(
                "n_routed_experts", 256, shared_count="n_shared_experts", dense="first_k_dense_replace"
            ),
            has_latent_attention=True,
        ),
        family_roles.deepseek_v3,
    ),
    "bert": Family(
        roles=family_roles.bert,
        head_roles={"cls.predictions.transform": "replicated", "cls.predictions.decoder": "head"},
    ),
    "bloom": Family(roles=family_roles.bloom),
    "falcon": Family(roles=family_roles.falcon),
    "gptj": Family(roles=family_roles.gptj),
    "olmo3": Family(roles=family_roles.olmo2),
    "opt": Family(roles=family_roles.opt),
    "roberta": Family(
        roles=family_roles.bert,
        head_roles={"lm_head.dense": "replicated", "lm_head.layer_norm": "replicated", "lm_head.decoder": "head"},
    ),
    "stablelm": Family(roles=family_roles.stablelm),
    "t5": Family(roles=family_roles.t5),
    "vit": Family(roles=family_roles.vit, head_roles={"classifier": "replicated"}),
}


# Those that the planner knows, in the order in which messages list them.
DECODERS: dict[str, Decoder] = {kind: family.decoder for kind, family in FAMILIES.items() if family.decoder is not None}

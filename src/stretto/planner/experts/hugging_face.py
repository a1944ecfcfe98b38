# SPDX-License-Identifier: Apache-2.0
"""Reads mixtures of experts, and DeepSeek's latent attention, from Hugging Face configurations."""

from collections.abc import Callable, Mapping
from typing import Any

from stretto.planner.architecture import check_count
from stretto.planner.experts.layers import LatentShape, MoeShape

EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")
# What transformers takes where a configuration is silent.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "decoder_sparse_step": 1,
    },
    "qwen3_moe": {
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
    },
    "olmoe": {"num_experts": 64, "num_experts_per_tok": 8},
    "deepseek_v3": {
        "n_routed_experts": 256,
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
}


def read_experts(name: str, kind: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an Architecture that say which blocks have which experts, of one of the known model types.

    Raises ValueError for a missing or impossible number.
    """
    # transformers writes the number of experts under one name for all families.
    own = next(key for key in EXPERT_KEYS if key in _DEFAULTS[kind])
    named = next((key for key in (own, *EXPERT_KEYS) if config.get(key) is not None), own)
    config = {**_DEFAULTS[kind], **config}

    def count(key: str) -> int:
        check_count(f"{name}: {key}", config.get(key))
        value: int = config[key]
        return value

    layers = count("num_hidden_layers")
    match kind:
        case "mixtral":
            shape = MoeShape(count(named), count("num_experts_per_tok"), count("intermediate_size"))
        case "olmoe":
            shape = MoeShape(count(named), count("num_experts_per_tok"), count("intermediate_size"))
        case "deepseek_v3":
            ffn = count("moe_intermediate_size")
            shared = ffn * count("n_shared_experts") if config.get("n_shared_experts") else 0
            shape = MoeShape(count(named), count("num_experts_per_tok"), ffn, shared_ffn=shared)
        case _:
            has_shared = kind == "qwen2_moe"
            shape = MoeShape(
                count(named),
                count("num_experts_per_tok"),
                count("moe_intermediate_size"),
                shared_ffn=count("shared_expert_intermediate_size") if has_shared else 0,
                has_shared_gate=has_shared,
            )
    pattern = tuple(_has_experts(name, kind, config, block, count) for block in range(layers))
    if not any(pattern):
        return {"moe": None}
    return {"moe": shape, "moe_pattern": () if all(pattern) else pattern}


def _has_experts(name: str, kind: str, config: Mapping[str, Any], block: int, count: Callable[[str], int]) -> bool:
    match kind:
        case "deepseek_v3":
            first = config.get("first_k_dense_replace") or 0
            if isinstance(first, bool) or not isinstance(first, int) or first < 0:
                raise ValueError(f"{name}: first_k_dense_replace is {first!r}, but must be a whole number, at least 0")
            return block >= first
        case "qwen2_moe" | "qwen3_moe":
            dense = config.get("mlp_only_layers") or []
            if not isinstance(dense, list) or not all(isinstance(each, int) for each in dense):
                raise ValueError(f"{name}: mlp_only_layers is {dense!r}, but must be a list of blocks")
            return block not in dense and (block + 1) % count("decoder_sparse_step") == 0
        case _:
            return True


def read_latent(name: str, kind: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an Architecture of DeepSeek's latent attention; none of another model type."""
    if kind != "deepseek_v3":
        return {}
    config = {**_DEFAULTS[kind], **config}
    keys = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    for key in (*keys, *(["q_lora_rank"] if config.get("q_lora_rank") is not None else [])):
        check_count(f"{name}: {key}", config.get(key))
    shape = LatentShape(config.get("q_lora_rank") or 0, *(config[key] for key in keys))
    return {"latent": shape, "head_dim": shape.nope + shape.rope, "kv_heads": config["num_attention_heads"]}

# SPDX-License-Identifier: Apache-2.0
"""Tiny mixtures of experts of Hugging Face families, with what each of them has that others have not."""

import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from stretto.train.checkpoint.metadata import saved_tensors

SEED = 53
VOCAB = 61

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "sliding_window": 8},
    "qwen2_moe": {  # layer 1 is dense; experts that all tokens pass, with a gate
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
        "mlp_only_layers": [1],
        "norm_topk_prob": False,
    },
    "qwen3_moe": {  # layers 0 and 2 are dense; more than ten experts, whose names are in no alphabetical order
        "num_experts": 12,
        "moe_intermediate_size": 8,
        "decoder_sparse_step": 2,
        "head_dim": 8,
        "norm_topk_prob": True,
    },
    "olmoe": {"num_experts": 4, "intermediate_size": 16, "norm_topk_prob": False},
    "deepseek_v3": _LATENT  # layer 0 is dense; groups of experts, and experts that all tokens pass
    | {
        "n_routed_experts": 8,
        "moe_intermediate_size": 16,
        "n_shared_experts": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "num_nextn_predict_layers": 0,
    },
    # Biases, weights [in, out], gates and what they scale in turns, limits.
    "gpt_oss": {"num_local_experts": 4, "head_dim": 8, "sliding_window": 4},
}

_SHARED = {"moe_intermediate_size": 16, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
_LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_LINEAR |= {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "head_dim": 8}
BY_BLOCKS: dict[str, dict[str, Any]] = {
    # Inputs of experts are scaled, not their outputs.
    "llama4_text": {"num_local_experts": 4, "intermediate_size": 16, "intermediate_size_mlp": 24, "head_dim": 8}
    | {"interleave_moe_layer_step": 2, "attention_chunk_size": 4, "no_rope_layers": [1, 0, 1]},
    "granitemoe": {"num_local_experts": 4, "intermediate_size": 16, "residual_multiplier": 0.5},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_num_shared_experts": 1},
    "glm4_moe": _SHARED | {"head_dim": 8, "n_group": 2, "topk_group": 2},
    "qwen3_next": {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16} | _LINEAR,
    "lfm2_moe": {"num_experts": 4, "moe_intermediate_size": 16, "num_dense_layers": 1}
    | {"layer_types": ["conv", "full_attention", "conv"]},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "head_dim": 8},
    "minimax_m2": {"num_local_experts": 4, "intermediate_size": 16, "head_dim": 8},
    "mistral4": _SHARED | _LATENT | {"num_key_value_heads": 4, "n_group": 1, "topk_group": 1},
    "phimoe": {"num_local_experts": 4, "router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    "deepseek_v2": _SHARED | _LATENT | {"num_key_value_heads": 4, "n_group": 2, "topk_group": 2},
    "dots1": _SHARED | {"head_dim": 8},
    "flex_olmo": {"num_experts": 4, "intermediate_size": 16},
    "jamba": {"num_experts": 4, "mamba_d_state": 8, "attn_layer_period": 2, "attn_layer_offset": 1}
    | {"use_mamba_kernels": False},
    "nemotron_h": {"n_routed_experts": 4, "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16}
    | {"layers_block_type": ["mamba", "attention", "moe"], "mamba_num_heads": 4, "mamba_head_dim": 8}
    | {"ssm_state_size": 8, "n_groups": 2, "n_group": 1, "topk_group": 1, "head_dim": 8},
}
"""Families whose experts are divided, while blocks shard the rest (x = y = 1)."""


def make_config(family: str, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return CONFIG_MAPPING[family](**{**_SIZES, **(FAMILIES | BY_BLOCKS).get(family, {}), **options})


def build(family: str, **options: Any) -> nn.Module:
    """A model of random weights, in fp32; biases and norms too, which start alike and show no mistake."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # token ids: nothing that a tiny model minds
        torch.manual_seed(SEED)
        config = make_config(family, **options)
        is_known = type(config) in AutoModelForCausalLM._model_mapping
        kind = AutoModelForCausalLM if is_known else transformers.Mistral4ForCausalLM  # of no class of AutoModel
        model = (kind.from_config if is_known else kind._from_config)(config).train()
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for tensor in saved_tensors(model).values():
            tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=0.1)
    return model


def write_folder(folder: Path, family: str, *, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    """Write such a model as transformers does, without a tokenizer, and return it. dtype: of its parameters."""
    model: Any = build(family, **options)
    model.config.dtype = dtype
    for parameter in model.parameters():  # not the bias of experts' scores, which published files have in fp32
        parameter.data = parameter.data.to(dtype)
    model.save_pretrained(folder)
    return model

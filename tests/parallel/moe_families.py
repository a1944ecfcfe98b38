# SPDX-License-Identifier: Apache-2.0
"""Tiny mixtures of experts of five Hugging Face families, with what each of them has that others have not."""

import warnings
from pathlib import Path
from typing import Any

import torch
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
}


def make_config(family: str, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return CONFIG_MAPPING[family](**{**_SIZES, **FAMILIES.get(family, {}), **options})


def build(family: str, **options: Any) -> nn.Module:
    """A model of random weights, in fp32; biases and norms too, which start alike and show no mistake."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # token ids: nothing that a tiny model minds
        torch.manual_seed(SEED)
        model = AutoModelForCausalLM.from_config(make_config(family, **options)).train()
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

# SPDX-License-Identifier: Apache-2.0
"""Tests of what the planner reads off mixtures of experts: their parameters, which blocks have experts,
and what is refused.
"""

import warnings
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from stretto.axes import GridSizes
from stretto.models import GPT, GPTConfig
from stretto.planner import read_architecture

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "num_hidden_layers": 5,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
    "qwen3_moe": {"num_experts": 6, "moe_intermediate_size": 24, "num_experts_per_tok": 3},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 3},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "n_shared_experts": 2,
        "first_k_dense_replace": 2,
        "q_lora_rank": 12,
        "kv_lora_rank": 10,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 5,
        "n_group": 2,
        "topk_group": 1,
        "num_key_value_heads": 4,
    },
}
VARIANTS = [
    *((kind, {}) for kind in EXPERTS),
    ("qwen2_moe", {"decoder_sparse_step": 2}),
    ("qwen3_moe", {"mlp_only_layers": [0, 3]}),
    ("qwen3_moe", {"tie_word_embeddings": True, "attention_bias": True}),
    ("deepseek_v3", {"q_lora_rank": None, "attention_bias": True}),
    ("deepseek_v3", {"first_k_dense_replace": 0}),
]


def config_of(kind: str, **options: Any) -> Any:
    return CONFIG_MAPPING[kind](**{**SIZES, **EXPERTS[kind], **options})


@pytest.mark.parametrize(("kind", "options"), VARIANTS, ids=str)
def test_parameters_are_those_of_transformers_model(kind, options):
    config = config_of(kind, **options)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(config)
    found = read_architecture(config, 16)
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())
    has_experts = tuple(any("experts" in name for name, _ in layer.named_modules()) for layer in model.model.layers)
    assert found.has_moe == has_experts
    of_experts = (parameter for name, parameter in model.named_parameters() if ".experts." in name)
    assert found.expert_parameters == sum(parameter.numel() for parameter in of_experts)


GPTS = [
    {"moe_layers": "every:2", "shared_ffn": 24},
    {"shared_ffn": 8, "activation": "swiglu", "shared_expert_gate": True},
    {"moe_layers": "from:2", "bias": False, "expert_ffn": 20},
]


@pytest.mark.parametrize("options", GPTS, ids=str)
def test_parameters_are_those_of_strettos_gpt(options):
    config = GPTConfig(layers=4, hidden=32, heads=4, vocab=61, max_seq_len=16, num_experts=4, **options)
    with torch.device("meta"):
        model = GPT(config)
    found = read_architecture(config, 16)
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert found.has_moe == tuple(block in config.moe_blocks for block in range(4))


def test_a_token_is_multiplied_with_its_own_experts_weights():
    # Mixtral: of each block queries, keys, values and output, the router, and gate, up and down of 2 of 4 experts.
    of_block = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 32 * 4 + 2 * 3 * 32 * 48
    assert read_architecture(config_of("mixtral"), 16).active_weights == 5 * of_block
    # DeepSeek-V3: latent attention, 2 dense blocks, and 3 with 3 experts of 24 features, a shared MLP of 48, a router.
    attention = 32 * 12 + 12 * 4 * 10 + 32 * 14 + 10 * 4 * 11 + 4 * 5 * 32
    dense, experts = 3 * 32 * 48, 3 * 32 * (3 * 24 + 48) + 32 * 8
    assert read_architecture(config_of("deepseek_v3"), 16).active_weights == 5 * attention + 2 * dense + 3 * experts


def test_the_models_of_the_files_that_people_have_are_counted():
    deepseek = CONFIG_MAPPING["deepseek_v3"]().to_dict() | {"architectures": ["DeepseekV3ForCausalLM"]}
    deepseek |= {"quantization_config": {"quant_method": "fp8"}, "num_nextn_predict_layers": 1}
    found = read_architecture(deepseek, 4096)
    assert found.parameters == 671_026_404_352  # 671B (its report), whose extra prediction layer is not counted
    assert "extra prediction layer" in found.notes[0]
    qwen = CONFIG_MAPPING["qwen3_moe"](num_hidden_layers=48, head_dim=128)
    assert read_architecture(qwen, 4096).parameters == 30_532_122_624  # 30.5B (its model card)


def test_latent_attention_multiplies_queries_with_keys_and_weights_with_values():
    layer = read_architecture(config_of("deepseek_v3"), 16).kinds[0].model.block[1]
    # Of 4 heads, 10 features a query and key and 5 a value, 2 FLOPs each, of which a causal mask leaves half.
    assert layer.attention_flops(GridSizes(), 64, 16) == 64 * 16 * 4 * (10 + 5)
    assert layer.attention_flops(GridSizes(x=2), 64, 16) == 64 * 16 * 2 * (10 + 5)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("mixtral", {"num_experts_per_tok": 5}, "a token goes to 5 of 4 experts"),
        ("qwen2_moe", {"num_experts": "4"}, "num_experts is '4'"),
        ("qwen3_moe", {"mlp_only_layers": 3}, "mlp_only_layers is 3, but must be a list of blocks"),
        ("deepseek_v3", {"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
        ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank is 0"),
        ("mixtral", {"architectures": ["MixtralForSequenceClassification"]}, "Pass roles={'score': 'head'}"),
        ("mixtral", {"attention_dropout": 0.1}, "shards block by block cannot be planned"),
        ("mixtral", {"model_type": "jamba"}, "'jamba', a mixture of experts that the planner does not support"),
    ],
)
def test_experts_that_cannot_be_counted_are_refused(kind, options, message):
    with pytest.raises(ValueError, match=message.replace("{", r"\{")):
        read_architecture({**config_of(kind).to_dict(), **options}, 16)

# SPDX-License-Identifier: Apache-2.0
"""Public models by name: the planner's numbers are those of the models that transformers builds."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from stretto.axes import GridSizes
from stretto.huggingface.public_models import PUBLIC_MODELS
from stretto.planner import predict, read_architecture
from stretto.planner.memory import local_parameters
from stretto.train.gpt.model_source import HuggingFaceSource

SEQ_LEN = 4096
# As their model cards say: in all, and with which a token is multiplied.
PARAMETERS = {
    "gpt2-xl": 1_557_611_200,
    "gpt-3-6.7b": 6_658_404_352,
    "gpt-3-175b": 174_604_259_328,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "gemma-7b": 8_537_680_896,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "mixtral-8x7b": 46_702_792_704,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "deepseek-v3": 671_026_404_352,
}


@pytest.mark.parametrize("name", PUBLIC_MODELS)
def test_a_public_model_has_the_sizes_and_operations_of_the_one_that_transformers_builds(name: str) -> None:
    config = AutoConfig.for_model(**PUBLIC_MODELS[name])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    sizes = read_architecture(name, SEQ_LEN)
    assert sizes == replace(read_architecture(model, SEQ_LEN), name=name)  # so are a plan's times and memory
    count = sum(parameter.numel() for parameter in model.parameters())
    assert sizes.parameters == local_parameters(sizes, GridSizes()) == count == PARAMETERS[name]
    embedding = model.get_input_embeddings().weight
    share = getattr(config, "num_experts_per_tok", 1) / (getattr(config, "num_local_experts", None) or 1)
    looked_up = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    multiplied = embedding.numel() + sum(  # by the head
        parameter.numel() * (share if parameter.dim() == 3 else 1)
        for each, parameter in model.named_parameters()
        if parameter.dim() > 1 and id(parameter) not in looked_up and each != "lm_head.weight" and "_bias" not in each
    )
    queries = config.num_attention_heads * sizes.head_dim
    attention = SEQ_LEN * queries * config.num_hidden_layers
    assert isinstance(model.lm_head, nn.Linear)
    assert HuggingFaceSource(name).flops_per_token(SEQ_LEN) == 6 * multiplied + 12 * attention


def test_a_plan_by_name_is_that_of_its_configuration_and_its_state_takes_the_bytes_of_its_parameters() -> None:
    asked = {"grid": {"z": 8}, "batch": 64, "seq_len": SEQ_LEN, "micro_batch": 1, "recompute": "full"}
    by_name = predict("llama-3-8b", "dgx-h200", **asked)
    assert by_name.step_time == predict(PUBLIC_MODELS["llama-3-8b"], "dgx-h200", **asked).step_time
    state = sum(by_name.memory[part] for part in ("parameters", "optimizer"))
    assert state == pytest.approx(12 * PARAMETERS["llama-3-8b"] / 8, rel=1e-3)
    with pytest.raises(ValueError, match="no model is named 'qwen-3-8b'; did you mean 'qwen3-8b'"):
        read_architecture("qwen-3-8b", SEQ_LEN)
    with pytest.raises(ValueError, match=r"no model is named 'nosuch'.*llama-3-8b"):
        read_architecture("nosuch", SEQ_LEN)

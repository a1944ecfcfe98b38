# SPDX-License-Identifier: Apache-2.0
"""Rules for what `parallelize` accepts of Hugging Face: tensor-parallel plans and configurations.

`parallelize` applies them to models, the planner and `stretto train` to a config.json. Plain data, without imports of
torch or transformers, since whether a model can be trained is asked before the model exists.
"""

from collections.abc import Mapping
from typing import Any

# The role for each style of a tensor-parallel plan.
STYLES = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "embedding_rowwise": "embedding",
    "replicated_with_grad_allreduce": "head_norm",
    "moe_tp_experts": "experts",
}
# Styles that gather an output or split a whole input, and their roles where x = y = 1, so that it is whole anyway.
WHOLE = {"colwise_gather_output": "colwise", "colwise_rep": "colwise", "rowwise_split_input": "rowwise"}
# The one head that needs no role from the user.
LANGUAGE_MODEL_HEAD = "lm_head"
FP8_BLOCK = 128  # rows and columns that share a scale, as DeepSeek-V3 and most fp8 files after it were published

# By `config.model_type`: between their blocks' ends, these models' code reads no shape outside of attention.
SHARDED_FAMILIES = frozenset(
    {
        "arcee",
        "cohere",
        "cwm",
        "ernie4_5",
        "exaone4",
        "gemma",
        "gemma2",
        "gemma3_text",
        "gpt2",
        "gpt_neox",
        "gptj",
        "granite",
        "helium",
        "llama",
        "ministral",
        "mistral",
        "mixtral",
        "olmo2",
        "olmoe",
        "opt",
        "phi",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "seed_oss",
        "smollm3",
        "stablelm",
        "starcoder2",
    }
)


def refusal_of_style(owner: str, prefix: str, tp_plan: Mapping[str, str]) -> str | None:
    """Say why the tensor-parallel plan of the class `owner` is refused, and what to do; None if all styles are known.

    prefix: of the patterns' names within the whole model, with a dot.
    """
    for pattern, style in tp_plan.items():
        if style not in STYLES:
            return (
                f"the tensor-parallel plan of {owner} gives {prefix + pattern!r} the style {style!r}; "
                f"Stretto knows {', '.join(STYLES)}" + _advice(prefix, tp_plan)
            )
    return None


def _advice(prefix: str, tp_plan: Mapping[str, str]) -> str:
    """The roles that linears of unknown styles have where no axis cuts features; nothing if Stretto cannot say."""
    roles = {prefix + pattern: WHOLE[style] for pattern, style in tp_plan.items() if style in WHOLE}
    if any(style not in STYLES and style not in WHOLE for style in tp_plan.values()):
        return ""
    return f". On a grid of x=1, y=1, where every rank has whole features, they are roles={roles}"


def refusal_of_attention_dropout(options: Mapping[str, Any]) -> str | None:
    """Say why a configuration with dropout of attention weights is refused; None if it has none."""
    for option, value in options.items():
        if "att" in option and "drop" in option and isinstance(value, float) and value > 0:
            return (
                f"config.{option} is {value}: attention draws its dropout inside the kernel, where ranks that share a "
                f"head would draw differently. Set {option}=0.0"
            )
    return None


def refusal_of_quantization(options: Mapping[str, Any]) -> str | None:
    """Say why a configuration whose weights are quantized is refused; None if they are not, or in fp8 by blocks."""
    quantization = options.get("quantization_config")
    if quantization is None:
        return None
    found = quantization if isinstance(quantization, Mapping) else {}
    method, block = found.get("quant_method"), found.get("weight_block_size")
    if method == "fp8" and list(block or ()) == [FP8_BLOCK, FP8_BLOCK]:
        return None
    of_blocks = "" if method != "fp8" else f" with weight_block_size={block!r}"
    return (
        f"config.quantization_config says that the weights are quantized by {method!r}{of_blocks}, which is not read; "
        f"fp8 with weight_block_size=[{FP8_BLOCK}, {FP8_BLOCK}] is. Load the model with transformers, call its "
        "dequantize(), and write it with save_pretrained"
    )


def refusal_of_sharded_sequence(owner: str, options: Mapping[str, Any]) -> str | None:
    """Say why the code of the class `owner` cannot work on a part of the tokens between blocks; None if it can."""
    family = options.get("model_type")
    if family not in SHARDED_FAMILIES:
        return (
            f"{owner} is of the family {family!r}, whose code has not been shown to work on a part of the tokens "
            f"between blocks; that of {', '.join(sorted(SHARDED_FAMILIES))} has"
        )
    if options.get("output_router_logits"):
        return (
            "output_router_logits is set, a load-balancing loss over all tokens, of which a rank's routers see a part: "
            "set it to False"
        )
    return None

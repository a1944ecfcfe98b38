# SPDX-License-Identifier: Apache-2.0
"""The transformers models of `python -m lab transformers`: their configurations, and tiny ones of the same families."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Transformer:
    """A model's family in transformers (`model_type`), sizes of its configuration, layers that fit, and sequences."""

    family: str
    layers: int
    sizes: Mapping[str, Any]
    seq_len: int = 4096
    small: Mapping[str, Any] = field(default_factory=dict)

    def config(self, layers: int, *, is_small: bool) -> Any:
        """The configuration, with torch's own attention and without dropout or a cache."""
        from transformers import AutoConfig

        count = "n_layer" if self.family == "gpt2" else "num_hidden_layers"
        sizes = {**self.sizes, **(self.small if is_small else {}), count: layers}
        return AutoConfig.for_model(self.family, **sizes, use_cache=False, attn_implementation="sdpa")

    @property
    def experts(self) -> tuple[int, int] | None:
        """Experts of a layer, and of a token; None of a dense model."""
        name = next((name for name in ("num_experts", "num_local_experts") if name in self.sizes), None)
        return None if name is None else (self.sizes[name], self.sizes["num_experts_per_tok"])


def _gated(hidden: int, ffn: int, heads: int, kv_heads: int, vocab: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": 8192,
        **more,
    }


def _gpt2(hidden: int, heads: int, positions: int, vocab: int) -> dict[str, Any]:
    sizes = {"n_embd": hidden, "n_head": heads, "n_positions": positions, "vocab_size": vocab}
    return sizes | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)


_SMALL = _gated(64, 128, 4, 4, 256)
_SMALL_GPT2 = _gpt2(64, 4, 64, 256)
_UNTIED = {"tie_word_embeddings": False, "experts_implementation": "grouped_mm"}
_QWEN3 = {"head_dim": 128, "tie_word_embeddings": False}
_QWEN3_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
_SMALL_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SMALL_QWEN2 = _SMALL | _SMALL_EXPERTS | {"shared_expert_intermediate_size": 64}


def _qwen2_experts(experts: int, top_k: int, ffn: int, shared: int) -> dict[str, Any]:
    sizes = {"num_experts": experts, "num_experts_per_tok": top_k, "moe_intermediate_size": ffn}
    return {**sizes, "shared_expert_intermediate_size": shared, "norm_topk_prob": False, **_UNTIED}


# Layers are as many as fit into 80 GB with the state of AdamW on z=4 (x=4 for those of TileLink's figure 11, which are
# few so that the whole figure takes minutes); head and embedding are whole.
TRANSFORMERS: Mapping[str, Transformer] = {
    "llama-3.75b": Transformer("llama", 16, _gated(4096, 14336, 32, 8, 32_000), small=_SMALL),
    "qwen3-8b": Transformer(
        "qwen3", 16, _gated(4096, 12288, 32, 8, 151_936, **_QWEN3), small=_SMALL | {"head_dim": 16}
    ),
    "qwen3-0.6b": Transformer(
        "qwen3", 28, _gated(1024, 3072, 16, 8, 151_936, head_dim=128, tie_word_embeddings=True), small=_SMALL
    ),
    "gpt2-xl": Transformer("gpt2", 48, _gpt2(1600, 25, 1024, 50_257), seq_len=1024, small=_SMALL_GPT2),
    "gpt3-6.7b": Transformer("gpt2", 8, _gpt2(4096, 32, 2048, 50_304), seq_len=2048, small=_SMALL_GPT2),
    "llama2-7b": Transformer("llama", 8, _gated(4096, 11008, 32, 32, 32_000), small=_SMALL),
    "llama2-13b": Transformer("llama", 8, _gated(5120, 13824, 40, 40, 32_000), small=_SMALL),
    "llama3-8b": Transformer("llama", 8, _gated(4096, 14336, 32, 8, 128_256, rope_theta=5e5), small=_SMALL),
    "gemma-7b": Transformer(
        "gemma", 8, _gated(3072, 24576, 16, 16, 256_000, head_dim=256), small=_SMALL | {"head_dim": 16}
    ),
    "qwen3-30b-a3b": Transformer(
        "qwen3_moe",
        4,
        _gated(2048, 6144, 32, 4, 151_936, **_QWEN3, **_QWEN3_EXPERTS, experts_implementation="grouped_mm"),
        small=_SMALL | {"head_dim": 16} | _SMALL_EXPERTS,
    ),
    # Mixtures of TileLink's figure 11, and one of 64 experts: as many layers as fit into 141 GB on 4 ranks.
    "mixtral-8x7b": Transformer(
        "mixtral",
        8,
        _gated(4096, 14336, 32, 8, 32_000, num_local_experts=8, num_experts_per_tok=2, rope_theta=1e6, **_UNTIED),
        small=_SMALL,
    ),
    "qwen1.5-moe-a2.7b": Transformer(
        "qwen2_moe", 12, _gated(2048, 5632, 16, 16, 151_936, **_qwen2_experts(60, 4, 1408, 5632)), small=_SMALL_QWEN2
    ),
    "qwen2-57b-a14b": Transformer(
        "qwen2_moe", 4, _gated(3584, 18944, 28, 4, 151_936, **_qwen2_experts(64, 8, 2560, 20480)), small=_SMALL_QWEN2
    ),
}


def make_transformer(name: str, layers: int, *, is_small: bool) -> "nn.Module":
    """Make the model for causal language modelling on torch's default device."""
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_config(TRANSFORMERS[name].config(layers, is_small=is_small))
    return model.train()

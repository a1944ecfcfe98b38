# SPDX-License-Identifier: Apache-2.0
"""Every family of transformers with a head for language, as a tiny model of random weights, made from its registry.

A configuration's sizes are found by their names, which families share; one whose names are others stays as large as
its defaults, and is not built.
"""

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

TASKS: dict[str, tuple[Any, dict[str, str]]] = {
    "causal": (AutoModelForCausalLM, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    "masked": (AutoModelForMaskedLM, modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    "seq2seq": (AutoModelForSeq2SeqLM, modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
}
BATCH, SEQ_LEN, VOCAB = 4, 16, 96
MAX_PARAMETERS = 3_000_000

_SIZES = {
    32: "hidden_size d_model n_embd dim emb_dim embedding_size hidden_dim word_embed_proj_dim rnn_hidden_size",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers "
    "num_encoder_layers num_key_value_heads n_groups num_experts_per_tok moe_k num_global_key_value_heads",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_experts "
    "num_local_experts n_routed_experts moe_num_experts decoder_ngram num_attention_layers",
    48: "intermediate_size ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim n_inner inner_dim ffn_hidden_size",
    8: "head_dim d_kv qk_rope_head_dim v_head_dim qk_nope_head_dim mamba_d_state state_size ssm_state_size kv_channels",
    16: "moe_intermediate_size shared_expert_intermediate_size q_lora_rank kv_lora_rank mamba_head_dim",
    VOCAB: "vocab_size",
    64: "max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length",
    0: "pad_token_id",
    1: "bos_token_id decoder_start_token_id n_shared_experts first_k_dense_replace",
    3: "eos_token_id sep_token_id",
}
SIZE_OF = {name: size for size, names in _SIZES.items() for name in names.split()}


_NOT_BUILT = """
audioflamingo3 axk1 bailing_hybrid bamba blt cohere_compass_text dbrx deepseek_v3 deepseek_v32 deepseek_v4
dots3_note emu3 encoder-decoder esmc fsmt funnel fuyu gemma3 gemma3n gemma3n_text gemma4 gemma4_assistant
gemma4_text gemma4_unified gemma4_unified_assistant git glmasr got_ocr2 gpt_neo granite_speech
granite_speech_plus granitemoehybrid kimi_linear lfm2_moe llama4 longcat_flash luke mamba2 mllama modernvbert
moss_transcribe_diarize musicflamingo musicgen musicgen_melody nemo_speechlm neomme perceiver phi4_multimodal
qwen2_audio qwen3_5 qwen3_5_moe qwen3_asr qwen4_exp reformer roc_bert t5gemma t5gemma2 ultravbert
vibevoice_asr voxtral voxtral_realtime xmod zamba zamba2 zaya
"""
NOT_BUILT = frozenset(_NOT_BUILT.split())
"""Families that stay large, or that a tiny configuration of these sizes does not make, or that do not train (vision and
audio towers, sizes under other names, checks of the configuration)."""


@cache
def list_families() -> list[tuple[str, str]]:
    """(family, task) of the registry, in alphabetical order, but NOT_BUILT; of several heads the first of `TASKS`."""
    found: dict[str, str] = {}
    for task, (_, names) in TASKS.items():
        for family in names:
            found.setdefault(family, task)
    return sorted((family, task) for family, task in found.items() if family not in NOT_BUILT)


def build(family: str, task: str) -> nn.Module:
    """A tiny model. Raises whatever the family raises, and ValueError for one that stays large."""
    kind = CONFIG_MAPPING[family]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        defaults = kind().to_dict()
        sizes: dict[str, Any] = {name: SIZE_OF[name] for name in defaults if name in SIZE_OF}
        sizes |= {
            name: 0.0
            for name, value in defaults.items()
            if isinstance(value, float) and ("drop" in name or "pdrop" in name or name.endswith("jitter_noise"))
        }
        if "qk_rope_head_dim" in sizes:  # latent attention
            sizes.pop("head_dim", None)
            sizes["num_key_value_heads"] = sizes["num_attention_heads"]
        if "rotary_dim" in defaults:
            sizes["rotary_dim"] = 4
        config = kind(**sizes)
        config.use_cache = False
        if task == "seq2seq" and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = 1
        torch.manual_seed(0)
        with torch.device("meta"):
            count = sum(parameter.numel() for parameter in TASKS[task][0].from_config(config).parameters())
        if count > MAX_PARAMETERS:
            raise ValueError(f"{count} parameters: this configuration's sizes have other names")
        torch.manual_seed(0)
        return TASKS[task][0].from_config(config).train()


def make_batch(task: str) -> dict[str, Tensor]:
    """Inputs of one step, [BATCH, SEQ_LEN]; every label counts."""
    tokens = torch.randint(4, VOCAB, (BATCH, SEQ_LEN), generator=torch.Generator().manual_seed(7))
    return {"input_ids": tokens, "labels": tokens.roll(1, 1) if task != "causal" else tokens.clone()}


def train(model: nn.Module, batch: dict[str, Tensor], steps: int = 5) -> list[float]:
    """The losses of some steps with SGD."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    losses = []
    for _ in range(steps):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses

# SPDX-License-Identifier: Apache-2.0
"""Tiny Hugging Face models, made from configurations without any weights, and a mode that makes fp64 mean fp64."""

import warnings
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig, Qwen2Config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB = 61  # no axis divides it


def launched_by_host() -> AbstractContextManager[object]:
    """Have `parallelize` gather whole blocks of small weights on CPUs, as on devices whose kernels a host launches."""
    return patch("stretto.parallel.resolve._LAUNCHED_BY_HOST", ("cpu",))


class Fp32IsFp64(TorchFunctionMode):
    """Takes float64 wherever Python code asks torch for float32.

    Hugging Face models compute norms, rotary angles and the loss in fp32 whatever their dtype: parity ends at 1e-7.
    Wrap the plain model and the parallel one alike.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        kwargs = {name: _widen(value) for name, value in (kwargs or {}).items()}
        return func(*map(_widen, args), **kwargs)


def _widen(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 8,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def gpt2(tied: bool) -> nn.Module:
    return _make(
        GPT2Config(
            vocab_size=VOCAB,
            n_layer=2,
            n_embd=32,
            n_head=8,
            n_positions=32,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=1,
            eos_token_id=2,
            tie_word_embeddings=tied,
        )
    )


def llama(tied: bool) -> nn.Module:
    return _make(LlamaConfig(**_SIZES, num_key_value_heads=4, tie_word_embeddings=tied))


def qwen2(tied: bool) -> nn.Module:
    return _make(Qwen2Config(**_SIZES, num_key_value_heads=4, tie_word_embeddings=tied))


def causal_lm(model_type: str, **options: Any) -> nn.Module:
    """A tiny model of any type that transformers knows."""
    sizes = {**_SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    sizes |= {"attention_dropout": 0.0, "residual_dropout": 0.0}
    return _make(CONFIG_MAPPING[model_type](**{**sizes, **options})).eval()


def _make(config: PretrainedConfig) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # token ids, rope parameters: nothing that a tiny model minds
        return AutoModelForCausalLM.from_config(config)

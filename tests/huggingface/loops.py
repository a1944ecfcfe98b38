# SPDX-License-Identifier: Apache-2.0
"""Tiny models and data for the training loops of other libraries, and an environment as torchrun gives."""

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainingArguments
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from trl import SFTConfig

VOCAB, ROWS, LENGTH, STEPS, BATCH = 64, 48, 12, 5, 8
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 64, "tie_word_embeddings": True},
    "gpt2": {"n_positions": 32, "n_inner": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "head_dim": 8,
        "intermediate_size": 64,
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.1,
    },
}


def make_model(kind: str) -> nn.Module:
    sizes = {"vocab_size": VOCAB, "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    if kind != "gpt2":
        sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 32}
    torch.manual_seed(3)
    config = CONFIG_MAPPING[kind](**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2, **MODELS[kind])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(config)
    assert isinstance(model, nn.Module)
    return model


def make_rows(count: int = ROWS, *, seed: int = 5) -> Dataset:
    """Sequences of one length, whose last 0 to 6 tokens have no label, so that ranks count differently."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, VOCAB, (count, LENGTH), generator=generator)
    labels = tokens.clone()
    for row, valid in enumerate(torch.randint(3, LENGTH + 1, (count,), generator=generator).tolist()):
        labels[row, valid:] = -100
    return Dataset.from_dict({"input_ids": tokens.tolist(), "labels": labels.tolist()})


def make_texts(count: int = ROWS) -> Dataset:
    """Sequences of 4 to 12 tokens, as SFTTrainer takes them."""
    generator = torch.Generator().manual_seed(8)
    lengths = torch.randint(4, LENGTH + 1, (count,), generator=generator).tolist()
    return Dataset.from_dict(
        {"input_ids": [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]}
    )


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{number}": number for number in range(3, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def make_arguments(out: Path, ranks_of_batch: int, kind: type[TrainingArguments], **options: Any) -> TrainingArguments:
    """Arguments for a global batch of BATCH rows in two micro-batches, and steps large enough to show a wrong one."""
    given: dict[str, Any] = {
        "per_device_train_batch_size": BATCH // 2 // ranks_of_batch,
        "per_device_eval_batch_size": BATCH // ranks_of_batch,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "adam_epsilon": 1e-3,  # else a first step is a gradient's sign, also where it is rounding
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "dataloader_pin_memory": False,
    }
    if kind is SFTConfig:
        given |= {
            "gradient_checkpointing": False,
            "max_length": None,
            "dataset_num_proc": None,
            "pad_to_multiple_of": 4,
        }
    return kind(output_dir=str(out), **given | options)


@contextlib.contextmanager
def launched() -> Iterator[None]:
    """The environment variables of torchrun, for a rank of the pool, and Accelerate as in a new process."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "TORCHELASTIC_RUN_ID": 0,
    }
    found = {name: str(value) for name, value in variables.items()} if world > 1 else {}
    try:
        with mock.patch.dict(os.environ, {**found, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}):
            yield
    finally:
        AcceleratorState._reset_state(True)
        PartialState._reset_state()
        GradientState._reset_state()

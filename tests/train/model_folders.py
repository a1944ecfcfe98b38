# SPDX-License-Identifier: Apache-2.0
"""Tiny Hugging Face folders with weights and a tokenizer, runs that start from one, and the same in plain PyTorch."""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from tests.parallel import hugging_face
from tests.train import runs
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from stretto.train.config import TrainConfig, make_config
from stretto.train.data import Sampler
from stretto.train.gpt.preflight import open_data
from stretto.train.optimizer import learning_rate

SEED = 5
IGNORED = -100
# Names the role of each message, and marks what the assistant says: the loss is taken over that.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|end|>{% endif %}{% endfor %}"
)
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]


def write_folder(
    folder: Path, *, kind: str = "llama", tied: bool = False, dtype: torch.dtype = torch.float32, **config: Any
) -> Path:
    """Write a model of 2 layers with random weights, and a byte-level tokenizer of 300 ids."""
    torch.manual_seed(SEED)
    sizes = {
        "vocab_size": 301,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 4,
    }  # 301: no axis divides
    sizes |= {"tie_word_embeddings": tied, "eos_token_id": 0, "bos_token_id": None, "pad_token_id": 0}
    sizes |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0} if kind == "gpt2" else {}
    sizes |= {"dropout": 0.0, "ffn_dim": 48, "word_embed_proj_dim": 32} if kind == "opt" else {}
    sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8} if kind == "gpt_oss" else {}
    model = hugging_face.causal_lm(kind, **{**sizes, **config})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.1)
    model.to(dtype).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path, chat_template: str | None = CHAT_TEMPLATE) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [runs.TEXT], trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")
    fast.chat_template = chat_template
    fast.save_pretrained(folder)


def write_chat(path: Path, conversations: Sequence[Sequence[str]]) -> str:
    """Write conversations that a user begins and in which user and assistant take turns."""
    lines = [
        [{"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(texts)]
        for texts in conversations
    ]
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in lines))
    return str(path)


def configure(out: Path, folder: Path, *overrides: str, **model: Any) -> TrainConfig:
    """A run on `runs.TEXT` that starts from the folder; or of the `model` that is given in its place."""
    text = out.parent / "text.txt"
    if not text.exists():
        text.parent.mkdir(parents=True, exist_ok=True)
        text.write_text(runs.TEXT)
    values = {
        "out": str(out),
        "device": "cpu",
        "data": {"path": str(text)},
        "model": model or {"path": str(folder)},
        "train": {"steps": 10, "batch": 8, "seq_len": 16, "lr": 1e-3, "warmup_steps": 2},
    }
    return make_config(values, list(overrides))


def train_on_grid(ranks: Any, config: TrainConfig) -> None:
    """Train on ranks of the pool, which cache ids where this process does."""
    ranks(config.ranks).run(_train_with_cache, config, os.environ["STRETTO_CACHE"], timeout=120)


def _train_with_cache(config: TrainConfig, cache: str) -> None:
    with mock.patch.dict(os.environ, {"STRETTO_CACHE": cache}):
        runs.train_quietly(config)


def batches_of(config: TrainConfig, dataset: Any) -> list[tuple[Tensor, Tensor]]:
    """The global batches of a run: tokens and targets."""
    options = config.train
    sampler = Sampler(len(dataset), options.batch, options.seed)
    batches = []
    for step in range(options.steps):
        inputs, targets = zip(*(dataset.read(index) for index in sampler.indices(step)), strict=True)
        batches.append((torch.from_numpy(np.stack(inputs)), torch.from_numpy(np.stack(targets))))
    return batches


def logits_of(model: nn.Module) -> Tensor:
    """The logits of a few fixed tokens."""
    model.eval()
    with torch.no_grad():
        return model(input_ids=torch.arange(64).view(4, 16) * 4).logits


def train_plainly(config: TrainConfig) -> tuple[list[float], nn.Module]:
    """The same run in plain PyTorch and transformers, on one process. Returns its losses and the trained model."""
    options = config.train
    assert config.model.path is not None
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32).train()
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(options.beta1, options.beta2), eps=options.eps)
    losses = []
    for step, (tokens, targets) in enumerate(batches_of(config, open_data(config)), start=1):
        logits = model(input_ids=tokens).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip or math.inf)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, options)
        optimizer.step()
    return losses, model

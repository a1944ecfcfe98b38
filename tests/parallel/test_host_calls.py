# SPDX-License-Identifier: Apache-2.0
"""How many Python calls a layer of an unmodified model takes on one rank, beside the same layer without Stretto."""

import sys
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from stretto.parallel import Grid, parallelize

IDS = torch.arange(2 * 16).view(2, 16) * 7 % 61


def make_llama(layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=61, num_hidden_layers=layers, use_cache=False, **sizes))


def calls_of_a_step(model: nn.Module, backend: str | None) -> int:
    """Python calls of a forward and a backward pass, the third; what is called once a model among them."""
    if backend is not None:
        torch._dynamo.reset()
        for layer in model.get_submodule("model.layers").children():
            layer.compile(backend=backend)
    calls = 0

    def note(_: FrameType, event: str, __: Any) -> None:
        nonlocal calls
        calls += event == "call"

    for step in range(3):
        sys.setprofile(note if step == 2 else None)
        try:
            model(input_ids=IDS, labels=IDS).loss.backward()
        finally:
            sys.setprofile(None)
        model.zero_grad()
    return calls


def calls_of_a_layer(backend: str | None) -> tuple[int, int]:
    """Without Stretto and with it."""
    plain, parallel = (
        calls_of_a_step(make(make_llama(3)), backend) - calls_of_a_step(make(make_llama(1)), backend)
        for make in (lambda model: model, lambda model: parallelize(model, Grid()))
    )
    return plain // 2, parallel // 2


@pytest.mark.parametrize("backend", [None, pytest.param("aot_eager", marks=pytest.mark.long)])
def test_a_layer_on_one_rank_takes_few_more_calls_than_a_plain_one(ranks, backend):
    ((plain, parallel),) = ranks(1).run(calls_of_a_layer, backend)
    assert parallel <= 1.3 * plain

# SPDX-License-Identifier: Apache-2.0
"""transformers' models with activations sharded by tokens over x between blocks train as plain ones on one rank."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stretto.execution import ExecutionOptions
from stretto.huggingface.refusals import SHARDED_FAMILIES
from stretto.parallel import Grid, clip_grad_norm_, gather, no_sync, parallelize
from stretto.parallel.resolve import resolve
from tests.conftest import Ranks
from tests.differences import largest
from tests.parallel.comm.wire import WireCounter
from tests.parallel.hugging_face import VOCAB, causal_lm
from tests.parallel.training import IGNORED, Sizes, distance, my_rows

SEED = 58
BATCH, SEQ_LEN, STEPS = 8, 6, 5
MAX_NORM = 0.5
HIDDEN = 32  # of `causal_lm`
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
EXPERTS = {"num_experts_per_tok": 2, "norm_topk_prob": True}
QWEN_MOE = EXPERTS | {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}


@dataclass(frozen=True)
class Case:
    """One family's tiny model, the grid (data, x, y, z) that it trains on, and how."""

    model_type: str
    sizes: Sizes
    config: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = 1


X2, X4, X2_Z2, DATA2_X2, X2_Y2 = (1, 2, 1, 1), (1, 4, 1, 1), (1, 2, 1, 2), (2, 2, 1, 1), (1, 2, 2, 1)
GRIDS = (X2_Z2, X4, DATA2_X2, X2_Y2)  # x=4: KV heads that are fewer are copied
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 8, "sliding_window": 4},
    "gemma3_text": {"query_pre_attn_scalar": 8, "sliding_window": 4},
    "gpt2": NO_DROPOUT,
    "gptj": NO_DROPOUT | {"rotary_dim": 4},
    "mistral": {"sliding_window": 4},
    "mixtral": EXPERTS | {"num_local_experts": 4},
    "olmoe": QWEN_MOE | {"clip_qkv": 0.5},  # in place, before heads
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "qwen2_moe": QWEN_MOE,
    "qwen3_moe": QWEN_MOE,
}
WAYS: tuple[dict[str, Any], ...] = (
    {"recompute": "full"},
    {"reshard": "after_forward"},
    {},
    {"recompute": "products"},
    {"recompute": "communication", "reshard": "after_step"},
)
CASES = [  # y splits OPT by blocks, and exaone4's block takes hidden states that no norm has made
    Case(
        family,
        X2 if family == "opt" else GRIDS[turn % 4],
        CONFIGS.get(family, {}) | {"tie_word_embeddings": turn % 3 == 0},
        WAYS[turn % 5],
        1 + turn % 2,
    )
    for turn, family in enumerate(sorted(SHARDED_FAMILIES))
]

MARKS: dict[str, Any] = {"llama": (), "olmoe": pytest.mark.long}


def build(case: Case) -> nn.Module:
    torch.manual_seed(SEED)
    model = causal_lm(case.model_type, **case.config).train()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms start alike, and show no mistake
            parameter.add_(torch.randn(parameter.shape), alpha=0.1)
    return model


def batch() -> dict[str, Tensor]:
    """Rows with padding on the left, and labels that rows have few or none of."""
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(3, VOCAB, (BATCH, SEQ_LEN), generator=generator)
    mask = torch.ones_like(tokens)
    for row in range(BATCH):
        mask[row, : row % 3] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, IGNORED)}


def part_of(inputs: dict[str, Tensor], rows: slice, part: int, parts: int) -> dict[str, Tensor]:
    return {name: value[rows].chunk(parts)[part] for name, value in inputs.items()}


def descend(model: nn.Module) -> None:
    """One step of SGD, on shards: torch works out each DTensor operation anew in every job."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                shard, gradient = (
                    each.to_local() if isinstance(each, DTensor) else each for each in (parameter, parameter.grad)
                )
                shard.sub_(gradient, alpha=0.05)
            parameter.grad = None


MakeRanks = Callable[[int], Ranks]
Trace = tuple[list[float], list[float], dict[str, Tensor]]


@cache
def trained_plainly(model_type: str, config: tuple[tuple[str, Any], ...]) -> Trace:
    """Losses and gradient norms of five steps of plain transformers, and the weights after them."""
    model, inputs = build(Case(model_type, X2, dict(config))), batch()
    losses, norms = [], []
    for _ in range(STEPS):
        loss = model(**inputs).loss
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        descend(model)
        losses.append(loss.item())
    return losses, norms, {name: parameter.detach() for name, parameter in model.named_parameters()}


def differences(case: Case, expected: Trace) -> dict[str, float]:
    """What differs on this rank of the grid from plain training, and how far."""
    data, x, y, z = case.sizes
    grid = Grid(data=data, x=x, y=y, z=z)
    model = parallelize(build(case), grid, shard_sequence=True, **case.options)
    rows, count = my_rows(grid, BATCH), (batch()["labels"][:, 1:] != IGNORED).sum()
    found: dict[str, float] = {}
    for step in range(STEPS):
        total = torch.zeros(())
        for part in range(case.micro_batches):
            inputs = part_of(batch(), rows, part, case.micro_batches)
            last = part == case.micro_batches - 1
            if last:
                loss = model(**inputs, num_items_in_batch=count).loss
                loss.backward()
            else:
                with no_sync(model):
                    loss = model(**inputs, num_items_in_batch=count).loss
                    loss.backward()
            total += loss.detach()
        norm = clip_grad_norm_(model.parameters(), MAX_NORM, grid)
        descend(model)
        found |= {
            f"loss {step}": abs(total.item() - expected[0][step]),
            f"norm {step}": abs(norm.item() / expected[1][step] - 1),
        }
    for name, parameter in model.named_parameters():
        found[name] = distance(gather(parameter).detach(), expected[2][name])
    return {name: value for name, value in found.items() if not value < 1e-5}


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            each, id=f"{each.model_type} {each.sizes}", marks=MARKS.get(each.model_type, pytest.mark.exhaustive)
        )
        for each in CASES
    ],
)
def test_five_steps_equal_those_of_one_rank(ranks: MakeRanks, case: Case) -> None:
    print(f"seed {SEED}")
    expected = trained_plainly(case.model_type, tuple(case.config.items()))
    assert ranks(prod(case.sizes)).run(differences, case, expected) == [{}] * prod(case.sizes)


def messages_of_hidden(tokens: Tensor) -> tuple[Counter[str], list[float], str, str]:
    """A Llama's messages over x of as many elements as hidden states have; how far hidden states are from a plain
    model's; and the errors for tokens that x does not divide, at once and in decoding."""
    case, grid = Case("llama", X2), Grid(x=2)
    plain, model = build(case), parallelize(build(case), grid, shard_sequence=True)
    with WireCounter({"x": grid.group("x")}) as wire:
        model(input_ids=tokens, labels=tokens).loss.backward()
    hidden = tokens.numel() * HIDDEN
    sent = Counter({message.kind: times for message, times in wire.messages.items() if message.numel == hidden})
    with torch.no_grad():
        ours = model(input_ids=tokens, output_hidden_states=True, use_cache=True)
        theirs = plain(input_ids=tokens, output_hidden_states=True).hidden_states
        refusals: list[str] = []
        for row, options in ((tokens[:1, :5], {}), (tokens[:1, :1], {"past_key_values": ours.past_key_values})):
            with pytest.raises(ValueError, match="sequence sharding over x=2") as caught:
                model(input_ids=row, **options)
            refusals.append(str(caught.value))
    of_odd, of_decoding = refusals
    return sent, [distance(*pair) for pair in zip(ours.hidden_states, theirs, strict=True)], of_odd, of_decoding


def refuse_backward_hooks(tokens: Tensor) -> None:
    model = parallelize(build(Case("llama", X2)), Grid(x=2), shard_sequence=True)
    attention = model.get_submodule("model.layers.1.self_attn")
    for module in (attention, attention.get_submodule("v_proj")):
        handle = module.register_full_backward_hook(lambda _, gradients, __: tuple(gradients))
        with pytest.raises(ValueError, match=f"{type(module).__name__} has backward hooks"):
            model(input_ids=tokens)
        handle.remove()
    attention.get_submodule("o_proj").register_full_backward_hook(lambda _, gradients, __: tuple(gradients))
    model(input_ids=tokens, labels=tokens).loss.backward()


def test_backward_hooks_of_what_takes_a_stand_in_are_refused(ranks: MakeRanks) -> None:
    ranks(2).run(refuse_backward_hooks, torch.arange(16).view(2, 8))


def test_gathers_and_scatters_take_the_place_of_all_reduces_and_hidden_states_are_whole(ranks: MakeRanks) -> None:
    tokens = torch.arange(16).view(2, 8)
    for sent, distances, of_odd, of_decoding in ranks(2).run(messages_of_hidden, tokens):
        # Of each of the two layers: gathered for q, k and v and for gate and up, and both outputs' gradients;
        # scattered: both outputs, and the gradients of the inputs of q, k and v together, of gate and of up. Besides,
        # the embedding's sum and its gradient, and the head's input and its gradient.
        assert sent == {"all-gather": 2 * 4 + 2, "reduce-scatter": 2 * 5, "all-reduce": 2}
        assert largest(distances) < 1e-6
        assert "the 5 tokens of a batch [1, 5] cannot be shared equally; 4 could" in of_odd
        assert "the 1 tokens of a batch [1, 1] cannot be shared equally; 2 could" in of_decoding


@pytest.mark.parametrize(
    ("family", "options", "pipe", "message"),
    [
        ("bloom", {"n_layer": 2, "n_head": 4}, 1, "of the family 'bloom', whose code has not been shown to work"),
        ("qwen3_moe", QWEN_MOE | {"output_router_logits": True}, 1, "output_router_logits is set"),
        ("llama", {}, 2, "2 pipeline stages would divide the blocks"),
    ],
)
def test_what_cannot_be_sharded_is_refused(family: str, options: dict[str, Any], pipe: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(causal_lm(family, **options), {"x": 2, "pipe": pipe}, options=ExecutionOptions(shard_sequence=True))

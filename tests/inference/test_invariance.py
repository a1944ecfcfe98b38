# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities have the same bits in every batch, with every chunk, on every grid, and in a trainer's forward
pass."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.conftest import Ranks
from tests.inference.test_engine import make, prompts, refusal
from tests.parallel import hugging_face
from torch import Tensor, nn
from torch.nn import functional as F

from stretto.execution import ExecutionOptions
from stretto.inference import Engine, token_log_probabilities
from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid, parallelize
from stretto.parallel.layers.invariant import InvariantOperators
from stretto.parallel.resolve import resolve

MakeRanks = Callable[[int], Ranks]
Case = tuple[str, dict[str, int], torch.dtype]
Requests = tuple[list[list[int]], int]
"""Prompts, and tokens that continue each."""

FEW: Requests = (prompts(11, (3, 259, 17)), 2)
SHORT: Requests = (prompts(11, (3, 40, 17)), 2)
MANY: Requests = (prompts(11, (3, 290, 17, 1, 40, 256)), 6)
MIXES = ((1, 512), (3, 90))
"""(requests at a time, tokens of a chunk)."""


def build(case: Case) -> tuple[Any, Grid]:
    torch.set_num_threads(1)
    kind, sizes, dtype = case
    options = {name: sizes[name] for name in sizes if name == "shard_sequence"}
    grid = Grid(**{name: size for name, size in sizes.items() if name not in options})
    return parallelize(make(kind).to(dtype), grid, invariant=True, **options), grid


def decode(case: Case, requests: Requests, mixes: Any) -> list[Any]:
    """The (tokens, log-probabilities) of each prompt in each mix; each rank of data has all prompts."""
    model, grid = build(case)
    prompts, new = requests
    found = []
    for batch, chunk in mixes:
        engine = Engine(model, batch, 2048, chunk=chunk, invariant=True)
        waiting = [engine.submit(prompt, new, log_probabilities=True) for prompt in prompts]
        while engine.step():
            pass
        found.append([(request.tokens, request.log_probabilities) for request in waiting])
    grid.close()
    return found


def train(case: Case, requests: Requests, reference: list[Any]) -> bool:
    """True if a forward pass that gradients follow, of all texts padded to one batch, has the same bits."""
    model, grid = build(case)
    texts = [prompt + tokens for prompt, (tokens, _) in zip(requests[0], reference, strict=True)]
    longest = -(-max(map(len, texts)) // grid.size("x")) * grid.size("x")
    ids, mask = (torch.zeros(len(texts), longest, dtype=torch.int64, device=grid.device) for _ in range(2))
    for row, text in enumerate(texts):
        ids[row, : len(text)], mask[row, : len(text)] = torch.tensor(text), 1
    logits = model.train()(input_ids=ids, attention_mask=mask, use_cache=False).logits
    found = token_log_probabilities(logits[:, :-1], ids[:, 1:])
    found.sum().backward()
    grid.close()
    starts = [len(text) - 1 - requests[1] for text in texts]
    rows = [found[row, start : start + requests[1]].tolist() for row, start in enumerate(starts)]
    return rows == [logs for _, logs in reference]


def compare(reference: Case, others: list[Case], trainers: list[Case], requests: Requests, mixes: Any) -> list[Any]:
    """What has other bits than one request after another on the reference's grid."""
    first, *more = decode(reference, requests, mixes)
    wrong: list[Any] = [mix for mix, found in zip(mixes[1:], more, strict=True) if found != first]
    wrong += [case for case in others if decode(case, requests, mixes[-1:]) != [first]]
    return wrong + [case for case in trainers if not train(case, requests, first)]


def test_bits_depend_neither_on_the_batch_nor_on_the_ranks_nor_on_who_computes(ranks: MakeRanks) -> None:
    """In fp32, where no rounding hides another order of additions."""
    case: Case = ("llama", {"data": 2}, torch.float32)
    trainers = [("llama", sizes, torch.float32) for sizes in ({"z": 2}, {"x": 2, "shard_sequence": True})]
    assert ranks(2).run(compare, case, [("llama", {"x": 2}, torch.float32)], trainers, FEW, MIXES) == [[], []]


def on_four(kind: str, dtype: torch.dtype) -> Any:
    grids = [{"data": 2, "x": 2}, {"x": 4}]
    if kind == "qwen3_moe":
        grids += [{"data": 2, "x": 2, "expert": 2}, {"x": 4, "expert": 4, "expert_tensor": "fold"}]
    trainers = [
        {"x": 2, "z": 2, **({} if kind == "qwen3_moe" else {"shard_sequence": True})},
        *([{"x": 2, "z": 2, "expert": 2}] if kind == "qwen3_moe" else []),
    ]
    return (kind, {"data": 4}, dtype), *([(kind, each, dtype) for each in sizes] for sizes in (grids, trainers))


@pytest.mark.long
def test_bits_on_four_ranks(ranks: MakeRanks) -> None:
    assert ranks(4).run(compare, *on_four("llama", torch.bfloat16), FEW, MIXES, timeout=300) == [[]] * 4


@pytest.mark.long
def test_bits_of_experts(ranks: MakeRanks) -> None:
    case: Case = ("qwen3_moe", {"data": 2}, torch.float32)
    grids: list[dict[str, int]] = [{"x": 2}, {"data": 2, "expert": 2}, {"x": 2, "expert": 2, "expert_tensor": "fold"}]
    others, trainers = ([("qwen3_moe", sizes, torch.float32) for sizes in each] for each in (grids, grids[:1]))
    assert ranks(2).run(compare, case, others, trainers, SHORT, MIXES) == [[], []]


def test_bits_of_norms_over_heads_that_ranks_divide(ranks: MakeRanks) -> None:
    on_x: Case = ("olmo2", {"x": 2}, torch.float32)
    assert ranks(2).run(compare, ("olmo2", {"data": 2}, torch.float32), [on_x], [on_x], SHORT, MIXES) == [[], []]


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt2", "qwen3", "olmo2", "qwen3_moe"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_bits_of_every_family(ranks: MakeRanks, kind: str, dtype: torch.dtype) -> None:
    assert ranks(4).run(compare, *on_four(kind, dtype), MANY, (*MIXES, (5, 7)), timeout=1800) == [[]] * 4


def two_hundred(chunks: tuple[int, ...] = (1, 5, 32, 100, 400)) -> tuple[Requests, list[tuple[int, int]]]:
    """Two hundred requests, and twenty mixes of batch and chunk."""
    draw = random.Random(3)
    requests = prompts(12, tuple(draw.choice((1, 2, 9, 30, 70, 257)) for _ in range(200))), 4
    return requests, [(1, 512), *((draw.randint(2, 30), draw.choice(chunks)) for _ in range(19))]


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
def test_bits_of_two_hundred_requests_in_twenty_mixes(ranks: MakeRanks) -> None:
    requests, mixes = two_hundred()
    case: Case = ("llama", {"data": 8}, torch.bfloat16)
    others = [("llama", sizes, torch.bfloat16) for sizes in ({"data": 4, "x": 2}, {"data": 2, "x": 4}, {"x": 8})]
    assert ranks(8).run(compare, case, others, [], requests, mixes, timeout=7000) == [[]] * 8


TINY: Requests = (prompts(13, (2, 9)), 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_bits_of_interpreted_kernels(interpret: Callable[..., Any], kind: str) -> None:
    case: Case = (kind, {"data": 2}, torch.float32)
    others, trainers = [(kind, {"x": 2}, torch.float32)], [(kind, {"z": 2}, torch.float32)]
    assert interpret(2, compare, case, others, trainers, TINY, ((1, 64), (2, 5)), timeout=600) == [[], []]


def gradients(case: Case, options: dict[str, Any], ids: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
    kind, sizes, dtype = case
    grid = Grid(**sizes)
    model = parallelize(make(kind).to(dtype), grid, **options)
    labels = ids if mask is None else ids.masked_fill(mask * mask.roll(1, 1) == 0, -100)  # nor those that padding tells
    model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
    found = {name: parameter.grad.to_local() for name, parameter in model.named_parameters()}
    grid.close()
    return found


def differentiate() -> list[Any]:
    """What differs from gradients of a plain pass: of windows, experts over x, padded rows, and what is recomputed."""
    torch.set_num_threads(1)
    ids = torch.arange(2 * 40).view(2, 40) * 7 % 61
    mask = torch.ones_like(ids)
    mask[1, :6] = mask[1, 34:] = 0
    wrong = []
    for kind, padding, more in (
        ("mistral", mask, {}),
        ("qwen3_moe", None, {"recompute": "full"}),
        ("gpt2", None, {"shard_sequence": True}),
        ("olmo2", None, {"recompute": "full"}),
    ):
        case: Case = (kind, {"x": 2}, torch.float32)
        plain, found = (gradients(case, options, ids, padding) for options in ({}, {"invariant": True} | more))
        errors = {name: (plain[name] - found[name]).abs().max() / plain[name].abs().max() for name in plain}
        wrong += [(kind, name, error.item()) for name, error in errors.items() if not error <= 1e-3]
    return wrong


def test_gradients_are_those_of_a_plain_pass(ranks: MakeRanks) -> None:
    assert ranks(2).run(differentiate) == [[], []]


def of(kind: str, sizes: dict[str, int], model: nn.Module | None = None, **options: Any) -> Callable[[], object]:
    options = {"invariant": True} | options
    return lambda: resolve(model or make(kind), sizes, options=ExecutionOptions(**options))


def test_what_has_no_invariant_form_is_refused_by_name() -> None:
    small = GPT(GPTConfig(layers=2, hidden=16, heads=2, vocab=61))
    odd = hugging_face.causal_lm("llama", intermediate_size=60)
    cases = {
        "y is 2: y=1 would do": of("llama", {"y": 2}),
        "context is 2: context=1 would do": of("llama", {"context": 2}),
        "pipe is 2: pipe=1 would do": of("llama", {"pipe": 2}),
        "takes x of 1, 2, 4 or 8, not 16: x=8 would do": of("", {"x": 16}, make("llama", num_attention_heads=16)),
        "takes transformers' causal language models, not GPT": of("", {"x": 2}, small),
        "in 8 equal parts, which do not divide 60: 64 would do": of("", {"x": 2}, odd),
        "shard_sequence=True takes no experts": of("qwen3_moe", {"x": 2}, shard_sequence=True),
        "invariant is 1, but must be True or False": of("llama", {}, invariant=1),
    }
    said = {text: refusal(call) for text, call in cases.items()}
    assert {text: found for text, found in said.items() if text not in found} == {}
    dropping = parallelize(make("gpt2", embd_pdrop=0.1), Grid(), invariant=True)
    said = refusal(lambda: dropping.train()(input_ids=torch.ones(1, 2, dtype=torch.int64)))
    assert "transformer.drop drops 0.1 of its numbers, which an engine does not" in said
    model = parallelize(make("llama"), Grid(), invariant=True)
    assert "parallelize(..., invariant=False) would do" in refusal(lambda: Engine(model, 2, 64, invariant=False))
    plain = parallelize(make("llama"), Grid())
    assert "parallelize(..., invariant=True) would do" in refusal(lambda: Engine(plain, 2, 64, invariant=True))


@pytest.mark.long
def test_a_compiler_is_refused() -> None:
    model = parallelize(make("llama"), Grid(), invariant=True)
    ids, hidden = torch.ones(1, 4, dtype=torch.int64), torch.ones(1, 4, 32)
    for part, given in ((model, ids), (model.model.layers[0].mlp, hidden)):
        compiled = torch.compile(part, backend="eager")
        assert "torch.compile of a model with invariant=True" in refusal(partial(compiled, given))


def test_products_in_a_layers_own_code_are_invariant_or_refused() -> None:
    x, weight = torch.randn(5, 16), torch.randn(7, 16)
    column, row = torch.randn(2, 4, 1), torch.randn(2, 1, 6)
    with InvariantOperators():
        assert torch.equal(column @ row, column * row)  # rotary angles of older transformers
        found, gated = F.linear(x, weight), torch.sigmoid(x)
        assert torch.equal(F.linear(x[2:3], weight), found[2:3])
        assert torch.equal(torch.sigmoid(x[:, 3:8]), gated[:, 3:8])
        said = refusal(lambda: x @ weight.t())
    torch.testing.assert_close(found, F.linear(x, weight))
    assert "calls matmul, whose bits depend on the number of rows" in said


def test_log_probabilities_of_whole_logits_are_differentiable() -> None:
    logits, tokens = (
        (torch.randn(2, 3, 61, requires_grad=True) for _ in range(2)),
        torch.tensor([[1, 60, 0], [5, 5, 7]]),
    )
    own, other = logits
    with torch.no_grad():
        other.copy_(own)
    found, expected = token_log_probabilities(own, tokens), other.log_softmax(-1).gather(2, tokens[..., None])[..., 0]
    torch.testing.assert_close(found, expected)
    for each in (found, expected):
        (each * torch.arange(6.0).view(2, 3)).sum().backward()
    torch.testing.assert_close(own.grad, other.grad)
    assert "tokens must be [2, 3]" in refusal(lambda: token_log_probabilities(own, tokens[0]))
    for wrong, words in ((-100, "token -100 is outside the vocabulary"), (own.shape[-1], "is outside the vocabulary")):
        assert words in refusal(lambda wrong=wrong: token_log_probabilities(own, torch.full_like(tokens, wrong)))
    assert "tokens must be integers" in refusal(lambda: token_log_probabilities(own, tokens.double()))

# SPDX-License-Identifier: Apache-2.0
"""Tokens are drawn from a vocabulary that ranks divide as they would be from the whole one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.conftest import Ranks
from torch import Tensor

from stretto.inference.requests import Sampling
from stretto.inference.sampling import RandomRows, VocabularyPart, best_tokens, draw_tokens, log_probabilities
from stretto.parallel import Grid
from stretto.parallel.comm.collectives import NO_GROUP

MakeRanks = Callable[[int], Ranks]
SEED = 11


def rows_of(count: int, temperature: float, top_k: int, top_p: float) -> RandomRows:
    each = torch.arange(count)
    heat, mass = (torch.full((count,), value, dtype=torch.float64) for value in (temperature, top_p))
    counts = torch.full((count,), top_k) if top_k else None
    return RandomRows(heat, each * 7919 + SEED, each % 5, counts, mass if top_p < 1 else None)


def whole(vocab: int) -> VocabularyPart:
    return VocabularyPart(0, vocab, NO_GROUP)  # type: ignore[arg-type]


def logits_of(rows: int, vocab: int) -> Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(SEED))


SETTINGS = [(1.0, 0, 1.0), (0.7, 5, 1.0), (1.3, 0, 0.8), (0.9, 7, 0.6), (1e-4, 0, 1.0), (50.0, 1, 1.0)]
VOCABULARIES = (61, 8, 5120)  # in one piece on each rank, and in 64


def draw_on_parts() -> list[Any]:
    grid = Grid(x=4)
    found = []
    for vocab in VOCABULARIES:
        logits = logits_of(6, vocab)
        longest = -(-vocab // 4)
        first = longest * grid.coordinate("x")
        part, here = VocabularyPart(first, longest, grid.group("x")), logits[:, first : first + longest]
        best = best_tokens(here, part)
        found.append((best, log_probabilities(here, best, part)))
        found += [draw_tokens(here, rows_of(6, *setting), part) for setting in SETTINGS]
    return found


def test_four_parts_of_a_vocabulary_draw_the_tokens_of_one(ranks: MakeRanks) -> None:
    by_rank = [iter(found) for found in ranks(4).run(draw_on_parts)]
    for vocab in VOCABULARIES:
        logits = logits_of(6, vocab)
        for found in by_rank:
            best, logs = next(found)
            assert torch.equal(best, logits.argmax(1))
            expected = logits.log_softmax(1).gather(1, best[:, None])[:, 0]
            torch.testing.assert_close(logs, expected, rtol=0, atol=1e-5)
        for setting in SETTINGS:
            expected = draw_tokens(logits, rows_of(6, *setting), whole(vocab))
            for found in by_rank:
                assert torch.equal(next(found), expected), (vocab, setting)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("temperature", "top_k", "top_p"), SETTINGS)
def test_drawn_tokens_have_the_frequencies_that_transformers_warpers_leave(
    temperature: float, top_k: int, top_p: float
) -> None:
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = logits_of(1, 12)
    warped = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        warped = TopKLogitsWarper(top_k)(None, warped)
    if top_p < 1:
        warped = TopPLogitsWarper(top_p)(None, warped)
    expected = warped.softmax(1)[0]
    count = 4_000
    rows = rows_of(count, temperature, top_k, top_p)
    drawn = draw_tokens(logits.expand(count, -1), rows, whole(12))
    frequencies = drawn.bincount(minlength=12) / count
    assert (frequencies[expected == 0] == 0).all()
    spread = (expected * (1 - expected) / count).sqrt()
    assert ((frequencies - expected).abs() <= 4.5 * spread + 1e-9).all(), (frequencies, expected)


def test_a_row_is_drawn_alike_in_any_company() -> None:
    logits, rows = logits_of(6, 61), rows_of(6, 1.0, 9, 0.9)
    expected = draw_tokens(logits, rows, whole(61))
    order = torch.tensor([4, 2, 0])
    assert torch.equal(draw_tokens(logits[order], rows.take(order), whole(61)), expected[order])


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("setting", [(1.0, None, 1.0), (0.7, 3, 1.0), (1.0, None, 0.5), (1.3, 9, 0.9)])
def test_a_row_with_nan_draws_no_token_and_changes_no_other_row(sign: float, setting: tuple[Any, ...]) -> None:
    logits, rows = logits_of(6, 61), rows_of(6, *setting)
    expected = draw_tokens(logits, rows, whole(61))
    broken = logits.clone()
    broken[2, 17] = torch.copysign(torch.tensor(torch.nan), torch.tensor(sign))
    expected[2] = -1
    assert torch.equal(draw_tokens(broken, rows, whole(61)), expected)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1.0, but must be finite, and 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": 0}, "top_k is 0, but must be from 1 to 2"),
        ({"top_k": 2**63}, "or None for all tokens"),
        ({"top_p": 0.0}, "top_p is 0.0, but must be above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"seed": 2**63}, "must be of 64 bits; 0 would do"),
    ],
)
def test_settings_that_draw_nothing_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**given)

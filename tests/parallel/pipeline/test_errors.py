# SPDX-License-Identifier: Apache-2.0
"""Tests that what pipelines refuse is refused in one line that says what would do, on all ranks,
and nobody waits for ever.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto.execution import StageOptions
from stretto.memory import PeerError
from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid, Pipeline, parallelize
from stretto.schedules import build_schedule
from tests.parallel.pipeline.test_steps import Block, Classifier, examples

ROWS = 4
LIMIT = 20.0  # seconds; nothing here waits so long


def gpt(layers: int = 4, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return GPT(GPTConfig(layers=layers, hidden=16, heads=2, vocab=31, max_seq_len=8, **options))


def tokens(rows: int = ROWS) -> dict[str, Tensor]:
    text = torch.arange(rows * 8).view(rows, 8) % 31
    return {"tokens": text, "targets": text}


def refusal_of(call: Callable[[], object], kind: type[Exception] | tuple[type[Exception], ...] = ValueError) -> str:
    """The error's text, which is one line."""
    with pytest.raises(kind) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# What is wrong with a model, its stages and the schedule. None of these ranks waits for another.


class OwnParameters(nn.Module):
    """A model with a parameter of its own between its embedding and its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Classifier(4)
        self.shift = nn.Parameter(torch.zeros(8))

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        return self.inner(features + self.shift[:6], labels)


class SharedInside(nn.Module):
    """A model whose second and third blocks share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layers = nn.Linear(6, 8), nn.ModuleList(Block() for _ in range(4))
        self.layers[2].up.weight = self.layers[1].up.weight

    def forward(self, features: Tensor) -> Tensor:
        x = self.stem(features)
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def refusals() -> dict[str, str]:
    grid = Grid(pipe=2)
    blocks = ["layers.*"]

    def pipeline(model: nn.Module | None = None, **options: Any) -> Pipeline:
        model = parallelize(gpt(), grid) if model is None else model
        return Pipeline(model, grid, **{"micro_batch_size": 1, **options})

    def of(stages: StageOptions) -> nn.Module:
        return parallelize(gpt(), grid, stages=stages)

    with pipeline(micro_batch_size=3) as uneven:
        rows = refusal_of(lambda: uneven.step(**tokens()))
        none = refusal_of(lambda: uneven.step(tokens="text"))
    with pipeline(of(StageOptions(2)), schedule="interleaved", micro_batch_size=1) as rounds:
        numbers = refusal_of(lambda: rounds.step(**tokens(5)))
    with pipeline(of(StageOptions(2, "v")), schedule="dualpipe-v") as few:
        fewer = refusal_of(lambda: few.step(**tokens(2)))
    with pipeline(schedule=build_schedule("1f1b", 2, 8)) as fixed:
        other = refusal_of(lambda: fixed.step(**tokens(4)))
    return {
        "more stages than blocks": refusal_of(lambda: parallelize(gpt(1), grid)),
        "more virtual stages than blocks": refusal_of(lambda: of(StageOptions(4))),
        "cuts that are none": refusal_of(lambda: of(StageOptions(cuts=(4,)))),
        "rows that micro-batches do not divide": rows,
        "no rows at all": none,
        "a schedule that takes other stages": refusal_of(lambda: pipeline(schedule="interleaved")),
        "a schedule in a v": refusal_of(lambda: pipeline(of(StageOptions(2)), schedule="zb-v")),
        "messages that drive two stages a rank": refusal_of(
            lambda: pipeline(of(StageOptions(2)), schedule="message-driven")
        ),
        "micro-batches that fill no rounds": numbers,
        "fewer micro-batches than the schedule takes": fewer,
        "a schedule of another number of micro-batches": other,
        "a schedule that is not known": refusal_of(lambda: pipeline(schedule="1f2b")),
        "a schedule for more ranks": refusal_of(lambda: pipeline(schedule=build_schedule("1f1b", 4, 8))),
        "a limit without messages that drive": refusal_of(lambda: pipeline(limit=3)),
        "a limit of nothing": refusal_of(lambda: pipeline(schedule="message-driven", limit=0)),
        "an order that is not known": refusal_of(lambda: pipeline(schedule="message-driven", serve_first="last")),
        "a warm-up of another schedule": refusal_of(lambda: pipeline(schedule="gpipe", extra_warm_up=1)),
        "micro-batches of no rows": refusal_of(lambda: pipeline(micro_batch_size=0)),
        "a model that is on no grid": refusal_of(lambda: pipeline(gpt())),
        "a call of the model itself": refusal_of(lambda: parallelize(gpt(), grid)(**tokens())),
        "parameters beside blocks": refusal_of(lambda: parallelize(OwnParameters(), grid, blocks=["inner.layers.*"])),
        "a weight that inner stages share": refusal_of(
            lambda: parallelize(SharedInside(), grid, blocks=blocks, stages=StageOptions(2))
        ),
        "a split backward pass without roles": refusal_of(
            lambda: pipeline(parallelize(Classifier(4), grid, blocks=blocks), schedule="zb-h1")
        ),
        "parts that are not there": refusal_of(lambda: of(StageOptions(last=("hat",)))),
    }


EXPECTED = {
    "more stages than blocks": r"2 stages, but the model has 1 blocks.*pipe=1 would do",
    "more virtual stages than blocks": r"8 stages, but the model has 4 blocks.*pipe=1 would do",
    "cuts that are none": r"cuts is \[4\], but must be 1 ascending numbers between 1 and 3",
    "rows that micro-batches do not divide": r"micro-batches of 3 rows do not divide the 4 rows.*; 3 would do",
    "no rows at all": "none of them is a tensor with rows",
    "a schedule that takes other stages": "2 or more stages on each rank, not 1; 2 would do, or schedule",
    "a schedule in a v": r"virtual_stages=2, placement='v'\)\) would do",
    "messages that drive two stages a rank": "message-driven order takes one stage a rank, and the model has 4",
    "micro-batches that fill no rounds": "5 micro-batches are not; 4 or 6 would do",
    "fewer micro-batches than the schedule takes": "not 2; 4 would do",
    "a schedule of another number of micro-batches": "is of 8 micro-batches, and this step has 4; 8 rows would do",
    "a schedule that is not known": "schedule is '1f2b'.*'?1f1b",
    "a schedule for more ranks": r"stages on ranks \[0, 1, 2, 3\], and the model on \[0, 1\]",
    "a limit without messages that drive": "options of schedule='message-driven'",
    "a limit of nothing": "limit is 0, but must be at least 1",
    "an order that is not known": "serve_first is 'last', but must be one of arrival, backward, forward",
    "a warm-up of another schedule": "extra_warm_up is an option of schedule='1f1b'",
    "micro-batches of no rows": "micro_batch_size is 0, but must be a whole number, at least 1",
    "a model that is on no grid": "takes a model that stretto.parallelize has returned",
    "a call of the model itself": "call step or evaluate of stretto.parallel.Pipeline",
    "parameters beside blocks": r"OwnParameters has parameters .*\(shift\) in addition to its blocks.*use pipe=1",
    "a weight that inner stages share": r"layers.1.up.weight is shared by pipeline stages 1, 2",
    "a split backward pass without roles": "needs a model with roles.*takes 'gpipe', '1f1b'",
    "parts that are not there": "no module outside of the blocks is named 'hat'",
}


@pytest.mark.long
def test_each_misuse_is_answered_on_all_ranks_with_what_would_do(ranks):
    for messages in ranks(2).run(refusals):
        assert messages.keys() == EXPECTED.keys()
        assert {name: text for name, text in messages.items() if not re.search(EXPECTED[name], text)} == {}


# Connections that skip a cut. The rank that finds one tells the others.


class Skipping(nn.Module):
    """A model that uses what its first blocks have computed after its last ones, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.stem = nn.Linear(6, 8)
        self.layers = nn.ModuleList(WithMemory() if way == "a list" else Block() for _ in range(4))
        self.classify = nn.Linear(8, 5)

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        x = start = self.stem(features)
        skips: list[Tensor] = []
        for number, layer in enumerate(self.layers):
            if self.way == "a list":
                x = layer(x, skips)
                continue
            if self.way == "a U" and number >= 2:
                x = x + skips.pop()
            x = layer(x)
            if number < 2:
                skips.append(x)
        if self.way == "twice":
            x = self.layers[0](x)
        if self.way == "the stem":
            x = x + start
        if self.way == "a value":
            x = x * skips[0].mean()
        return nn.functional.cross_entropy(self.classify(x), labels)


class WithMemory(Block):
    """A block that writes to a list, and reads what others have written."""

    def forward(self, x: Tensor, skips: list[Tensor]) -> Tensor:
        y = super().forward(x + skips[0] if skips else x)
        skips.append(y)
        return y


SKIPS = {
    "a list": "tensors that need gradients in skips.*pass each as an argument",
    "twice": "once each and in order.*use pipe=1",
}
WAYS = ["a U", "the stem", "a value", "a list", "twice"]


def refusal_of_skip(way: str, is_evaluated: bool) -> str:
    grid = Grid(pipe=2, timeout=LIMIT)
    torch.manual_seed(0)
    model = parallelize(Skipping(way).double(), grid, blocks=["layers.*"])
    with Pipeline(model, grid, micro_batch_size=2) as pipeline:
        run = pipeline.evaluate if is_evaluated else pipeline.step
        return refusal_of(lambda: run(**examples(4)), (ValueError, PeerError))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("is_evaluated", [False, True], ids=["step", "evaluate"])
@pytest.mark.parametrize("way", WAYS)
def test_a_connection_that_skips_a_cut_is_found_before_it_does_harm(ranks, way, is_evaluated):
    for text in ranks(2).run(refusal_of_skip, way, is_evaluated, timeout=60):
        assert re.search(SKIPS.get(way, "skips the cut.*use pipe=1"), text)


class Given(nn.Module):
    """Its third block, the first of stage 1, is given the output of the first one, detached, or nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.classify = nn.Linear(6, 8), nn.Linear(8, 5)
        self.layers = nn.ModuleList(Taking() for _ in range(4))
        self.gives = False

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        x, given = self.stem(features), None
        for number, layer in enumerate(self.layers):
            x = layer(x, given)
            given = x.detach() if number == 0 and self.gives else given if number < 2 else None
        return nn.functional.cross_entropy(self.classify(x), labels)


class Taking(Block):
    def forward(self, x: Tensor, given: Tensor | None) -> Tensor:
        return super().forward(x if given is None else x + given)


def later_connections() -> None:
    """Steps in which tensors take another way over the cut than in the first, in which stages learn what to send."""
    torch.manual_seed(0)
    plain = Given().double()
    torch.manual_seed(0)
    grid = Grid(pipe=2, timeout=LIMIT)
    model = parallelize(Given().double(), grid, blocks=["layers.*"])
    with Pipeline(model, grid, micro_batch_size=2) as pipeline:
        for gives in (False, True, False, True):
            model.gives = plain.gives = gives
            assert float(pipeline.step(**examples(4))) == pytest.approx(float(plain(**examples(4))), rel=1e-9)
    torch.manual_seed(0)
    skipping = parallelize(Skipping("").double(), grid, blocks=["layers.*"])
    with Pipeline(skipping, grid, micro_batch_size=2) as pipeline:
        pipeline.step(**examples(4))
        skipping.way = "the stem"
        assert pipeline.evaluate(**examples(4)).isnan()
        text = refusal_of(lambda: pipeline.step(**examples(4)), (ValueError, PeerError))
        assert re.search(r"stage 1 uses tensors of an earlier stage.*skips the cut before that block", text)


@pytest.mark.long
def test_a_connection_of_a_later_step_is_sent_or_refused(ranks):
    ranks(2).run(later_connections, timeout=60)


# Ranks that do otherwise than the others.


def rows_of_one_rank(axis: str, schedule: str) -> str:
    grid = Grid(**{"pipe": 2, axis: 2} if axis != "pipe" else {"pipe": 2}, timeout=LIMIT)
    model = parallelize(gpt(), grid)
    is_other = grid.coordinate(axis) == 1
    with Pipeline(model, grid, schedule=schedule, micro_batch_size=1) as pipeline:
        return refusal_of(lambda: pipeline.step(**tokens(2 if is_other else 4)), (ValueError, PeerError))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("axis", ["pipe", "data", "z"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "message-driven"])
def test_ranks_with_different_numbers_of_rows_raise(ranks, axis, schedule):
    messages = ranks(2 if axis == "pipe" else 4).run(rows_of_one_rank, axis, schedule, timeout=60)
    assert any("micro-batches in this step" in text for text in messages), messages


def refusals_of_one_rank() -> dict[str, str]:
    """Return what each rank is told where one of them refuses: the model, the pipeline, a step."""
    grid = Grid(pipe=2, timeout=LIMIT)
    is_other = grid.coordinate("pipe") == 1
    other = Classifier(4)
    other.layers[3].table = nn.Embedding(4, 4, max_norm=1.0)  # of the second stage
    before = {name: id(parameter) for name, parameter in other.named_parameters()}
    model = refusal_of(lambda: parallelize(other, grid, blocks=["layers.*"]))
    assert {name: id(parameter) for name, parameter in other.named_parameters()} == before
    split = parallelize(gpt(), grid)
    schedule = "1f2b" if is_other else "1f1b"
    options = refusal_of(lambda: Pipeline(split, grid, schedule=schedule, micro_batch_size=2))
    with Pipeline(split, grid, micro_batch_size=2) as pipeline:
        refusal_of(lambda: pipeline.step(**tokens(3)))  # all ranks refuse this one, and take the next
        assert pipeline.step(**tokens(4)).isfinite()
        step = refusal_of(lambda: pipeline.step(**tokens(3 if is_other else 4)), (ValueError, PeerError))
    return {"model": model, "options": options, "step": step}


@pytest.mark.long
def test_what_one_rank_refuses_all_refuse_before_their_limit(ranks):
    reasons = {
        "model": "layers.3.table: an embedding with max_norm",
        "options": "schedule is '1f2b'",
        "step": "micro-batches of 2 rows do not divide the 3 rows",
    }
    told, own = ranks(2).run(refusals_of_one_rank, timeout=60)
    for name, reason in reasons.items():
        assert reason in own[name]
        assert re.search(rf"pipe rank 1 \(global rank 1\).*refuse.*{reason}", told[name]), told
        assert "within" not in told[name]


class Stumbling(Classifier):
    """A model of which one block raises on one rank, in the forward or in the backward pass."""

    def break_block(self, number: int, when: str) -> None:
        def stumble(*_: object) -> None:
            raise ArithmeticError("the block has stumbled")

        block = self.layers[number]
        if isinstance(block, Block):
            hook = block.register_forward_hook if when == "forward" else block.register_full_backward_hook
            hook(stumble)


def stumble(schedule: str, block: int, when: str) -> str:
    grid = Grid(pipe=4, timeout=LIMIT)
    torch.manual_seed(0)
    model = Stumbling(4).double()
    parallelize(model, grid, blocks=["layers.*"])
    model.break_block(block, when)
    with Pipeline(model, grid, schedule=schedule, micro_batch_size=1) as pipeline:
        try:
            pipeline.step(**examples(4))
        except (ArithmeticError, PeerError) as error:
            text = str(error)
        else:  # a rank that had done its part before
            text = refusal_of(lambda: pipeline.step(**examples(4)), PeerError)
    again = refusal_of(lambda: pipeline.step(**examples(4)), RuntimeError)
    assert "an earlier step of this pipeline has failed here" in again
    return text


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "message-driven"])
@pytest.mark.parametrize("block", range(4))
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_ranks_name_the_one_that_has_raised_and_what(ranks, schedule, block, when):
    for rank, text in enumerate(ranks(4).run(stumble, schedule, block, when, timeout=60)):
        if rank == block:
            assert text == "the block has stumbled"
        else:
            assert f"the cause is pipe rank {block} (global rank {block})" in text
            assert "raised ArithmeticError: the block has stumbled" in text


def capture() -> str:
    grid = Grid()
    with Pipeline(parallelize(gpt(), grid), grid, schedule="message-driven", micro_batch_size=1) as pipeline:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            return refusal_of(lambda: pipeline.step(**tokens()))


def test_no_graph_captures_a_step_that_messages_drive(ranks):
    assert "run it without CapturedStep" in ranks(1).run(capture)[0]

# SPDX-License-Identifier: Apache-2.0
"""Tests of what a pipeline's step sends, keeps in memory and computes when, counted."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from stretto.execution import StageOptions
from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid, Pipeline, count_collectives, parallelize
from stretto.parallel.layers import weight_shard
from stretto.parallel.layers.linear import ParallelLinear
from stretto.parallel.layers.linear_plan import LinearPlan
from stretto.parallel.layers.loss import ParallelHead
from stretto.parallel.layers.norm import ParallelNorm
from stretto.parallel.pipeline.actions import ActionRunner
from stretto.parallel.state import require_state
from stretto.schedules import Action, PipelineOperation
from tests.parallel.pipeline.training import STAGES
from tests.peak_memory import PeakMemory
from tests.pool import Pool
from tests.processes import LIMIT

VOCAB, SEQ_LEN = 31, 16
SCALARS = 64  # bytes that losses and numbers of targets take at most


def gpt(layers: int = 4, hidden: int = 32) -> nn.Module:
    torch.manual_seed(0)
    return GPT(GPTConfig(layers=layers, hidden=hidden, heads=2, vocab=VOCAB, max_seq_len=SEQ_LEN, tie_embeddings=False))


def text(rows: int) -> dict[str, Tensor]:
    tokens = torch.arange(rows * SEQ_LEN).view(rows, SEQ_LEN) * 7 % VOCAB
    return {"tokens": tokens, "targets": tokens}


@contextmanager
def following(note: Callable[[Action, bool], None]) -> Iterator[None]:
    """Call `note` at the beginning (True) and at the end (False) of each action that this rank computes."""
    take = ActionRunner.take

    def noting(self: Any, action: Action, **options: Any) -> None:
        note(action, True)
        take(self, action, **options)
        note(action, False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ActionRunner, "take", noting)
        yield


# What is sent.


def calls_of_a_step(
    sizes: dict[str, int], schedule: str, micro_batches: int, **options: Any
) -> tuple[int, Counter[tuple[str, str]], dict[str, int]]:
    """The weights of this rank, a step's calls by kind and axis but those of scalars, and its bytes by axis."""
    grid = Grid(**sizes)
    model = parallelize(gpt(), grid, stages=STAGES.get(schedule, StageOptions()), **options)
    weights = sum(isinstance(module, nn.Embedding | ParallelLinear) for module in model.modules())
    with Pipeline(model, grid, schedule=schedule, micro_batch_size=1) as pipeline:
        pipeline.step(**text(micro_batches))  # the first one learns orders, and compares them
        model.zero_grad()
        with count_collectives(grid) as counts:
            pipeline.step(**text(micro_batches))
    large = Counter((call.kind, call.axis) for call in counts.calls if call.bytes_sent > SCALARS)
    return weights, large, counts.bytes_by_axis()


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-v", "message-driven"])
def test_weights_are_gathered_once_a_step_and_gradients_scattered_once_a_micro_batch(ranks, schedule):
    for micro_batches in (2, 4):
        for weights, calls, _ in ranks(4).run(calls_of_a_step, {"pipe": 2, "z": 2}, schedule, micro_batches):
            # Two more at most: the embedding, and positions, are no linears.
            assert weights <= calls["all_gather", "z"] <= weights + 2
            assert weights * micro_batches <= calls["reduce_scatter", "z"] <= (weights + 2) * micro_batches


@pytest.mark.long
def test_gradients_that_add_up_unsharded_are_scattered_once_a_step(ranks):
    found = ranks(4).run(calls_of_a_step, {"pipe": 2, "z": 2}, "1f1b", 4, reshard="gradients_after_step")
    for weights, calls, _ in found:
        assert weights <= calls["reduce_scatter", "z"] <= weights + 2


@pytest.mark.exhaustive
def test_weights_that_are_not_kept_are_gathered_for_each_pass(ranks):
    for weights, calls, _ in ranks(4).run(calls_of_a_step, {"pipe": 2, "z": 2}, "1f1b", 4, reshard="after_forward"):
        assert calls["all_gather", "z"] >= 2 * 4 * (weights - 2)


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zb-h1", "message-driven"])
def test_gradients_are_summed_over_data_once_a_step(ranks, schedule):
    few, many = (ranks(4).run(calls_of_a_step, {"pipe": 2, "data": 2}, schedule, count) for count in (4, 8))
    for (_, calls, sent), (_, more_calls, more_sent) in zip(few, many, strict=True):
        over_data, more_over_data = (
            sum(count for (kind, axis), count in each.items() if axis != "pipe") for each in (calls, more_calls)
        )
        assert 0 < over_data == more_over_data <= 3
        assert more_sent["pipe"] > 1.9 * sent["pipe"]


def bytes_over_pipe(sizes: dict[str, int], rows: int, layers: int) -> int:
    grid = Grid(**sizes)
    model = parallelize(gpt(layers, hidden=256), grid)
    with Pipeline(model, grid, micro_batch_size=1) as pipeline:
        local = text(rows // grid.size("data"))
        pipeline.step(**local)
        with count_collectives(grid) as counts:
            pipeline.step(**local)
    return sum(call.bytes_sent for call in counts.calls if call.kind == "message")


@pytest.mark.exhaustive
def test_with_gpus_and_batch_fixed_a_stage_sends_in_proportion_to_the_number_of_stages(ranks):
    """Lemma 3.3.1. Of two stages there is no inner one: the first ones are compared."""
    shallow = ranks(4).run(bytes_over_pipe, {"pipe": 2, "data": 2}, 8, 4)
    deep = ranks(4).run(bytes_over_pipe, {"pipe": 4}, 8, 4)
    assert deep[0] / shallow[0] == pytest.approx(2, rel=0.02)
    assert deep[1] / deep[0] == pytest.approx(2, rel=0.02)  # an inner stage sends in both directions
    assert deep[0] == pytest.approx(8 * SEQ_LEN * 256 * 4, rel=0.1)  # beside headers


@pytest.mark.exhaustive
def test_twelve_stages_send_twice_what_six_do():
    """Lemma 3.3.1 for inner stages, on twelve ranks."""
    pool = Pool(12)
    try:
        six = pool.run(12, bytes_over_pipe, {"pipe": 6, "data": 2}, 24, 12, timeout=300)
        twelve = pool.run(12, bytes_over_pipe, {"pipe": 12}, 24, 12, timeout=300)
    finally:
        pool.close()
    for stage in range(1, 11):
        for inner in six[2:10]:
            assert twelve[stage] / inner == pytest.approx(2, rel=0.02)


# What is kept.


def storages_kept(schedule: str, recompute: str) -> list[str]:
    """Micro-batches of which something lives on when it should not."""
    grid = Grid(pipe=2)
    model = parallelize(gpt(), grid, stages=STAGES.get(schedule, StageOptions()), recompute=recompute)
    stages = require_state(model, "this test").stages
    now: list[Action] = []
    made: dict[tuple[int, int | None], list[StorageWeakRef]] = {}
    sent: dict[tuple[int, int | None], list[StorageWeakRef]] = {}
    wrong: list[str] = []

    def remember(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            if now[-1].operation is PipelineOperation.FORWARD:
                key = (now[-1].stage, now[-1].micro_batch)
                refs = [StorageWeakRef(output.untyped_storage())]
                made.setdefault(key, []).extend(refs)
                if name == stages.block_names[stages.cuts[now[-1].stage + 1] - 1] and now[-1].stage < stages.count - 1:
                    sent[key] = refs

        return hook

    def remember_input(module: nn.Module, args: Any) -> None:
        if now[-1].operation is PipelineOperation.FORWARD:
            made.setdefault((now[-1].stage, now[-1].micro_batch), []).append(StorageWeakRef(args[0].untyped_storage()))

    for name, module in model.named_modules():
        if name in stages.block_names or isinstance(module, ParallelLinear):
            module.register_forward_hook(remember(name))
        if isinstance(module, ParallelNorm):  # the first of a stage gets what was received
            module.register_forward_pre_hook(remember_input)

    def note(action: Action, begins: bool) -> None:
        key, ends = (action.stage, action.micro_batch), (PipelineOperation.BACKWARD, PipelineOperation.BACKWARD_WEIGHT)
        if begins:
            now.append(action)
            is_first_backward = action.operation in (PipelineOperation.BACKWARD, PipelineOperation.BACKWARD_INPUT)
            is_away = key in sent and stages.stage_ranks[action.stage + 1] != stages.rank
            if is_first_backward and is_away and not all(_expire(ref) for ref in sent[key]):
                wrong.append(f"{action}: what was sent")
        elif action.operation in ends and not all(_expire(ref) for ref in made[key]):
            wrong.append(f"{action}: activations")

    with following(note), Pipeline(model, grid, schedule=schedule, micro_batch_size=1) as pipeline:
        for _ in range(2):
            pipeline.step(**text(4))
            made.clear()
            sent.clear()
    if not now:
        wrong.append("no action was seen")
    return wrong


def _expire(ref: StorageWeakRef, seconds: float = LIMIT) -> bool:
    """True if memory is freed. A transport's thread may need a moment to drop what it has sent."""
    deadline = time.monotonic() + seconds
    while not ref.expired():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "message-driven"])
@pytest.mark.parametrize("recompute", ["none", "full", "products"])
def test_nothing_of_a_micro_batch_is_kept_after_its_backward_pass(ranks, schedule, recompute):
    assert ranks(2).run(storages_kept, schedule, recompute) == [[], []]


def live_bytes(schedule: str, steps: int) -> list[int]:
    """Bytes that are alive in tensors after each step."""
    grid = Grid(pipe=2)
    model = parallelize(gpt(), grid, stages=STAGES.get(schedule, StageOptions()))
    found = []
    with PeakMemory() as memory, Pipeline(model, grid, schedule=schedule, micro_batch_size=1) as pipeline:
        for _ in range(steps):
            pipeline.step(**text(4))
            model.zero_grad(set_to_none=True)
            found.append(memory.now)
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-v", "message-driven"])
def test_memory_is_flat_over_ten_steps(ranks, schedule):
    for found in ranks(2).run(live_bytes, schedule, 10):
        assert max(found[3:]) <= found[2] + 4096


# What is computed when.


def weight_gradients(schedule: str) -> tuple[list[str], int]:
    """The actions under which weights' gradients were made, and how many of those a rank's linears have."""
    grid = Grid(pipe=2)
    model = parallelize(gpt(), grid, stages=STAGES.get(schedule, StageOptions()))
    now: list[str] = []
    seen: list[str] = []
    make = LinearPlan.reduce_weight_gradient

    def noting(self: LinearPlan, *args: Any) -> None:
        seen.append(now[-1])
        make(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LinearPlan, "reduce_weight_gradient", noting)
        with (
            following(lambda action, begins: now.append(str(action)) if begins else None),
            Pipeline(model, grid, schedule=schedule, micro_batch_size=1) as pipeline,
        ):
            pipeline.step(**text(4))
        planned = [str(action) for action in pipeline.schedule_of(4).ranks[grid.coordinate("pipe")]]
    assert now == planned == [str(each.action) for each in pipeline.computed]
    # The head's gradient is made with the loss.
    linears = [
        each for each in model.modules() if isinstance(each, ParallelLinear) and not isinstance(each, ParallelHead)
    ]
    return seen, len(linears)


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v", "dualpipe-v"])
def test_a_weights_gradient_is_computed_when_the_schedule_requests_it(ranks, schedule):
    for seen, linears in ranks(2).run(weight_gradients, schedule):
        per_action = Counter(seen)
        assert len(seen) == 4 * linears > 0
        assert any("W" in action for action in seen)
        assert [action for action in per_action if "I" in action or "F" in action] == []


def count_casts() -> list[int]:
    """Return how often weights are cast to bf16 in steps of 4 micro-batches in 2 stages of one rank,
    and how many weights.
    """
    model = gpt(layers=2)
    parallelize(model, grid := Grid(), dtype=torch.bfloat16, stages=StageOptions(virtual_stages=2))
    counts = []
    with Pipeline(model, grid, schedule="interleaved", micro_batch_size=1) as pipeline:
        for _ in range(2):
            with mock.patch.object(weight_shard, "cast", wraps=weight_shard.cast) as cast:
                pipeline.step(**text(4))
            counts.append(cast.call_count)
    return [*counts, len({id(call.args[0]) for call in cast.call_args_list})]


def test_micro_batches_in_flight_share_one_low_precision_copy_of_a_weight(ranks):
    ((first, second, weights),) = ranks(1).run(count_casts)
    assert first == second == weights > 8

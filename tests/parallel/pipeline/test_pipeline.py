# SPDX-License-Identifier: Apache-2.0
"""A model that is trained in pipeline stages is the model trained on one rank: losses, gradient norms and weights."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

import pytest

from stretto.models import GPT, GPTConfig
from tests.conftest import Ranks
from tests.parallel.pipeline.training import Run, compare, compare_all, complaints, expect
from tests.parallel.training import PRECISIONS, SEED, Case, factorizations

EXACTLY = PRECISIONS["fp64-adamw"]

SCHEDULES = {
    "gpipe": {},
    "1f1b": {},
    "1f1b, warmed up": {"extra_warm_up": 2},
    "interleaved": {},
    "zb-h1": {},
    "zb-v": {},
    "dualpipe-v": {},
    "message-driven, arrival": {"serve_first": "arrival"},
    "message-driven, backward": {"serve_first": "backward", "limit": 2},
    "message-driven, forward": {"serve_first": "forward", "limit": 9},
}

VARIANTS = {
    "gpt2-like": Case(GPT, ({},), has_ignored_targets=True),
    "llama-like": Case(
        GPT,
        (
            {
                "positions": "rotary",
                "activation": "swiglu",
                "norm": "rmsnorm",
                "bias": False,
                "tie_embeddings": False,
                "ffn": 48,
            },
        ),
        has_ignored_targets=True,
    ),
    "gathered twice": Case(GPT, ({"tie_embeddings": False},), reshard="after_forward"),
    "sharded sequence": Case(GPT, ({"norm": "rmsnorm", "bias": False},), shards_sequence=True),
}


def gpt(layers: int, **options: object) -> GPTConfig:
    """A small GPT whose vocabulary, 61, no axis divides."""
    return GPTConfig(**{"layers": layers, "hidden": 32, "heads": 8, "vocab": 61, "max_seq_len": 16, **options})


def make_case(variant: str | Case, run: Run, micro_batches: int, layers: int | None = None) -> Case:
    """A variant with a block more than stages, and a batch of so many micro-batches."""
    case = VARIANTS[variant] if isinstance(variant, str) else variant
    stages = run.grid["pipe"] * run.stages.virtual_stages
    rows = run.grid.get("data", 1) * run.grid.get("z", 1) * micro_batches * run.micro_batch_size
    config = gpt(max(2, stages + 1) if layers is None else layers, **case.model_args[0])
    ignores = case.has_ignored_targets and rows > 1  # those of the first row all are
    return replace(case, model_args=(config,), batch=rows, has_ignored_targets=ignores)


def make_run(schedule: str, grid: dict[str, int], rows: int = 1, **options: object) -> Run:
    return Run(grid, schedule.partition(",")[0], rows, SCHEDULES[schedule], options)


def numbers_of_micro_batches(schedule: str, pipe: int) -> list[int]:
    """Numbers that the schedule takes, fewer and more than there are stages."""
    match schedule:
        case "dualpipe-v":
            return [2 * pipe, 2 * pipe + 1]
        case "interleaved":
            return [pipe, 2 * pipe]
        case _:
            return [1, pipe, pipe + 1]


def spread_cases(counts: Sequence[int], pipes: Sequence[int]) -> list[tuple[Run, int, str, str]]:
    """Every grid of so many ranks with every schedule; micro-batches, precisions and variants are dealt out in turn."""
    found = []
    for ranks in counts:
        for sizes in (sizes for pipe in pipes if ranks % pipe == 0 for sizes in factorizations(ranks // pipe)):
            grid = {"pipe": ranks // prod(sizes), **dict(zip(("data", "x", "y", "z"), sizes, strict=True))}
            for schedule in SCHEDULES:
                turn = len(found)
                numbers = numbers_of_micro_batches(schedule, grid["pipe"])
                variant = list(VARIANTS)[(turn + turn // len(VARIANTS)) % len(VARIANTS)]
                precision = list(PRECISIONS)[turn // 3 % 2]
                run = make_run(schedule, grid, rows=1 + turn // 2 % 2)
                found.append((run, numbers[turn % len(numbers)], variant, precision))
    return found


def check(ranks: Callable[[int], Ranks], run: Run, micro_batches: int, variant: str, precision: str) -> None:
    print(f"seed {SEED}")
    case, chosen = make_case(variant, run, micro_batches), PRECISIONS[precision]
    expected = expect(case, chosen)
    founds = ranks(prod(run.grid.values())).run(compare, run, case, chosen, expected)
    assert list(complaints(founds, expected)) == []


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("run", "micro_batches", "variant", "precision"), spread_cases([2, 4], [2, 4]), ids=str)
def test_five_steps_of_every_schedule_on_every_grid_equal_those_of_one_rank(
    ranks, run, micro_batches, variant, precision
):
    check(ranks, run, micro_batches, variant, precision)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("run", "micro_batches", "variant", "precision"),
    [*spread_cases([8], [2, 4, 8]), *spread_cases([2, 4, 8], [1])],
    ids=str,
)
def test_five_steps_on_eight_ranks_and_in_pipelines_of_one_equal_those_of_one_rank(
    ranks, run, micro_batches, variant, precision
):
    check(ranks, run, micro_batches, variant, precision)


def check_together(ranks: Callable[[int], Ranks], runs: list[tuple[Run, Case]]) -> None:
    """Compare runs of one grid in one job."""
    print(f"seed {SEED}")
    expected = [expect(case, EXACTLY) for _, case in runs]
    jobs = [(run, case, EXACTLY, plain) for (run, case), plain in zip(runs, expected, strict=True)]
    founds = ranks(prod(runs[0][0].grid.values())).run(compare_all, jobs)
    wrong = {}
    for number, plain in enumerate(expected):
        if found := list(complaints([each[number] for each in founds], plain)):
            wrong[str(runs[number])] = found
    assert wrong == {}


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_any_number_of_micro_batches_trains(ranks, schedule):
    """From one to one more than there are stages, which is the limit of those in flight."""
    run = make_run(schedule, {"pipe": 3})
    numbers = numbers_of_micro_batches(schedule, 3)
    if schedule.startswith("message-driven"):
        run = replace(run, pipeline={"serve_first": run.pipeline["serve_first"]})
        numbers = [1, 2, 3, 4]
    check_together(ranks, [(run, make_case("gpt2-like", run, number)) for number in numbers])


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "zb-v", "message-driven, arrival"])
@pytest.mark.parametrize("grid", [{"pipe": 2, "x": 2}, {"pipe": 2, "z": 2}], ids=str)
@pytest.mark.parametrize("recompute", ["full", "every:2", "products", "communication", "host"])
def test_blocks_that_are_computed_again_train_in_every_mode(ranks, schedule, grid, recompute):
    run = make_run(schedule, grid, recompute=recompute)
    layers = 2 * grid["pipe"] * run.stages.virtual_stages
    check_together(ranks, [(run, make_case("llama-like", run, 2, layers=layers))])


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zb-h1", "dualpipe-v", "message-driven, forward"])
@pytest.mark.parametrize(
    "options",
    [
        {"reshard": "gradients_after_step"},
        {"reshard": "after_step"},
        {"reshard": "after_forward", "recompute": "full"},
        {"overlap": False},
    ],
    ids=str,
)
def test_weights_may_be_gathered_and_gradients_scattered_at_other_times(ranks, schedule, options):
    run = make_run(schedule, {"pipe": 2, "z": 2}, **options)
    check_together(ranks, [(run, make_case("gpt2-like", run, 4, layers=4))])


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-v", "message-driven, backward"])
@pytest.mark.parametrize("recompute", ["none", "full", "products"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_sequences_may_be_sharded_too(ranks, schedule, recompute, is_tied):
    run = make_run(schedule, {"pipe": 2, "x": 2}, recompute=recompute)
    options = {"tie_embeddings": is_tied, "positions": "learned" if is_tied else "rotary"}
    case = replace(VARIANTS["sharded sequence"], model_args=(options,), has_ignored_targets=not is_tied)
    check_together(ranks, [(run, make_case(case, run, 4, layers=4))])

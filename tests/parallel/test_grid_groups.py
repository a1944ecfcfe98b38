# SPDX-License-Identifier: Apache-2.0
"""Grids share process groups, make none for one rank, and give them back when they are closed."""

import copy
import gc
import os
import pickle
import time
import typing
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stretto.memory import shared_groups
from stretto.memory.shared_groups import SharedGroups
from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid, Pipeline, api, gather, parallelize
from stretto.train.trainer import train
from tests.parallel.experts.training import gpt
from tests.train.runs import configure

GPT_SIZES = {"layers": 2, "hidden": 16, "heads": 4, "vocab": 32, "max_seq_len": 8}


def count_resources() -> dict[str, int]:
    """This process's threads, open files and process groups."""
    for _ in range(3):  # what one collection frees may hold, in C++, what only the next one can free
        gc.collect()
    open_here = {"threads": "/proc/self/task", "files": "/proc/self/fd"}
    groups = len(dist.distributed_c10d._world.pg_map)
    return {name: len(os.listdir(path)) for name, path in open_here.items()} | {"groups": groups}


def count_settled(most: dict[str, int]) -> dict[str, int]:
    """The resources once they are no more than these, or a minute later: threads and connections end by themselves."""
    deadline = time.monotonic() + 60
    while True:
        counts = count_resources()
        if all(counts[what] <= most[what] for what in most) or time.monotonic() > deadline:
            return counts
        time.sleep(0.01)


def train_on(grid: Grid) -> None:
    """A step of a model: by blocks, by roles, with experts, or in pipeline stages."""
    torch.manual_seed(0)
    tokens = torch.randint(32, (8 // grid.size("batch"), 8))
    if grid.size("pipe") > 1:
        model = parallelize(GPT(GPTConfig(**GPT_SIZES)), grid)
        with Pipeline(model, grid, micro_batch_size=2, schedule="message-driven") as pipeline:
            pipeline.step(tokens, tokens)
        return
    config = gpt(balance="none") if grid.size("expert") > 1 else GPTConfig(**GPT_SIZES)
    parallelize(GPT(config), grid)(tokens, tokens).backward()
    if grid.size("x") * grid.size("y") == 1 and grid.size("expert") == 1:
        plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
        parallelize(plain, grid, dtype=torch.float32)(torch.randn(4, 8)).sum().backward()


def count_over_grids(shapes: Sequence[dict[str, int]], rounds: int) -> list[dict[str, int]]:
    """The resources after each round of one grid after another, each with a model that is trained on it."""
    counts = []
    for _ in range(rounds):
        for shape in shapes:
            train_on(Grid(**shape))
        counts.append(count_resources())
    return counts


def assert_no_growth(counts: list[dict[str, int]]) -> None:
    """What a round leaves is in every later count; a thread or a connection that is ending may be in any single one."""
    half = len(counts) // 2
    for what in ("threads", "files"):
        assert min(each[what] for each in counts[half:]) <= min(each[what] for each in counts[:half]), counts
    assert {each["groups"] for each in counts} == {counts[0]["groups"]}, counts


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("shape", [{"z": 2}, {"x": 2}, {"pipe": 2}], ids=str)
def test_six_grids_of_one_shape_need_what_one_needs(ranks, shape):
    for counts in ranks(2).run(count_over_grids, [shape], 6):
        assert_no_growth(counts)


def test_a_grid_over_all_ranks_makes_no_group(ranks):
    for (counts,) in ranks(2).run(count_over_grids, [{"z": 2}], 1):
        assert counts["groups"] == 1, "the job's own; and pipe, data, x and y have one rank"


SHAPES = [
    {"z": 4},
    {"x": 2, "z": 2},
    {"x": 2, "data": 2},
    {"data": 2, "z": 2},
    {"y": 2, "x": 2},
    {"pipe": 2, "z": 2},
    {"pipe": 2, "x": 2},
    {"data": 2, "x": 2, "expert": 2},
    {"data": 2, "z": 2, "expert": 2},
]


@pytest.mark.exhaustive
def test_grids_of_many_shapes_share_the_groups_of_the_same_ranks(ranks):
    for first, *others in ranks(4).run(count_over_grids, SHAPES, 3):
        # The job's own; for pairs of near and of far ranks those of axes and of the batch; for one of the two those of
        # experts, of tied weights and of the leaders of messages.
        assert first["groups"] == 8
        assert all(min(each[what] for each in others) <= count for what, count in first.items()), (first, others)


def close_grids() -> dict[str, Any]:
    warm = Grid(x=2, z=2)  # a process keeps the threads that its first training starts
    train_on(warm)
    warm.close()
    dist.all_reduce(torch.ones(1))
    before = count_resources()
    first, second = Grid(x=2, z=2), Grid(z=2, data=2)
    model = parallelize(GPT(GPTConfig(**GPT_SIZES)), first)
    blocks = parallelize(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), first)
    tokens = torch.randint(32, (4, 8))
    model(tokens, tokens).backward()
    between = count_resources()
    first.close()
    first.close()
    refusals = []
    for use in (
        lambda: first.group("x"),
        lambda: first.size("x"),
        lambda: first.coordinate("z"),
        lambda: first.mesh,
        lambda: parallelize(GPT(GPTConfig(**GPT_SIZES)), first),
        lambda: model(tokens, tokens),
        lambda: blocks(torch.randn(4, 8)),
    ):
        with pytest.raises(ValueError, match=r"Grid\(.*x=2.*was closed.*make another Grid") as caught:
            use()
        refusals.append(str(caught.value))
    total = torch.ones(1)
    dist.all_reduce(total, group=second.group("z"))  # the ranks of x on the first grid: this group is needed still
    assert len(dist.get_process_group_ranks(second.group("z"))) == 2
    second.close()
    model = blocks = use = caught = None  # the error has the frames of a forward pass
    after = count_settled(before)
    again = Grid(x=2, z=2)  # the same ranks may have groups again
    train_on(again)
    torch.manual_seed(0)
    gather(next(parallelize(GPT(GPTConfig(**GPT_SIZES)), again).parameters()))
    return {"before": before, "between": between, "after": after, "total": total.item(), "refusals": len(refusals)}


@pytest.mark.long
def test_closing_grids_gives_back_what_no_other_uses_and_a_closed_one_is_refused(ranks):
    for seen in ranks(4).run(close_grids):
        assert seen["between"]["groups"] > seen["before"]["groups"]
        assert seen["between"]["threads"] > seen["before"]["threads"]
        assert seen["after"]["groups"] == seen["before"]["groups"]
        assert seen["after"]["threads"] <= seen["before"]["threads"]
        assert seen["after"]["files"] <= seen["before"]["files"]
        assert (seen["total"], seen["refusals"]) == (2.0, 7)


def close_after_the_job() -> None:
    grid = Grid(x=2, z=2)
    dist.destroy_process_group()
    grid.close()


def test_a_grid_may_be_closed_after_the_job_has_left_its_process_group(ranks):
    assert ranks(4).run(close_after_the_job) == [None] * 4


def use_groups_of_one_rank() -> tuple[float, list[int], int, int]:
    grid = Grid(x=2)
    none = len(dist.distributed_c10d._world.pg_map)
    total = torch.ones(1)
    dist.all_reduce(total, group=grid.group("y"))
    members = dist.get_process_group_ranks(grid.group("data"))
    again = Grid(z=2)
    assert again.group("x") is grid.group("y") is grid.mesh.get_group("pipe")
    return total.item(), members, none, len(dist.distributed_c10d._world.pg_map)


def test_axes_of_one_rank_have_one_group_which_is_made_when_it_is_asked_for(ranks):
    for rank, seen in enumerate(ranks(2).run(use_groups_of_one_rank)):
        assert seen == (1.0, [rank], 1, 2)


def hold_purposes() -> dict[str, bool]:
    holders = [SharedGroups() for _ in range(4)]
    grid, pairs = Grid(x=2, z=2), [[0, 1], [2, 3]]
    first = holders[0].get(pairs, "one", timeout=grid.timeout)
    same = {
        "purpose": holders[1].get(pairs, "one", timeout=grid.timeout) is first,
        "order": holders[1].get([[3, 2], [1, 0]], "one", timeout=grid.timeout) is first,
        "another purpose": holders[2].get(pairs, "two", timeout=grid.timeout) is first,
        "another limit": holders[2].get(pairs, "one", timeout=2 * grid.timeout) is first,
    }
    apart = holders[3].get([[0, 3]], "some ranks", timeout=grid.timeout)
    same["outside"] = (apart is None) == (dist.get_rank() in (1, 2))
    before = len(dist.distributed_c10d._world.pg_map)
    for holder in holders:
        holder.close()
    same["closed"] = before - len(dist.distributed_c10d._world.pg_map) == 3 + (apart is not None)
    return same


def test_groups_are_shared_for_the_same_ranks_purpose_and_time_limit(ranks):
    expected = dict.fromkeys(("purpose", "order", "outside", "closed"), True)
    expected |= dict.fromkeys(("another purpose", "another limit"), False)
    assert ranks(4).run(hold_purposes) == [expected] * 4


def train_again_and_again(folder: Path) -> list[dict[str, int]]:
    counts = []
    for number in range(4):
        train(configure(folder / str(number), "grid.z=2", "train.steps=2", "train.checkpoint_every=1"), display="none")
        counts.append(count_resources())
    return counts


@pytest.mark.exhaustive
def test_trainings_one_after_another_in_a_process_share_all_groups(ranks, tmp_path):
    configure(tmp_path / "0")  # writes the text
    for counts in ranks(2).run(train_again_and_again, tmp_path):
        assert_no_growth(counts)
        assert counts[0]["groups"] == 3, "the job's own, and those of stop requests and of saves"


def copy_grid() -> tuple[bool, str]:
    grid = Grid(data=2)
    with pytest.raises(ValueError) as caught:
        pickle.dumps(grid)
    return copy.deepcopy({"grid": grid})["grid"] is grid, str(caught.value)


def test_pickling_a_grid_is_refused_with_what_would_do(ranks):
    for is_same, refusal in ranks(2).run(copy_grid):
        assert is_same
        assert "a grid cannot be pickled" in refusal
        assert "Grid(**sizes)" in refusal


def redistribute() -> tuple[list[int], float]:
    grid = Grid(pipe=2)
    model = parallelize(GPT(GPTConfig(**GPT_SIZES)), grid)
    parameter = next(iter(model.parameters()))
    return list(grid.parameter_mesh.shape), float((gather(parameter) - parameter.full_tensor()).abs().sum())


def test_parameters_of_a_stage_of_one_rank_are_dtensors_that_torch_gathers(ranks):
    assert ranks(2).run(redistribute) == [([1], 0.0)] * 2


def test_parallelize_returns_the_class_of_the_model_to_a_type_checker():
    given, returned = (eval(parallelize.__annotations__[name], vars(api)) for name in ("model", "return"))
    assert isinstance(returned, typing.TypeVar)
    assert returned is given
    assert returned.__bound__ is nn.Module


def close_and_remember() -> set[Any]:
    grid = Grid(x=2, data=2)
    grid.close()
    return shared_groups._find_job().destroyed


def test_a_connected_communicator_is_split_by_one_call_for_a_partition_but_not_again(ranks):
    """torch names a split by its ranks: gloo would find, under this name, the addresses of one that was destroyed."""
    pairs = ((0, 1), (2, 3))
    (destroyed, *_) = ranks(4).run(close_and_remember)
    assert destroyed == {pairs, ((0, 2), (1, 3))}
    world = SimpleNamespace(bound_device_id=torch.device("cuda", 0), size=lambda: 4)
    job = SimpleNamespace(destroyed=set())
    with (
        mock.patch.object(torch.accelerator, "is_available", return_value=True),
        mock.patch.object(shared_groups, "_find_job", return_value=job),
    ):
        assert shared_groups._can_split(pairs, None, world)
        assert not shared_groups._can_split(pairs, "gloo", world)
        assert not shared_groups._can_split(((0, 1),), None, world), "ranks 2 and 3 would be in no group"
        assert not shared_groups._can_split(pairs, None, SimpleNamespace(bound_device_id=None, size=lambda: 4))
        job.destroyed = destroyed
        assert not shared_groups._can_split(pairs, None, world)

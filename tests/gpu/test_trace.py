# SPDX-License-Identifier: Apache-2.0
"""Tests of what a trace of real kernels shows: with overlap, most of what z sends is hidden under computation."""

import gc
import json
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from stretto.parallel import Grid, Overlap
from stretto.report import Timeline, plot_timeline, read_timeline
from stretto.train.config import make_config
from stretto.train.trainer import train
from tests.gpu.sharing import GpuRanks

pytestmark = [
    pytest.mark.alone,
    pytest.mark.ranks(2, own=(2, 4)),
    pytest.mark.own_gpus("it measures how NCCL's collectives hide under computation"),
]
OFF = [f"overlap.{field.name}=false" for field in fields(Overlap)]


def out_of(folder: Path, axis: str, is_on: bool) -> Path:
    return folder / f"{axis}-overlap-{'on' if is_on else 'off'}"


def train_both(folder: Path, axis: str) -> None:
    world = dist.get_world_size()
    Grid(data=world, device="cuda")  # one process group for both runs
    gc.collect()
    gc.freeze()  # what other tests have left in this process would be gone through again, for milliseconds, in a step
    torch.cuda.empty_cache()
    # The one that is to be fast comes last, when the process has all that a first run makes.
    for is_on in (False, True):
        values = {
            "out": str(out_of(folder, axis, is_on)),
            "device": "cuda",
            "ranks": world,
            "data": {"path": str(folder / "text.txt")},
            # Products that take longer than the host needs to launch them, with a profiler that watches: otherwise
            # nothing can be hidden. And layers enough that the first gathers and the last scatters, which nothing
            # hides, are the lesser part.
            "model": {"layers": 6, "hidden": 4096, "heads": 32},
            "train": {"steps": 5, "batch": 8 * world, "seq_len": 2048, "dtype": "bf16", "trace": True},
        }
        train(make_config(values, [f"grid.{axis}={world}", *([] if is_on else OFF)]), display="none")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, world: int) -> Path:
    folder = tmp_path_factory.mktemp("trace")
    (folder / "text.txt").write_text("It was a bright cold day in April. " * 40_000)
    return folder


@pytest.fixture(scope="module")
def over_z(gpu_pool: GpuRanks, folder: Path, world: int) -> Path:
    gpu_pool.run(world, train_both, folder, "z", timeout=150)
    return folder


@pytest.fixture(scope="module")
def over_x(gpu_pool: GpuRanks, folder: Path, world: int) -> Path:
    gpu_pool.run(world, train_both, folder, "x", timeout=150)
    return folder


def timeline_of(folder: Path, axis: str, *, is_on: bool) -> Timeline:
    return read_timeline(out_of(folder, axis, is_on) / "trace.json")


def exposed_share(folder: Path, axis: str, *, is_on: bool) -> float:
    """Of the time in which the axis sends, how much has no computation beside it."""
    timeline = timeline_of(folder, axis, is_on=is_on)
    return timeline.exposed_by_axis[axis] / timeline.communication[axis]


@pytest.mark.parametrize("axis", [pytest.param("x", marks=pytest.mark.exhaustive), "z"])
def test_overlap_hides_a_part_of_what_is_sent(request: pytest.FixtureRequest, axis: str, world: int) -> None:
    """Assert that something is hidden; how much is measured by `python -m lab overlap`."""
    folder = request.getfixturevalue(f"over_{axis}")
    hidden, exposed = (exposed_share(folder, axis, is_on=is_on) for is_on in (True, False))
    assert hidden < 0.9 * exposed, f"exposed: {hidden:.0%} with overlap, {exposed:.0%} without"


@pytest.mark.parametrize("axis", [pytest.param("x", marks=pytest.mark.exhaustive), "z"])
def test_without_overlap_what_is_sent_is_exposed(request: pytest.FixtureRequest, axis: str, world: int) -> None:
    timeline = timeline_of(request.getfixturevalue(f"over_{axis}"), axis, is_on=False)
    assert timeline.exposed_by_axis[axis] > 0.9 * timeline.communication[axis] > 0


def test_a_trace_has_both_steps_and_computation_in_most_of_their_time(over_z: Path, tmp_path: Path) -> None:
    timeline = timeline_of(over_z, "z", is_on=True)
    assert [step.number for step in timeline.steps] == [4, 5]
    assert 0.5 < timeline.compute / timeline.step_time <= 1
    assert timeline.rows[:2] == ("compute", "z")
    summary = json.loads((out_of(over_z, "z", True) / "summary.json").read_text())
    assert summary["measured"] == timeline.summary()
    plot_timeline(timeline, tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").stat().st_size > 0

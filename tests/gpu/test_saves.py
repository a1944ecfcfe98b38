# SPDX-License-Identifier: Apache-2.0
"""Asynchronous saves on a GPU: the host does not wait for the copy, and no update overtakes it, nor in a graph."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from stretto.parallel import Grid
from stretto.train.checkpoint.folders import checkpoints_by_step
from stretto.train.checkpoint.metadata import read_metadata
from stretto.train.checkpoint.staging import Staging
from stretto.train.checkpoint.storage import LazyBox, LocalBox, ShardedState, read_tensor
from stretto.train.config import make_config
from stretto.train.trainer import train

Run = Callable[..., list[Any]]
pytestmark = pytest.mark.ranks(1, own=(1,), among=(1,))
LONG = 400_000_000  # cycles that a kernel waits: more than 100 ms
RUNS = {
    "eager": "",
    "graph": "train.cuda_graph=true",
    "16 bits": "train.dtype=bf16 train.optimizer_state=device",
    "host": "train.dtype=bf16 train.optimizer_state=host",
}


def copy_and_change() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    values = torch.arange(1 << 22, device=device, dtype=torch.float32)
    cut = torch.arange(1 << 20, device=device, dtype=torch.float32).view(1024, 1024)[:, 5:900]
    count = torch.tensor(7.0)
    like = torch.empty(1 << 20, device="meta")
    state = {
        "model.whole": ShardedState(tuple(values.shape), (LocalBox((0,), values),)),
        "model.cut": ShardedState(tuple(cut.shape), (LocalBox((0, 0), cut),)),
        "model.made": ShardedState((1 << 20,), (LazyBox((0,), like, lambda: values[: 1 << 20] * 2),)),
        "optimizer.count": ShardedState((), (LocalBox((), count),)),
    }
    # The first launch of a kernel loads it, which waits for the device: each has run before.
    expected = {"model.whole": values.cpu(), "model.cut": cut.cpu(), "model.made": (values[: 1 << 20] * 2).cpu()}
    staging = Staging(device)
    staging.reserve(state)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)  # a step that still runs
    copy = staging.copy(state)
    done = torch.cuda.Event()
    done.record()
    assert not done.query(), "the host waited for the step before the copy"
    staging.wait_on_device()
    values.add_(1)
    cut.mul_(3)
    count.fill_(8.0)
    staging.wait_on_host()
    for name, whole in expected.items():
        assert torch.equal(copy[name].boxes[0].values, whole), name
        assert copy[name].boxes[0].values.is_pinned()
    assert float(copy["optimizer.count"].boxes[0].values) == 7.0


@pytest.mark.usefixtures("world")
def test_a_copy_has_the_values_before_an_update_that_waits_on_the_device(run_ranks: Run) -> None:
    run_ranks(1, copy_and_change)


def train_slowly(folder: Path) -> None:
    """Train with saves between steps and beside them, where each copy begins long after the save has returned."""
    Grid(device="cuda")
    (folder / "text.txt").write_text("It was a bright cold day in April. " * 200)
    copy = Staging.copy

    def copy_late(staging: Staging, state: Any) -> Any:
        assert staging._stream is not None
        with torch.cuda.stream(staging._stream):
            torch.cuda._sleep(LONG)
        return copy(staging, state)

    for name, overrides in RUNS.items():
        for is_async in ("false", "true"):
            values = {
                "out": str(folder / f"{name} {is_async}"),
                "device": "cuda",
                "data": {"path": str(folder / "text.txt")},
                "model": {"layers": 2, "hidden": 128, "heads": 8},
                "train": {"steps": 10, "batch": 4, "seq_len": 64, "lr": 1e-2, "checkpoint_every": 2}
                | {"keep_checkpoints": 9},
            }
            config = make_config(values, [*overrides.split(), f"train.async_save={is_async}"])
            with mock.patch.object(Staging, "copy", copy_late):
                train(config, display="none")
    dist.barrier()


@pytest.mark.usefixtures("world")
def test_asynchronous_checkpoints_equal_those_between_two_steps(run_ranks: Run, tmp_path: Path) -> None:
    run_ranks(1, train_slowly, tmp_path)
    for name in RUNS:
        there, here = (checkpoints_by_step(tmp_path / f"{name} {is_async}") for is_async in ("false", "true"))
        assert len(there) == len(here) == 5
        for one, other in zip(there, here, strict=True):
            entries, others = read_metadata(one).tensors, read_metadata(other).tensors
            assert entries.keys() == others.keys()
            for key, entry in entries.items():
                assert torch.equal(read_tensor(one, entry), read_tensor(other, others[key])), (name, one.name, key)

# SPDX-License-Identifier: Apache-2.0
"""`stretto bench train` measures every grid beside FSDP2."""

import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tests.lab.workloads import TINY, WORKLOAD, start_on_pool

from stretto.bench.training import throughput as train
from stretto.bench.training.runs import Stepped, TrainingRun, measure
from stretto.bench.training.throughput import bench_train


class FailingStep:
    """A step that fails, or none, and is closed, which may fail, too."""

    def __init__(self, error: str | None, closing: list[bool]) -> None:
        self.error, self.closing = error, closing

    def __call__(self) -> Stepped:
        if self.error is not None:
            raise RuntimeError(self.error)
        return Stepped(torch.tensor(2.0), torch.tensor(1.0))

    def close(self) -> None:
        self.closing.append(True)
        if self.error is not None:
            raise RuntimeError("closing failed")


def measure_steps() -> tuple[list[dict[str, Any]], int]:
    closing: list[bool] = []
    runs = [TrainingRun(str(error), partial(FailingStep, error, closing)) for error in ("no memory", None)]
    return measure(runs, WORKLOAD, torch.device("cpu")), len(closing)


def test_a_run_that_fails_is_closed_and_its_own_error_is_raised(ranks):
    (failed, measured), closed = ranks(1).run(measure_steps)[0]
    assert failed["error"] == "no memory"
    assert measured["loss"] == 2.0
    assert closed == 1 + WORKLOAD.rounds
    assert [len(seconds) for seconds in measured["step_seconds"]] == [WORKLOAD.repeats] * WORKLOAD.rounds


@pytest.mark.exhaustive
def test_every_grid_and_fsdp2_are_rows_with_their_speed(ranks, tmp_path, monkeypatch):
    start_on_pool(monkeypatch, train, ranks)
    # compiling needs a compiler, which a bare machine lacks
    monkeypatch.setattr(train, "FSDP2", {"FSDP2": train.FSDP2["FSDP2"]})
    tied = replace(TINY, positions="learned", tie_embeddings=True)
    bench_train(replace(WORKLOAD, model=tied), 2, tmp_path, peak_flops=1e12, with_peers=True)
    rows = {row["name"]: row for row in json.loads((tmp_path / "train.json").read_text())["rows"]}
    assert {"data=2", "x=2", "y=2", "z=2"} < set(rows)
    for row in rows.values():
        assert row["loss"] == pytest.approx(4.16, abs=0.1)  # ln 64, each from weights of its own
        flops = 72 * 2 * 16 * 2 * 32**2 * (1 + 16 / (6 * 32) + 64 / (12 * 2 * 32))
        assert row["mfu"] == pytest.approx(flops / (row["step_milliseconds"] / 1e3) / 2 / 1e12)
    assert (tmp_path / "train.png").stat().st_size > 1000

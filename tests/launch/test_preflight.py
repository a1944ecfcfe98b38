# SPDX-License-Identifier: Apache-2.0
"""The preflight names a slow rank and a slow link, and accuses nothing else, on ranks that share busy cores."""

import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from stretto.cluster import Cluster
from stretto.launch.preflight import PreflightReport, check_machines, rounds_of_pairs

RANKS = 8


def check(
    folder: Path, slow_rank: int | None, slow_link: tuple[int, int] | None, cluster: Cluster | None = None
) -> PreflightReport:
    """Measure with a rank that computes each product four times, and a link that takes 20 ms more for a message."""

    def multiply(a: torch.Tensor, b: torch.Tensor) -> None:
        for _ in range(4 if dist.get_rank() == slow_rank else 1):
            torch.mm(a, b)

    def send(tensor: torch.Tensor, to: int, group: Any) -> None:
        if (dist.get_rank(), to) == slow_link:
            time.sleep(0.02)
        dist.send(tensor, to, group)

    torch.set_num_threads(1)
    return check_machines(torch.device("cpu"), folder=folder, cluster=cluster, multiply=multiply, send=send)


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(50))
def test_the_slow_rank_and_the_slow_link_are_named_and_nothing_else(ranks: Any, tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    slow = int(rng.integers(RANKS))
    link = tuple(map(int, rng.choice(RANKS, 2, replace=False)))
    reports = ranks(RANKS).run(check, tmp_path, slow, link, timeout=300)
    assert [(fault.kind, fault.where.split(" on ")[0]) for fault in reports[0].faults] == [
        ("CPU", f"of rank {slow}"),
        ("link", f"from rank {link[0]}"),
    ], f"seed {seed}: {[*reports[0].lines()]}"
    assert f"to rank {link[1]} on " in reports[0].faults[1].where
    assert len(reports[0].links) == RANKS * (RANKS - 1)
    assert all(report.faults == reports[0].faults for report in reports)
    assert not list(tmp_path.iterdir())


def test_what_a_cluster_file_promises_is_expected_of_all(ranks: Any, tmp_path: Path) -> None:
    """Two equal ranks, of which each is slower than the file says; versions of one differ."""
    known = Cluster.preset("dgx-h100")
    fast = {"empirical_flops": type(known.gpu.empirical_flops)(fp32=1e18)}
    cluster = replace(known, gpu=replace(known.gpu, **fast))
    report = ranks(2).run(check_with_other_versions, tmp_path, cluster)[0]
    kinds = [fault.kind for fault in report.faults]
    assert kinds.count("CPU") == 2
    assert kinds.count("link") == 2  # of 450 GB/s
    assert "of the cluster file 1e+06" in str(report.faults[0])
    versions = {fault.where.split()[1]: fault for fault in report.faults if fault.kind == "version"}
    assert {"stretto", "torch"} < versions.keys()
    assert "0.0.1" in versions["torch"].found + versions["torch"].expected
    assert f"{len(report.faults)} faults found" in "\n".join(report.lines())
    assert len(report.faults) == 4 + len(versions)
    assert len(report.links) == 2


def check_with_other_versions(folder: Path, cluster: Cluster) -> PreflightReport:
    with mock.patch("importlib.metadata.version", return_value="0.0.1") if dist.get_rank() else nullcontext():
        return check(folder, None, None, cluster)


def test_rounds_pair_every_two_ranks_once_and_many_ranks_evenly() -> None:
    for count in (2, 3, 5, 8, 34):
        rounds = list(rounds_of_pairs(count))
        pairs = [pair for each in rounds for pair in each]
        assert sorted(pairs) == [(a, b) for a in range(count) for b in range(a + 1, count)]
        assert all(len({rank for pair in each for rank in pair}) == 2 * len(each) for each in rounds)
    many = list(rounds_of_pairs(1000))
    assert len(many) <= 33
    assert all(len(each) == 500 for each in many)

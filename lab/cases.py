# SPDX-License-Identifier: Apache-2.0
"""Benches of many cases: predicted for a cluster and committed, then measured one after another in one job.

A case is a dict of the columns by which its row is known. A case that fails has the reason in its row's `failed`.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lab.harness import ANY_CPU, Columns, Measured, keep_rows
from stretto.bench.harness import FAILURES, in_one_line, print_row, run_ranks
from stretto.bench.interleaved import TimingEffort, time_interleaved
from stretto.bench.operators.peers import world_name
from stretto.cluster import Cluster
from stretto.launch.failures import RanksFailed
from stretto.parallel import Grid

Case = dict[str, Any]
Measure = Callable[..., Case]
"""Takes the grid and a case's columns, on every rank; returns the columns that it measured."""


def predict_cases(
    name: str, about: Mapping[str, Any], cases: Iterable[Case], cluster: str, predict: Callable[..., Case]
) -> Measured:
    """Predict all cases, for the file `predictions-NAME.json`. predict: takes the cluster and a case's columns."""
    found = Cluster.find(cluster)
    rows = [case | predict(found, **case) for case in cases]
    about = {**about, "machine": ANY_CPU, "cluster": found.name}
    return Measured(rows, about, name=f"predictions-{name}")


def measure_cases(
    name: str,
    about: Mapping[str, Any],
    cases: Sequence[Case],
    ranks: int,
    measure: Measure,
    *,
    row: Columns,
    out: Path,
    device: str | None = None,
    with_nvshmem: Measure | None = None,
) -> Measured:
    """Measure all cases; rows are kept as they come, beside what `out` has predicted for GPUs.

    with_nvshmem: measures a peer that needs NVSHMEM as the backend of torch's symmetric memory, in a job of its own.
    """
    about, has_gpus = dict(about), device is None and torch.cuda.is_available()
    predicted = read_predictions(out / f"predictions-{name}.json" if has_gpus else None, cases)
    keep = partial(keep_rows, out, name, row, about)
    rows: list[Case] = run_ranks(ranks, measure_rows, ranks, device, cases, predicted, measure, keep, trains=False)
    if with_nvshmem is not None and has_gpus:
        try:
            found = run_ranks(ranks, _measure_with_nvshmem, ranks, cases, with_nvshmem, trains=False)
        except RanksFailed as error:
            found = [{"failed": f"with NVSHMEM: {in_one_line(error)}"}] * len(rows)
        for measured, more in zip(rows, found, strict=True):
            measured |= more
    return Measured(rows, about, name=name)


def read_predictions(path: Path | None, cases: Iterable[Case]) -> list[float | None]:
    """The predicted number of each case, None of those that the file has no row of."""
    known = json.loads(path.read_text())["rows"] if path is not None and path.is_file() else []
    return [next((row["predicted"] for row in known if case.items() <= row.items()), None) for case in cases]


def measure_rows(
    ranks: int,
    device: str | None,
    cases: Sequence[Case],
    predicted: Sequence[float | None],
    measure: Measure,
    keep: Callable[[list[Case]], Any],
) -> list[Case]:
    grid = Grid(data=ranks, device=device)
    rows: list[Case] = []
    for case, number in zip(cases, predicted, strict=True):
        row = case | {"predicted": number} | _attempt(partial(measure, grid), case)
        rows.append(row)
        print_row(row)
        if dist.get_rank() == 0:
            keep(rows)
        if grid.device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def _measure_with_nvshmem(ranks: int, cases: Sequence[Case], measure: Measure) -> list[Case]:
    import torch.distributed._symmetric_memory as symmetric

    grid = Grid(data=ranks)
    if not symmetric.is_nvshmem_available():
        return [{"failed": "with NVSHMEM: it is not here"}] * len(cases)
    symmetric.set_backend("NVSHMEM")
    symmetric.enable_symm_mem_for_group(world_name())  # type: ignore[arg-type]
    return [_attempt(partial(measure, grid), case, "with NVSHMEM: ") for case in cases]


def _attempt(measure: Callable[..., Case], case: Case, head: str = "") -> Case:
    """Say what was measured of a case, or why it was not."""
    try:
        return measure(**case)
    except FAILURES as error:
        return {"failed": head + in_one_line(error)}


def time_milliseconds(
    runs: Mapping[str, Callable[[], Any]], replays: int = 5, never_captured: Sequence[str] = ()
) -> dict[str, float]:
    """Milliseconds of each run in a CUDA graph of one call, without rests between runs."""
    effort = TimingEffort(rounds=6, replays=replays)
    found = time_interleaved(runs, 64 << 20, is_graph=True, effort=effort, never_captured=never_captured, rests=False)
    return {name: timed.seconds * 1e3 for name, timed in found.items()}


def run_pass(function: Callable[..., Tensor], operands: Sequence[Tensor], has_gradients: bool) -> list[Tensor]:
    if not has_gradients:
        with torch.no_grad():
            return [function(*operands)]
    leaves = [each.detach().requires_grad_() for each in operands]
    y = function(*leaves)
    return list(torch.autograd.grad(y, leaves, y.detach()))


def largest_difference(found: Iterable[Tensor], right: Iterable[Tensor]) -> float:
    """The largest norm of a difference, over the norm of the right result."""
    pairs = zip(found, right, strict=True)
    differences = [(one.float() - other.float()).norm() / other.float().norm() for one, other in pairs]
    return torch.stack(differences).max().item()  # NaN if one is

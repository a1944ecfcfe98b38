# SPDX-License-Identifier: Apache-2.0
"""`stretto bench ops`: overlapped operators, the GEMM alone, GEMM and NCCL, and torch's async tensor parallelism.

The runs of a row are timed in turn, in one job. Overlap efficiency is Flux's (section 2.3). The effective communication
time of a run is its time beyond the library's GEMM alone (equation 1). Overlap efficiency is one minus the quotient of
that time and the same time of GEMM and NCCL one after the other (equation 2).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto import ops
from stretto.bench.harness import Column, print_row, print_table, run_ranks, write_result
from stretto.bench.interleaved import TimingEffort, time_interleaved
from stretto.bench.operators.peers import Runs, peers, world_name
from stretto.bench.operators.settings import CASES, MODES, OPERATORS, OperatorsSetting, local_shape
from stretto.ops.choices import choose_config
from stretto.ops.operands import FP8
from stretto.ops.tuning import RotatingOperands
from stretto.parallel import Grid

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp8": FP8}
_KEYS = ("operator", "case", "m", "mode")
COLUMNS = (
    Column("operator", "operator"),
    Column("case", "case"),
    Column("m", "m"),
    Column("n", "n"),
    Column("k", "k"),
    Column("mode", "mode"),
    Column("gemm", "GEMM (ms)", "{:.4f}"),
    Column("nccl", "GEMM + NCCL (ms)", "{:.4f}"),
    Column("async_tp", "async-TP, not in a graph (ms)", "{:.4f}"),
    Column("stretto", "Stretto (ms)", "{:.4f}"),
    Column("ran", "ran as"),
    Column("efficiency", "overlap efficiency", "{:.0%}"),
    Column("to_nccl", "NCCL / Stretto", "{:.2f}"),
    Column("to_async_tp", "async-TP / Stretto", "{:.2f}"),
    Column("host", "host, a call (us)", "{:.0f}"),
    Column("nccl_host", "NCCL's (us)", "{:.0f}"),
    Column("error", "error", "{:.0e}"),
)


def bench_operators(ranks: int, out: Path, setting: OperatorsSetting) -> list[dict[str, Any]]:
    """Measure, print the table, write the JSON. Each row is written at once; earlier runs' rows are kept.

    Returns all rows of the file.
    """
    run_ranks(ranks, measure_all, ranks, out, setting, trains=False)
    path = out / f"{setting.file_name}.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    print_table(f"Operators, {setting.dtype}, {ranks} ranks", COLUMNS, rows)
    return rows


def measure_all(ranks: int, out: Path, setting: OperatorsSetting) -> None:
    device = Grid(data=ranks).device
    measured: list[dict[str, Any]] = []
    for name, case, m in setting.shapes():
        shape = local_shape(name, case, m, ranks)
        operands = RotatingOperands.make(OPERATORS[name], *shape, None, TORCH_DTYPES[setting.dtype], device)
        for mode in setting.modes:
            row = {"operator": name, "case": case, "m": m, "n": shape[1], "k": shape[2], "mode": mode}
            measured.append(row | _measure(operands, m, mode, setting.implementation))
            print_row(measured[-1])
            if dist.get_rank() == 0:
                rows = _merge(out / f"{setting.file_name}.json", measured)
                write_result(out, setting.file_name, COLUMNS, rows, ranks=ranks, dtype=setting.dtype)
        del operands
        torch.cuda.empty_cache()


def _merge(path: Path, measured: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The file's rows with those measured now in place of their old ones, in the order of operators and cases."""
    try:
        earlier = json.loads(path.read_text(encoding="utf-8"))["rows"]
    except (OSError, ValueError, KeyError):
        earlier = []
    rows = {tuple(row[key] for key in _KEYS): row for row in (*earlier, *measured)}
    orders = (tuple(OPERATORS), tuple(CASES), None, MODES)

    def place(keys: tuple[Any, ...]) -> tuple[int, ...]:
        return tuple(key if order is None else order.index(key) for key, order in zip(keys, orders, strict=True))

    return [rows[keys] for keys in sorted(rows, key=place)]


def _measure(operands: RotatingOperands, m: int, mode: str, implementation: str) -> dict[str, Any]:
    runs: Runs = peers(operands, m)
    runs["stretto"] = partial(operands.call, implementation)
    error = _compare(operands, runs["stretto"], runs["nccl"])
    before = dict(ops.counts())
    size = 0 if m <= 1024 else 64 << 20  # from 2048 rows on, one call a graph takes long enough
    is_graph = mode == "graph"
    effort = TimingEffort(rounds=2 * len(runs) if is_graph else 3, replays=3 if is_graph else 5)
    # Eager calls start on an idle GPU, or the run before would hide the host's time.
    found = time_interleaved(
        runs, size, is_graph=is_graph, effort=effort, never_captured=("async_tp",), rests=not is_graph
    )
    call = operands.describe(m)
    own = [(key, count) for key, count in ops.counts().items() if key[0] == call.operator]
    ran = sorted(key[1] for key, count in own if count != before.get(key, 0))
    config = choose_config(call, operands.x, operands.weights[0], world_name(), implementation)
    milliseconds = {name: timed.seconds * 1e3 for name, timed in found.items()}
    exposed = milliseconds["nccl"] - milliseconds["gemm"]
    async_tp = milliseconds.get("async_tp")
    return {
        **milliseconds,
        "async_tp": async_tp,
        "ran": " ".join(ran),
        "plan": config.encode(),
        "effective_communication": milliseconds["stretto"] - milliseconds["gemm"],
        "efficiency": 1 - (milliseconds["stretto"] - milliseconds["gemm"]) / exposed,
        "to_nccl": milliseconds["nccl"] / milliseconds["stretto"],
        "to_async_tp": None if async_tp is None else async_tp / milliseconds["stretto"],
        "host": None if mode == "graph" else found["stretto"].host * 1e6,
        "nccl_host": None if mode == "graph" else found["nccl"].host * 1e6,
        "error": error,
    }


def _compare(operands: RotatingOperands, one: Callable[[], Tensor], other: Callable[[], Tensor]) -> float:
    """The relative error between the results of two runs, both with the first weight."""
    results = []
    for run in (one, other):
        operands.restart()
        results.append(run().float())
    return float((results[0] - results[1]).norm() / results[1].norm())

# SPDX-License-Identifier: Apache-2.0
"""Measures what `stretto tune` keeps: a job of ranks for each kind, which returns a row for each problem.

Operators have functions of their own (`ops.tune`, `ops.tune_attention`, `ops.tune_embedding`); collectives are measured
here in CUDA graphs, and products by a training step with `tune_matmuls`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from stretto import ops
from stretto.bench.collectives.peers import CollectiveBuffers, nccl_run
from stretto.bench.collectives.settings import CollectivesTuning
from stretto.bench.embedding.run import make_batch
from stretto.bench.embedding.settings import EmbeddingTuning
from stretto.bench.harness import TORCH_DTYPES, run_ranks
from stretto.bench.interleaved import name_size, time_interleaved
from stretto.bench.operators.run import TORCH_DTYPES as OPERATOR_DTYPES
from stretto.bench.operators.settings import AttentionTuning, ExpertsTuning, OperatorsTuning
from stretto.bench.training.runs import build_stretto
from stretto.bench.training.settings import ProductsTuning, grids_of
from stretto.collectives.executor.cuda.communicator import CudaCommunicator, machine_name
from stretto.collectives.selection import (
    COPY_ENGINE_MIN_BYTES,
    LIBRARY,
    AlgorithmChoice,
    Table,
    add_candidate,
    find_choices,
    time_key,
)
from stretto.collectives.xml import read_ranks
from stretto.parallel import Grid
from stretto.parallel.layers.gemm_layout import GEMM_LAYOUTS
from stretto.tuning import TuningStore, machine_key

Row = dict[str, Any]


def tune(setting: Any, ranks: int) -> list[Row]:
    """Measure in `ranks` processes and keep the times.

    Returns rows with "problem", "fastest", "choices" (how many were measured) and "seconds" of the fastest (None where
    these are not known).
    """
    is_of_training = isinstance(setting, ProductsTuning)
    return run_ranks(ranks, _JOBS[type(setting)], ranks, setting, trains=is_of_training)


def _row(problem: str, times: dict[str, float]) -> Row:
    fastest = min(times, key=times.__getitem__)
    row = {"problem": problem, "fastest": fastest, "choices": len(times), "seconds": times[fastest]}
    if dist.get_rank() == 0:
        print(f"{problem}: {fastest} of {len(times)} choices", flush=True)
    return row


def _tune_collectives(ranks: int, setting: CollectivesTuning) -> list[Row]:
    device = Grid(data=ranks).device
    communicator = CudaCommunicator(table=Table())
    rows = measure_collectives(communicator, setting, device)
    communicator.close()
    return rows


def measure_collectives(communicator: Any, setting: CollectivesTuning, device: torch.device) -> list[Row]:
    """Time the library and every algorithm and protocol in CUDA graphs, and keep the seconds."""
    has_nvlink = communicator.workspace.has_nvlink
    if setting.schedules is not None:
        for file in sorted(setting.schedules.glob("*.xml")):
            if read_ranks(file) in (communicator.world_size, None):
                add_candidate(file)
    rows: list[Row] = []
    measured: dict[str, list[float]] = {}
    for collective in setting.collectives:
        for dtype in setting.dtypes:
            name = str(TORCH_DTYPES[dtype]).removeprefix("torch.")
            choices = find_choices(collective, has_nvlink=has_nvlink, ranks=communicator.world_size)
            kernels = {
                choice: communicator.kernel(choice, name, in_place=False) for choice in choices if choice != LIBRARY
            }
            for size in setting.sizes:
                buffers = CollectiveBuffers.make(collective, size, TORCH_DTYPES[dtype], device)
                runs: dict[str, Callable[[], Any]] = {LIBRARY.name: nccl_run(collective, buffers)}
                for choice, kernel in kernels.items():
                    if not _is_hopeless(choice, size):
                        runs[choice.name] = partial(kernel, buffers.input, buffers.output)
                found = time_interleaved(runs, size, is_graph=True)
                for choice in choices:
                    if choice.name in found:
                        key = time_key(collective, name, communicator.world_size, size, choice)
                        measured[key] = [found[choice.name].seconds]
                communicator.workspace.check()  # raises if a wait timed out: that time must not be stored
                times = {name: timed.seconds for name, timed in found.items()}
                rows.append(_row(f"{collective} {dtype} {name_size(size)}", times))
    if dist.get_rank() == 0:
        TuningStore(setting.table).add(machine_name(has_nvlink), measured)
    dist.barrier()
    return rows


def _is_hopeless(choice: AlgorithmChoice, size: int) -> bool:
    """True if a choice is too slow at that size to be worth timing; a graph launches copies at no cost to the host."""
    if choice.protocol == "Copy":
        return size < COPY_ENGINE_MIN_BYTES
    return choice.algorithm == "one-shot-all-reduce" and size > 8 << 20


def _tune_operators(ranks: int, setting: OperatorsTuning) -> list[Row]:
    device = Grid(data=ranks).device
    rows = []
    for problem, (operator, m, n, k, transposed) in zip(setting.problems(ranks), setting.calls(ranks), strict=True):
        dtype = OPERATOR_DTYPES[setting.dtype]
        times = ops.tune(operator, m, n, k, dtype=dtype, device=device, transposed=transposed)
        rows.append(_row(problem, {config.encode(): seconds for config, seconds in times.items()}))
        torch.cuda.empty_cache()
    return rows


def _tune_attention(ranks: int, setting: AttentionTuning) -> list[Row]:
    device = Grid(data=ranks).device
    problems, rows = iter(setting.problems(ranks)), []
    for length in setting.sequences:
        shapes = [
            (setting.batch, heads, length // ranks, setting.size) for heads in (setting.heads, *[setting.kv_heads] * 2)
        ]
        for trains in (False, True):
            q, k, v = (torch.randn(shape, device=device).bfloat16().requires_grad_(trains) for shape in shapes)
            rows.append(_row(next(problems), ops.tune_attention(q, k, v, causal=True, layout="zigzag")))
    return rows


def _tune_experts(ranks: int, setting: ExpertsTuning) -> list[Row]:
    device = Grid(data=ranks).device
    rows = []
    for problem, call in zip(setting.problems(ranks), setting.calls(ranks), strict=True):
        case, operator, m, n, k, transposed = call
        times = ops.tune(
            operator, m, n, k, device=device, transposed=transposed, experts=case.experts, top_k=case.top_k
        )
        rows.append(_row(problem, {config.encode(): seconds for config, seconds in times.items()}))
        torch.cuda.empty_cache()
    return rows


def _tune_embedding(ranks: int, setting: EmbeddingTuning) -> list[Row]:
    device = Grid(data=ranks).device
    rows = []
    for problem, case in zip(setting.problems(ranks), setting.cases, strict=True):
        batch = make_batch(case, setting, device)
        config = ops.tune_embedding(
            batch.indices, batch.offsets, batch.tables, batch=batch.placement.batch, name=str(case)
        )
        rows.append({"problem": problem, "fastest": str(config), "choices": None, "seconds": None})
        ops.check_indices()
    return rows


def _tune_products(ranks: int, setting: ProductsTuning) -> list[Row]:
    """Train a step on every grid; the first step's products are timed in all layouts at its end."""
    machine = machine_key(Grid(data=ranks).device)
    rows = []
    for problem, sizes in zip(setting.problems(ranks), grids_of(ranks), strict=True):
        known = TuningStore().read(machine)
        dist.barrier()
        try:
            build_stretto(setting.workload(ranks), Grid(**sizes), tunes_matmuls=True)()
        except ValueError as error:  # the grid cannot hold the model or the batch
            rows.append({"problem": problem, "fastest": None, "choices": 0, "seconds": None, "error": str(error)})
            continue
        found = {key: times for key, times in TuningStore().read(machine).items() if known.get(key) != times}
        for key, times in found.items():
            rows.append(_row(key, dict(zip(_LAYOUTS, times, strict=True))))
        if not found:
            rows.append({"problem": problem, "fastest": "measured before", "choices": None, "seconds": None})
    return rows


_LAYOUTS = [layout.layout or ("swapped" if layout.is_swapped else "as they are") for layout in GEMM_LAYOUTS]
_JOBS: dict[type[Any], Callable[[int, Any], list[Row]]] = {
    CollectivesTuning: _tune_collectives,
    OperatorsTuning: _tune_operators,
    AttentionTuning: _tune_attention,
    ExpertsTuning: _tune_experts,
    EmbeddingTuning: _tune_embedding,
    ProductsTuning: _tune_products,
}

# SPDX-License-Identifier: Apache-2.0
"""`stretto bench embedding`: look-ups with their all-to-all, fused and not, and studies of the fused kernel."""

import heapq
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto import ops
from stretto.bench.embedding.peers import Batched, Chunked, EmbeddingBags, LookupBatch, draw_lookups, exchange_alone
from stretto.bench.embedding.settings import EmbeddingSetting, LookupShape, LookupShapes
from stretto.bench.harness import Column, print_table, run_ranks, time_steps, write_result
from stretto.bench.interleaved import TimingEffort, time_interleaved
from stretto.ops.embedding.forward import count_trace, find_launch_config, look_up_and_send
from stretto.ops.embedding.forward_kernel import ORDERS, TRACE_WORDS
from stretto.ops.embedding.launch_config import LaunchConfig
from stretto.ops.embedding.placement import find_placement
from stretto.ops.embedding.table_set import find_tables
from stretto.parallel import Grid
from stretto.recommendation.model_config import MLPERF_POOLING, MLPERF_ROWS

HBM, NVLINK = 4.16e12, 351e9  # bytes/s that one H200 of four reads or writes, and stores to its peers
SHOWN_PROGRAMS = 32

COLUMNS = (
    Column("case", "batch x tables x dim x pooling"),
    Column("what", "what"),
    Column("bags", "EmbeddingBags (ms)", "{:.3f}"),
    Column("batched", "batched (ms)", "{:.3f}"),
    Column("chunked", "chunked (ms)", "{:.3f}"),
    Column("alone", "look-up alone (ms)", "{:.3f}"),
    Column("exchange", "exchange alone (ms)", "{:.3f}"),
    Column("stretto", "Stretto (ms)", "{:.3f}"),
    Column("over_bags", "less than bags", "{:.0%}"),
    Column("over_batched", "less than batched", "{:.0%}"),
    Column("of_alone", "of look-up alone", "{:.3f}"),
    Column("hbm", "HBM", "{:.0%}"),
    Column("nvlink", "NVLink", "{:.0%}"),
    Column("setting", "setting"),
    Column("skew", "skew", "{:.1%}"),
    Column("error", "error"),
)


def bench_embedding(ranks: int, out: Path, setting: EmbeddingSetting) -> list[dict[str, Any]]:
    """Measure all cases and print the table. The JSON is written anew after every row. Returns the rows."""
    rows = run_ranks(ranks, measure_all, ranks, out, setting, trains=False)
    print_table(f"Embedding look-ups and their exchange, {ranks} ranks", _used(rows), rows)
    return rows


def measure_all(ranks: int, out: Path, setting: EmbeddingSetting) -> list[dict[str, Any]]:
    """The job of each rank; returns the rows. Rank 0 writes them after each."""
    device = Grid(data=ranks, device=None if torch.cuda.is_available() else "cpu").device
    rows: list[dict[str, Any]] = []
    studies = {
        "peers": measure_peers,
        "orders": study_launch_configs,
        "slices": study_launch_configs,
        "occupancy": study_launch_configs,
    }
    for case in setting.cases:
        batch = make_batch(case, setting, device)
        for study in setting.studies:
            measure = partial(studies.get(study, trace_programs), study=study)
            for row in measure(case, batch, setting):
                rows.append({"case": str(case), "study": study} | row)
                if dist.get_rank() == 0:
                    shown = {key: value for key, value in rows[-1].items() if key != "timeline"}
                    print(" ".join(f"{key}={value}" for key, value in shown.items() if value is not None), flush=True)
                    write_result(out, "embedding", _used(rows), rows, ranks=ranks, dtype=setting.dtype)
        ops.check_indices()
        del batch
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def _used(rows: Sequence[dict[str, Any]]) -> list[Column]:
    return [column for column in COLUMNS if any(row.get(column.key) is not None for row in rows)]


def make_batch(case: LookupShape, setting: LookupShapes, device: torch.device) -> LookupBatch:
    """Make this rank's tables, of small numbers, and look-ups that differ between ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if case.tables:
        owned = [[(setting.rows, case.pooling)] * case.tables] * world
    else:
        owned = place_tables([min(count, setting.rows) for count in MLPERF_ROWS], MLPERF_POOLING, world)
    dtype = getattr(torch, setting.dtype)
    rows, poolings = [rows for rows, _ in owned[rank]], [pooling for _, pooling in owned[rank]]
    tables = [torch.empty(count, case.dim, dtype=dtype, device=device).uniform_(-1, 1) for count in rows]
    count = -(-case.batch // world) * world
    indices, offsets = draw_lookups(poolings, rows, count, device, 17 + rank, is_fixed=not setting.is_jagged)
    assert dist.group.WORLD is not None
    name = dist.group.WORLD.group_name
    dims = tuple(case.dim for _ in rows)
    placement = find_placement(name, device, str(case), dims, dtype, count, needs_grad=False)
    return LookupBatch(placement, tables, indices, offsets)


def place_tables(rows: Sequence[int], poolings: Sequence[int], world: int) -> list[list[tuple[int, int]]]:
    """Distribute tables by load, the most looked-up first; returns (rows, pooling) of each rank's tables."""
    ranks: list[tuple[int, int]] = [(0, rank) for rank in range(world)]
    owned: list[list[tuple[int, int]]] = [[] for _ in range(world)]
    for pooling, count in sorted(zip(poolings, rows, strict=True), reverse=True):
        load, rank = heapq.heappop(ranks)
        owned[rank].append((count, pooling))
        heapq.heappush(ranks, (load + pooling, rank))
    return owned


def measure_peers(case: LookupShape, batch: LookupBatch, setting: EmbeddingSetting, study: str) -> list[dict[str, Any]]:
    """Time the forward pass, and the backward pass with a fused SGD step, and their peers."""
    placement, device = batch.placement, batch.offsets.device
    batched = Batched(batch)
    alike = all(dims == placement.dims[0] for dims in placement.dims)
    runs: dict[str, Callable[[], Any]] = {
        "stretto": partial(_look_up, batch, case),
        "batched": batched.forward,
        "alone": batched.look_up,
        "exchange": exchange_alone(batch),
        "bags": EmbeddingBags(batch).forward,
    }
    if alike and len(batch.tables) >= 4:
        runs |= {f"chunked {parts}": Chunked(batch, parts).forward for parts in (2, 4)}
    runs = {name: run for name, run in runs.items() if name.split()[0] not in setting.skip}
    outputs = {name: run().clone() for name, run in runs.items() if name not in ("alone", "exchange")}
    rows = [_row("forward", _time(runs, batch, setting), batch) | _compare(outputs)]
    del outputs
    if setting.has_backward:
        grad = torch.randn(placement.local_batch, placement.width, device=device).to(placement.dtype) * 1e-3
        settings = torch.tensor([1e-6, 1e-8], device=device)
        runs = {
            "stretto": partial(_update, batch, case, grad, settings),
            "batched": partial(batched.update, grad, settings),
            "exchange": partial(batched.push, grad),
        }
        rows.append(_row("backward", _time(runs, batch, setting), batch))
    return rows


def _look_up(batch: LookupBatch, case: LookupShape) -> Tensor:
    count = batch.placement.batch
    return ops.embedding_all_to_all(batch.indices, batch.offsets, batch.tables, batch=count, name=str(case))


def _update(batch: LookupBatch, case: LookupShape, grad: Tensor, settings: Tensor) -> None:
    ops.embedding_all_to_all_update(
        grad,
        batch.indices,
        batch.offsets,
        batch.tables,
        optimizer="sgd",
        settings=settings,
        batch=batch.placement.batch,
        name=str(case),
    )


def _compare(outputs: dict[str, Tensor]) -> dict[str, Any]:
    """An "error" that names the runs whose outputs differ from ours; empty if all are close."""
    ours = outputs.get("stretto")
    if ours is None:
        return {}
    bound = 1e-3 if ours.dtype == torch.float32 else 5e-2
    scale = max(float(ours.abs().max()), 1e-3)
    wrong = [name for name, out in outputs.items() if float((out - ours).abs().max()) > bound * scale]
    return {"error": f"other numbers: {', '.join(wrong)}"} if wrong else {}


def _time(runs: dict[str, Callable[[], Any]], batch: LookupBatch, setting: EmbeddingSetting) -> dict[str, float]:
    """Milliseconds of each run on the slowest rank."""
    placement = batch.placement
    if batch.offsets.device.type == "cpu":
        return {name: 1e3 * time_steps(run, warm_up=1, repeats=1) for name, run in runs.items()}
    bytes_moved = batch.indices.numel() * max(batch.dims, default=0) * placement.dtype.itemsize
    found = time_interleaved(
        runs, bytes_moved // 16, is_graph=setting.is_graph, effort=TimingEffort(setting.rounds, setting.replays)
    )
    return {name: 1e3 * timed.seconds for name, timed in found.items()}


def _row(what: str, milliseconds: dict[str, float], batch: LookupBatch) -> dict[str, Any]:
    row: dict[str, Any] = {"what": what, **{k: v for k, v in milliseconds.items() if not k.startswith("chunked")}}
    chunked = [value for name, value in milliseconds.items() if name.startswith("chunked")]
    if chunked:
        row["chunked"] = min(chunked)
    ours = milliseconds["stretto"]
    for name in ("bags", "batched"):
        if name in milliseconds:
            row[f"over_{name}"] = 1 - ours / milliseconds[name]
    if "alone" in milliseconds:
        row["of_alone"] = ours / milliseconds["alone"]
        read = batch.indices.numel() * max(batch.dims, default=0) * batch.placement.dtype.itemsize
        row["hbm"] = read / (ours * 1e-3) / HBM
    placement = batch.placement
    sent = placement.local_batch * (placement.world_size - 1) * placement.widths[placement.rank]
    row["nvlink"] = sent * placement.dtype.itemsize / (ours * 1e-3) / NVLINK
    return row


def study_launch_configs(
    case: LookupShape, batch: LookupBatch, setting: EmbeddingSetting, study: str
) -> list[dict[str, Any]]:
    """The fused look-up with other launch configs; the skew is how much longer the slowest rank takes than the fastest.

    orders: which slices come first. slices: samples of a task. occupancy: programs on a multiprocessor.
    """
    placement, device = batch.placement, batch.offsets.device
    chosen = find_launch_config(placement, len(batch.tables), batch.indices.numel(), device)
    configs: dict[str, LaunchConfig]
    match study:
        case "orders":
            configs = {order: chosen._replace(order=order) for order in ORDERS}
        case "slices":
            sizes = (1, 2, 4, 8, 16, 32, 64, 128)
            configs = {f"slice {size}": chosen._replace(slice=size) for size in sizes if size >= chosen.bags}
        case _:
            counts = (2, 4, 8, 12, 16, 20, 24, 32)
            tiles = ((1, 4), (1, 8), (1, 16), (2, 4), (4, 2), (8, 1))
            configs = {f"{count} programs": chosen._replace(programs=count) for count in counts}
            for bags, depth in tiles:
                size = max(chosen.slice, bags)
                configs[f"tile {bags} x {depth}"] = chosen._replace(bags=bags, rows=depth, slice=size)
    rows = []
    for name, config in configs.items():
        run = partial(_launch, batch, config)
        times = _time_each_rank(run, device)
        slowest, fastest = max(times), min(times)
        chosen_mark = " (chosen)" if config == chosen else ""
        rows.append({"what": study, "setting": name + chosen_mark, "stretto": slowest, "skew": slowest / fastest - 1})
    return rows


def _launch(batch: LookupBatch, config: LaunchConfig, trace: Tensor | None = None) -> Tensor:
    assert dist.group.WORLD is not None
    name = dist.group.WORLD.group_name
    tables = find_tables(batch.tables, batch.offsets.device)
    return look_up_and_send(
        batch.indices, batch.offsets, tables, None, batch.placement, name, "sum", config=config, trace=trace
    )


def _time_each_rank(run: Callable[[], Any], device: torch.device, repeats: int = 9) -> list[float]:
    """Median milliseconds of a call on each rank; a barrier precedes each call, so that all ranks start together."""
    seconds = []
    for _ in range(repeats if device.type == "cuda" else 1):
        dist.barrier()
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            seconds.append(start.elapsed_time(end))
        else:
            seconds.append(1e3 * time_steps(run, warm_up=0, repeats=1))
    every = [torch.zeros(1, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(every, torch.tensor([sorted(seconds)[len(seconds) // 2]], device=device))
    return [float(value) for value in every]


def trace_programs(
    case: LookupShape, batch: LookupBatch, setting: EmbeddingSetting, study: str
) -> list[dict[str, Any]]:
    """Rank 0's first programs on a time axis (figure 9): their slices for others and own ones, and how they wait."""
    placement, device = batch.placement, batch.offsets.device
    config = find_launch_config(placement, len(batch.tables), batch.indices.numel(), device)
    size = count_trace(config, placement, len(batch.tables), device)
    trace = torch.zeros(size, TRACE_WORDS, dtype=torch.int64, device=device)
    for _ in range(3):
        dist.barrier()
        _launch(batch, config, trace)
    if device.type == "cuda":
        torch.cuda.synchronize()
    tasks = placement.world_size * len(batch.tables) * -(-placement.local_batch // config.slice)
    words = trace.cpu()
    programs = words[tasks : tasks + SHOWN_PROGRAMS, :3]
    zero = int(words[tasks:, 0].min())
    slices = words[:tasks][words[:tasks, 0] < SHOWN_PROGRAMS]
    timeline = {
        "rank": placement.rank,
        "programs": ((programs - zero).double() / 1e3).tolist(),
        "slices": [
            [program, destination, (begin - zero) / 1e3, (end - zero) / 1e3]
            for program, destination, begin, end in slices.tolist()
        ],
        "milliseconds": float((words[tasks:, 2].max() - zero) / 1e6),
    }
    return [{"what": study, "setting": str(config), "stretto": timeline["milliseconds"], "timeline": timeline}]

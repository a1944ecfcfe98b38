# SPDX-License-Identifier: Apache-2.0
"""`stretto bench embedding`: look-ups with their all-to-all, fused and not."""

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
from stretto.bench.harness import Column, print_row, print_table, run_ranks, write_result
from stretto.bench.interleaved import TimingEffort, time_interleaved
from stretto.ops.embedding.placement import find_placement
from stretto.parallel import Grid
from stretto.recommendation.model_config import MLPERF_POOLING, MLPERF_ROWS

HBM, NVLINK = 4.16e12, 351e9  # bytes/s that one H200 of four reads or writes, and stores to its peers

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
    Column("roofline", "of roofline", "{:.0%}"),
    Column("error", "error"),
)


def bench_embedding(ranks: int, out: Path, setting: EmbeddingSetting) -> list[dict[str, Any]]:
    """Measure all cases and print the table. The JSON is written anew after every row. Returns the rows."""
    rows = run_ranks(ranks, measure_all, ranks, out, setting, trains=False)
    print_table(f"Embedding look-ups and their exchange, {ranks} ranks", COLUMNS, rows)
    return rows


def measure_all(ranks: int, out: Path, setting: EmbeddingSetting) -> list[dict[str, Any]]:
    """The job of each rank; returns the rows. Rank 0 writes them after each."""
    device = Grid(data=ranks, device=None if torch.cuda.is_available() else "cpu").device
    rows: list[dict[str, Any]] = []
    for case in setting.cases:
        refusal = describe_excess(case, setting, device)
        batch = None if refusal else make_batch(case, setting, device)
        for row in measure_peers(case, batch, setting) if batch else [{"what": "forward", "error": refusal}]:
            rows.append({"case": str(case), "study": "peers"} | row)
            print_row(rows[-1])
            if dist.get_rank() == 0:
                write_result(out, "embedding", COLUMNS, rows, ranks=ranks, dtype=setting.dtype)
        ops.check_indices()
        del batch
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def describe_excess(case: LookupShape, setting: LookupShapes, device: torch.device) -> str:
    """Say why tables and what all peers take beside them do not fit on some rank's GPU; "" if they do."""
    if device.type != "cuda":
        return ""
    world, itemsize = dist.get_world_size(), 2 if setting.dtype != "float32" else 4
    owned, batch = _list_owned(case, setting, world), -(-case.batch // world) * world
    width = case.dim * itemsize  # bytes of a row
    rows = max(sum(count for count, _ in tables) for tables in owned)
    lookups = max(sum(pooling for _, pooling in tables) for tables in owned) * batch * (1 + setting.is_jagged / 8)
    vectors = max(max(map(len, owned)) * batch, sum(map(len, owned)) * batch // world) * width
    beside = 80 * lookups + 12 * vectors  # indices and their sort; outputs, gradients, and what is sent and received
    room = torch.tensor(float(torch.cuda.mem_get_info(device)[0]), device=device)
    dist.all_reduce(room, op=dist.ReduceOp.MIN)
    free = int(room) - (2 << 30)
    if rows * width + beside <= free:
        return ""
    fitting = int(max(free - beside, 0) / width) // max(len(tables) for tables in owned)
    return (
        f"a rank has tables of {rows * width / 1e9:,.0f} GB, and indices and vectors of {beside / 1e9:,.0f} GB beside "
        f"them; {free / 1e9:,.0f} GB are free: --rows {fitting} would do"
    )


def _list_owned(case: LookupShape, setting: LookupShapes, world: int) -> list[list[tuple[int, int]]]:
    """Return (rows, pooling) of each rank's tables."""
    if case.tables:
        return [[(setting.rows, case.pooling)] * case.tables] * world
    return place_tables([min(count, setting.rows) for count in MLPERF_ROWS], MLPERF_POOLING, world)


def make_batch(case: LookupShape, setting: LookupShapes, device: torch.device) -> LookupBatch:
    """Make this rank's tables, of small numbers, and look-ups that differ between ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    owned = _list_owned(case, setting, world)
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


def measure_peers(case: LookupShape, batch: LookupBatch, setting: EmbeddingSetting) -> list[dict[str, Any]]:
    """Time the forward pass, and the backward pass with a fused SGD step, and their peers."""
    placement, device = batch.placement, batch.offsets.device
    batched = Batched(batch)
    runs: dict[str, Callable[[], Any]] = {
        "stretto": partial(_look_up, batch, case),
        "batched": batched.forward,
        "alone": batched.look_up,
        "exchange": exchange_alone(batch),
        "bags": EmbeddingBags(batch).forward,
    }
    if max(map(len, placement.dims)) >= 4:
        runs |= {f"chunked {parts}": Chunked(batch, parts).forward for parts in (2, 4)}
    runs = {name: run for name, run in runs.items() if name.split()[0] not in setting.skip}
    outputs = {name: run().clone() for name, run in runs.items() if name not in ("alone", "exchange")}
    rows = [_row("forward", _time(runs, batch, setting), batch) | compare_outputs(outputs)]
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
        update=ops.TableUpdate("sgd", settings),
        batch=batch.placement.batch,
        name=str(case),
    )


def compare_outputs(outputs: dict[str, Tensor]) -> dict[str, Any]:
    """An "error" that names the runs whose outputs differ from ours; empty if all are close."""
    ours = outputs.get("stretto")
    if ours is None:
        return {}
    bound = 1e-3 if ours.dtype == torch.float32 else 5e-2
    scale = max(float(ours.abs().max()), 1e-3)
    wrong = [name for name, out in outputs.items() if not float((out - ours).abs().max()) <= bound * scale]
    return {"error": f"other numbers: {', '.join(wrong)}"} if wrong else {}


def _time(runs: dict[str, Callable[[], Any]], batch: LookupBatch, setting: EmbeddingSetting) -> dict[str, float]:
    """Milliseconds of each run on the slowest rank."""
    placement = batch.placement
    bytes_moved = batch.indices.numel() * max(batch.dims, default=0) * placement.dtype.itemsize
    found = time_interleaved(
        runs, bytes_moved // 16, is_graph=setting.is_graph, effort=TimingEffort(setting.rounds, setting.replays)
    )
    return {name: 1e3 * timed.seconds for name, timed in found.items()}


def _row(what: str, milliseconds: dict[str, float], batch: LookupBatch) -> dict[str, Any]:
    """The roofline is the time that HBM or NVLink takes at least. Forward: rows, one a look-up, which caches may have;
    vectors sent. Backward: rows that were looked up, once read and once written, and the vectors' gradient: read;
    what others sent is stored, too, and read."""
    row: dict[str, Any] = {"what": what, **{k: v for k, v in milliseconds.items() if not k.startswith("chunked")}}
    chunked = [value for name, value in milliseconds.items() if name.startswith("chunked")]
    if chunked:
        row["chunked"] = min(chunked)
    ours, placement = milliseconds["stretto"], batch.placement
    seconds, itemsize = ours * 1e-3, placement.dtype.itemsize
    for name in ("bags", "batched"):
        if name in milliseconds:
            row[f"over_{name}"] = 1 - ours / milliseconds[name]
    width = placement.widths[placement.rank]
    sent = placement.local_batch * (placement.world_size - 1) * width * itemsize
    if "alone" in milliseconds:
        row["of_alone"] = ours / milliseconds["alone"]
        read = batch.indices.numel() * max(batch.dims, default=0) * itemsize
        row["hbm"] = read / seconds / HBM
    else:
        sent = placement.local_batch * (placement.width - width) * itemsize
        gradients = placement.local_batch * placement.width + 2 * (placement.batch - placement.local_batch) * width
        read = (2 * batch.count_distinct_numbers() + gradients) * itemsize
    row["nvlink"] = sent / seconds / NVLINK
    needed = torch.tensor(max(read / HBM, sent / NVLINK), device=batch.offsets.device, dtype=torch.float64)
    dist.all_reduce(needed, op=dist.ReduceOp.MAX)
    row["roofline"] = float(needed) / seconds
    return row

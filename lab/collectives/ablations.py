# SPDX-License-Identifier: Apache-2.0
"""`python -m lab ablations`: pipelining over tiles on and off, and one kernel against a composition of NCCL calls.

Both ablations are MSCCLang's (section 7). With pipelining, a chunk's second tile travels while the first is reduced
(section 6.2). A composition of NCCL calls waits for each of its steps to end, which one kernel does not.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lab.collectives.composed import RingAllReduce, TwoShotAllReduce, TwoStepAllToAll
from lab.collectives.settings import AblationsSetting
from lab.pictures import draw_result
from stretto.bench.harness import Column, print_table, run_ranks, write_result
from stretto.bench.interleaved import name_size, time_interleaved
from stretto.collectives.algorithms import find
from stretto.collectives.executor.cuda.fused.kernel import FusedScheduleKernel
from stretto.collectives.executor.cuda.interpreter import InterpretedSchedule
from stretto.collectives.executor.cuda.nvrtc import LaunchError
from stretto.collectives.executor.cuda.variant import DATA_BYTES, Variant
from stretto.collectives.executor.cuda.workspace import DEFAULT_REGIONS, CollectiveWorkspace
from stretto.collectives.executor.plan import make_plan
from stretto.collectives.schedule import Schedule
from stretto.parallel import Grid

PIPELINED = ("ring-all-reduce", "hierarchical-all-reduce")
COMPOSED = ("ring-all-reduce", "two-shot-all-reduce", "two-step-all-to-all")
WHOLE = "whole"
_DTYPE = torch.bfloat16
_SLACK = 1 << 20  # bytes, since tiles are rounded up

TimedCall = Callable[[], Any]


def bench_ablations(ranks: int, out: Path, setting: AblationsSetting) -> dict[str, list[dict[str, Any]]]:
    """Measure the ablations, print tables, write JSON, Markdown and pictures. Returns the rows by ablation."""
    measured: list[dict[str, Any]] = run_ranks(ranks, _measure, ranks, setting, trains=False)
    return write_ablations(measured, ranks, out, setting)


def write_ablations(
    measured: Sequence[Mapping[str, Any]], ranks: int, out: Path, setting: AblationsSetting
) -> dict[str, list[dict[str, Any]]]:
    """Write tables and pictures of the measurements. Returns the rows by ablation.

    measured: dictionaries of "ablation", "algorithm", "mode", "bytes" and "microseconds" (by the name of a run).
    """
    makers = {
        "pipelining": (pipelining_row, _pipelining_columns(setting.tiles)),
        "composition": (composition_row, _COMPOSITION_COLUMNS),
    }
    made = {}
    for ablation in setting.ablations:
        make, columns = makers[ablation]
        rows = [make(one) for one in measured if one["ablation"] == ablation]
        print_table(f"{ablation.capitalize()}, {ranks} ranks, whole arrays", columns, rows)
        about = {"ranks": ranks, "protocol": setting.protocol, "instances": setting.instances}
        path = write_result(out, ablation, columns, rows, **about)
        draw_result(path)
        made[ablation] = rows
    return made


_FIRST_COLUMNS = (Column("algorithm", "algorithm"), Column("mode", "mode"), Column("size", "size"))
_COMPOSITION_COLUMNS = (
    *_FIRST_COLUMNS,
    Column("composed", "composed of NCCL calls (us)", "{:.1f}"),
    Column("kernel", "one kernel, fused (us)", "{:.1f}"),
    Column("interpreted", "one kernel, interpreted (us)", "{:.1f}"),
    Column("ratio", "composed / best kernel", "{:.2f}"),
    Column("library", "NCCL's own (us)", "{:.1f}"),
)


def _pipelining_columns(tiles: Sequence[int]) -> tuple[Column, ...]:
    """The columns of the first table: one for each tile size, in the given order."""
    return (
        *_FIRST_COLUMNS,
        Column(WHOLE, "one tile (us)", "{:.1f}"),
        *(Column(tile_name(tile), f"tiles of {name_size(tile)} (us)", "{:.1f}") for tile in tiles),
        Column("best", "best tile"),
        Column("ratio", "one tile / best", "{:.2f}"),
    )


def tile_name(tile_bytes: int) -> str:
    """The key of a tile size in a row."""
    return f"tile {tile_bytes}"


def pipelining_row(measured: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the first table; best and ratio are None if no chunk is larger than a tile."""
    times: Mapping[str, float] = measured["microseconds"]
    tiled = {name: value for name, value in times.items() if name != WHOLE}
    best = min(tiled, key=lambda name: tiled[name], default=None)
    whole = times.get(WHOLE)
    return {
        **_identity(measured),
        **times,
        "best": None if best is None else name_size(int(best.removeprefix("tile "))),
        "ratio": None if best is None or whole is None else whole / tiled[best],
    }


def composition_row(measured: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the second table; runs that could not be captured or launched have no time."""
    times: Mapping[str, float] = measured["microseconds"]
    kernels = [times[name] for name in ("kernel", "interpreted") if name in times]
    composed = times.get("composed")
    ratio = None if composed is None or not kernels else composed / min(kernels)
    return {**_identity(measured), **times, "ratio": ratio}


def _identity(measured: Mapping[str, Any]) -> dict[str, Any]:
    names = ("algorithm", "mode", "bytes")
    return {name: measured[name] for name in names} | {"size": name_size(measured["bytes"])}


def find_nodes(ranks: int) -> int:
    """The number of nodes that the ranks emulate: the smallest one, from 2, that divides the ranks."""
    return next(nodes for nodes in range(2, ranks + 1) if ranks % nodes == 0)


def compile_for(algorithm: str, ranks: int, instances: int) -> Schedule:
    """Compile the algorithm, out of place. If it has a parameter `nodes`, the ranks emulate `find_nodes` nodes."""
    found = find(algorithm)
    if "nodes" not in found.parameters:
        return found.compile(ranks=ranks, instances=instances, in_place=False)
    nodes = find_nodes(ranks)
    return found.compile(nodes=nodes, gpus=ranks // nodes, instances=instances, in_place=False)


def fifo_bytes(schedule: Schedule, num_bytes: int, protocol: str) -> int:
    """Bytes that the FIFOs of one rank need if a whole chunk is one tile. num_bytes: of the whole array."""
    elements = num_bytes // _DTYPE.itemsize
    plan = make_plan(
        schedule,
        elements,
        elements,
        in_place=False,
        dtype=_DTYPE,
        reduction="sum",
        tile_bytes=num_bytes,
        slots=None,
    )
    # Tiles are rounded up to 480 bytes, LL128's to whole warps of lines.
    return plan.buffer_bytes * 16 // DATA_BYTES[protocol] * 17 // 16 + _SLACK


def _measure(ranks: int, setting: AblationsSetting) -> list[dict[str, Any]]:
    device = Grid(data=ranks).device
    largest = max(setting.sizes)
    pipelined = {name: compile_for(name, ranks, setting.instances) for name in PIPELINED}
    needed = max(fifo_bytes(schedule, largest, setting.protocol) for schedule in pipelined.values())
    workspace = CollectiveWorkspace(regions={setting.protocol: max(needed, DEFAULT_REGIONS[setting.protocol])})
    rows = []
    for ablation in setting.ablations:
        for algorithm in PIPELINED if ablation == "pipelining" else COMPOSED:
            for size in setting.sizes:
                for mode in setting.modes:
                    input, output = _buffers(size, ranks, device)
                    if ablation == "pipelining":
                        runs = _pipelining_runs(pipelined[algorithm], workspace, setting, size, input, output)
                    else:
                        runs = _composition_runs(algorithm, workspace, setting, input, output)
                    runs = {name: run for name, run in runs.items() if _is_launched(name, run)}
                    if mode == "graph":
                        runs = {name: run for name, run in runs.items() if _can_be_captured(run)}
                    found = time_interleaved(runs, size, is_graph=mode == "graph") if runs else {}
                    workspace.check()
                    times = {name: one.seconds * 1e6 for name, one in found.items()}
                    row = {"ablation": ablation, "algorithm": algorithm, "mode": mode, "bytes": size}
                    rows.append(row | {"microseconds": times})
                    if dist.get_rank() == 0:
                        print(rows[-1], flush=True)
    workspace.close()
    return rows


def _buffers(size: int, ranks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    count = max(size // _DTYPE.itemsize // ranks, 1) * ranks
    return torch.randn(count, device=device).to(_DTYPE), torch.empty(count, dtype=_DTYPE, device=device)


def _pipelining_runs(
    schedule: Schedule,
    workspace: CollectiveWorkspace,
    setting: AblationsSetting,
    size: int,
    input: Tensor,
    output: Tensor,
) -> dict[str, TimedCall]:
    """The interpreted schedule with a whole chunk as one tile, and with each tile size smaller than a chunk."""
    variant = Variant("bfloat16", "sum", setting.protocol)
    chunk_bytes = -(-size // schedule.collective.chunks_per_loop)
    tiles = {WHOLE: size} | {tile_name(tile): tile for tile in setting.tiles if tile < chunk_bytes}
    kernels = {
        name: InterpretedSchedule(schedule, workspace, variant, in_place=False, tile_bytes=tile)
        for name, tile in tiles.items()
    }
    return {name: partial(kernel, input, output) for name, kernel in kernels.items()}


def _composition_runs(
    algorithm: str, workspace: CollectiveWorkspace, setting: AblationsSetting, input: Tensor, output: Tensor
) -> dict[str, TimedCall]:
    """One algorithm as NCCL calls, as a fused kernel and interpreted; and NCCL's own collective."""
    ranks = workspace.world_size
    variant = Variant("bfloat16", "sum", setting.protocol)
    fused = FusedScheduleKernel(compile_for(algorithm, ranks, 1), workspace, variant, in_place=False)
    schedule = compile_for(algorithm, ranks, setting.instances)
    interpreted = InterpretedSchedule(schedule, workspace, variant, in_place=False)
    sizes = (input.numel(), input.dtype, input.device)
    composed: Callable[[Tensor, Tensor], None]
    match algorithm:
        case "ring-all-reduce":
            composed = RingAllReduce(*sizes)
        case "two-shot-all-reduce":
            composed = TwoShotAllReduce(*sizes)
        case _:
            composed = TwoStepAllToAll(*sizes, nodes=find_nodes(ranks))
    is_reduction = algorithm != "two-step-all-to-all"
    return {
        "composed": partial(composed, input, output),
        "kernel": partial(fused, input, output),
        "interpreted": partial(interpreted, input, output),
        "library": partial(dist.all_reduce, output) if is_reduction else partial(dist.all_to_all_single, output, input),
    }


def _is_launched(name: str, run: TimedCall) -> bool:
    """Whether the run can be launched (the same on all ranks): a schedule may need more blocks than the GPU holds."""
    try:
        run()
    except LaunchError as error:
        if dist.get_rank() == 0:
            print(f"{name} is left out: {error}", flush=True)
        return False
    return True


def _can_be_captured(run: TimedCall) -> bool:
    """Whether all ranks can capture the run in a CUDA graph."""
    run()
    torch.cuda.synchronize()
    dist.barrier()
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        graph.replay()
        torch.cuda.synchronize()
        is_captured = True
    except RuntimeError:
        is_captured = False
    everywhere = torch.tensor(int(is_captured), device="cuda")
    dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
    return bool(everywhere)

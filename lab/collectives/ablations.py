# SPDX-License-Identifier: Apache-2.0
"""`python -m lab ablations`: pipelining over tiles on and off, and one kernel against a composition of NCCL calls.

Both ablations are MSCCLang's (section 7). With pipelining, a chunk's second tile travels while the first is reduced
(section 6.2). A composition of NCCL calls waits for each of its steps to end, which one kernel does not.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lab.collectives.composed import RingAllReduce, TwoShotAllReduce, TwoStepAllToAll
from lab.harness import Bench, Measured, column
from lab.pictures import describe_origin, points, select
from stretto.bench.collectives.settings import MODES, PROTOCOLS
from stretto.bench.harness import Column, run_ranks
from stretto.bench.interleaved import name_size, time_interleaved
from stretto.bench.settings import LargestBytes, Modes, Needs, Option, Ranks, Step, list_sizes, require_known
from stretto.collectives.algorithms import find
from stretto.collectives.executor.cuda.fused.kernel import FusedScheduleKernel
from stretto.collectives.executor.cuda.interpreter import InterpretedSchedule
from stretto.collectives.executor.cuda.nvrtc import LaunchError
from stretto.collectives.executor.cuda.variant import DATA_BYTES, Variant
from stretto.collectives.executor.cuda.workspace import DEFAULT_REGIONS, CollectiveWorkspace
from stretto.collectives.executor.plan import make_plan
from stretto.collectives.schedule import Schedule
from stretto.parallel import Grid

ABLATIONS = ("pipelining", "composition")
PIPELINED = ("ring-all-reduce", "hierarchical-all-reduce")
COMPOSED = ("ring-all-reduce", "two-shot-all-reduce", "two-step-all-to-all")
WHOLE = "whole"
_DTYPE = torch.bfloat16
_SLACK = 1 << 20  # bytes, since tiles are rounded up

TimedCall = Callable[[], Any]


@dataclass(frozen=True)
class AblationsSetting:
    """The ablations to measure, with array and tile sizes (bytes), protocol and schedule instances.

    Raises ValueError for unknown names.
    """

    ablations: Annotated[tuple[str, ...], Option("pipelining, composition, with commas.", "--only")] = ABLATIONS
    protocol: Annotated[str, Option("Simple, LL or LL128.")] = "LL128"
    instances: Annotated[int, Option("Instances of the interpreted schedules; each has its own thread blocks.")] = 16
    tiles: Annotated[tuple[int, ...], Option("Bytes of tiles, with commas.")] = (16 << 10, 64 << 10, 256 << 10)
    smallest: Annotated[int, Option("Bytes of the whole array; sizes are multiples of it.")] = 1 << 20
    largest: LargestBytes = 256 << 20
    step: Step = 4
    modes: Modes = MODES
    ranks: Ranks = None

    def __post_init__(self) -> None:
        require_known("mode", self.modes, MODES)
        require_known("ablation", self.ablations, ABLATIONS)
        require_known("protocol", (self.protocol,), PROTOCOLS)
        list_sizes(self.smallest, self.largest, self.step)
        if not self.tiles or min(self.tiles) < 480:
            raise ValueError("ablations take one size of tiles or more, and tiles of at least 480 bytes")
        if self.instances < 1:
            raise ValueError(f"a schedule has at least 1 instance, not {self.instances}")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of whole arrays."""
        return list_sizes(self.smallest, self.largest, self.step)


@dataclass(frozen=True)
class Row:
    """Microseconds of an algorithm composed of NCCL calls, in one kernel, and of NCCL's own collective."""

    algorithm: str = column("algorithm")
    mode: str = column("mode")
    size: str = column("size")
    composed: float | None = column("composed of NCCL calls (us)", "{:.1f}")
    kernel: float | None = column("one kernel, fused (us)", "{:.1f}")
    interpreted: float | None = column("one kernel, interpreted (us)", "{:.1f}")
    ratio: float | None = column("composed / best kernel", "{:.2f}")
    library: float | None = column("NCCL's own (us)", "{:.1f}")


def pipelining_columns(tiles: Sequence[int]) -> tuple[Column, ...]:
    """The columns of the other ablation: one for each tile size, in the given order."""
    return (
        *(Column(name, name) for name in ("algorithm", "mode", "size")),
        Column(WHOLE, "one tile (us)", "{:.1f}"),
        *(Column(f"tile {tile}", f"tiles of {name_size(tile)} (us)", "{:.1f}") for tile in tiles),
        Column("best", "best tile"),
        Column("ratio", "one tile / best", "{:.2f}"),
    )


def run_ablations(setting: AblationsSetting) -> Iterator[Measured]:
    """Measure the ablations, on a GPU a rank."""
    assert setting.ranks is not None  # the harness has counted the GPUs
    return tabulate(run_ranks(setting.ranks, _measure, setting, trains=False), setting)


def tabulate(measured: Sequence[Mapping[str, Any]], setting: AblationsSetting) -> Iterator[Measured]:
    """The result of each ablation.

    measured: dictionaries of "ablation", "algorithm", "mode", "bytes" and "microseconds" (by the name of a run).
    """
    makers: dict[str, tuple[Callable[..., dict[str, Any]], Any]] = {
        "pipelining": (pipelining_row, pipelining_columns(setting.tiles)),
        "composition": (composition_row, Row),
    }
    for ablation in setting.ablations:
        make, columns = makers[ablation]
        rows = [make(one) for one in measured if one["ablation"] == ablation]
        title = f"{ablation.capitalize()}, {setting.ranks} ranks, whole arrays"
        yield Measured(rows, name=ablation, title=title, row=columns)


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
        schedule, elements, elements, in_place=False, dtype=_DTYPE, reduction="sum", tile_bytes=num_bytes, slots=None
    )
    # Tiles are rounded up to 480 bytes, LL128's to whole warps of lines.
    return plan.buffer_bytes * 16 // DATA_BYTES[protocol] * 17 // 16 + _SLACK


def _measure(setting: AblationsSetting) -> list[dict[str, Any]]:
    ranks = dist.get_world_size()
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
                    count = max(size // _DTYPE.itemsize // ranks, 1) * ranks
                    input = torch.randn(count, device=device).to(_DTYPE)
                    output = torch.empty_like(input)
                    if ablation == "pipelining":
                        runs = _pipelining_runs(pipelined[algorithm], workspace, setting, size, input, output)
                    else:
                        runs = _composition_runs(algorithm, workspace, setting, input, output)
                    is_graph = mode == "graph"
                    runs = {name: run for name, run in runs.items() if _works(name, run, is_graph=is_graph)}
                    found = time_interleaved(runs, size, is_graph=is_graph) if runs else {}
                    workspace.check()
                    times = {name: one.seconds * 1e6 for name, one in found.items()}
                    row = {"ablation": ablation, "algorithm": algorithm, "mode": mode, "bytes": size}
                    rows.append(row | {"microseconds": times})
                    if dist.get_rank() == 0:
                        print(rows[-1], flush=True)
    workspace.close()
    return rows


def _pipelining_runs(
    schedule: Schedule, workspace: CollectiveWorkspace, setting: AblationsSetting, size: int, *buffers: Tensor
) -> dict[str, TimedCall]:
    """The interpreted schedule with a whole chunk as one tile, and with each tile size smaller than a chunk."""
    variant = Variant("bfloat16", "sum", setting.protocol)
    chunk_bytes = -(-size // schedule.collective.chunks_per_loop)
    tiles = {WHOLE: size} | {f"tile {tile}": tile for tile in setting.tiles if tile < chunk_bytes}
    return {
        name: partial(InterpretedSchedule(schedule, workspace, variant, in_place=False, tile_bytes=tile), *buffers)
        for name, tile in tiles.items()
    }


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
    if algorithm == "two-step-all-to-all":
        composed = TwoStepAllToAll(*sizes, nodes=find_nodes(ranks))
    else:
        composed = (RingAllReduce if algorithm == "ring-all-reduce" else TwoShotAllReduce)(*sizes)
    is_reduction = algorithm != "two-step-all-to-all"
    return {
        "composed": partial(composed, input, output),
        "kernel": partial(fused, input, output),
        "interpreted": partial(interpreted, input, output),
        "library": partial(dist.all_reduce, output) if is_reduction else partial(dist.all_to_all_single, output, input),
    }


def _works(name: str, run: TimedCall, *, is_graph: bool) -> bool:
    """True if the run can be launched (on all ranks, or on none), and in a CUDA graph captured on all ranks."""
    try:
        run()
    except LaunchError as error:  # a schedule may need more blocks than the GPU holds
        if dist.get_rank() == 0:
            print(f"{name} is left out: {error}", flush=True)
        return False
    if not is_graph:
        return True
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


def plot_pipelining(data: dict[str, Any], picture: Path) -> None:
    """Draw one tile compared with every tile size."""
    from lab.style import PEER
    from stretto.report.style import SERIES

    tiles = sorted({int(name[5:]) for row in data["rows"] for name in row if name.startswith("tile ")})
    names = [(f"tile {tile}", f"tiles of {name_size(tile)}") for tile in tiles]
    series = [(WHOLE, "a chunk in one tile", PEER)]
    series += [(*each, SERIES[number % len(SERIES)]) for number, each in enumerate(names)]
    caption = "With tiles, a thread block passes a part of a chunk on before it has received the rest."
    _plot_ablation(data, picture, series, "Pipelining over tiles", caption)


def plot_composition(data: dict[str, Any], picture: Path) -> None:
    """Draw one kernel compared with library calls."""
    from lab.style import OTHER_PEER, PEER, THIRD_PEER
    from stretto.report.style import STRETTO

    series = [
        ("composed", "the algorithm, composed of NCCL calls", PEER),
        ("library", "NCCL's own collective", OTHER_PEER),
        ("interpreted", "the algorithm in one kernel, interpreted", THIRD_PEER),
        ("kernel", "the algorithm in one kernel, fused", STRETTO),
    ]
    title = "One kernel beside the same algorithm composed of calls"
    caption = "Interpreted: the kernel reads the schedule's steps from memory. Fused: it is generated for the schedule."
    _plot_ablation(data, picture, series, title, caption)


def _plot_ablation(
    data: dict[str, Any], picture: Path, series: Sequence[tuple[str, str, Any]], title: str, caption: str
) -> None:
    """Draw a panel an algorithm and mode: microseconds over size, a line for each of (key, label, look)."""
    from lab.collectives.peers_plot import _MODES
    from lab.style import drawing, plain_log

    algorithms, modes = (list(dict.fromkeys(row[key] for row in data["rows"])) for key in ("algorithm", "mode"))
    with drawing(picture, max(6.0, 3.1 * len(algorithms)), 2.3 * max(1, len(modes))) as drawn:
        panels = drawn.panels(len(modes), len(algorithms), sharey="col")
        for across, mode in zip(panels, modes, strict=False):
            for panel, algorithm in zip(across, algorithms, strict=False):
                rows = sorted(select(data["rows"], algorithm=algorithm, mode=mode), key=lambda row: row["bytes"])
                for key, label, look in series:
                    if any(row.get(key) is not None for row in rows):
                        panel.plot(*points(rows, "bytes", key), label=label, **look.line)
                drawn.log_ticks(panel.xaxis, [row["bytes"] for row in rows], name_size)
                if panel.has_data():
                    plain_log(panel.yaxis)
                panel.set_title(algorithm if mode == modes[0] else "")
                panel.set_xlabel("size of the whole array" if mode == modes[-1] else "")
            across[0].set_ylabel(f"{_MODES.get(mode, mode)},\nmicroseconds")
        drawn.title = f"{title}: {data['ranks']} ranks, protocol {data['protocol']}"
        drawn.subtitle = describe_origin(data)
        drawn.caption = caption


BENCH = Bench(
    "ablations",
    """MSCCLang's ablations: pipelining over tiles on and off; one kernel compared with the same algorithm in NCCL
    calls.""",
    AblationsSetting,
    run_ablations,
    Row,
    title="Ablations",
    plot={"pipelining": plot_pipelining, "composition": plot_composition},
    needs=Needs.TWO_GPUS,
    about=lambda setting: {"ranks": setting.ranks, "protocol": setting.protocol, "instances": setting.instances},
)

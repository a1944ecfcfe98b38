# SPDX-License-Identifier: Apache-2.0
"""`python -m lab operator-ablations`: the effect of each field of a kernel's configuration, varied one at a time.

The choices are those of Flux (section 4) and TileLink (section 3.1): tile sizes and order, shifted by rank or not; rows
moved by copy engines or by programs (how many), pushed or pulled, and in which piece size; an all-reduce in one shot or
two, with partial sums as tiles or as packets.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist

from lab.harness import Bench, column
from lab.pictures import describe_origin
from stretto.bench.harness import run_ranks
from stretto.bench.interleaved import TimingEffort, time_interleaved
from stretto.bench.operators.settings import OPERATORS, OperatorsSetting, local_shape
from stretto.bench.settings import Needs, Option, Ranks
from stretto.ops import Blocks, KernelConfig
from stretto.ops.config import choose_config
from stretto.ops.tuning import RotatingOperands
from stretto.parallel import Grid

ROWS: Mapping[str, tuple[int, ...]] = {
    "gather": (1024, 8192),
    "gathered": (1024, 8192),
    "scatter": (1024, 8192),
    "reduce": (1, 64),
}


@dataclass(frozen=True)
class OperatorAblationsSetting(OperatorsSetting):
    """Operators and shapes, as `stretto bench ops` takes them; ablations are of bf16 and in CUDA graphs."""

    cases: Annotated[tuple[str, ...], Option("Models whose shapes are taken, with commas.")] = ("flux",)
    ranks: Ranks = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype != "bf16":
            raise ValueError(f"ablations are of bf16, not {self.dtype}")


@dataclass(frozen=True)
class Row:
    """The time of a configuration, and divided by that of the configuration as chosen."""

    operator: str = column("operator")
    case: str = column("case")
    m: int = column("m")
    variation: str = column("variation")
    milliseconds: float = column("ms", "{:.4f}")
    relative: float = column("to the configuration as chosen", "{:.2f}")


def run_ablations(setting: OperatorAblationsSetting) -> list[Row]:
    """Measure in CUDA graphs, on a GPU a rank."""
    assert setting.ranks is not None  # the harness has counted the GPUs
    found: list[Row] = run_ranks(setting.ranks, measure_all, setting, trains=False)
    return found


def vary(name: str, config: KernelConfig) -> dict[str, KernelConfig]:
    """Configurations that vary one field each, by what they vary; the first is the configuration itself."""
    configs = {"as chosen": config, "no shift by rank": config._replace(is_shifted=not config.is_shifted)}
    if config.blocks is not None and name != "reduce":
        blocks = config.blocks
        processors = blocks.programs // (2 if blocks.num_warps <= 4 else 1)
        for together in (1, 2, 4, 8):
            configs[f"{together} rows of tiles together"] = config._replace(blocks=blocks._replace(group_rows=together))
        for kind, other in {
            "128 x 256 tiles": Blocks(128, 256, 64, blocks.group_rows, 8, 4, processors),
            "128 x 256 tiles, 3 stages": Blocks(128, 256, 64, blocks.group_rows, 8, 3, processors),
            "128 x 128 tiles, two programs at once": Blocks(128, 128, 64, blocks.group_rows, 4, 3, 2 * processors),
        }.items():
            configs[kind] = config._replace(blocks=other)
    match name:
        case "gather":
            movers = [(count, "push") for count in (4, 8, 16, 32, 64, 132)] + [(16, "pull")]
            for count, direction in movers:
                by_programs = config._replace(transfer="programs", direction=direction, movers=count)
                configs[f"{count} programs {direction}"] = by_programs
            configs |= _vary_pieces(config._replace(direction="push"), 19)
        case "gathered":
            configs |= _vary_pieces(config._replace(direction="push"), 19)
        case "scatter":
            configs["sums as packets"] = config._replace(exchange="packets")
            tiles = config._replace(exchange="tiles")
            configs["tiles stored by programs"] = tiles._replace(transfer="programs")
            configs |= _vary_pieces(tiles, 20)
        case _:
            del configs["no shift by rank"]
            configs |= {f"{shots} shots": config._replace(shots=shots) for shots in (1, 2)}
    return configs


def _vary_pieces(config: KernelConfig, smallest: int) -> dict[str, KernelConfig]:
    """Copies in pieces of each power of two, up to 16 MiB."""
    sizes = {f"copies of {2.0 ** (power - 20):g} MiB": 1 << power for power in range(smallest, 25)}
    return {name: config._replace(transfer="copies", piece_bytes=size) for name, size in sizes.items()}


def measure_all(setting: OperatorAblationsSetting) -> list[Row]:
    """The job of each rank."""
    assert setting.ranks is not None
    device = Grid(data=setting.ranks).device
    return [
        row
        for name in setting.operators
        for case in setting.cases
        for m in setting.ms or ROWS[name]
        for row in _measure(name, case, m, device)
    ]


def _measure(name: str, case: str, rows: int, device: torch.device) -> Iterator[Row]:
    assert dist.group.WORLD is not None
    world = dist.group.WORLD.group_name
    m, n, k = local_shape(name, case, rows, dist.get_world_size())
    operands = RotatingOperands.make(OPERATORS[name], m, n, k, None, torch.bfloat16, device)
    configs = vary(name, choose_config(operands.describe(m), operands.x, operands.weights[0], world, "kernel"))
    if m > 1024:
        configs.pop("sums as packets", None)  # packets take twice the memory, and are for few rows
    runs = {variation: partial(operands.call, config) for variation, config in configs.items()}
    effort = TimingEffort(rounds=6, replays=3)
    found = time_interleaved(runs, 0 if m <= 1024 else 64 << 20, is_graph=True, effort=effort, rests=False)
    chosen = found["as chosen"].seconds
    for variation, timed in found.items():
        yield Row(name, case, m, variation, timed.seconds * 1e3, timed.seconds / chosen)
    del operands
    torch.cuda.empty_cache()


def plot_ablations(data: dict[str, Any], picture: Path) -> None:
    """Draw a panel an operator and m: the time of each variation, as a bar."""
    from lab.operators.peers_plot import _BAR, _NAMES
    from lab.style import PEER, drawing, name_bars
    from stretto.report.style import STRETTO

    rows_of: dict[tuple[str, str, int], list[Mapping[str, Any]]] = {}
    for row in data["rows"]:
        rows_of.setdefault((row["operator"], row["case"], row["m"]), []).append(row)
    heights = [_BAR * len(rows) + 0.7 for rows in rows_of.values()]
    with drawing(picture, 8, sum(heights)) as drawn:
        panels = drawn.panels(len(rows_of), 1, height_ratios=heights)[:, 0]
        for panel, ((operator, case, m), rows) in zip(panels, rows_of.items(), strict=True):
            times = [row["milliseconds"] for row in rows[::-1]]
            looks = [STRETTO if row["variation"] == "as chosen" else PEER for row in rows[::-1]]
            bars = panel.barh(range(len(rows)), times, 0.75, color=[look.colour for look in looks])
            drawn.label_bars(panel, bars, [f"{time:.3f}" for time in times])
            name_bars(panel, range(len(rows)), [row["variation"] for row in rows[::-1]])
            panel.set_title(f"{_NAMES.get(operator, operator)}, {case}, m = {m}", loc="left")
            panel.set_xlabel("ms")
        drawn.title = f"One choice of the operators changed at a time: {data['ranks']} ranks, bf16, in CUDA graphs"
        drawn.subtitle = describe_origin(data)
        drawn.caption = "Blue: the operator as it is. Grey: with one choice changed, which the row names."


BENCH = Bench(
    "operator-ablations",
    "Overlapped operators with one field of a configuration varied at a time (cases: flux by default).",
    OperatorAblationsSetting,
    run_ablations,
    Row,
    title=lambda setting: f"Operators, one choice varied, {setting.ranks} ranks",
    plot={"operator-ablations*": plot_ablations},
    needs=Needs.TWO_GPUS,
    about=lambda setting: {"ranks": setting.ranks},
)

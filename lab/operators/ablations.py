# SPDX-License-Identifier: Apache-2.0
"""`python -m lab operator-ablations`: the effect of each field of a kernel's configuration, varied one at a time.

The choices are those of Flux (section 4) and TileLink (section 3.1): tile sizes and order, shifted by rank or not; rows
moved by copy engines or by programs (how many), pushed or pulled, and in which piece size; an all-reduce in one shot or
two, with partial sums as tiles or as packets.
"""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lab.pictures import draw_result
from stretto.bench.harness import Column, print_table, run_ranks, write_result
from stretto.bench.interleaved import TimingEffort, time_interleaved
from stretto.bench.operators.settings import OPERATORS, OperatorsSetting, local_shape
from stretto.ops import Blocks, KernelConfig
from stretto.ops.dispatch import choose_config, describe_problem
from stretto.ops.tuning import RotatingOperands
from stretto.parallel import Grid

ROWS: Mapping[str, tuple[int, ...]] = {"gather": (1024, 8192), "scatter": (1024, 8192), "reduce": (1, 64)}
COLUMNS = (
    Column("operator", "operator"),
    Column("case", "case"),
    Column("m", "m"),
    Column("variation", "variation"),
    Column("milliseconds", "ms", "{:.4f}"),
    Column("relative", "to the configuration as chosen", "{:.2f}"),
)


def bench_operator_ablations(ranks: int, out: Path, setting: OperatorsSetting) -> list[dict[str, Any]]:
    """Measure in CUDA graphs, print the table, write JSON and a picture. Returns the rows. ValueError for fp8."""
    if setting.dtype != "bf16":
        raise ValueError(f"ablations are of bf16, not {setting.dtype}")
    run_ranks(ranks, measure_all, ranks, out, setting, trains=False)
    path = out / "operator-ablations.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    print_table(f"Operators, one choice varied, {ranks} ranks", COLUMNS, rows)
    draw_result(path)
    return rows


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
            for movers in (4, 8, 16, 32, 64, 132):
                configs[f"{movers} programs push"] = config._replace(
                    transfer="programs", direction="push", movers=movers
                )
            configs["16 programs pull"] = config._replace(transfer="programs", direction="pull", movers=16)
            for size in (19, 20, 21, 22, 23, 24):
                pieces = config._replace(transfer="copies", direction="push", piece_bytes=1 << size)
                configs[f"copies of {(1 << size) / (1 << 20):g} MiB"] = pieces
        case "scatter":
            configs["sums as packets"] = config._replace(exchange="packets")
            tiles = config._replace(exchange="tiles")
            configs["tiles stored by programs"] = tiles._replace(transfer="programs")
            for size in (20, 21, 22, 23, 24):
                pieces = tiles._replace(transfer="copies", piece_bytes=1 << size)
                configs[f"copies of {(1 << size) / (1 << 20):g} MiB"] = pieces
        case _:
            del configs["no shift by rank"]
            configs |= {f"{shots} shots": config._replace(shots=shots) for shots in (1, 2)}
    return configs


def measure_all(ranks: int, out: Path, setting: OperatorsSetting) -> None:
    """The job of each rank; rank 0 writes the rows."""
    device = Grid(data=ranks).device
    assert dist.group.WORLD is not None
    world, rows = dist.group.WORLD.group_name, []
    for name in setting.operators:
        for case in setting.models:
            for m in setting.ms or ROWS[name]:
                m, n, k = local_shape(name, case, m, dist.get_world_size())
                operands = RotatingOperands.make(OPERATORS[name], m, n, k, None, torch.bfloat16, device)
                call = describe_problem(OPERATORS[name], m, operands.x, operands.weights[0], world)
                configs = vary(name, choose_config(call, operands.x, operands.weights[0], world, "kernel"))
                if m > 1024:
                    configs.pop("sums as packets", None)  # packets take twice the memory, and are for few rows
                runs = {variation: partial(operands.call, config) for variation, config in configs.items()}
                size = 0 if m <= 1024 else 64 << 20
                found = time_interleaved(
                    runs, size, is_graph=True, effort=TimingEffort(rounds=6, replays=3), rests=False
                )
                for variation, timed in found.items():
                    rows.append(
                        {
                            "operator": name,
                            "case": case,
                            "m": m,
                            "variation": variation,
                            "milliseconds": timed.seconds * 1e3,
                            "relative": timed.seconds / found["as chosen"].seconds,
                        }
                    )
                if dist.get_rank() == 0:
                    write_result(out, "operator-ablations", COLUMNS, rows, ranks=dist.get_world_size())
                del operands
                torch.cuda.empty_cache()

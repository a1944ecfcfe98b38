# SPDX-License-Identifier: Apache-2.0
"""Draws the results of benches: which function draws which file, after a measurement and for `stretto bench redraw`.

A picture has the path of the JSON that it is drawn from, with another suffix.
"""

from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path
from typing import Any

from stretto.report.pictures import can_draw, require_drawing
from stretto.suggestions import did_you_mean_file

# Of file names to functions; the first pattern that matches counts. Imported on use: they import matplotlib.
_PLOTS = {
    "train.json": "training.plot:plot_train",
    "peers-*.json": "training.plot:plot_peers",
    "overlap.json": "training.plot:plot_overlap",
    "dlrm.json": "training.plot:plot_dlrm",
    "ddp.json": "training.plot:plot_ddp",
    "offload-buckets.json": "training.plot:plot_buckets",
    "chunks.json": "training.plot:plot_chunks",
    "pipeline.json": "training.plot:plot_pipeline",
    "faults.json": "faults.report:plot_faults",
    "messages.json": "messages.plot:plot_messages",
    "plan.json": "plan.plot:plot_plan",
    "layouts-*.json": "plan.plot:plot_layouts",
    "collectives.json": "collectives.plot:plot_collectives",
    "compile.json": "collectives.plot:plot_compile",
    "pipelining.json": "collectives.plot:plot_pipelining",
    "composition.json": "collectives.plot:plot_composition",
    "operators.json": "operators.plot:plot_operators",
    "operators-fp8.json": "operators.plot:plot_operators",
    "operator-ablations*.json": "operators.plot:plot_ablations",
    "embedding.json": "embedding.plot:plot_embedding",
    "two-level.json": "two_level.plot:plot_two_level",
    "simulated-two-level.json": "studies.plot:plot_two_level_heat_maps",
    "simulated-curves.json": "studies.plot:plot_curves",
    "simulated-zero3.json": "studies.plot:plot_zero3",
    "simulated-dlrm.json": "studies.plot:plot_simulated_dlrm",
    "simulated-scaling.json": "studies.plot:plot_scaling",
    "checkouts.json": "checkouts.plot:plot_checkouts",
    "schedules.json": "plan.plot:plot_schedules",
    "simulated-steps.json": "plan.plot:plot_simulated_steps",
    "simulated-pipelines.json": "plan.plot:plot_simulated_pipelines",
    "moe-demo.json": "training.plot:plot_moe_demo",
    "experts.json": "training.plot:plot_experts",
    "simulated-collectives.json": "simulated_schedules.plot:plot_simulated_collectives",
    "simulated-msccl.json": "simulated_schedules.plot:plot_simulated_msccl",
    "simulator-speed.json": "simulator_speed:plot_simulator_speed",
}


def draw_result(result: Path) -> Path | None:
    """Draw a bench's JSON. Returns the picture's path; without matplotlib, prints how to install it and returns None.

    Raises ValueError for a file that has no picture.
    """
    plot = _find_plot(result)
    if plot is None:
        raise ValueError(f"{result} has no picture: {', '.join(_PLOTS)} have one")
    if not can_draw():
        return None
    picture = result.with_suffix(".png")
    module, name = plot.split(":")
    draw: Callable[[Path, Path], None] = getattr(import_module(f"stretto.bench.{module}"), name)
    draw(result, picture)
    return picture


def redraw(folder: Path) -> list[Path]:
    """Draw every result in a folder and its subfolders again, and the loss (and experts' load) of every run.

    Returns the pictures' paths.

    A run (a folder with config.toml and metrics.jsonl) is drawn with the run in its subfolder `one-rank`, as the
    demo's is. Raises ValueError if there is no such folder, nothing in it to draw, or nothing to draw with.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}{did_you_mean_file(folder)}")
    require_drawing()
    results = [path for path in sorted(folder.rglob("*.json")) if _find_plot(path) is not None]
    pictures = [picture for path in results if (picture := draw_result(path)) is not None]
    for config in sorted(folder.rglob("config.toml")):
        out = config.parent
        if (out / "metrics.jsonl").is_file() and out.name != "one-rank":
            from stretto.report.run import draw_experts, draw_loss, read_run

            run, single = read_run(out), out / "one-rank"
            pictures.append(draw_loss(run, read_run(single) if single.is_dir() else None))
            if (picture := draw_experts(run)) is not None:
                pictures.append(picture)
    if not pictures:
        raise ValueError(f"{folder} has no result of a bench that has a picture ({', '.join(_PLOTS)}), and no run")
    return pictures


def describe_origin(data: Mapping[str, Any], *, simulated: str = "") -> str:
    """The devices and the date of a result, as `harness.write_result` has written them.

    simulated: of a simulation, the machines that it is of.
    """
    origin = f"{data['machine']['devices']}, {data['date']}"
    return f"simulated: {simulated}; computed on {origin}" if simulated else origin


def _find_plot(result: Path) -> str | None:
    return next((plot for pattern, plot in _PLOTS.items() if fnmatch(result.name, pattern)), None)

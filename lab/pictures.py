# SPDX-License-Identifier: Apache-2.0
"""Draws the results of benches: which function draws which file, after a measurement and for `python -m lab redraw`.

A picture has the path of the JSON that it is drawn from, with another suffix.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path
from typing import Any

from stretto.report.pictures import can_draw, require_drawing
from stretto.suggestions import did_you_mean_file

# Of file names to functions; the first pattern that matches counts. Imported on use: they import matplotlib. The lab
# adds its own.
PLOTS = {
    "train.json": "lab.training.throughput_plot:plot_train",
    "collectives.json": "lab.collectives.peers_plot:plot_collectives",
    "operators.json": "lab.operators.peers_plot:plot_operators",
    "operators-fp8.json": "lab.operators.peers_plot:plot_operators",
    "embedding.json": "lab.embedding.plot:plot_embedding",
}


def draw_result(result: Path) -> Path | None:
    """Draw a bench's JSON. Returns the picture's path; without matplotlib, prints how to install it and returns None.

    Raises ValueError for a file that has no picture.
    """
    plot = _find_plot(result)
    if plot is None:
        raise ValueError(f"{result} has no picture: {', '.join(PLOTS)} have one")
    if not can_draw():
        return None
    picture = result.with_suffix(".png")
    module, name = plot.split(":")
    draw: Callable[[dict[str, Any], Path], None] = getattr(import_module(module), name)
    try:
        draw(json.loads(result.read_text()), picture)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:  # cut off, or not a result's rows
        problem = f"has no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{result} is damaged, and cannot be drawn: {problem}") from error
    return picture


def redraw(folder: Path) -> list[Path]:
    """Draw a result, or every result in a folder and its subfolders, again, and the loss (and experts' load) of runs.

    Returns the pictures' paths.

    A run (a folder with config.toml and metrics.jsonl) is drawn with the run in its subfolder `one-rank`, as the
    demo's is. Raises ValueError if there is no such folder, nothing in it to draw, or nothing to draw with.
    """
    if not folder.exists():
        raise ValueError(f"there is no folder {folder}{did_you_mean_file(folder)}")
    require_drawing()
    found = [folder] if folder.is_file() else sorted(folder.rglob("*.json"))
    results = [path for path in found if _find_plot(path) is not None]
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
        raise ValueError(f"{folder} has no result of a bench that has a picture ({', '.join(PLOTS)}), and no run")
    return pictures


def describe_origin(data: Mapping[str, Any], *, simulated: str = "") -> str:
    """The devices and the date of a result, as `harness.write_result` has written them.

    simulated: of a simulation, the machines that it is of.
    """
    origin = f"{data['machine']['devices']}, {data['date']}"
    return f"simulated: {simulated}; computed on {origin}" if simulated else origin


def select(rows: Iterable[Mapping[str, Any]], **values: Any) -> list[Mapping[str, Any]]:
    """The rows of a result that have these values."""
    return [row for row in rows if all(row[key] == value for key, value in values.items())]


def group(rows: Iterable[Mapping[str, Any]], *keys: str) -> dict[Any, list[Mapping[str, Any]]]:
    """The rows of a result by their value of a column (or values of several), in the order of the first rows."""
    found: dict[Any, list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(row[keys[0]] if len(keys) == 1 else tuple(row[key] for key in keys), []).append(row)
    return found


def points(rows: Iterable[Mapping[str, Any]], x: str, y: str) -> tuple[list[Any], list[Any]]:
    """The values of two columns, of the rows in which the second one has a value."""
    known = [row for row in rows if row.get(y) is not None]
    return [row[x] for row in known], [row[y] for row in known]


def _find_plot(result: Path) -> str | None:
    return next((plot for pattern, plot in PLOTS.items() if fnmatch(result.name, pattern)), None)

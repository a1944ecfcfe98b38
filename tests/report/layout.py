# SPDX-License-Identifier: Apache-2.0
"""Checks a picture's layout by matplotlib's own bounding boxes: texts, frames, bars and legends."""

from collections.abc import Iterator
from itertools import combinations
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox

TOUCH = 1.0  # pixels that boxes may share: they are rounded up, and have some room around the letters


def find_faults(figure: Figure) -> list[str]:
    """Everything that is wrong with the layout of a picture that has been drawn."""
    texts = visible_texts(figure)
    return [*_texts(figure, texts), *_frames(figure, texts), *_legends(figure), *_bars(figure), *_axes(figure)]


def visible_texts(figure: Figure) -> list[tuple[Text, Bbox]]:
    """Texts that are seen, with their boxes in pixels."""
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    hidden = _hidden_names(figure)
    return [
        (text, text.get_window_extent(renderer))
        for text in figure.findobj(Text)
        if text.get_text().strip() and text.get_visible() and id(text) not in hidden
    ]


def _hidden_names(figure: Figure) -> set[int]:
    """Ids of the texts of ticks that are not drawn: an axis keeps ticks beyond its ends."""
    hidden = set()
    for panel in figure.axes:
        for axis in (panel.xaxis, panel.yaxis):
            shown = set(map(id, axis._update_ticks()))  # type: ignore[attr-defined]
            for tick in (*axis.majorTicks, *axis.minorTicks):
                if id(tick) not in shown:
                    hidden |= {id(tick.label1), id(tick.label2)}
    return hidden


def _texts(figure: Figure, texts: list[tuple[Text, Bbox]]) -> Iterator[str]:
    for text, box in texts:
        if box.x0 < -TOUCH or box.y0 < -TOUCH or box.x1 > figure.bbox.x1 + TOUCH or box.y1 > figure.bbox.y1 + TOUCH:
            yield f"{text.get_text()!r} leaves the picture: {box} of {figure.bbox}"
    for (one, box), (other, other_box) in combinations(texts, 2):
        if _overlap(box, other_box):
            yield f"{one.get_text()!r} overlaps {other.get_text()!r}"


def _frames(figure: Figure, texts: list[tuple[Text, Bbox]]) -> Iterator[str]:
    for panel in figure.axes:
        frame = panel.get_window_extent()
        edges = {
            "left": Bbox.from_extents(frame.x0, frame.y0, frame.x0, frame.y1),
            "right": Bbox.from_extents(frame.x1, frame.y0, frame.x1, frame.y1),
            "bottom": Bbox.from_extents(frame.x0, frame.y0, frame.x1, frame.y0),
            "top": Bbox.from_extents(frame.x0, frame.y1, frame.x1, frame.y1),
        }
        for text, box in texts:
            for side, edge in edges.items():
                # A frame that is not drawn still bounds the labels inside of the panel.
                if (panel.spines[side].get_visible() or text in panel.texts) and _crosses(box, edge, text, panel):
                    yield f"{text.get_text()!r} is over the {side} edge of its panel"


def _crosses(box: Bbox, edge: Bbox, text: Text, panel: Axes) -> bool:
    if text in panel.texts and text.get_transform() is not panel.transData and not isinstance(text, Annotation):
        return False  # placed beside the panel on purpose
    return _overlap(
        box, Bbox.from_extents(edge.x0 - 2 * TOUCH, edge.y0 - 2 * TOUCH, edge.x1 + 2 * TOUCH, edge.y1 + 2 * TOUCH)
    )


def _overlap(one: Bbox, other: Bbox) -> bool:
    width = min(one.x1, other.x1) - max(one.x0, other.x0)
    height = min(one.y1, other.y1) - max(one.y0, other.y0)
    return width > TOUCH and height > TOUCH


def _legends(figure: Figure) -> Iterator[str]:
    """A legend names each kind of artist that is drawn with a label, once, in its colour, and nothing else."""
    labelled: dict[str, Any] = {}
    for panel in figure.axes:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            labelled.setdefault(label, handle)
            if not _has_data(handle):
                yield f"{label!r} is in the legend, but nothing of it is drawn"
        if panel.get_legend() is not None:
            yield "a panel has a legend of its own, which may cover what it draws"
    named = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    if sorted(named) != sorted(labelled):
        yield f"the legend names {named}, but {list(labelled)} are drawn"
    for legend in figure.legends:
        for text, handle in zip(legend.get_texts(), legend.legend_handles, strict=True):
            if text.get_text() in labelled and _colour(handle) != _colour(labelled[text.get_text()]):
                yield f"{text.get_text()!r} has another colour in the legend"


def _has_data(handle: Any) -> bool:
    if hasattr(handle, "patches"):
        return len(handle.patches) > 0
    if hasattr(handle, "lines"):  # error bars
        return _has_data(handle.lines[0])
    if hasattr(handle, "get_xdata"):
        return len(handle.get_xdata()) > 0
    return not hasattr(handle, "get_paths") or len(handle.get_paths()) > 0


def _colour(handle: Any) -> tuple[float, ...]:
    if hasattr(handle, "patches"):
        handle = handle.patches[0]
    elif isinstance(getattr(handle, "lines", None), tuple):  # error bars
        handle = handle.lines[0]
    if hasattr(handle, "get_markeredgecolor"):
        return to_rgba(handle.get_markeredgecolor())
    colour = handle.get_color() if hasattr(handle, "get_color") else handle.get_facecolor()
    return to_rgba(colour[0] if getattr(colour, "ndim", 1) == 2 else colour)


def _bars(figure: Figure) -> Iterator[str]:
    """Names stand at the middle of their bar or group of bars, and labels at the middle of a bar's end."""
    for panel in figure.axes:
        bars = [container for container in panel.containers if hasattr(container, "orientation")]
        if not bars:
            continue
        is_horizontal = bars[0].orientation == "horizontal"
        side = 1 if is_horizontal else 0
        spans = [bar.get_bbox().get_points()[:, side] for container in bars for bar in container.patches]
        axis = panel.yaxis if is_horizontal else panel.xaxis
        names = [text.get_text() for text in axis.get_ticklabels()]  # none in a panel that shares its neighbour's
        if all(names):
            for place, name in zip(axis.get_ticklocs(), names, strict=bool(names)):
                group = [span for span in spans if abs(span.mean() - place) < 0.5]
                if group and abs((min(map(min, group)) + max(map(max, group))) / 2 - place) > 1e-6:
                    yield f"{name!r} is not at the middle of its bars"
        for label in panel.texts:
            if isinstance(label, Annotation) and not any(abs(label.xy[side] - span.mean()) < 1e-6 for span in spans):
                yield f"{label.get_text()!r} is not centred on a bar"


def _axes(figure: Figure) -> Iterator[str]:
    """An axis along which numbers differ names at least two values, or one could not read any other."""
    for panel in figure.axes:
        for name, axis in (("x", panel.xaxis), ("y", panel.yaxis)):
            low, high = axis.get_data_interval()
            shown = [tick.label1 for tick in axis._update_ticks() if tick.label1.get_visible()]  # type: ignore[attr-defined]
            named = {label.get_text() for label in shown} - {""}
            if axis.get_scale() == "log" and high > 1.5 * low and len(named) == 1:
                yield f"the {name} axis from {low:g} to {high:g} names only {named}"

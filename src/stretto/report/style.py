# SPDX-License-Identifier: Apache-2.0
"""The style of all pictures: colours, markers, fonts and sizes, and how a picture is laid out and written.

Colours are Okabe and Ito's, which colour-blind readers can tell apart. Each series also has a marker, a line style and
a hatch, and neighbouring bars differ in lightness, so that pictures are readable in grey. This module imports
matplotlib: import it where something is drawn.

    with drawing(file, 8, 3) as picture:
        panel = picture.panels(1, 1)[0, 0]
        panel.plot(sizes, times, label="Stretto", **STRETTO.line)
        picture.title = "4 ranks, bf16"

Panels have the given size. Title and legend are added above them and the caption below, so that none can cover
another. The legend names what the panels have drawn with a label.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.text import Text
from numpy.typing import NDArray

from stretto.atomic_files import write_atomically

BLACK, ORANGE, SKY, GREEN, YELLOW = "#000000", "#e69f00", "#56b4e9", "#009e73", "#f0e442"
BLUE, VERMILION, PURPLE = "#0072b2", "#d55e00", "#cc79a7"
GREY, LIGHT, INK = "#808080", "#e4e4e4", "#444444"

DPI = 150
TITLE, TEXT, SMALL = 11, 9, 8
"""Font sizes in points: the picture's title, labels of axes and panels' titles, and all else."""

_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # matplotlib brings it along: pictures are the same on every machine
    "font.size": TEXT,
    "axes.titlesize": TEXT,
    "axes.labelsize": TEXT,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "legend.fontsize": SMALL,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": LIGHT,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelcolor": BLACK,
    "ytick.labelcolor": BLACK,
    "hatch.linewidth": 0.8,
    "lines.linewidth": 1.5,
    "lines.markersize": 4.5,
}


@dataclass(frozen=True)
class Look:
    """Looks of a series, drawn as a line or as bars."""

    colour: str
    marker: str
    dashes: str | tuple[float, tuple[float, ...]] = "-"
    hatch: str = ""

    @property
    def line(self) -> dict[str, Any]:
        """Keyword arguments of `Axes.plot`."""
        return {"color": self.colour, "marker": self.marker, "linestyle": self.dashes}

    @property
    def bar(self) -> dict[str, Any]:
        """Keyword arguments of `Axes.bar` and `Axes.barh`."""
        return {"facecolor": self.colour, "hatch": self.hatch, "edgecolor": "white", "linewidth": 0}


STRETTO = Look(BLUE, "o")
EXPOSED = Look(VERMILION, "X", (0, (3, 1)), "////")
SERIES = (
    STRETTO,
    Look(ORANGE, "^", (0, (5, 1.5))),
    Look(GREEN, "s", (0, (5, 1.5, 1, 1.5))),
    Look(PURPLE, "v", (0, (1.5, 1))),
    Look(SKY, "D", (0, (3, 1, 1, 1, 1, 1))),
    Look(VERMILION, "X", (0, (8, 2))),
)
"""Looks for series that have no role."""

GUIDE: dict[str, Any] = {"color": INK, "linewidth": 0.8}
"""Keyword arguments of lines that mark a value, such as 1 in a panel of ratios."""

_EDGE = 0.08  # inches between the picture's edge and its texts
_GAP, _PANEL_GAP = 0.07, 0.14  # inches between title, subtitle and legend, and between these, panels and caption


@contextmanager
def drawing(file: str | Path, width: float, height: float, make: "type[Picture] | None" = None) -> Iterator[Any]:
    """Draw a `Picture` and write it to `file` (.png or .svg). width, height: of all panels together, in inches."""
    with rc_context(_STYLE):
        # Without pyplot, which has global state and may need a window system.
        figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
        FigureCanvasAgg(figure)
        picture = (make or Picture)(figure)
        yield picture
        picture.lay_out()
        # The bounding box must stay: texts are wrapped to this width.
        kind = Path(file).suffix.removeprefix(".") or "png"
        write_atomically(Path(file), lambda out: picture.figure.savefig(out, dpi=DPI, format=kind))


@dataclass
class Picture:
    """A figure in the style. title, subtitle, caption: texts, wrapped to the figure's width."""

    figure: Figure
    title: str = ""
    subtitle: str = ""
    caption: str = ""
    has_legend: bool = True

    def panels(self, rows: int, columns: int, **options: Any) -> NDArray[Any]:
        """Add panels. options: of `Figure.subplots`. Returns axes [rows, columns]."""
        return self.figure.subplots(max(1, rows), max(1, columns), squeeze=False, **options)

    @property
    def _renderer(self) -> Any:
        return self.figure.canvas.get_renderer()  # type: ignore[attr-defined]

    def lay_out(self) -> None:
        """Place title, legend and caption around the panels, then make the axes fit their labels."""
        figure = self.figure
        width, height = figure.get_size_inches()
        above: list[Text | Legend] = [
            self._write(text, size, colour)
            for text, size, colour in ((self.title, TITLE, BLACK), (self.subtitle, SMALL, INK))
            if text
        ]
        legend = self._add_legend() if self.has_legend else None
        if legend is not None:
            above.append(legend)
        below = [self._write(self.caption, SMALL, INK)] if self.caption else []
        heights = {id(each): each.get_window_extent(self._renderer).height / self.figure.dpi for each in above + below}
        top = sum(heights[id(each)] + _GAP for each in above) + (_PANEL_GAP if above else 0)
        bottom = sum(heights[id(each)] + _PANEL_GAP for each in below)
        whole = height + top + bottom
        figure.set_size_inches(width, whole)
        y = whole - _EDGE
        for each in above:
            _place(each, _EDGE / width, y / whole)
            y -= heights[id(each)] + _GAP
        for each in below:
            _place(each, _EDGE / width, (_EDGE + heights[id(each)]) / whole)
        engine = figure.get_layout_engine()
        assert engine is not None
        engine.set(rect=(0, bottom / whole, 1, 1 - (top + bottom) / whole))  # type: ignore[call-arg]
        for _ in range(2):  # what is shown of ticks and labels changes the panels' sizes a little
            figure.draw_without_rendering()
            self.fit_panels()

    def fit_panels(self) -> None:
        """Change panels once their sizes are known: for subclasses."""

    def _write(self, text: str, size: float, colour: str) -> Text:
        width = (self.figure.get_size_inches()[0] - 2 * _EDGE) * self.figure.dpi
        written = self.figure.text(0, 0, "", fontsize=size, color=colour, va="top", linespacing=1.3)
        lines: list[str] = []
        for paragraph in text.splitlines():
            lines.append("")
            for word in paragraph.split(" "):
                longer = f"{lines[-1]} {word}".lstrip()
                written.set_text(longer)
                if written.get_window_extent(self._renderer).width > width and lines[-1]:
                    lines.append(word)
                else:
                    lines[-1] = longer
        written.set_text("\n".join(lines))
        return written

    def _add_legend(self) -> Legend | None:
        """A legend of what the panels have drawn with a label, in as many columns as fit."""
        found: dict[str, Any] = {}
        for panel in self.figure.axes:
            for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
                found.setdefault(label, handle)
        if not found:
            return None
        width = (self.figure.get_size_inches()[0] - 2 * _EDGE) * self.figure.dpi
        for columns in range(len(found), 0, -1):
            # matplotlib fills columns, but people read rows.
            order = [place for column in range(columns) for place in range(column, len(found), columns)]
            legend = self.figure.legend(
                [list(found.values())[place] for place in order],
                [list(found)[place] for place in order],
                ncols=columns,
                loc="upper left",
                borderpad=0,
                borderaxespad=0,
                columnspacing=1.6,
                handlelength=2.6,
            )
            legend.set_in_layout(False)
            if columns == 1 or legend.get_window_extent(self._renderer).width <= width:
                return legend
            legend.remove()
        return None


def tint(colour: str, strength: float = 0.5) -> str:
    """A colour mixed with white, as a ground for black text."""
    red, green, blue = (1 - strength * (1 - part) for part in to_rgb(colour))
    return to_hex((red, green, blue))


def _place(artist: Text | Legend, x: float, y: float) -> None:
    if isinstance(artist, Legend):
        artist.set_bbox_to_anchor((x, y))
    else:
        artist.set_position((x, y))

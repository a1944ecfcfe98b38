# SPDX-License-Identifier: Apache-2.0
"""Picture of `python -m lab messages`, drawn from its JSON."""

import json
from itertools import cycle
from pathlib import Path

from lab.messages.settings import LIBRARY
from lab.pictures import describe_origin
from stretto.report.style import PEER, SERIES, drawing, plain_log

_TITLES = {"message": "a message, half of a round trip", "all-reduce": "an all-reduce of all {ranks} ranks"}


def plot_messages(result: Path, picture: Path) -> None:
    """Draw a panel for messages and one for all-reduces: times over size, a line a transport or back end."""
    data = json.loads(result.read_text())
    parts = list(dict.fromkeys(row["part"] for row in data["rows"]))
    names = list(dict.fromkeys(row["by"] for row in data["rows"]))
    looks = dict(zip([name for name in names if name != LIBRARY], cycle(SERIES), strict=False)) | {LIBRARY: PEER}
    with drawing(picture, max(5.0, 4.4 * len(parts)), 3.2) as drawn:
        for panel, part in zip(drawn.panels(1, len(parts))[0], parts, strict=True):
            rows = [row for row in data["rows"] if row["part"] == part]
            for name in dict.fromkeys(row["by"] for row in rows):
                measured = [(row["megabytes"], row["milliseconds"]) for row in rows if row["by"] == name]
                panel.plot(*zip(*measured, strict=True), label=name, **looks[name].line)
            drawn.log_ticks(panel.xaxis, [row["megabytes"] for row in rows])
            plain_log(panel.yaxis)
            panel.set_xlabel("MiB")
            panel.set_ylabel("ms")
            panel.set_title(_TITLES[part].format(ranks=data["ranks"]))
        drawn.title = "Messages between two ranks by transport, and all-reduces by back end"
        drawn.subtitle = describe_origin(data)
        drawn.caption = (
            "Messages (Singh, figure 3.2, left): from the call of send until the receiver can use the tensor. torch's "
            "send and recv block, and their receiver knows the shape."
        )

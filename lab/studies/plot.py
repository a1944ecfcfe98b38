# SPDX-License-Identifier: Apache-2.0
"""Pictures of the studies, drawn from their JSON."""

import json
from collections.abc import Iterable
from pathlib import Path

from lab.pictures import describe_origin
from stretto.report.style import SERIES, SMALL, drawing, group_bars, name_bars, plain_log


def _name(machines: Iterable[str]) -> str:
    return ", ".join(machine.capitalize() for machine in machines)


def plot_two_level_heat_maps(result: Path, picture: Path) -> None:
    """Draw figures 6.9 and 6.11: a panel a machine and collective, the speed-up of two levels by ranks and MiB."""
    import numpy as np
    from matplotlib.colors import LogNorm

    data = json.loads(result.read_text())
    panels = list(dict.fromkeys((row["machine"], row["collective"]) for row in data["rows"]))
    machines = list(dict.fromkeys(machine for machine, _ in panels))
    collectives = list(dict.fromkeys(collective for _, collective in panels))
    with drawing(picture, 4.2 * len(collectives), 3.2 * len(machines)) as drawn:
        axes = drawn.panels(len(machines), len(collectives))
        for machine, collective in panels:
            panel = axes[machines.index(machine)][collectives.index(collective)]
            rows = [row for row in data["rows"] if (row["machine"], row["collective"]) == (machine, collective)]
            ranks = sorted({row["ranks"] for row in rows})
            sizes = sorted({row["mb"] for row in rows}, reverse=True)
            cells = np.full((len(sizes), len(ranks)), np.nan)
            for row in rows:
                found = row["speedup"] if row["event_speedup"] is None else row["event_speedup"]
                cells[sizes.index(row["mb"]), ranks.index(row["ranks"])] = found
            panel.imshow(cells, cmap="RdBu", norm=LogNorm(1 / 40, 40), aspect="auto")
            for line, column in np.ndindex(cells.shape):
                value = cells[line, column]
                colour = "white" if abs(np.log(value)) > np.log(8) else "black"
                panel.text(column, line, f"{value:.2g}", ha="center", va="center", fontsize=SMALL, color=colour)
            panel.set_xticks(range(len(ranks)), [f"{count}" for count in ranks])
            panel.set_yticks(range(len(sizes)), [f"{size}" for size in sizes])
            panel.grid(visible=False)
            panel.set_title(f"{machine.capitalize()}, {collective.replace('_', '-')}")
            panel.set_xlabel("ranks")
            panel.set_ylabel("MiB")
        drawn.title = "Speed-up of two levels over the vendor's flat ring, simulated"
        drawn.subtitle = describe_origin(data, simulated=_name(machines))
        drawn.caption = (
            "Event-driven: packets that queue on links; a node stands for all. Above 1, two levels (recursive between "
            "nodes) are faster. MiB: an all-gather's output, a reduce-scatter's input, of a rank."
        )


def plot_curves(result: Path, picture: Path) -> None:
    """Draw figures 6.7, 6.8 and 6.10: a panel a machine and collective, the times of each library by ranks."""
    data = json.loads(result.read_text())
    panels = list(dict.fromkeys((row["machine"], row["collective"]) for row in data["rows"]))
    machines = list(dict.fromkeys(machine for machine, _ in panels))
    collectives = list(dict.fromkeys(collective for _, collective in panels))
    libraries = (("two_level", "two levels"), ("flat", "vendor's ring"), ("mpi", "Cray MPICH"))
    with drawing(picture, 4.2 * len(collectives), 3.0 * len(machines)) as drawn:
        axes = drawn.panels(len(machines), len(collectives))
        for machine, collective in panels:
            panel = axes[machines.index(machine)][collectives.index(collective)]
            rows = [row for row in data["rows"] if (row["machine"], row["collective"]) == (machine, collective)]
            for nth, mb in enumerate(sorted({row["mb"] for row in rows})):
                cells = [row for row in rows if row["mb"] == mb]
                ranks = [row["ranks"] for row in cells]
                for place, (key, name) in enumerate(libraries):
                    # Cray MPICH's ring is not simulated event by event.
                    times = [row.get(f"{key}_event_ms") or row[f"{key}_ms"] for row in cells]
                    look = SERIES[place + 3 * (nth % 2)]
                    label = f"{name}, {'smaller' if nth == 0 else 'larger'}"
                    panel.plot(ranks, times, label=label, **look.line)
            drawn.log_ticks(panel.xaxis, [row["ranks"] for row in rows])
            plain_log(panel.yaxis)
            sizes = " and ".join(f"{mb}" for mb in sorted({row["mb"] for row in rows}))
            panel.set_title(f"{machine.capitalize()}, {collective.replace('_', '-')}, {sizes} MiB")
            panel.set_xlabel("ranks")
            panel.set_ylabel("ms")
        drawn.title = "All-gathers and reduce-scatters by library, simulated"
        drawn.subtitle = describe_origin(data, simulated=_name(machines))
        drawn.caption = "Event-driven, but for Cray MPICH (closed-form, on one network interface, additions left out)."


def plot_zero3(result: Path, picture: Path) -> None:
    """Draw figure 6.12: a panel a machine, the batch time of each model and library by ranks."""
    data = json.loads(result.read_text())
    machines = list(dict.fromkeys(row["machine"] for row in data["rows"]))
    with drawing(picture, 4.2 * len(machines), 3.2) as drawn:
        panels = drawn.panels(1, len(machines))[0]
        for panel, machine in zip(panels, machines, strict=True):
            rows = [row for row in data["rows"] if row["machine"] == machine]
            for model in dict.fromkeys(row["model"] for row in rows):
                of_model = [row for row in rows if row["model"] == model]
                ranks = [row["ranks"] for row in of_model]
                for place, (key, name) in enumerate((("vendor", "vendor's ring"), ("two_level", "two levels"))):
                    look = SERIES[2 * ["7B", "13B"].index(model) + place]
                    panel.plot(
                        ranks, [row[f"{key}_seconds"] for row in of_model], label=f"{model}, {name}", **look.line
                    )
            drawn.log_ticks(panel.xaxis, [row["ranks"] for row in rows])
            plain_log(panel.yaxis)
            panel.set_xlabel("ranks")
            panel.set_title(machine.capitalize())
        panels[0].set_ylabel("s a batch")
        drawn.title = f"ZeRO-3 on {data['setting']['batch']} sequences of {data['seq_len']} tokens, simulated"
        drawn.subtitle = describe_origin(data, simulated=_name(machines))


def plot_scaling(result: Path, picture: Path) -> None:
    """Draw figure 5.5 (steps of the ladder by run) and figure 5.7 (days by GCDs, with the published ones)."""
    import numpy as np

    data = json.loads(result.read_text())
    names = (("baseline_seconds", "baseline"), ("model_seconds", "model's grid"), ("overlap_seconds", "with overlap"))
    rows = data["rows"]
    with drawing(picture, 9.4, max(3.2, 0.4 * len(rows))) as drawn:
        ladder, strong = drawn.panels(1, 2)[0]
        places, width = group_bars(len(rows), len(names))
        for series, (key, name) in enumerate(names):
            values = [row[key] or np.nan for row in rows]
            ladder.barh(places[series], values, width, label=name, **SERIES[series].bar)
        name_bars(ladder, range(len(rows)), [f"{row['cluster'].capitalize()} {row['gpus']:,}" for row in rows])
        ladder.invert_yaxis()
        ladder.set_xlabel("s a step")
        ladder.set_title("Figure 5.5: grid and overlap")
        models = dict.fromkeys(row["model"] for row in data["strong"])
        for series, model in enumerate(models):
            found = [row for row in data["strong"] if row["model"] == model]
            known = [row for row in found if row["published_days"] is not None]
            look = SERIES[3 + series]
            strong.plot([row["gpus"] for row in found], [row["days"] for row in found], label=model, **look.line)
            strong.plot(
                [row["gpus"] for row in known],
                [row["published_days"] for row in known],
                label=f"{model}, published",
                color=look.colour,
                marker="*",
                markersize=8,
                linestyle="none",
            )
        drawn.log_ticks(strong.xaxis, [row["gpus"] for row in data["strong"]])
        plain_log(strong.yaxis)
        strong.set_xlabel("GCDs of Frontier")
        strong.set_ylabel("days to 2T tokens")
        strong.set_title("Figure 5.7: strong scaling")
        drawn.title = "Weak and strong scaling of training, planned"
        drawn.subtitle = describe_origin(data, simulated=_name(dict.fromkeys(row["cluster"] for row in rows)))


def plot_simulated_dlrm(result: Path, picture: Path) -> None:
    """Draw section 4.4 of Punniyamurthy et al.: steps by fusion, and what fusing saves by the number of nodes."""
    data = json.loads(result.read_text())
    rows = [row for row in data["rows"] if row["fidelity"] == "event-driven"]
    names = (("none_ms", "separate"), ("forward_ms", "forward fused"), ("both_ms", "both passes fused"))
    with drawing(picture, 9.4, 3.6) as drawn:
        steps, growth = drawn.panels(1, 2)[0]
        places, width = group_bars(len(rows), len(names))
        for series, (key, name) in enumerate(names):
            steps.barh(places[series], [row[key] for row in rows], width, label=name, **SERIES[series].bar)
        name_bars(steps, range(len(rows)), [f"{row['kernels']}, {row['collective']}" for row in rows])
        steps.invert_yaxis()
        steps.set_xlabel("ms a step")
        steps.set_title("128 nodes")
        scale = [row for row in data["scale"] if row["fidelity"] == "event-driven"]
        ranks = [row["ranks"] for row in scale]
        for series, (key, name) in enumerate(names[1:], start=1):
            less = [100 * row[key.replace("_ms", "_less")] for row in scale]
            growth.plot(ranks, less, label=name, **SERIES[series].line)
        growth.axhline(100 * data["published"], color=SERIES[3].colour, linestyle="--", label="published, forward")
        drawn.log_ticks(growth.xaxis, ranks)
        growth.set_xlabel("nodes")
        growth.set_ylabel("% less time a step")
        growth.set_title("More nodes, by dimension")
        drawn.title = "A DLRM's step with look-up and all-to-all separate and fused, simulated"
        drawn.subtitle = describe_origin(data, simulated="nodes of one GPU")
        drawn.caption = (
            "Event-driven on a 2D torus of 200 Gb/s links with 700 ns. Kernels' times: an MI210's datasheet, an H200's "
            "as measured. The paper does not publish its MI210's times, nor its batch and tables."
        )

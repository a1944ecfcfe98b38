"""Pictures of bench results, made from their JSON so that they can be made again."""

import json
from pathlib import Path

from matplotlib.figure import Figure


def plot_train(result: Path, picture: Path) -> None:
    """Tokens/s a GPU and peak memory of each run, as bars; peers in another colour."""
    data = json.loads(result.read_text())
    rows = [row for row in data["rows"] if "tokens_per_second_per_gpu" in row][::-1]
    figure = Figure(figsize=(9, 0.4 * len(rows) + 1.6), layout="constrained")
    speed, memory = figure.subplots(1, 2, sharey=True)
    names = [row["name"] for row in rows]
    colours = ["#8a8a8a" if "FSDP" in name else "#2a6f97" for name in names]
    bars = speed.barh(names, [row["tokens_per_second_per_gpu"] for row in rows], color=colours)
    speed.bar_label(bars, fmt="{:,.0f}", padding=3, fontsize=8)
    speed.set_xlabel("tokens/s a GPU")
    speed.margins(x=0.18, y=0.02)
    bars = memory.barh(names, [row["peak_memory_gib"] for row in rows], color=colours)
    memory.bar_label(bars, fmt="{:.0f}", padding=3, fontsize=8)
    memory.set_xlabel("peak memory (GiB)")
    memory.margins(x=0.15, y=0.02)
    model = data["workload"]["model"]
    figure.suptitle(
        f"GPT, {model['layers']} layers of hidden {model['hidden']}, sequence length {data['workload']['seq_len']}, "
        f"{data['machine']['devices']}, {data['date']}",
        fontsize=10,
    )
    figure.savefig(picture, dpi=130)

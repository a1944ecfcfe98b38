# SPDX-License-Identifier: Apache-2.0
"""Reports a run: reads what it wrote to its folder, and writes loss.png, experts.png, timeline.png and summary.md."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from shlex import quote
from typing import Any

from stretto.atomic_files import write_atomically
from stretto.cluster import name_grid, read_bounded
from stretto.quantities import show_bytes
from stretto.report.pictures import can_draw
from stretto.train.checkpoint import newest_checkpoint
from stretto.train.config import JobConfig, TrainConfig, load_config
from stretto.train.observe.metrics import METRICS_FILE, SUMMARY_FILE, read_steps
from stretto.train.observe.timeline import OTHER, TRACE_FILE, read_timeline

LOSS_PLOT = "loss.png"
TIMELINE_PLOT = "timeline.png"
EXPERT_PLOT = "experts.png"
SUMMARY = "summary.md"
MAX_SUMMARY_BYTES = 1 << 20
EVALUATION = ("auc", "evaluation_loss", "perplexity")  # keys in the lines of steps after which there was an evaluation


@dataclass(frozen=True)
class RunRecord:
    """A run, as its folder describes it.

    steps, losses, rates: of each step its number, loss (NaN of a skipped one), and tokens or samples per second.
    evaluations: the steps after which there was an evaluation, with its results. routing: of a mixture of experts, the
    entries of each step's line. summary: {} if the run was interrupted.
    """

    out: Path
    config: JobConfig
    steps: tuple[int, ...]
    losses: tuple[float, ...]
    rates: tuple[float, ...]
    evaluations: tuple[tuple[int, Mapping[str, float | None]], ...] = ()
    routing: tuple[Mapping[str, Any], ...] = ()
    summary: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The run's name in plots: its ranks and grid."""
        grid = self.config.grid
        return f"{grid.ranks} ranks, {name_grid(grid.sizes())}" if grid.ranks > 1 else "1 rank"

    @property
    def origin(self) -> str:
        """The device and the date of the run, for plots. The date is that of its last step if the summary has none."""
        last = datetime.fromtimestamp((self.out / METRICS_FILE).stat().st_mtime, UTC)
        device = self.summary.get("device", self.config.device)
        return f"{'CPU' if device == 'cpu' else device}, {self.summary.get('date', f'{last:%Y-%m-%d}')}"

    def finite_losses(self) -> tuple[list[int], list[float]]:
        """The steps whose loss is a number, and their losses."""
        known = [(step, loss) for step, loss in zip(self.steps, self.losses, strict=True) if math.isfinite(loss)]
        return [step for step, _ in known], [loss for _, loss in known]


def read_run(out: Path) -> RunRecord:
    """Read a run's folder. Raises ValueError for a folder without config.toml or without a step in metrics.jsonl."""
    config = load_config(out / "config.toml")
    metrics = read_metrics(out)
    if not metrics:
        raise ValueError(f"{out} has no step in its {METRICS_FILE}: nothing was trained there")
    summary_file = out / SUMMARY_FILE
    return RunRecord(
        out=out,
        config=config,
        steps=tuple(line["step"] for line in metrics),
        losses=tuple(line["loss"] for line in metrics),
        rates=tuple(line[f"{config.unit}_per_second"] for line in metrics),
        evaluations=tuple(
            (line["step"], {name: line[name] for name in EVALUATION if name in line})
            for line in metrics
            if "evaluation_loss" in line
        ),
        routing=tuple(line for line in metrics if "expert_load" in line),
        summary=json.loads(read_bounded(summary_file, MAX_SUMMARY_BYTES, "a run's summary"))
        if summary_file.is_file()
        else {},
    )


def largest_difference(run: RunRecord, other: RunRecord) -> float:
    """The largest difference between two runs' losses at a step that both have; NaN if they share no step.

    Infinite if one of them alone has skipped a step, for a loss that was not finite.
    """
    others = dict(zip(other.steps, other.losses, strict=True))
    pairs = [(loss, others[step]) for step, loss in zip(run.steps, run.losses, strict=True) if step in others]
    both = [abs(one - two) for one, two in pairs if math.isfinite(one) or math.isfinite(two)]
    return max((each if math.isfinite(each) else math.inf for each in both), default=math.nan)


def write_report(out: Path, *, compare_with: Path | None = None, sample: str | None = None) -> RunRecord:
    """Write loss.png and summary.md to `out`, timeline.png if the run was traced, and experts.png if it has experts.

    Returns the run.

    Without matplotlib there are no pictures, and a line on stderr explains how to install it.

    compare_with: the folder of another run, whose loss is plotted and compared. sample: generated text for the summary.
    Raises ValueError as `read_run` does.
    """
    run = read_run(out)
    for picture in (LOSS_PLOT, TIMELINE_PLOT, EXPERT_PLOT):
        (out / picture).unlink(missing_ok=True)  # it may be an earlier run's
    draws = can_draw()
    if draws and (out / TRACE_FILE).is_file():
        from stretto.report.timeline import plot_timeline

        plot_timeline(read_timeline(out / TRACE_FILE), out / TIMELINE_PLOT, origin=run.origin)
    other = None if compare_with is None else read_run(compare_with)
    if draws:
        draw_loss(run, other)
        draw_experts(run)
    sections = [
        *(_overview(run), _loss(run, other), _experts(run), _timeline(run), _measured(run)),
        *(_bytes_sent(run), _configuration(run), _checkpoint(run)),
    ]
    if sample is not None:
        sections.insert(2, f"## What it writes\n\n```text\n{sample.replace('```', '')}\n```")
    write_atomically(out / SUMMARY, "\n\n".join(filter(None, sections)) + "\n")
    return run


def draw_loss(run: RunRecord, other: RunRecord | None = None) -> Path:
    """Draw a run's loss.png into its folder, with another run's loss if given. Returns the picture's path."""
    from stretto.report.loss_plot import plot_loss

    curves = {each.label: each.finite_losses() for each in (run, other) if each}
    picture = run.out / LOSS_PLOT
    plot_loss(curves, picture, unit=run.config.unit[:-1], origin=run.origin)
    return picture


def draw_experts(run: RunRecord) -> Path | None:
    """Draw a run's experts.png into its folder. Returns the picture's path; None if the run has no experts."""
    if not run.routing:
        return None
    from stretto.report.expert_plot import RoutingHistory, plot_experts

    picture = run.out / EXPERT_PLOT
    lines = run.routing
    history = RoutingHistory(
        _moe_blocks(run),
        *([line[key] for line in lines] for key in ("step", "expert_load", "dropped_tokens", "bias_range")),
    )
    plot_experts(history, picture, origin=run.origin)
    return picture


def remove_report(out: Path) -> None:
    """Delete what `write_report` wrote for an earlier run."""
    for name in (LOSS_PLOT, TIMELINE_PLOT, EXPERT_PLOT, SUMMARY):
        (out / name).unlink(missing_ok=True)


def read_metrics(out: Path) -> list[dict[str, Any]]:
    """Read the steps of a run, oldest first; [] before the first step. Skips a truncated last line, left by a kill.

    Raises ValueError for any other damaged line.
    """
    file = out / METRICS_FILE
    if not file.is_file():
        return []
    return [step for _, step in read_steps(file)]


def _overview(run: RunRecord) -> str:
    summary, grid = run.summary, run.config.grid
    unit = run.config.unit
    rows = {
        "steps": f"{run.steps[-1]:,} of {run.config.train.steps:,}",
        "final loss": f"{run.losses[-1]:.4f} nats a {unit[:-1]}, the mean over the step's batch",
        "ranks": f"{grid.ranks} ({grid}) on {summary.get('device', run.config.device)}",
    }
    if run.evaluations:
        step, found = run.evaluations[-1]
        values = (f"{name.replace('_', ' ')} {value:.4f}" for name, value in found.items() if value is not None)
        rows[f"on {'samples' if unit == 'samples' else 'sequences'} not trained on"] = (
            f"{', '.join(values)}, after step {step:,}"
        )
    if summary:
        rows |= {
            "parameters": f"{summary['parameters']:,}",
            f"{unit}/s": f"{summary[f'{unit}_per_second']:,.0f}, all ranks together",
            "time in steps": _duration(summary["seconds"]),
            "peak memory of a rank": show_bytes(summary["peak_memory_bytes"]),
        }
    else:
        rows[f"{unit}/s"] = f"{run.rates[-1]:,.0f} in the last step; the run was cut short"
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return f"# The run in `{run.out}`\n\n| | |\n|---|---|\n{table}"


def _loss(run: RunRecord, other: RunRecord | None) -> str:
    has_picture = (run.out / LOSS_PLOT).is_file()
    shown = f"![loss by step]({LOSS_PLOT})" if has_picture else f"Each step's is in [{METRICS_FILE}]({METRICS_FILE})."
    text = f"## Loss\n\n{shown}"
    if other is not None:
        text += (
            f"\n\nThe same training on {other.label} (`{other.out}`): the losses of a step differ by at most "
            f"{largest_difference(run, other):.1e}."
        )
    return text


def _experts(run: RunRecord) -> str:
    """The load of each block in the last step, and what was dropped in the whole run."""
    if not run.routing:
        return ""
    last = run.routing[-1]
    shown = f"![load by step and block]({EXPERT_PLOT})\n\n" if (run.out / EXPERT_PLOT).is_file() else ""
    rows = "\n".join(
        f"| {block} | {load:.2f} | {dropped:,} | {bias:.3g} |"
        for block, load, dropped, bias in zip(
            _moe_blocks(run), last["expert_load"], last["dropped_tokens"], last["bias_range"], strict=True
        )
    )
    dropped = sum(sum(line["dropped_tokens"]) for line in run.routing)
    return (
        f"## Experts\n\n{shown}In step {last['step']:,}. Load: the tokens of the fullest expert, as a multiple of the "
        f"mean expert's. In the whole run {dropped:,} choices of an expert were dropped. Losses of the routers beside "
        f"the model's: balance {last['balance_loss']:.3g}, z {last['z_loss']:.3g}.\n\n"
        f"| block | load | dropped | biases, max - min |\n|---:|---:|---:|---:|\n{rows}"
    )


def _moe_blocks(run: RunRecord) -> list[int]:
    """The numbers of the blocks that have experts; counted from 0 where another model's are not known."""
    if isinstance(run.config, TrainConfig) and run.config.model.num_experts is not None:
        config = run.config.model.to_gpt(data_vocab=1, seq_len=run.config.train.seq_len)
        return list(config.moe_blocks)
    return list(range(len(run.routing[-1]["expert_load"])))


def _timeline(run: RunRecord) -> str:
    if not (run.out / TRACE_FILE).is_file():
        return ""
    has_picture = (run.out / TIMELINE_PLOT).is_file()
    shown = f"![computation and communication by axis]({TIMELINE_PLOT})\n\n" if has_picture else ""
    return f"## Timeline\n\n{shown}All of it is in [{TRACE_FILE}]({TRACE_FILE}), which https://ui.perfetto.dev shows."


def _measured(run: RunRecord) -> str:
    """Compare step time, exposed communication and peak memory: measured, and predicted if there is a prediction."""
    measured, predicted = run.summary.get("measured", {}), run.summary.get("predicted", {})
    if not measured and not predicted:
        return ""
    exposed, expected = measured.get("exposed", {}), predicted.get("exposed", {})
    rows = {
        "step time": (
            _milliseconds(run.config.items_a_step / run.summary[f"{run.config.unit}_per_second"]),
            _milliseconds(predicted.get("step_time")),
        ),
        "step time while traced": (_milliseconds(measured.get("traced_step_time")), ""),
    }
    for axis in dict.fromkeys((*exposed, *expected)):
        name = f"exposed communication over {'several axes' if axis == OTHER else axis}"
        if exposed.get(axis) or expected.get(axis):
            rows[name] = (_milliseconds(exposed.get(axis)), _milliseconds(expected.get(axis)))
    for direction, seconds in measured.get("exposed_host_copies", {}).items():
        if measured["host_copies"][direction]:
            rows[f"exposed copies {direction}"] = (_milliseconds(seconds), "")
    rows["exposed communication, together"] = (
        _milliseconds(measured.get("exposed_total")),
        _milliseconds(sum(expected.values()) if expected else None),
    )
    if "bubble" in measured or predicted.get("bubble"):
        rows["computation"] = (_milliseconds(measured.get("compute")), _milliseconds(predicted.get("compute")))
        rows["pipeline's bubble"] = (_milliseconds(measured.get("bubble")), _milliseconds(predicted.get("bubble")))
    peak = predicted.get("peak_memory")
    rows["peak memory of a rank"] = (
        show_bytes(run.summary["peak_memory_bytes"]),
        "" if peak is None else show_bytes(peak),
    )
    about = "Times are a step's, in the mean. Where two axes are exposed at once, they count once together."
    if not predicted:
        lines = [f"| {name} | {ours} |" for name, (ours, _) in rows.items() if ours]
        return f"## Measured\n\n{about}\n\n| | |\n|---|---:|\n" + "\n".join(lines)
    lines = [f"| {name} | {ours} | {theirs} |" for name, (ours, theirs) in rows.items() if ours or theirs]
    head = "| | measured | predicted |\n|---|---:|---:|\n"
    return f"## Measured beside predicted\n\n{about}\n\n{head}" + "\n".join(lines)


def _bytes_sent(run: RunRecord) -> str:
    sent = {axis: count for axis, count in run.summary.get("bytes_sent", {}).items() if count}
    if not sent:
        return "## Bytes sent\n\nNone: one rank has nobody to send to." if run.config.ranks == 1 else ""
    rows = "\n".join(f"| {axis} | {count:,} | {show_bytes(count)} |" for axis, count in sent.items())
    return (
        "## Bytes sent\n\nBy one rank in one step, counted at the process groups (`batch`: data and z together; "
        "`replicas`: data and context; `loss`: data, context and z; `world`: all ranks).\n\n"
        f"| axis | bytes | |\n|---|---:|---:|\n{rows}"
    )


def _configuration(run: RunRecord) -> str:
    config, train = run.config, run.config.train
    model = ", ".join(f"{name} {value}" for name, value in config.model if value is not None)
    if isinstance(config, TrainConfig):
        data = f"{config.data.path}, {config.data.format}"
        batch = f"{config.train.batch} sequences of {config.train.seq_len} tokens, {config.train.dtype}"
    else:
        data = ", ".join(f"{name} {value}" for name, value in config.data if value is not None)
        batch = f"{config.items_a_step} {config.unit}, {config.train.dtype}"
    rows = {
        "model": model,
        "data": data,
        "batch": batch,
        "optimizer": f"{train.optimizer}, learning rate {train.lr:g}, {train.warmup_steps} steps of warm-up, "
        f"then {train.schedule}",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return f"## Configuration\n\n| | |\n|---|---|\n{table}\n\nAll of it is in [config.toml](config.toml)."


def _checkpoint(run: RunRecord) -> str:
    checkpoint = newest_checkpoint(run.out)
    if checkpoint is None:
        return "## Checkpoint\n\nNone was written."
    steps = max(run.config.train.steps, 2 * run.steps[-1]) if run.steps[-1] >= run.config.train.steps else None
    longer = f" --set train.steps={steps}" if steps else ""
    return (
        f"## Checkpoint\n\n`{checkpoint}`. To continue, on this grid or another "
        "(`--set ranks=... --set grid.x=...`):\n\n"
        f"```sh\nstretto train {quote(str(run.out / 'config.toml'))} --set train.resume=latest{longer}\n```\n\n"
        f"To use the weights elsewhere:\n\n```sh\nstretto export {quote(str(run.out))} --to model.safetensors\n```"
    )


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:,.1f} ms"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"

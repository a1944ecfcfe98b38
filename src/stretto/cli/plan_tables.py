# SPDX-License-Identifier: Apache-2.0
"""The tables of `stretto plan`: plans, modes of recomputation, formulas of a plan's memory, a DLRM's placement."""

import json
import textwrap
from collections.abc import Collection, Iterable
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from stretto.axes import EXPERT, INNER_TO_OUTER, STAGE_AXES, name_grid

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from stretto.cluster import Cluster
    from stretto.planner import GridPlan
    from stretto.planner.inference import InferencePlan, PassSeconds
    from stretto.recommendation.training.config import DLRMTrainConfig


def print_modes(plans: "list[GridPlan]", cost: str) -> None:
    first = plans[0]
    title = f"Modes of recomputation on {name_grid(first.grid)}, micro-batches of {first.micro_batch}"
    headings = ("recompute", "step", "computation", "communication", "memory", "kept", "of it on hosts", "fits")
    table = _make_table(title, headings, left=("recompute",), padding=(0, 1))
    for plan in plans:
        table.add_row(
            plan.recompute,
            f"{plan.step_time:.4g} s",
            "-" if plan.compute_time is None else f"{plan.compute_time:.4g} s",
            f"{plan.communication['total']:.4g} s",
            _memory(plan.peak_memory),
            _memory(plan.kept_activations),
            _memory(plan.activations_on_host),
            "yes" if plan.fits else "no",
        )
    console = _print_wide(table, 120)
    console.print("communication: all that a rank sends in a step, hidden or not", highlight=False, soft_wrap=True)
    console.print("kept: activations of all blocks, between the passes of a micro-batch", highlight=False)
    if cost == "paper":
        console.print("the paper's model counts no recomputation: --cost full does", highlight=False)


def print_inference(plans: "list[InferencePlan]", cluster: "Cluster", top: int) -> None:
    good = sum(plan.fits and plan.meets for plan in plans)
    title = f"{len(plans)} grids on {cluster.name}, {good} of which hold all requests in time"
    headings = ("", "grid", "first token", "limit", "sums", "a token", "limit", "sums", "tokens/s/GPU", "cache", "fits")
    table = _make_table(title, headings)
    for place, plan in enumerate(plans[:top], start=1):
        is_good = plan.fits and plan.meets
        table.add_row(
            str(place),
            name_grid(plan.grid),
            *_pass_cells(plan.first_token),
            *_pass_cells(plan.token),
            f"{plan.tokens_per_gpu:,.0f}",
            f"{plan.cache_tokens:,}",
            "no" if not plan.fits else "yes" if plan.meets else "late",
            style=None if is_good else "dim",
        )
    console = _print_wide(table, 150)
    notes = (
        "first token: of a prompt alone; a token: one step that decodes the whole batch, of which the rate is",
        "limit: the GPU's bytes and FLOPs by its data sheet, without communication; sums: communication's part",
        "cache: tokens of all requests together; fits: it holds them ('late': above --tpot)",
    )
    for note in notes:
        console.print(note, highlight=False, soft_wrap=True)


def _pass_cells(seconds: "PassSeconds") -> tuple[str, str, str]:
    share = seconds.communication / seconds.total
    return f"{seconds.total * 1e3:.3g} ms", f"{seconds.limit * 1e3:.3g} ms", f"{share:.0%}"


def print_table(plans: "list[GridPlan]", cluster: "Cluster", cost: str, top: int, *, has_memory: bool) -> None:
    """has_memory: whether to show where optimizer state is stored, and what is recomputed."""
    from rich.console import Console
    from rich.measure import Measurement

    from stretto.planner.memory import USABLE, max_allocated
    from stretto.planner.optimizer_state import USABLE_OF_HOST

    fitting = sum(plan.fits for plan in plans)
    title = f"{len(plans)} grids on {cluster.name}, {fitting} of which fit"
    axes = INNER_TO_OUTER if any(plan.grid["pipe"] > 1 for plan in plans) else STAGE_AXES[::-1]
    if all(plan.grid.get("context", 1) == 1 for plan in plans):
        axes = tuple(axis for axis in axes if axis != "context")
    axes += (EXPERT,) * any(plan.exposed.get(EXPERT) for plan in plans)
    time, of_axes = ("communication", "ms") if cost == "paper" else ("step", "exposed ms")
    has_pipelines = any(plan.schedule is not None for plan in plans)
    headings = ["", "grid", "micro", time, f"{of_axes}: {'/'.join(axes)}", "memory", "fits"]
    headings += ["schedule", "bubble"] * has_pipelines + ["state", "recompute", "host, a node"] * has_memory
    table = _make_table(title, headings)
    any_host_bound = any(plan.is_host_bound for plan in plans[:top])
    marks = ("", "") if has_memory else (" ", "*")
    for place, plan in enumerate(plans[:top], start=1):
        exposed = "/".join(_milliseconds(plan.exposed.get(axis, 0.0)) for axis in axes)
        table.add_row(
            str(place),
            name_grid(plan.grid),
            f"{plan.micro_batch}{'+' if plan.shard_sequence else ''}{marks[plan.recompute != 'none']}",
            f"{plan.step_time:.4g} s{'^' if plan.is_host_bound else ' ' * any_host_bound}",
            exposed,
            _memory(plan.peak_memory),
            "yes" if plan.fits else "no",
            *((_name_schedule(plan), _milliseconds(plan.bubble) if plan.schedule else "-") if has_pipelines else ()),
            *((plan.optimizer_state, plan.recompute, _memory(plan.host_memory_of_node)) if has_memory else ()),
            style=None if plan.fits else "dim",
        )
    console = Console()
    width = console.width
    whole = Measurement.get(console, console.options.update(max_width=1000), table).maximum
    console.width = max(console.width, whole)  # a narrow terminal wraps lines; a figure cut short would be another one
    console.print(table)
    usable = max_allocated(cluster.require("gpu.memory"))
    _print_text(
        f"fits: allocates at most {_memory(usable)}, which with fragmentation and all that is outside of torch's "
        f"allocator takes {USABLE:.0%} of a GPU's memory here",
        width,
    )
    if has_memory and cluster.host_memory is not None:
        pinned = _memory(USABLE_OF_HOST * cluster.host_memory)
        console.print(f"and pins at most {USABLE_OF_HOST:.0%} of a node's memory, {pinned}", highlight=False)
    elif has_memory:
        console.print(f"the memory of a node's host is not checked: {cluster.name} does not say it", highlight=False)
    modes = {plan.recompute for plan in plans[:top] if plan.recompute != "none"}
    if modes and not has_memory:  # several where pipelines keep every k-th block's input
        which = "" if modes == {"full"} else f": {', '.join(sorted(modes))}"
        console.print(f"* with activation checkpointing{which}", highlight=False)
    if any(plan.shard_sequence for plan in plans[:top]):
        console.print("+ with train.shard_sequence", highlight=False)
    if any_host_bound:
        _print_text(
            "^ host-bound: the host takes longer to launch a step than the GPU to run it; more tokens a GPU would "
            "help, or steps as CUDA graphs (CapturedStep; --captured plans for them)",
            width,
        )
    if cost == "paper":
        console.print("communication: of the linears, as the paper counts it, nothing hidden", highlight=False)
    if has_pipelines:
        _explain_pipelines(plans[:top], width)
    for place, plan in enumerate(plans[:top], start=1):
        _print_text(plan.why, width, f"{place:3}. ")
    for note in plans[0].notes:
        _print_text(note, width, "Note: ")


def _make_table(
    title: str, headings: Iterable[str], left: Collection[str] = ("grid", "schedule"), padding: Any = (0, 1, 0, 0)
) -> "Table":
    """Make a table whose columns hold numbers, to the right, or words. left: the headings of the latter."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD, padding=padding, pad_edge=padding == (0, 1))
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right", no_wrap=True)
    return table


def _print_wide(table: "Table", least: int) -> "Console":
    """Print a table on a console of at least `least` characters a line, and return the console."""
    from rich.console import Console

    console = Console()
    console.width = max(console.width, least)
    console.print(table)
    return console


def _print_text(text: str, width: int, first: str = "") -> None:
    """Print a text in lines of the terminal's width, below what stands before it."""
    print("\n".join(textwrap.wrap(text, width, initial_indent=first, subsequent_indent=" " * len(first))))


def _name_schedule(plan: "GridPlan") -> str:
    """A schedule and its options, short."""
    if plan.schedule is None:
        return "-"
    parts = [
        plan.schedule,
        f"v={plan.virtual_stages}" if plan.schedule == "interleaved" else "",
        f"+{plan.extra_warm_up}" if plan.extra_warm_up else "",
        f"limit={plan.limit} {plan.serve_first} first" if plan.limit else "",
    ]
    return " ".join(filter(None, parts))


def _explain_pipelines(plans: "list[GridPlan]", width: int) -> None:
    """Explain the table's columns of pipelines, and how the first of them is split."""
    _print_text("schedule: its virtual stages (v), extra warm-up (+), or limit; bubble: ms a step", width)
    first = next((plan for plan in plans if plan.schedule is not None), None)
    if first is None or first.is_possible is False:
        return
    blocks = [str(end - start) for start, end in pairwise(first.stages)]
    _print_text(f"blocks of each stage of the first of them, {name_grid(first.grid)}: {' '.join(blocks)}", width)


def print_formulas(plan: "GridPlan") -> None:
    title = f"Memory of a rank on {name_grid(plan.grid)}, optimizer_state={plan.optimizer_state}, in bytes"
    table = _make_table(title, ("what", "formula", "with", "bytes"), ("what", "formula", "with"), padding=(0, 1))
    for each in plan.formulas:
        terms = ", ".join(f"{name} = {value:,.0f}" for name, value in each.terms.items())
        table.add_row(each.name.replace("_", " "), each.formula or "by layers", terms, f"{each.bytes:,.0f}")
    console = _print_wide(table, 120)
    if (step := plan.terms.get("the optimizer")) is not None:
        console.print(f"a step of the optimizer takes {step:.4g} s of {plan.step_time:.4g} s", highlight=False)
    if plan.nic_bytes:
        sent = ", ".join(f"{_memory(size)} {kind.replace('_', ' ')}" for kind, size in plan.nic_bytes.items())
        console.print(f"each network interface of a node sends in a step: {sent}", highlight=False)


def _memory(size: float) -> str:
    for unit, name in ((1e12, "TB"), (1e9, "GB")):
        if size >= 0.9995 * unit:
            return f"{size / unit:.3g} {name}"
    return f"{size / 1e6:.3g} MB"


def _milliseconds(time: float) -> str:
    return f"{time * 1e3:,.0f}" if time >= 0.01 else f"{time * 1e3:.2g}"


def plan_dlrm(
    config: "DLRMTrainConfig", cluster: str | None, gpus: int | None, *, explain: bool, as_json: bool
) -> None:
    """Print the plan of a DLRM's tables on so many GPUs of a cluster; default: the configuration's ranks, on an H200's.

    explain: also what the search has changed from whole tables, and why. ValueError if the batch is not to be shared
    out among the GPUs, or the tables do not fit.
    """
    from stretto.cluster import Cluster
    from stretto.recommendation import place_tables
    from stretto.recommendation.table_planner import TableRates, plan_tables
    from stretto.recommendation.training.config import sizes_of, table_options

    ranks = config.ranks if gpus is None else gpus
    if ranks < 1 or config.train.batch % ranks:
        raise ValueError(f"--gpus is {ranks}, but must be at least 1 and divide train.batch, {config.train.batch}")
    options: dict[str, Any] = {}
    if cluster is not None:
        machine = Cluster.find(cluster)
        memory = machine.gpu.memory
        options = {"rates": TableRates.of_cluster(machine), "ranks_per_node": machine.gpus_per_node}
        options["memory"] = None if memory is None else _TABLES_PART * memory
    sizes = sizes_of(config.model.to_dlrm())
    plan = plan_tables(sizes, ranks, **table_options(config.train), **options)
    if as_json:
        print(json.dumps(plan.as_json()), flush=True)
        return
    whole = max(place_tables(sizes, ranks).work_shares()) * ranks - 1
    cut = max(plan.placement.work_shares()) * ranks - 1
    print((plan if explain else replace(plan, reasons=())).explain())
    print(f"look-ups of the busiest rank: {cut:.0%} above even, with whole tables {whole:.0%} (train.sharding='auto')")


_TABLES_PART = 0.8  # of a GPU's memory; the rest is for MLPs, activations and exchanges

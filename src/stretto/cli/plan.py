# SPDX-License-Identifier: Apache-2.0
"""`stretto plan`: predicts which grid is fastest and fits into memory, without the machine."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from stretto.axes import name_grid
from stretto.cli.console import Json, refusing_bad_input
from stretto.execution import StateLocation, StateOptions, resolve_recompute
from stretto.suggestions import are_missing

if TYPE_CHECKING:
    from rich.console import Console

    from stretto.cluster import Cluster
    from stretto.planner import GridPlan


def plan(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="[CONFIG.toml]", help="A training configuration: its model, batch, lengths and dtype."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="gpt2-small, gpt-5b to gpt-640b, a .toml with [model], or a Hugging Face config.json."),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="A machine of `stretto cluster list`, or a cluster file (`stretto probe`).")
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="How many (default: the configuration's ranks, or all).")] = None,
    batch: Annotated[int | None, typer.Option(help="Global batch, in sequences.")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens a sequence.")] = None,
    cost: Annotated[
        str,
        typer.Option(help="full: whole steps. paper: the linears' collectives alone (Singh, equations 5.1 to 5.7)."),
    ] = "full",
    dtype: Annotated[
        str | None, typer.Option(help="bf16, fp16, fp32 or fp64 (default: the configuration's, or bf16).")
    ] = None,
    optimizer: Annotated[str | None, typer.Option(help="adamw or sgd.")] = None,
    micro_batch: Annotated[int | None, typer.Option(help="Sequences a rank takes at once (default: searched).")] = None,
    recompute: Annotated[
        str | None,
        typer.Option(
            help="none, full, every:k, products, communication or host, as train.recompute (default: none or full)."
        ),
    ] = None,
    optimizer_state: Annotated[
        str | None,
        typer.Option(help="fp32, device or host, as train.optimizer_state (default: the configuration's, or fp32)."),
    ] = None,
    clip: Annotated[
        bool | None,
        typer.Option(help="Gradients are clipped, as train.clip says (default: the configuration's, or so)."),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="auto", help="auto: search all of --optimizer-state and --recompute that are not given here."
        ),
    ] = None,
    checkpointing: Annotated[bool | None, typer.Option(help="The same as --recompute full, or none.")] = None,
    modes: Annotated[
        bool, typer.Option("--modes", help="What each mode of --recompute takes on the first grid.")
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="By which formulas the first grid needs its memory, and what travels.")
    ] = False,
    keep_gathered: Annotated[
        bool | None, typer.Option(help="Keep weights gathered over z for the backward pass (default: searched).")
    ] = None,
    shard_sequence: Annotated[
        bool, typer.Option("--shard-sequence", help="Try train.shard_sequence too, where x > 1.")
    ] = False,
    accumulate_unsharded: Annotated[
        bool | None,
        typer.Option(help="As train.accumulate_unsharded (default: the configuration's, or not)."),
    ] = None,
    overlap: Annotated[bool, typer.Option(help="Collectives are hidden where they can be.")] = True,
    pipe: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto",
            help="Ranks of pipeline stages, or auto: search them (default: the configuration's, or 1).",
        ),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(help="gpipe, 1f1b, interleaved, zb-h1, zb-v, dualpipe-v or message-driven (default: searched)."),
    ] = None,
    virtual_stages: Annotated[int | None, typer.Option(help="Stages on each rank of pipe (default: searched).")] = None,
    extra_warm_up: Annotated[
        int | None, typer.Option(help="Of 1f1b: more forward passes before the first backward pass.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Of message-driven: micro-batches in flight.")] = None,
    serve_first: Annotated[
        str | None, typer.Option(help="Of message-driven, where both wait: arrival, backward or forward.")
    ] = None,
    top: Annotated[int, typer.Option(help="Rows of the table.", min=1)] = 15,
    as_json: Json = False,
) -> None:
    """Rank every grid of data x X x Y x Z for a model on a cluster, with predicted time, memory, and why.

    With --pipe, grids of several pipeline stages too, each with its best schedule.

    Needs no GPU. For example:

    - stretto plan --model gpt-20b --cluster perlmutter --gpus 32 --batch 1024 --seq-len 2048
    - stretto plan configs/demo.toml --cluster dgx-h200 --gpus 4
    - stretto plan --model gpt-40b --cluster dgx-h200 --gpus 8 --batch 64 --seq-len 2048 --memory auto --explain
    - stretto plan --model gpt-80b --cluster alps --gpus 512 --batch 2048 --seq-len 2048 --pipe auto
    """
    with refusing_bad_input(as_json=as_json):
        given: dict[str, Any] = {
            "gpus": gpus,
            "batch": batch,
            "seq_len": seq_len,
            "dtype": dtype,
            "optimizer": optimizer,
            "accumulate_unsharded": accumulate_unsharded,
            "clips": clip,
            "pipe": _read_pipe(pipe),
            "schedule": schedule,
            "virtual_stages": virtual_stages,
            "extra_warm_up": extra_warm_up,
            "limit": limit,
            "serve_first": serve_first,
        }
        asked = _from_config(config) if config is not None else {}
        asked |= {name: value for name, value in given.items() if value is not None}
        if model is not None:
            asked["model"] = model
        is_auto = _check_memory(memory)
        if recompute is not None or checkpointing is not None:
            asked["recompute"] = resolve_recompute(recompute, checkpointing)
        elif is_auto:
            asked.pop("recompute", None)
        asked["state"] = _choose_state(optimizer_state, asked.get("state"), is_auto)
        _require_all(asked | {"cluster": cluster})
        assert cluster is not None

        from stretto.cluster import Cluster
        from stretto.planner import plan as search

        machine = Cluster.find(cluster)

        plans = search(
            asked["model"],
            machine,
            cost=cost,  # type: ignore[arg-type]
            micro_batch=micro_batch,
            memory="auto" if is_auto else None,
            keep_gathered=keep_gathered,
            shard_sequence=None if shard_sequence else False,
            overlaps=overlap,
            **{name: value for name, value in asked.items() if name != "model"},
        )
        if modes:
            plans = _in_each_mode(plans[0], asked, machine, cost, overlap)
    if as_json:
        print(json.dumps([plan.as_dict() for plan in plans]), flush=True)
    elif modes:
        _print_modes(plans, cost)
    else:
        _print_table(plans, machine, cost, top, has_memory=is_auto or plans[0].optimizer_state != "fp32")
    if explain and not as_json:
        _print_formulas(plans[0])


def _read_pipe(pipe: str | None) -> int | str | None:
    """A number of ranks, or "auto". ValueError for another value."""
    if pipe is None or pipe == "auto":
        return pipe
    if not pipe.isdecimal() or int(pipe) < 1:
        raise ValueError(f"--pipe is {pipe!r}, but must be a whole number, at least 1, or auto")
    return int(pipe)


def _check_memory(memory: str | None) -> bool:
    """Whether `--memory auto` was given. ValueError for another value."""
    if memory not in (None, "auto"):
        raise ValueError(
            f"--memory is {memory!r}, but can be auto alone; --optimizer-state and --recompute take values"
        )
    return memory == "auto"


def _choose_state(location: str | None, of_file: StateOptions | None, is_auto: bool) -> StateOptions | None:
    """Where optimizer state lies: where the command line says, else anywhere, or as the file says. None: anywhere."""
    known = {each: each for each in get_args(StateLocation)}
    if location is not None and location not in known:
        raise ValueError(f"--optimizer-state is {location!r}, but must be one of {', '.join(known)}")
    if location is not None:
        return replace(of_file or StateOptions(), location=known[location])
    return None if is_auto else of_file


_REQUIRED = {
    "model": "the model's name or file",
    "batch": "the global batch, in sequences",
    "seq_len": "tokens a sequence",
    "cluster": "a machine of `stretto cluster list`, or a cluster file",
}


def _require_all(asked: dict[str, Any]) -> None:
    """Raise ValueError that names all options that are missing."""
    missing = {f"--{name.replace('_', '-')}": name for name in _REQUIRED if asked.get(name) is None}
    if not missing:
        return
    meanings = "".join(f"\n  {option}  {_REQUIRED[name]}" for option, name in missing.items())
    from_file = "\nA CONFIG.toml has all of these but --cluster." if set(missing.values()) - {"cluster"} else ""
    raise ValueError(f"{are_missing(list(missing))}:{meanings}{from_file}")


def _from_config(path: Path) -> dict[str, Any]:
    """The planner's inputs from a training configuration. The data is not opened: it may not exist yet."""
    from stretto.train.config import TrainConfig, load_config

    config = load_config(path)
    if not isinstance(config, TrainConfig):
        raise ValueError(f"{path}: plans are for GPTs, and this is a configuration of another kind of model")
    run = config.train
    is_bytes = config.data.tokenizer in (None, "bytes") and config.data.format in ("auto", "text")
    folder = None if config.model.path is None else str(Path(config.model.path).expanduser())
    if folder is None and config.model.known_vocab() is None and not is_bytes:
        raise ValueError(f"{path}: model.vocab is left to the data; say it for a plan")
    recompute = (
        {"recompute": run.recompute_mode} if {"recompute", "checkpoint_activations"} & run.model_fields_set else {}
    )
    return (
        recompute
        | {
            "model": config.model.to_gpt(data_vocab=256, seq_len=run.seq_len) if folder is None else folder,
            "gpus": config.ranks if config.ranks > 1 else None,
            "batch": run.batch,
            "seq_len": run.seq_len,
            "dtype": run.dtype,
            "optimizer": run.optimizer,
            "accumulate_unsharded": run.accumulate_unsharded,
            "state": run.state,
            "clips": run.clip is not None,
        }
        | ({} if config.grid.pipe == 1 else {"pipe": config.grid.pipe})
    )


_OF_PREDICT = ("batch", "seq_len", "dtype", "optimizer", "accumulate_unsharded", "state", "clips")


def _schedule_of(plan: "GridPlan") -> dict[str, Any]:
    """How a plan's pipeline runs, as `predict` takes it."""
    options = {name: getattr(plan, name) for name in ("schedule", "virtual_stages", "limit", "serve_first")}
    options["extra_warm_up"] = plan.extra_warm_up or None
    return {name: value for name, value in options.items() if value is not None} if plan.schedule else {}


def _in_each_mode(
    best: "GridPlan", asked: dict[str, Any], cluster: "Cluster", cost: str, overlaps: bool
) -> "list[GridPlan]":
    """Predict the best plan's grid and micro-batch in each mode of recomputation."""
    from stretto.planner import predict, read_architecture

    layers = read_architecture(asked["model"], asked["seq_len"]).layers
    asked = asked | {"state": asked["state"] or StateOptions(best.optimizer_state)}
    segments = [f"every:{length}" for length in (2, 4, 8) if length <= layers]
    return [
        predict(
            asked["model"],
            cluster,
            grid=best.grid,
            micro_batch=best.micro_batch,
            cost=cost,  # type: ignore[arg-type]
            overlaps=overlaps,
            recompute=mode,
            keep_gathered=best.keep_gathered,
            shard_sequence=best.shard_sequence,
            **_schedule_of(best),
            **{name: value for name, value in asked.items() if name in _OF_PREDICT},
        )
        for mode in ("none", "full", *segments, "products", "communication", "host")
    ]


def _print_modes(plans: "list[GridPlan]", cost: str) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    first = plans[0]
    table = Table(
        title=f"Modes of recomputation on {name_grid(first.grid)}, micro-batches of {first.micro_batch}",
        box=box.SIMPLE_HEAD,
    )
    headings = ("recompute", "step", "computation", "communication", "memory", "kept", "of it on hosts", "fits")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "recompute" else "right", no_wrap=True)
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
    console = Console()
    console.width = max(console.width, 120)
    console.print(table)
    console.print("communication: all that a rank sends in a step, hidden or not", highlight=False, soft_wrap=True)
    console.print("kept: activations of all blocks, between the passes of a micro-batch", highlight=False)
    if cost == "paper":
        console.print("the paper's model counts no recomputation: --cost full does", highlight=False)


def _print_table(plans: "list[GridPlan]", cluster: "Cluster", cost: str, top: int, *, has_memory: bool) -> None:
    """has_memory: whether to say where optimizer state lies, and what is computed again."""
    from rich import box
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table

    from stretto.axes import INNER_TO_OUTER, STAGE_AXES
    from stretto.planner.memory import USABLE, most_allocated
    from stretto.planner.optimizer_state import USABLE_OF_HOST

    fitting = sum(plan.fits for plan in plans)
    title = f"{len(plans)} grids on {cluster.name}, {fitting} of which fit"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    console = Console()
    axes = INNER_TO_OUTER if any(plan.grid["pipe"] > 1 for plan in plans) else STAGE_AXES[::-1]
    time, of_axes = ("communication", "ms") if cost == "paper" else ("step", "exposed ms")
    for heading in ("", "grid", "micro", time, f"{of_axes}: {'/'.join(axes)}", "memory", "fits"):
        table.add_column(heading, justify="left" if heading == "grid" else "right", no_wrap=True)
    has_pipelines = any(plan.schedule is not None for plan in plans)
    for heading in ("schedule", "bubble") if has_pipelines else ():
        table.add_column(heading, justify="left" if heading == "schedule" else "right", no_wrap=True)
    for heading in ("state", "recompute", "host, a node") if has_memory else ():
        table.add_column(heading, justify="right", no_wrap=True)
    marks = ("", "") if has_memory else (" ", "*")
    for place, plan in enumerate(plans[:top], start=1):
        exposed = "/".join(_milliseconds(plan.exposed[axis]) for axis in axes)
        table.add_row(
            str(place),
            name_grid(plan.grid),
            f"{plan.micro_batch}{'+' if plan.shard_sequence else ''}{marks[plan.checkpoint_activations]}",
            f"{plan.step_time:.4g} s",
            exposed,
            _memory(plan.peak_memory),
            "yes" if plan.fits else "no",
            *((_name_schedule(plan), _milliseconds(plan.bubble) if plan.schedule else "-") if has_pipelines else ()),
            *((plan.optimizer_state, plan.recompute, _memory(plan.host_memory_of_node)) if has_memory else ()),
            style=None if plan.fits else "dim",
        )
    whole = Measurement.get(console, console.options.update(max_width=1000), table).maximum
    console.width = max(console.width, whole)  # a narrow terminal wraps lines; a figure cut short would be another one
    console.print(table)
    usable = most_allocated(cluster.require("gpu.memory"))
    console.print(
        f"fits: allocates at most {_memory(usable)}, which with fragmentation and all that is outside of torch's "
        f"allocator takes {USABLE:.0%} of a GPU's memory here",
        highlight=False,
        soft_wrap=True,
    )
    if has_memory and cluster.host_memory is not None:
        pinned = _memory(USABLE_OF_HOST * cluster.host_memory)
        console.print(f"and pins at most {USABLE_OF_HOST:.0%} of a node's memory, {pinned}", highlight=False)
    elif has_memory:
        console.print(f"the memory of a node's host is not checked: {cluster.name} does not say it", highlight=False)
    modes = {plan.recompute for plan in plans[:top] if plan.checkpoint_activations}
    if modes and not has_memory:  # several where pipelines keep every k-th block's input
        which = "" if modes == {"full"} else f": {', '.join(sorted(modes))}"
        console.print(f"* with activation checkpointing{which}", highlight=False)
    if any(plan.shard_sequence for plan in plans[:top]):
        console.print("+ with train.shard_sequence", highlight=False)
    if cost == "paper":
        console.print("communication: of the linears, as the paper counts it, nothing hidden", highlight=False)
    if has_pipelines:
        _explain_pipelines(plans[:top], console)
    for place, plan in enumerate(plans[:top], start=1):
        console.print(f"{place:3}. {plan.why}", highlight=False, soft_wrap=True)
    for note in plans[0].notes:
        console.print(f"Note: {note}", highlight=False, soft_wrap=True, markup=False)


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


def _explain_pipelines(plans: "list[GridPlan]", console: "Console") -> None:
    """Say what the table's columns of pipelines mean, and how the first of them is cut."""
    console.print("schedule: its virtual stages (v), extra warm-up (+), or limit; bubble: ms a step", highlight=False)
    first = next((plan for plan in plans if plan.schedule is not None), None)
    if first is None or first.is_possible is False:
        return
    blocks = [str(end - start) for start, end in pairwise(first.stages)]
    console.print(
        f"blocks of each stage of the first of them, {name_grid(first.grid)}: {' '.join(blocks)}",
        highlight=False,
        soft_wrap=True,
    )


def _print_formulas(plan: "GridPlan") -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    title = f"Memory of a rank on {name_grid(plan.grid)}, optimizer_state={plan.optimizer_state}, in bytes"
    table = Table(title=title, box=box.SIMPLE_HEAD)
    for heading in ("what", "formula", "with", "bytes"):
        table.add_column(heading, justify="right" if heading == "bytes" else "left", no_wrap=True)
    for each in plan.formulas:
        terms = ", ".join(f"{name} = {value:,.0f}" for name, value in each.terms.items())
        table.add_row(each.name.replace("_", " "), each.formula or "by layers", terms, f"{each.bytes:,.0f}")
    console = Console()
    console.width = max(console.width, 120)
    console.print(table)
    if (step := plan.terms.get("the optimizer")) is not None:
        console.print(f"a step of the optimizer takes {step:.4g} s of {plan.step_time:.4g} s", highlight=False)


def _memory(size: float) -> str:
    for unit, name in ((1e12, "TB"), (1e9, "GB")):
        if size >= 0.9995 * unit:
            return f"{size / unit:.3g} {name}"
    return f"{size / 1e6:.3g} MB"


def _milliseconds(time: float) -> str:
    return f"{time * 1e3:,.0f}" if time >= 0.01 else f"{time * 1e3:.2g}"

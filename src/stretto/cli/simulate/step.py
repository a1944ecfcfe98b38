# SPDX-License-Identifier: Apache-2.0
"""`stretto simulate step`: one training step on a cluster, in closed form or message by message."""

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.atomic_files import require_writable
from stretto.axes import NAMES, check_sizes, name_grid
from stretto.cli.commands import refuse_options
from stretto.cli.console import Json, print_json, refusing_bad_input
from stretto.cli.plan import OF_WORKLOAD, Batch, ClusterName, ConfigFile, Model, SeqLen, read_workload, require_all
from stretto.execution import ExecutionOptions, Overlap
from stretto.quantities import require_least

if TYPE_CHECKING:
    from stretto.cluster import Cluster
    from stretto.planner.workload import StepConfig, StepWorkload
    from stretto.simulator.training import ChangedStep, RankFactors, StepSimulation


def step(
    call: typer.Context,
    config: ConfigFile = None,
    model: Model = None,
    cluster: ClusterName = None,
    gpus: Annotated[
        int | None, typer.Option(help="Number of GPUs (default: the grid's or the configuration's).")
    ] = None,
    batch: Batch = None,
    seq_len: SeqLen = None,
    grid: Annotated[
        str | None,
        typer.Option(
            metavar='"x=2 z=4"', help="Sizes of the grid's axes (default: the planner's best grid of --gpus)."
        ),
    ] = None,
    micro_batch: Annotated[
        int | None, typer.Option(help="Sequences of a rank in one forward pass (default: all).")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16, fp32 or fp64 (default: bf16).")] = None,
    recompute: Annotated[str | None, typer.Option(help="As train.recompute (default: none).")] = None,
    reshard: Annotated[str | None, typer.Option(help="As train.reshard (default: after_backward).")] = None,
    shard_sequence: Annotated[bool, typer.Option("--shard-sequence", help="As train.shard_sequence.")] = False,
    overlap: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="all (default), none, or some of all_reduce, reduce_scatter, all_gather, data, copy_engines.",
        ),
    ] = None,
    schedule: Annotated[str | None, typer.Option(help="The pipeline schedule (default: 1f1b).")] = None,
    virtual_stages: Annotated[int | None, typer.Option(help="Stages on each rank of pipe.")] = None,
    fidelity: Annotated[
        str, typer.Option(help="closed-form: the planner's collectives. event-driven: messages that queue on links.")
    ] = "closed-form",
    stragglers: Annotated[
        str | None,
        typer.Option(
            metavar="KIND:NUMBERS",
            help="Distribution of the GPUs' slowdown: lognormal:SIGMA, uniform:WIDTH or fraction:PART:FACTOR.",
        ),
    ] = None,
    slow_links: Annotated[
        str | None,
        typer.Option(
            metavar="KIND:NUMBERS",
            help="Distribution of the slowdown of each GPU's links, in the format of --stragglers.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of --stragglers and --slow-links.")] = 0,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            help="nic: one more NIC per node. gpu: GPUs twice as fast. link: one link lost. all: all of "
            "these. May be repeated."
        ),
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Write the ranks' timeline here, for ui.perfetto.dev.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the timeline of the busiest rank here, as PNG.")] = None,
    as_json: Json = False,
) -> None:
    """Simulate a training step: its time, exposed communication by axis, and what would change it.

    Needs no GPU. For example:

    - stretto simulate step --model gpt-20b --cluster perlmutter --gpus 32 --batch 1024 --seq-len 2048
    - stretto simulate step --model gpt-5b --cluster dgx-h100 --grid "x=2 z=4" --batch 16 --seq-len 2048 --what-if all
    - stretto simulate step demo.toml --cluster dgx-h200 --gpus 4 --trace step.json --picture step.png
    """
    with refusing_bad_input(as_json=as_json):
        if stragglers is None and slow_links is None:
            refuse_options(call, "a step without --stragglers and --slow-links", "seed")
        given = {"model": model, "cluster": cluster, "batch": batch, "seq_len": seq_len, "gpus": gpus, "dtype": dtype}
        asked = _gather_inputs(config, given)
        for path, option in ((trace, "--trace"), (picture, "--picture")):
            if path is not None:
                require_writable(path, option)
        if picture is not None:
            from stretto.report.pictures import require_drawing

            if picture.suffix.lower() not in (".png", ".svg"):
                raise ValueError(f"a picture must be a .png or .svg file, not {picture.name!r}")
            require_drawing()
        require_least(1, **{"--micro-batch": micro_batch})

        from stretto.cluster import Cluster
        from stretto.simulator.training import simulate_change, simulate_step
        from stretto.simulator.training.what_if import check_changes

        machine = Cluster.find(asked["cluster"])
        changes = check_changes(what_if or ())
        options = {
            "overlap": None if overlap is None else _read_overlap(overlap),
            "recompute": recompute,
            "reshard": reshard,
            "shard_sequence": shard_sequence or None,
        }
        run = {"micro_batch": micro_batch, "schedule": schedule, "virtual_stages": virtual_stages}
        asked |= {name: value for name, value in run.items() if value is not None}
        chosen_options = {name: value for name, value in options.items() if value is not None}
        workload, how, fits = _choose_step(asked, machine, grid, chosen_options)
        factors = _draw_factors(stragglers, slow_links, how.grid.ranks, seed)
        chosen: Any = fidelity
        simulated = simulate_step(workload, how, machine, fidelity=chosen, factors=factors)
        changed, impossible = list["ChangedStep"](), dict[str, str]()
        for name in changes:
            try:
                changed.append(simulate_change(name, simulated, workload, how, machine, chosen))
            except ValueError as error:
                if "all" not in (what_if or ()):
                    raise
                impossible[name] = str(error)
        _write(simulated, trace, picture)
        if as_json:
            found = {"what_if": [each.as_dict() for each in changed], "impossible": impossible} if changes else {}
            print_json(simulated.as_dict() | {"fits": fits} | found)
        else:
            _print(simulated, changed)
            if not fits:
                print("by the planner's model, this step does not fit into memory")
            for reason in impossible.values():
                print(f"not possible: {reason}")


def _gather_inputs(config: Path | None, given: dict[str, Any]) -> dict[str, Any]:
    """The workload and the cluster; of a configuration, its options and grid too. ValueError names what is missing."""

    asked: dict[str, Any] = {}
    if config is not None:
        from stretto.train.config import TrainConfig, load_config

        asked = read_workload(config)
        run = load_config(config)
        assert isinstance(run, TrainConfig)  # read_workload refuses others
        asked["options"] = run.execution
        if run.ranks > 1 and given["gpus"] in (None, run.ranks):
            asked |= {"grid": dict(run.grid), "micro_batch": run.train.micro_batch}
            if run.grid.pipe > 1:
                names = ("schedule", "virtual_stages", "limit", "serve_first")
                asked |= {name: getattr(run.pipeline, name) for name in names}
    asked |= {name: value for name, value in given.items() if value is not None}
    require_all(asked)
    return asked


def _read_overlap(text: str) -> Overlap:
    """The switches that are named. ValueError for another name."""
    if text in ("all", "none"):
        return Overlap.parse(text == "all")
    known = [each.name for each in fields(Overlap)]
    names = text.split(",")
    for name in names:
        if name not in known:
            raise ValueError(f"--overlap has {name!r}, but takes all, none, or some of {', '.join(known)}")
    return Overlap(**{name: name in names for name in known})


def read_grid(text: str) -> dict[str, int]:
    """Sizes by axis, of "x=2 z=4" or "x=2,z=4". ValueError for anything else."""
    sizes: dict[str, int] = {}
    for part in text.replace(",", " ").split():
        axis, _, size = part.partition("=")
        if axis not in (*NAMES, "expert") or not size.isdecimal() or int(size) < 1 or axis in sizes:
            raise ValueError(
                f"--grid has {part!r}, but must be sizes of axes, such as x=2 z=4; the axes are {', '.join(NAMES)} and "
                "expert"
            )
        sizes[axis] = int(size)
    if not sizes:
        raise ValueError("--grid is empty; it must be sizes of axes, such as x=2 z=4, and x=1 is one rank")
    return sizes


_OF_RUN = ("state", "clips")
_OF_SCHEDULE = ("micro_batch", "schedule", "virtual_stages", "limit", "serve_first")


def _choose_step(
    asked: dict[str, Any], machine: "Cluster", grid: str | None, changes: dict[str, Any]
) -> "tuple[StepWorkload, StepConfig, bool]":
    """The workload, how it runs, on the grid that is given or the file's, or on the planner's best, and if that fits.

    changes: options of execution that the command line gives.
    """
    from stretto.planner import plan, predict
    from stretto.planner.architecture_loader import read_architecture
    from stretto.planner.compute import Device
    from stretto.planner.workload import StepWorkload
    from stretto.simulator.training import step_of_plan

    def given(names: Sequence[str]) -> dict[str, Any]:
        return {name: asked[name] for name in names if asked.get(name) is not None}

    workload = StepWorkload(read_architecture(asked["model"], asked["seq_len"]), **given(OF_WORKLOAD))
    Device(machine, workload.dtype)  # a cluster that does not say what is needed is refused first
    options: ExecutionOptions = asked.get("options", ExecutionOptions()).replace(**changes)
    sizes = asked.get("grid") if grid is None else read_grid(grid)
    about = given((*OF_WORKLOAD, *_OF_RUN, *_OF_SCHEDULE))
    kept: dict[str, Any] = {"drop_duplicates": options.drop_duplicates, "two_level": options.two_level}
    if sizes is not None:
        found = predict(asked["model"], machine, grid=sizes, options=options, **about)
        _check_gpus(found.grid, asked.get("gpus") if grid is not None else None, machine)
    else:
        searched: dict[str, Any] = {
            name: changes[name] for name in ("recompute", "reshard", "shard_sequence") if name in changes
        }
        searched |= given(("context", "pipe")) | kept
        gpus, overlaps = asked.get("gpus"), options.overlap.hides_any
        found = plan(asked["model"], machine, gpus=gpus, overlaps=overlaps, **about, **searched)[0]
        if not found.fits:
            raise ValueError(
                "no grid of this number of GPUs fits; `stretto plan` prints the memory of each, or what does not divide"
            )
    config = step_of_plan(found, overlap=options.overlap, **given(_OF_RUN), **kept)
    if sizes is not None:
        config = replace(config, options=options)
    return workload, config, found.fits


def _check_gpus(grid: Any, gpus: int | None, machine: "Cluster") -> None:
    ranks = check_sizes(grid).ranks
    if gpus is not None and gpus != ranks:
        raise ValueError(f"--gpus is {gpus}, but the grid has {ranks} ranks; --gpus {ranks} would do")
    if machine.gpus is not None and ranks > machine.gpus:
        raise ValueError(f"the grid has {ranks} ranks, but cluster {machine.name!r} has {machine.gpus} GPUs")


def _draw_factors(stragglers: str | None, slow_links: str | None, ranks: int, seed: int) -> "RankFactors | None":
    from stretto.simulator.training import RankFactors, Variation

    if stragglers is None and slow_links is None:
        return None
    given = (("--stragglers", stragglers), ("--slow-links", slow_links))
    drawn = [() if text is None else Variation.parse(text, name).draw(ranks, seed) for name, text in given]
    return RankFactors(compute=drawn[0], links=drawn[1])


def _write(simulated: "StepSimulation", trace: Path | None, picture: Path | None) -> None:
    """Write the files that were asked for."""
    from stretto.simulator.training.trace import make_trace, write_trace

    if trace is not None:
        write_trace(simulated, trace)
    if picture is not None:
        from stretto.report.timeline import plot_timeline
        from stretto.train.observe.timeline import read_timeline

        plot_timeline(read_timeline(make_trace(simulated)), picture)


def _print(simulated: "StepSimulation", changed: "Sequence[ChangedStep]") -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    config = simulated.programs.config
    schedule = "" if config.schedule is None else f", {config.schedule}"
    table = Table(
        title=f"{name_grid(config.grid.sizes())}{schedule}, micro-batches of {config.micro_batch}: "
        f"{simulated.step_time:.4g} s a step ({simulated.fidelity})",
        box=box.SIMPLE_HEAD,
    )
    for heading in (f"on rank {simulated.device}", "seconds", "exposed"):
        table.add_column(heading, justify="left" if heading.startswith("on") else "right")
    slowed = max(0.0, simulated.computation - simulated.undisturbed)
    table.add_row("computation", f"{simulated.computation:.4g}", "")
    table.add_row("  of it lost beside communication", f"{slowed:.4g}", "")
    for axis, time in simulated.communication.items():
        table.add_row(f"communication over {axis}", f"{time:.4g}", f"{simulated.exposed[axis]:.4g}")
    table.add_row("neither", f"{simulated.idle:.4g}", "")
    console.print(table)
    if (use := simulated.link_use) is not None and len(use):
        console.print(f"links send {use.mean():.0%} of the step on the average, the busiest {use.max():.0%}")
    if changed:
        table = Table(title="What if", box=box.SIMPLE_HEAD)
        for heading in ("change", "step (s)", "speed-up"):
            table.add_column(heading, justify="left" if heading == "change" else "right")
        for each in changed:
            table.add_row(each.description, f"{each.step.step_time:.4g}", f"{each.speed_up:.3f}x")
        console.print(table)

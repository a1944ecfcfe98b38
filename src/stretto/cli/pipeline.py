# SPDX-License-Identifier: Apache-2.0
"""`stretto pipeline`: draws and verifies pipeline schedules."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from stretto.atomic_files import require_writable
from stretto.cli.commands import App, refuse_options, with_options_of
from stretto.cli.console import Json, fail, print_json, refusing_bad_input
from stretto.quantities import counted
from stretto.suggestions import did_you_mean_file, name_known, require_one_of

if TYPE_CHECKING:
    from stretto.schedules import PipelineSchedule, PipelineTimeline

NOT_VERIFIED = 1
MESSAGE_DRIVEN = "message-driven"
SHOWN_RANKS = 64
MIN_WIDTH, MAX_WIDTH = 60, 400  # characters of a drawing

app = App(help="Draw, time and verify pipeline schedules.")

Name = Annotated[
    str,
    typer.Argument(
        metavar="SCHEDULE|FILE.csv",
        help="gpipe, 1f1b, interleaved, zb-h1, zb-v, dualpipe-v, message-driven, or a CSV file of "
        "torch.distributed.pipelining.",
    ),
]


@dataclass(frozen=True)
class _ScheduleNumbers:
    """The numbers of a schedule that the command line gives."""

    pipe: Annotated[
        int | None, typer.Option(help="Number of pipeline ranks (for a file: the number that is expected).")
    ] = None
    micro_batches: Annotated[
        int | None, typer.Option(help="Micro-batches of a step (for a file: the number that is expected).")
    ] = None
    virtual_stages: Annotated[int | None, typer.Option(help="Stages on each rank (default: the fewest).")] = None
    extra_warm_up: Annotated[
        int, typer.Option(help="For 1f1b: additional forward passes before the first rank's first backward pass.")
    ] = 0

    def load(self, name: str) -> "PipelineSchedule":
        """Build the schedule of this name, or read the file. ValueError for numbers that differ from it."""
        from stretto.schedules import SCHEDULES, build_schedule

        if name in SCHEDULES:
            return build_schedule(name, *self._require(name), self.virtual_stages, self.extra_warm_up)
        if not any(letter in name for letter in "./") and not Path(name).is_file():
            raise ValueError(f"there is no schedule {name!r}{name_known(name, (*SCHEDULES, MESSAGE_DRIVEN))}")
        return self._read(Path(name))

    def _read(self, file: Path) -> "PipelineSchedule":
        from stretto.schedules import read_csv

        try:
            schedule = read_csv(file)
        except FileNotFoundError as error:
            raise ValueError(f"{file}: {error.strerror}{did_you_mean_file(file, ('.csv',))}") from error
        if self.extra_warm_up:
            raise ValueError(f"--extra-warm-up is of 1f1b, not of {file}")
        for what, given, has in (
            ("ranks, but --pipe", self.pipe, schedule.pipe),
            ("micro-batches, but --micro-batches", self.micro_batches, schedule.micro_batches),
            ("stages on a rank, but --virtual-stages", self.virtual_stages, schedule.virtual_stages),
        ):
            if given is not None and given != has:
                raise ValueError(f"{file} has {has} {what} is {given}")
        return schedule

    def require_message_driven(self) -> tuple[int, int]:
        """The ranks and micro-batches of message-driven order. ValueError for numbers that it has not."""
        if self.virtual_stages not in (None, 1) or self.extra_warm_up:
            raise ValueError(f"{MESSAGE_DRIVEN} has one stage on each rank, and --limit in place of a warm-up")
        return self._require(MESSAGE_DRIVEN)

    def _require(self, name: str) -> tuple[int, int]:
        if self.pipe is None or self.micro_batches is None:
            raise ValueError(f"{name} takes --pipe and --micro-batches")
        return self.pipe, self.micro_batches


@app.command()
@with_options_of(_ScheduleNumbers)
def show(
    call: typer.Context,
    name: Name,
    given: _ScheduleNumbers,
    limit: Annotated[
        int | None, typer.Option(help="For message-driven: micro-batches in flight (default: --pipe).")
    ] = None,
    serve_first: Annotated[
        str | None,
        typer.Option(
            help="For message-driven: the priority if both kinds of messages wait: arrival, backward or "
            "forward (default: arrival)."
        ),
    ] = None,
    forward: Annotated[float, typer.Option(help="Time of F, the forward pass of a stage.")] = 1.0,
    backward_input: Annotated[float, typer.Option(help="Time of I, the gradient of its input.")] = 1.0,
    backward_weight: Annotated[float, typer.Option(help="Time of W, the gradients of its weights. B is both.")] = 1.0,
    latency: Annotated[float, typer.Option(help="Time of a message between ranks.")] = 0.0,
    transmission: Annotated[float, typer.Option(help="Time for which a message occupies its channel.")] = 0.0,
    jitter: Annotated[float, typer.Option(help="Random variation of each action's time: 0.2 is 20%.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the jitter.")] = 0,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Also draw a picture: .png or .svg.")] = None,
    csv: Annotated[
        Path | None, typer.Option(help="Also write the schedule as a CSV file of torch.distributed.pipelining.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Draw a pipeline schedule, with its makespan, bubble and live micro-batches by the timing model.

    Times are in any unit. The schedule is verified first: exit status 1 if it cannot run.

    - stretto pipeline show 1f1b --pipe 4 --micro-batches 8
    - stretto pipeline show zb-v --pipe 4 --micro-batches 8 --out zb-v.png
    - stretto pipeline show message-driven --pipe 4 --micro-batches 16 --limit 8 --latency 0.25
    """
    with refusing_bad_input(as_json=as_json):
        if out is not None and out.suffix.lower() not in (".png", ".svg"):
            raise ValueError(f"a picture must be a .png or .svg file, not {out.name!r}")
        if name != MESSAGE_DRIVEN:
            refuse_options(call, f"{name}, but of {MESSAGE_DRIVEN}", "limit", "serve_first")
        if not jitter:
            refuse_options(call, "times without --jitter", "seed")
        for path, option in ((out, "--out"), (csv, "--csv")):
            if path is not None:
                require_writable(path, option)

        from stretto.report.pictures import require_drawing, require_few_boxes
        from stretto.schedules import StageCosts, StageLinks, simulate, simulate_message_driven, write_csv

        if out is not None:
            require_drawing()
        times = (forward, backward_input, backward_weight)
        links = StageLinks(latency, transmission)
        if name == MESSAGE_DRIVEN:
            ranks, count = given.require_message_driven()
            require_few_boxes(2 * ranks * count if out is not None else 0)
            timeline = simulate_message_driven(
                count,
                StageCosts.uniform(ranks, *times),
                links,
                limit=limit,
                serve_first=_read_order(serve_first),
                jitter=jitter,
                seed=seed,
            )
        else:
            schedule = given.load(name)
            require_few_boxes(sum(map(len, schedule.ranks)) if out is not None else 0)
            _require_verified(schedule, as_json=as_json)
            costs = StageCosts.uniform(schedule.stages, *times)
            timeline = simulate(schedule, costs, links, jitter=jitter, seed=seed)
        if out is not None:
            from stretto.report.pipeline import plot_pipeline  # imports matplotlib

            plot_pipeline(timeline, out)
        if csv is not None:
            actions = (action for actions in timeline.schedule.ranks for action in actions)
            write_csv(timeline.schedule, csv, communication=any(not each.operation.is_computation for each in actions))
        if as_json:
            print_json(_describe(timeline))
        else:
            print("\n".join(_report(timeline)))


@app.command("verify")
@with_options_of(_ScheduleNumbers)
def verify_(
    name: Name,
    given: _ScheduleNumbers,
    buffers: Annotated[
        int | None, typer.Option(help="Message buffers of a channel between two ranks (default: any number).")
    ] = None,
    delivery: Annotated[
        str,
        typer.Option(
            help="in_order: a channel's messages are received in the order in which they are sent. "
            "matched: in any order."
        ),
    ] = "in_order",
    max_live: Annotated[
        int | None, typer.Option(help="Micro-batches whose activations fit on a rank (default: any number).", min=1)
    ] = None,
    as_json: Json = False,
) -> None:
    """Verify a pipeline schedule. Exit status: 0 if it can run, 1 if it cannot, 2 if it is not a schedule.

    Checks that every stage computes everything once and in order, on its rank; that every message is sent and used,
    in the order sent; deadlock, with the buffers that there are; and live micro-batches.

    - stretto pipeline verify schedule.csv
    - stretto pipeline verify schedule.csv --pipe 4 --micro-batches 16 --buffers 1 --max-live 4
    """
    with refusing_bad_input(as_json=as_json):
        if name == MESSAGE_DRIVEN:
            raise ValueError(f"{name} has no order to verify before it runs; stretto pipeline show has one that came")

        from stretto.schedules import buffers_needed, live_micro_batches

        schedule = given.load(name)
        limits: dict[str, Any] = {"buffers": buffers, "delivery": delivery, "max_live": max_live}
        _require_verified(schedule, as_json=as_json, **limits)
        needed = buffers_needed(schedule, delivery)  # type: ignore[arg-type]
        live = live_micro_batches(schedule)
        if as_json:
            sizes = {"pipe": schedule.pipe, "stages": schedule.stages, "micro_batches": schedule.micro_batches}
            kept = {"ranks": live.ranks, "stages": live.stages}
            print_json({"ok": True} | sizes | {"buffers_needed": needed, "live_micro_batches": kept})
            return
        print(f"{_title(schedule)}: verified")
        print(f"  buffers a channel needs         {needed}")
        print(f"  live micro-batches, by rank     {_numbers(live.ranks)}")


def _read_order(serve_first: str | None) -> Any:
    from stretto.schedules import ServeFirst

    if serve_first is not None:
        require_one_of(get_args(ServeFirst), **{"--serve-first": serve_first})
    return serve_first or "arrival"


def _require_verified(schedule: "PipelineSchedule", *, as_json: bool, **limits: Any) -> None:
    """End the command with status 1 if the schedule cannot run. Raises ValueError for limits that make no sense."""
    from stretto.schedules import ScheduleError, verify

    try:
        verify(schedule, **limits)
    except ScheduleError as error:
        raise fail(f"{schedule.name} is NOT verified: {error}", NOT_VERIFIED, as_json=as_json) from error


def _describe(timeline: "PipelineTimeline") -> dict[str, Any]:
    schedule, live = timeline.schedule, timeline.live
    return {
        "schedule": schedule.name,
        "pipe": schedule.pipe,
        "stages": schedule.stages,
        "micro_batches": schedule.micro_batches,
        "makespan": timeline.makespan,
        "period": timeline.period,
        "bubble": timeline.bubble,
        "idle": timeline.idle,
        "inner_idle": timeline.inner_idle,
        "live_micro_batches": {"ranks": live.ranks, "stages": live.stages},
        "ranks": [
            [[str(action), start, end] for action, start, end in zip(*of_rank, strict=True)]
            for of_rank in zip(schedule.ranks, timeline.starts, timeline.ends, strict=True)
        ],
    }


def _title(schedule: "PipelineSchedule") -> str:
    stages = f", {counted(schedule.stages, 'stage')}" if schedule.stages != schedule.pipe else ""
    batches = counted(schedule.micro_batches, "micro-batch")
    return f"{schedule.name}: {counted(schedule.pipe, 'rank')}{stages}, {batches}"


def _numbers(values: tuple[float, ...]) -> str:
    """Numbers of ranks in words: one where all are equal."""
    if len(set(values)) == 1:
        return f"{values[0]:g}" + (" on each" if len(values) > 1 else "")
    shown = " ".join(f"{value:.4g}" for value in values[:SHOWN_RANKS])
    return shown + (f" and {len(values) - SHOWN_RANKS} more ranks (--json)" if len(values) > SHOWN_RANKS else "")


def _report(timeline: "PipelineTimeline") -> list[str]:
    schedule, live = timeline.schedule, timeline.live
    waits = timeline.makespan - timeline.period
    return [
        _title(schedule),
        *draw_characters(timeline, shutil.get_terminal_size((100, 24)).columns),
        f"  makespan                        {timeline.makespan:g}",
        f"  idle, by rank                   {_numbers(timeline.idle)}  ({timeline.bubble:.1%} of all time)",
        f"  of it between first and last    {_numbers(timeline.inner_idle)}",
        f"  live micro-batches, by rank     {_numbers(live.ranks)}",
        *([f"  waiting for all ranks adds      {waits:g}, as clipping over all stages does"] if waits > 0 else []),
    ]


def draw_characters(timeline: "PipelineTimeline", width: int) -> list[str]:
    """Lines that draw a timeline: a row for each rank, a column for a slice of time.

    An action is its letter and micro-batch where these fit, else its letter, then dashes; dots are a rank that waits.
    Letters of a rank's later stages are lower case. A timeline that is too long for one column for each of its
    shortest actions is drawn by what each rank does in the middle of a column's time.
    """
    schedule = timeline.schedule
    lead = len(f"rank {schedule.pipe - 1}  ")
    width = min(MAX_WIDTH, max(MIN_WIDTH, width)) - lead
    spans = [
        end - start
        for starts, ends in zip(timeline.starts, timeline.ends, strict=True)
        for start, end in zip(starts, ends, strict=True)
    ]
    shortest = min((span for span in spans if span > 0), default=1.0)
    label = len(f"F{schedule.micro_batches - 1} ")
    columns = next((each for each in (label, 1) if timeline.makespan / shortest * each <= width), None)
    scale = width / timeline.makespan if columns is None else columns / shortest
    lines = []
    for rank in range(min(schedule.pipe, SHOWN_RANKS)):
        first = schedule.stages_of(rank)[:1]
        row = ["."] * round(timeline.makespan * scale)
        actions = zip(schedule.ranks[rank], timeline.starts[rank], timeline.ends[rank], strict=True)
        for action, start, end in actions:
            left, right = (round(time * scale) for time in (start, end))
            letter = action.operation.value if (action.stage,) == first else action.operation.value.lower()
            if not action.operation.is_computation or right == left:
                continue
            text = f"{letter}{action.micro_batch}"
            text = text if len(text) < right - left or columns is None else letter
            row[left:right] = (letter if columns is None else text).ljust(right - left, "-")
        lines.append(f"  {f'rank {rank}'.ljust(lead)}{''.join(row)}")
    if schedule.pipe > SHOWN_RANKS:
        lines.append(f"  and {schedule.pipe - SHOWN_RANKS} more ranks (--json, or --out for a picture)")
    later = ", lower case on a rank's later stages" if schedule.virtual_stages > 1 else ""
    lines.append(f"  a column is {1 / scale:.3g} of time; F forward, B backward (I inputs, W weights){later}, . waits")
    return lines

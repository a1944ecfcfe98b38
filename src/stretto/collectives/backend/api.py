# SPDX-License-Identifier: Apache-2.0
"""Functions for users: `install`, `uninstall`, `set_two_level`, `monitored_barrier` and `call_counts`."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.cluster.two_level import ALGORITHMS, LEVELED
from stretto.collectives.backend.calls import COLLECTIVES, BackendCall
from stretto.collectives.backend.dispatcher import Dispatcher, InstalledSchedule, find_dispatcher
from stretto.collectives.backend.two_level import TwoLevelRunner
from stretto.collectives.collective import Collective
from stretto.collectives.executor.plan import digest
from stretto.collectives.schedule import Schedule
from stretto.collectives.two_level import TwoLevelGroup
from stretto.collectives.two_level.group import check_library
from stretto.collectives.verifier import verify
from stretto.collectives.xml import named_collective, read_ranks, read_schedule
from stretto.execution import ExecutionOptions, TwoLevel
from stretto.memory import PeerError, exchange, find_missing, group_timeout, shared_gpus
from stretto.memory.groups import check_timeout
from stretto.suggestions import require_one_of

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Work

T = TypeVar("T")
_OWN_REDUCTIONS = ("sum", "max", "min", "prod")
MIN_TILE_BYTES = 480
"""The smallest tile: whole lines of LL128, and a multiple of every dtype's size."""


def install(
    schedule: Schedule | Path | str,
    group: dist.ProcessGroup | None = None,
    *,
    min_bytes: int | None = None,
    max_bytes: int | None = None,
    dtypes: Collection[torch.dtype] | None = None,
    even_sizes: bool = False,
    waive: Collection[str] = (),
    tile_bytes: int | None = None,
    collective: Collective | None = None,
    timeout: float | None = None,
) -> InstalledSchedule:
    """Install a schedule in a group, which then runs matching calls of its collective by it. All ranks call it.

    schedule: a Schedule, or the path of an MSCCL XML file; group: of the backend stretto, None for all ranks. A
    collective that torch.distributed has no operation for, such as AllToNext or one of your own, is called by its name
    (`run_collective`); collective: its conditions, where a file has another name than Stretto knows.
    min_bytes, max_bytes: which calls it is for, by the bytes of a rank's larger buffer, both inclusive (None: the
    schedule's own limits; max_bytes 0: no upper limit); dtypes: None for all that its executor supports; even_sizes:
    promises that all-to-alls with explicit sizes have equal sizes on all ranks, so that a schedule can run them too
    (one with unequal sizes raises ValueError on all ranks); waive: as in `verify`; tile_bytes: what a step handles at
    once of each chunk, at least 480 bytes, while other steps handle other tiles (None: the executor's default; with a
    number GPUs run the schedule by the interpreter, since a fused kernel has no tiles); timeout: seconds to wait here
    for the other ranks (None: the group's own limit). If several schedules match a call, the one that was installed
    last runs.

    ValueError, on all ranks, for a schedule that fails verification, that is for another number of ranks, that no
    operation can use or no executor can run, and where ranks install different ones; ScheduleFileError for an invalid
    file. PeerError for ranks that do not arrive.
    """
    dispatcher = find_dispatcher(group)

    def check() -> tuple[InstalledSchedule, str]:
        parsed = read_schedule(Path(schedule), collective=collective) if isinstance(schedule, str | Path) else schedule
        entry = InstalledSchedule(
            _verified(parsed, dispatcher.member.size, waive),
            parsed.min_bytes if min_bytes is None else min_bytes,
            parsed.max_bytes if max_bytes is None else max_bytes,
            None if dtypes is None else frozenset(dtypes),
            even_sizes,
            tile_bytes,
        )
        _check_options(entry, dispatcher)
        named = "all" if entry.dtypes is None else ", ".join(sorted(str(dtype)[6:] for dtype in entry.dtypes))
        limits = (
            f"{entry.min_bytes} to {entry.max_bytes or 'any number of'} bytes, dtypes {named}, "
            f"even sizes {even_sizes}, tiles of {tile_bytes or 'any number of'} bytes"
        )
        return entry, f"schedule {parsed.name} ({digest(parsed)}) for {parsed.collective.name}, {limits}"

    with dispatcher.bypassed():
        timeout = group_timeout(group) if timeout is None else timeout
        entry = _agree(check, group, timeout)
        runners = [runner for device in dispatcher.inner if (runner := dispatcher.runner(device)) is not None]
        for runner in runners:
            runner.prepare(entry.schedule, group, timeout, tile_bytes)
    dispatcher.installed = (*dispatcher.installed, entry)
    return entry


def install_folder(
    folder: Path | str,
    group: dist.ProcessGroup | None = None,
    *,
    waive: Collection[str] = (),
    timeout: float | None = None,
) -> tuple[InstalledSchedule, ...]:
    """Install all MSCCL XML files (*.xml) of a folder that are for the group's number of ranks. All ranks call it.

    Files for other numbers of ranks are ignored. Each of the others is for the sizes that its attributes minBytes and
    maxBytes say; waive: as in `install`. Files are installed in the order of their names, and of several that match a
    call the last one runs. The environment variable STRETTO_SCHEDULES names a folder that every group of several ranks
    installs so before its first collective.

    ValueError as `install`, on all ranks, and for a folder that is none or has no XML file.
    """
    dispatcher = find_dispatcher(group)

    def check() -> tuple[list[Schedule], str]:
        files = sorted(Path(folder).glob("*.xml"))
        if not files:
            raise ValueError(f"{folder} is no folder with schedules: it has no file *.xml")
        size = dispatcher.member.size
        # A file whose number of ranks cannot be read is read as well, for an error that says what is wrong with it.
        read = [read_schedule(file) for file in files if read_ranks(file) in (size, None)]
        return read, "the schedules " + ", ".join(f"{each.name} ({digest(each)})" for each in read)

    timeout = group_timeout(group) if timeout is None else timeout
    with dispatcher.bypassed():
        schedules = _agree(check, group, timeout)
    return tuple(install(schedule, group, waive=waive, timeout=timeout) for schedule in schedules)


def uninstall(
    installed: InstalledSchedule | None = None, group: dist.ProcessGroup | None = None, *, timeout: float | None = None
) -> None:
    """Remove a schedule that `install` returned from its group, or all of them (None). All ranks of the group call it.

    Calls that were made before still run by it. ValueError for one that is not installed in this group, or where ranks
    name different ones; PeerError for ranks that do not arrive.
    """
    dispatcher = find_dispatcher(group)

    def check() -> tuple[tuple[InstalledSchedule, ...], str]:
        removed = dispatcher.installed if installed is None else (installed,)
        for each in removed:
            if each not in dispatcher.installed:
                raise ValueError(f"the schedule {each.schedule.name} is not installed in this group")
        return removed, "schedules out: " + ", ".join(str(dispatcher.installed.index(each)) for each in removed)

    with dispatcher.bypassed():
        removed = _agree(check, group, group_timeout(group) if timeout is None else timeout)
    dispatcher.installed = tuple(each for each in dispatcher.installed if each not in removed)
    for device in dispatcher.inner:
        if (runner := dispatcher.runner(device)) is not None:
            for each in removed:
                runner.discard(each.schedule)


def run_collective(
    name: str,
    output: Tensor,
    input: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    reduction: str = "sum",
    async_op: bool = False,
) -> "Work | None":
    """Run a collective that torch.distributed has no operation for, by a schedule that is installed for it.

    name: of the collective, as "alltonext" of AllToNext. output, input: of one dtype, on one device, with as many
    elements as the collective's output and input chunks; chunks that may hold anything are left as they are, or not.
    The input is not modified. reduction: "sum", "max", "min" or "prod". All ranks call it.

    Returns a Work if `async_op`, and otherwise None, once the output is there (on GPUs: for the current stream).
    ValueError for a name, a size or a dtype that no installed schedule is for. Errors of the run are those of the
    group's other calls.
    """
    dispatcher = find_dispatcher(group)
    if name in COLLECTIVES.values():
        raise ValueError(f"{name} is an operation of torch.distributed: call that")
    require_one_of(_OWN_REDUCTIONS, reduction=reduction)
    for each in dispatcher.installed:
        of = each.schedule.collective
        if of.name == name and output.numel() * of.input_chunks != input.numel() * of.output_chunks:
            raise ValueError(
                f"{name} has {of.input_chunks} input and {of.output_chunks} output chunks a rank, which "
                f"{input.numel()} and {output.numel()} elements do not fit"
            )
    limit = group_timeout(group)
    work = dispatcher.start(BackendCall(name, (output,), (input,), reduction, 0, limit, is_async=async_op, is_own=True))
    assert work is not None
    if async_op:
        return work
    work.wait()
    return None


def set_two_level(
    mode: TwoLevel = "auto",
    group: dist.ProcessGroup | None = None,
    *,
    intra: str | None = None,
    inter: str | None = None,
) -> bool:
    """Have a group's collectives run in two levels, between nodes and inside them. All ranks call it.

    For all-reduces, and for all-gathers and reduce-scatters of single tensors, that no installed schedule matches.
    mode: True for all of these; "auto" for those that a model of both levels (`stretto.cluster.two_level`) predicts to
    be faster so; False for none from now on. group: of the backend stretto, None for all ranks. intra, inter: the
    backend of each level (None: the group's inner ones). Calls that were made before are not changed.

    Returns whether the group has two levels: its ranks are on several nodes with equally many ranks each. ValueError,
    on all ranks, for another mode, an unknown backend, ranks that ask for different things, and where `mode` is True
    and nodes have unequal numbers of ranks; PeerError for ranks that do not arrive.
    """
    dispatcher = find_dispatcher(group)

    def check() -> tuple[TwoLevel, str]:
        asked = ExecutionOptions(two_level=mode).two_level
        check_library("intra", intra)
        check_library("inter", inter)
        return asked, f"two levels {mode}, intra {intra}, inter {inter}"

    limit = group_timeout(group)
    default = shared_gpus.default_backend("cuda" if "cuda" in dispatcher.inner else "cpu")
    with dispatcher.bypassed():
        asked = _agree(check, group, limit)
        made = None
        if asked is not False:
            algorithms = LEVELED if asked is True else ALGORITHMS
            levels = {"intra": intra or default, "inter": inter or default}
            try:
                made = TwoLevelGroup(group, algorithms=algorithms, timeout=limit, **levels)  # type: ignore[arg-type]
            except ValueError:  # on all ranks: nodes have unequal numbers of ranks
                if asked is True:
                    raise
    if dispatcher.two_level is not None:
        dispatcher.two_level.close(limit)
    has_levels = made is not None and made.nodes.count > 1
    dispatcher.two_level = TwoLevelRunner(dispatcher.member, made) if made is not None and has_levels else None
    return has_levels


def monitored_barrier(
    group: dist.ProcessGroup | None = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
) -> None:
    """Wait until all ranks of the group have called it, or name on every rank one that has not within the time limit.

    Its arguments are those of `torch.distributed.monitored_barrier`, which torch allows to gloo's groups alone. group:
    of the backend stretto, None for all ranks; a process outside of it returns at once. timeout: seconds or a
    timedelta, None for the group's own limit. wait_all_ranks: whether to name all missing ranks, not only the first. On
    GPUs it begins once all schedules that this rank has started have ended.

    PeerError, with ranks as the group numbers them; a rank that comes later raises it, too. ValueError for a group of
    another backend, and for a time limit that is none.
    """
    if group is not None and dist.get_rank(group) < 0:
        return
    dispatcher = find_dispatcher(group)
    seconds = group_timeout(group) if timeout is None else check_timeout(timeout).total_seconds()
    dispatcher.begin_barrier(on_gpu=False, is_async=False)
    members = dist.group.WORLD if group is None else group
    assert members is not None
    if missing := find_missing(members, "stretto monitored barriers", seconds):
        named = missing if wait_all_ranks else missing[:1]
        raise PeerError(  # in gloo's words, which programs may look for
            f"[Rank {dispatcher.member.rank}]: Rank{'s' if wait_all_ranks else ''} {', '.join(map(str, named))} failed "
            f"to pass monitoredBarrier in {round(seconds * 1000)} ms"
        )


def call_counts(group: dist.ProcessGroup | None = None) -> Mapping[tuple[str, str], int]:
    """Count this rank's calls in a group (None: the default group) by what ran them, since the group was made.

    Keys are (c10d's operation, "schedule NAME" or the inner backend: "gloo" or "nccl"). ValueError for a group of
    another backend.
    """
    return find_dispatcher(group).counts()


def _agree(check: Callable[[], tuple[T, str]], group: dist.ProcessGroup | None, timeout: float) -> T:
    """Run this rank's check; return its result once all ranks' checks have succeeded with equal descriptions."""
    error: Exception | None = None
    result: T | None = None
    try:
        result, description = check()
    except (ValueError, OSError) as caught:
        error, description = caught, f"refuses: {caught}"
    answers = exchange((error is not None, description), group, timeout, tuple[bool, str])
    if error is not None:
        raise error
    for rank, (refused, other) in enumerate(answers):
        if refused:
            raise ValueError(f"rank {rank} {other}")
        if other != description:
            own = dist.get_rank(group)
            raise ValueError(f"all ranks must ask for the same: {description} on rank {own}, {other} on rank {rank}")
    assert result is not None
    return result


def _verified(schedule: Schedule, ranks: int, waive: Collection[str]) -> Schedule:
    """The schedule with the conditions of its collective's operation. ValueError where it does not meet them."""
    collective = schedule.collective
    if collective.ranks != ranks:
        raise ValueError(f"{schedule.name} is for {collective.ranks} ranks, and the group has {ranks}")
    if collective.name not in COLLECTIVES.values():
        _check_own(schedule)
        expected = collective
    else:
        expected = named_collective(collective.name, ranks, collective.chunks_per_loop, collective.root)
    if (expected.input_chunks, expected.output_chunks) != (collective.input_chunks, collective.output_chunks):
        raise ValueError(
            f"{schedule.name} has {collective.input_chunks} input and {collective.output_chunks} output chunks a rank: "
            f"{collective.name} has {expected.input_chunks} and {expected.output_chunks}"
        )
    checked = replace(schedule, collective=replace(expected, in_place=collective.in_place))
    verification = verify(checked, waive=waive)
    if not verification.ok:
        raise ValueError(f"{schedule.name} is not verified, and does not run:\n" + "\n".join(verification.errors))
    return checked


def _check_own(schedule: Schedule) -> None:
    """ValueError for a user-defined collective without conditions or without a call."""
    collective = schedule.collective
    if collective.is_unknown:
        known = ", ".join(sorted(set(COLLECTIVES.values())))
        raise ValueError(
            f"no operation of torch.distributed is a {collective.name!r}, but {known}: a collective of your own is "
            "installed with its conditions (collective=)"
        )
    if not schedule.out_of_place and collective.input_chunks != collective.output_chunks:
        raise ValueError(
            f"{schedule.name} runs only in place, but input and output of {collective.name} have different sizes: "
            "compile it with in_place=False"
        )


def _check_options(entry: InstalledSchedule, dispatcher: Dispatcher) -> None:
    """ValueError for byte limits out of order, tiles that are too small, and dtypes that no executor here supports."""
    if entry.tile_bytes is not None and entry.tile_bytes < MIN_TILE_BYTES:
        raise ValueError(f"tile_bytes is at least {MIN_TILE_BYTES}, not {entry.tile_bytes}")
    if entry.min_bytes < 0 or entry.max_bytes < 0 or 0 < entry.max_bytes < entry.min_bytes:
        raise ValueError(f"a schedule is for 0 <= min_bytes <= max_bytes: not {entry.min_bytes} to {entry.max_bytes}")
    runners = [runner for device in dispatcher.inner if (runner := dispatcher.runner(device)) is not None]
    for dtype in entry.dtypes or ():
        if not any(dtype in runner.dtypes for runner in runners):
            raise ValueError(f"no executor here runs schedules on {str(dtype)[6:]}")

# SPDX-License-Identifier: Apache-2.0
"""Pipeline schedules in torch.distributed.pipelining's CSV: a row for each rank, a cell for each action.

Torch has two formats. "compute_only" has F, B, I and W. "compute_comms" also has UNSHARD and RESHARD, and SEND_F,
RECV_F, SEND_B and RECV_B of every message, and REDUCE_GRAD after the last backward pass of a stage. Here the last five
are implied by the others: reading checks that they are complete and in order, and writing adds them. Cells may be
empty, where torch draws a rank that waits; a schedule's ranks wait for messages, not for slots, so these are left out.
"""

import csv
import io
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from stretto.atomic_files import write_atomically
from stretto.schedules.schedule import Action, PipelineOperation, PipelineSchedule, ScheduleError

MAX_FILE_BYTES = 1 << 24
MAX_CELLS = 1 << 20
MAX_RANKS = 1 << 14
_LARGEST = 1 << 22  # stage or micro-batch
_SHOWN = 40  # letters of a cell in an error

_F, _B = PipelineOperation.FORWARD, PipelineOperation.BACKWARD
_I, _W = PipelineOperation.BACKWARD_INPUT, PipelineOperation.BACKWARD_WEIGHT
_CELL = re.compile(r"([0-9]{1,9})(UNSHARD|RESHARD|REDUCE_GRAD|(?:SEND|RECV)_[FB]|[FBIW])([0-9]{1,9})?")
_PAIR = re.compile(r"\(([^();]*);([^();]*)\)OVERLAP_F_B")
_WITHOUT_MICRO_BATCH = ("UNSHARD", "RESHARD", "REDUCE_GRAD")


def read_csv(path: str | Path, max_bytes: int = MAX_FILE_BYTES) -> PipelineSchedule:
    """Read a schedule in either of torch's formats; its name is the file's.

    A stage's rank is the row in which its actions are, and the number of micro-batches that of the largest. `verify`
    checks whether the schedule can be run. Raises ScheduleError with the row and cell, and OSError.
    """
    file = Path(path)
    if file.exists() and not file.is_file():  # reading a pipe might never begin
        raise ScheduleError(f"{file} is not a regular file")
    with file.open("rb") as stream:
        content = stream.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ScheduleError(f"{file} has more than {max_bytes} bytes, the most that is read")
    try:
        return parse_csv(content.decode(), file.stem)
    except UnicodeDecodeError as error:
        raise ScheduleError(f"{file} is not text: byte {error.start} is not UTF-8") from error
    except ScheduleError as error:
        raise ScheduleError(f"{file}: {error}") from error


def write_csv(schedule: PipelineSchedule, path: str | Path, communication: bool = False) -> None:
    """Write a schedule as torch does. Raises as `format_csv`, and OSError."""
    write_atomically(Path(path), format_csv(schedule, communication))


def parse_csv(text: str, name: str = "schedule") -> PipelineSchedule:
    """Parse what `format_csv` or torch has written. Raises ScheduleError with the row and cell."""
    rows: list[list[_Cell]] = []
    cells = 0
    try:
        for row, texts in enumerate(csv.reader(io.StringIO(text, newline=""), strict=True)):
            cells += len(texts)
            if row == MAX_RANKS or cells > MAX_CELLS:
                raise ScheduleError(f"more than {MAX_RANKS} rows or {MAX_CELLS} cells, the most that is read")
            rows.append([cell for column, each in enumerate(texts) for cell in _parse_cell(each, row, column)])
    except csv.Error as error:
        raise ScheduleError(f"row {len(rows) + 1} is not CSV: {error}") from error
    owners: dict[int, int] = {}
    largest = -1
    for row, own in enumerate(rows):
        for cell in own:
            if owners.setdefault(cell.stage, row) != row:
                raise cell.error(f"stage {cell.stage} is in row {owners[cell.stage] + 1}, too, but is on one rank")
            largest = max(largest, -1 if cell.micro_batch is None else cell.micro_batch)
    if largest < 0:
        raise ScheduleError("no actions; a row is a rank, with cells such as 0F0,0B0")
    if (missing := next((s for s in range(len(owners)) if s not in owners), None)) is not None:
        raise ScheduleError(f"stages are 0 to {max(owners)}, but stage {missing} has no action")
    stage_ranks = tuple(owners[stage] for stage in range(len(owners)))
    _check_messages(rows, stage_ranks)
    for own in rows:
        _check_reductions(own)
    ranks = tuple(tuple(cell.action() for cell in own if cell.word in _OPERATIONS) for own in rows)
    return PipelineSchedule(name, stage_ranks, largest + 1, ranks)


_OPERATIONS = {operation.value: operation for operation in PipelineOperation}


class _Cell:
    """One action of a cell, and where it is."""

    __slots__ = ("micro_batch", "overlaps_next", "place", "stage", "text", "word")

    def __init__(self, place: tuple[int, int], text: str, values: tuple[int, str, int | None], paired: bool) -> None:
        self.place = place
        self.text = text
        self.stage, self.word, self.micro_batch = values
        self.overlaps_next = paired

    def error(self, reason: str) -> ScheduleError:
        return _cell_error(self.text, *self.place, reason)

    def action(self) -> Action:
        return Action(self.stage, _OPERATIONS[self.word], self.micro_batch, self.overlaps_next)


def _cell_error(text: str, row: int, column: int, reason: str) -> ScheduleError:
    shown = ascii(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")
    return ScheduleError(f"row {row + 1}, cell {column + 1} ({shown}): {reason}")


def _parse_cell(text: str, row: int, column: int) -> Iterator[_Cell]:
    stripped = text.strip()
    pair = _PAIR.fullmatch(stripped)
    parts = [part.strip() for part in pair.groups()] if pair else [stripped] if stripped else []
    for number, part in enumerate(parts):
        found = _CELL.fullmatch(part)
        if found is None:
            raise _cell_error(text, row, column, "not an action: stage, operation and micro-batch, such as 2F0")
        stage, word, micro_batch = int(found[1]), found[2], None if found[3] is None else int(found[3])
        if max(stage, micro_batch or 0) > _LARGEST:
            raise _cell_error(text, row, column, f"stages and micro-batches are at most {_LARGEST}")
        if (micro_batch is None) != (word in _WITHOUT_MICRO_BATCH):
            has = "is for all micro-batches" if micro_batch is not None else "needs a micro-batch"
            raise _cell_error(text, row, column, f"{word} {has}")
        if pair and word != ("F", "B")[number]:
            raise _cell_error(text, row, column, "OVERLAP_F_B has an F and then a B, such as (0F1;3B0)OVERLAP_F_B")
        yield _Cell((row, column), text, (stage, word, micro_batch), pair is not None and number == 0)


_Message = tuple[str, int, int | None]  # "F" or "B", and the stage and micro-batch that it is for


def _find_messages(
    stage: int, word: str, micro_batch: int | None, stage_ranks: Sequence[int]
) -> tuple[_Message | None, _Message | None]:
    """The message from another rank that an action uses, and the one that goes to another rank after it, if any."""
    if word not in ("F", "B", "I"):
        return None, None
    kind, step = ("F", 1) if word == "F" else ("B", -1)

    def find(other: int, to: int) -> _Message | None:
        is_far = 0 <= other < len(stage_ranks) and stage_ranks[other] != stage_ranks[stage]
        return (kind, to, micro_batch) if is_far else None

    return find(stage - step, stage), find(stage + step, stage + step)


def _check_messages(rows: list[list[_Cell]], stage_ranks: Sequence[int]) -> None:
    """Raise ScheduleError if messages are given, but not each once, after it is computed and before it is used."""
    if not any(cell.word[:4] in ("SEND", "RECV") for own in rows for cell in own):
        return
    for own in rows:
        computed: dict[_Message, _Cell] = {}
        sent: set[_Message] = set()
        received: dict[_Message, bool] = {}  # whether it was used
        for cell in own:
            if cell.word.startswith("SEND"):
                message = cell.word[-1], cell.stage + (1 if cell.word == "SEND_F" else -1), cell.micro_batch
                if message not in computed or message in sent:
                    raise cell.error("sent a second time" if message in sent else "no action before it makes this")
                sent.add(message)
            elif cell.word.startswith("RECV"):
                message = cell.word[-1], cell.stage, cell.micro_batch
                if message in received:
                    raise cell.error("received a second time")
                received[message] = False
            else:
                needed, made = _find_messages(cell.stage, cell.word, cell.micro_batch, stage_ranks)
                if needed is not None and needed not in received:
                    raise cell.error(f"its message is not received before: it needs {cell.stage}RECV_{needed[0]}")
                if needed is not None:
                    received[needed] = True
                if made is not None:
                    computed[made] = cell
        for message, cell in computed.items():
            if message not in sent:
                raise cell.error(f"its message is not sent: it needs {cell.stage}SEND_{message[0]}{cell.micro_batch}")
        for cell in own:
            if cell.word.startswith("RECV") and not received[cell.word[-1], cell.stage, cell.micro_batch]:
                raise cell.error("no action after it uses this")


def _check_reductions(own: list[_Cell]) -> None:
    """Raise ScheduleError for a REDUCE_GRAD that comes twice, or before a stage's gradients are final."""
    reduced: set[int] = set()
    for cell in own:
        if cell.word == "REDUCE_GRAD" and cell.stage in reduced:
            raise cell.error(f"the gradients of stage {cell.stage} are reduced a second time")
        if cell.word == "REDUCE_GRAD":
            reduced.add(cell.stage)
        elif cell.word in ("B", "W") and cell.stage in reduced:
            raise cell.error(f"REDUCE_GRAD of stage {cell.stage} comes before this")


def format_csv(schedule: PipelineSchedule, communication: bool = False) -> str:
    """Return a schedule in torch's CSV.

    communication: also write messages, and REDUCE_GRAD, in torch's format "compute_comms"; ranks then send and receive
        in an order that does not deadlock, even where both wait for each other's calls. Torch does not take UNSHARD and
        RESHARD in the other format, "compute_only".

    Raises ScheduleError for a schedule that deadlocks, or has UNSHARD or RESHARD without communication.
    """
    units = [list(_units(actions)) for actions in schedule.ranks]
    if communication:
        rows = _add_messages(schedule, units)
    else:
        for actions in schedule.ranks:
            for action in actions:
                if not action.operation.is_computation:
                    raise ScheduleError(f"{schedule.name} has {action}, which takes the format with communication")
        rows = [[_show(unit) for unit in own] for own in units]
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue()


def _units(actions: Sequence[Action]) -> Iterator[tuple[Action, ...]]:
    """The actions, each overlapped pair as one."""
    position = 0
    while position < len(actions):
        size = 2 if actions[position].overlaps_next else 1
        yield tuple(actions[position : position + size])
        position += size


def _show(unit: tuple[Action, ...]) -> str:
    return str(unit[0]) if len(unit) == 1 else f"({';'.join(map(str, unit))})OVERLAP_F_B"


def _add_messages(schedule: PipelineSchedule, units: list[list[tuple[Action, ...]]]) -> list[list[str]]:
    """Rows with sends and receives: each pair of them is added to both ranks once the message is computed."""
    rows: list[list[str]] = [[] for _ in units]
    owners = schedule.stage_ranks
    left: dict[int, int] = defaultdict(int)
    for actions in schedule.ranks:
        for action in actions:
            left[action.stage] += action.operation in (_B, _W)
    arrived: set[_Message] = set()
    position = [0] * len(units)
    progress = True
    while progress:
        progress = False
        for rank, own in enumerate(units):
            if position[rank] == len(own):
                continue
            unit = own[position[rank]]
            needed = [_find_messages(*action[:3], owners)[0] for action in unit]
            if any(message is not None and message not in arrived for message in needed):
                continue
            progress = True
            position[rank] += 1
            rows[rank].append(_show(unit))
            for action in unit:
                if action.operation in (_B, _W):
                    left[action.stage] -= 1
                    if not left[action.stage]:
                        rows[rank].append(f"{action.stage}REDUCE_GRAD")
                _, message = _find_messages(*action[:3], owners)
                if message is not None:
                    kind, target, number = message
                    rows[rank].append(f"{action.stage}SEND_{kind}{number}")
                    rows[owners[target]].append(f"{target}RECV_{kind}{number}")
                    arrived.add(message)
    if any(at < len(own) for at, own in zip(position, units, strict=True)):
        raise ScheduleError(f"{schedule.name} deadlocks; verify() lists the actions that wait for each other")
    return rows

# SPDX-License-Identifier: Apache-2.0
"""Schedules in torch's CSV: torch reads what is written, and what torch writes is read."""

import csv
import random

import pytest
from tests.fuzzing import fuzz
from tests.schedules.torch_oracle import flatten, make_runtime
from torch.distributed.pipelining.schedules import _Action

from stretto.schedules import (
    SCHEDULES,
    PipelineOperation,
    PipelineSchedule,
    ScheduleError,
    add_unshard_actions,
    build_schedule,
    format_csv,
    parse_csv,
    read_csv,
    verify,
    write_csv,
)

VIRTUAL_STAGES = {"interleaved": 3, "zb-v": 2, "dualpipe-v": 2}


def build(name, pipe=3, micro_batches=6):
    return build_schedule(name, pipe, micro_batches, VIRTUAL_STAGES.get(name))


def runtime_for(schedule):
    return make_runtime(schedule.pipe, schedule.virtual_stages, schedule.micro_batches)


@pytest.mark.parametrize("name", SCHEDULES)
def test_torch_loads_what_is_written(name, tmp_path):
    schedule = build(name)
    write_csv(schedule, tmp_path / "schedule.csv")
    runtime = runtime_for(schedule)
    runtime._load_csv(tmp_path / "schedule.csv")
    assert tuple(tuple(flatten(runtime.pipeline_order[rank])) for rank in range(3)) == schedule.ranks
    assert runtime.stage_index_to_group_rank == dict(enumerate(schedule.stage_ranks))


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "dualpipe-v"])
def test_torch_runs_the_sends_and_receives_that_are_written(name, tmp_path):
    """Torch's simulator refuses a receive before its send, and actions whose messages were not received."""
    schedule = build(name)
    write_csv(schedule, tmp_path / "schedule.csv", communication=True)
    assert (tmp_path / "schedule.csv").read_text().count("REDUCE_GRAD") == schedule.stages
    runtime = runtime_for(schedule)
    runtime._load_csv(tmp_path / "schedule.csv", format="compute_comms")
    for actions in runtime.pipeline_order_with_comms.values():  # which the simulator does not know
        actions[:] = [action for action in actions if action.computation_type.value != "REDUCE_GRAD"]
    runtime._simulate()


@pytest.mark.parametrize("name", SCHEDULES)
def test_torchs_files_are_read(name, tmp_path):
    schedule = build(name)
    write_csv(schedule, tmp_path / "ours.csv")
    runtime = runtime_for(schedule)
    runtime._load_csv(tmp_path / "ours.csv")
    for format in ("compute_only", "compute_comms"):
        runtime._dump_csv(tmp_path / f"{name}.csv", format=format)
        found = read_csv(tmp_path / f"{name}.csv")
        kept = [[a for a in actions if a.operation.is_computation] for actions in found.ranks]
        assert tuple(map(tuple, kept)) == schedule.ranks
        assert (found.name, found.stage_ranks, found.micro_batches) == (name, schedule.stage_ranks, 6)
        verify(found)
    assert any(not action.operation.is_computation for action in found.ranks[0])  # torch gathers stages' weights


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("communication", [False, True])
def test_schedules_survive_a_file(name, communication):
    schedule = build(name)
    if communication:
        schedule = add_unshard_actions(schedule)
    assert parse_csv(format_csv(schedule, communication), name) == schedule


def test_every_cell_is_one_that_torch_parses_to_the_same_text():
    schedule = add_unshard_actions(build("dualpipe-v"))
    cells = [cell for row in csv.reader(format_csv(schedule, communication=True).splitlines()) for cell in row]
    assert len(cells) > 150
    assert [str(_Action.from_str(cell)) for cell in cells] == cells


def test_empty_cells_are_ranks_that_wait():
    schedule = parse_csv("0F0,,,0B0\n,1F0,1B0,\n")
    assert [list(map(str, actions)) for actions in schedule.ranks] == [["0F0", "0B0"], ["1F0", "1B0"]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no actions; a row is a rank, with cells such as 0F0,0B0"),
        ("0UNSHARD", "no actions"),
        ("0F0,0B0\n1F0,1X0", "row 2, cell 2 ('1X0'): not an action"),
        ("0F0,0B0extra", "row 1, cell 2 ('0B0extra'): not an action"),
        ("0F0,-1B0", "not an action"),
        ("0F\N{SUPERSCRIPT TWO}", r"row 1, cell 1 ('0F\xb2'): not an action"),
        ("0F", "row 1, cell 1 ('0F'): F needs a micro-batch"),
        ("0UNSHARD3", "UNSHARD is for all micro-batches"),
        ("0F" + "9" * 5000, "..."),
        ("0F999999999", "stages and micro-batches are at most 4194304"),
        ("5F0,5B0", "stages are 0 to 5, but stage 0 has no action"),
        ("0F0,0B0\n0F1,0B1", "row 2, cell 1 ('0F1'): stage 0 is in row 1, too, but is on one rank"),
        ("(0F0)OVERLAP_F_B", "not an action"),
        ("(0B0;0F1)OVERLAP_F_B", "OVERLAP_F_B has an F and then a B"),
        ("(0F0;(0F1;0B1)OVERLAP_F_B)OVERLAP_F_B", "not an action"),
        ('0F0,"0B0', "row 1 is not CSV"),
        ("0F0,0REDUCE_GRAD,0B0", "row 1, cell 3 ('0B0'): REDUCE_GRAD of stage 0 comes before this"),
        ("0F0,0B0,0REDUCE_GRAD,0REDUCE_GRAD", "are reduced a second time"),
        ("0F0,0SEND_F0,0B0\n1F0,1B0,1SEND_B0", "row 1, cell 3 ('0B0'): its message is not received before"),
        ("0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0", "('0F0'): its message is not sent: it needs 0SEND_F0"),
        ("0SEND_F0,0F0\n1RECV_F0,1F0", "row 1, cell 1 ('0SEND_F0'): no action before it makes this"),
        ("0F0,0SEND_F0,0SEND_F0\n1RECV_F0,1F0", "row 1, cell 3 ('0SEND_F0'): sent a second time"),
        ("0F0,0SEND_F0\n1RECV_F0,1RECV_F0,1F0", "row 2, cell 2 ('1RECV_F0'): received a second time"),
        ("0F0,0SEND_F0\n1RECV_F0,1RECV_F1,1F0", "row 2, cell 2 ('1RECV_F1'): no action after it uses this"),
        ("0F0,1RECV_F0,1F0", "row 1, cell 2 ('1RECV_F0'): no action after it uses this"),
    ],
)  # fmt: skip
def test_invalid_schedules_raise_with_row_and_cell(text, message):
    with pytest.raises(ScheduleError) as error:
        parse_csv(text)
    assert message in str(error.value)
    assert len(str(error.value)) < 300
    assert "\n" not in str(error.value)


def test_files_are_bounded_and_named(tmp_path):
    file = tmp_path / "large.csv"
    file.write_text("0F0,0B0," * 100)
    with pytest.raises(ScheduleError, match=r"large.csv has more than 100 bytes"):
        read_csv(file, max_bytes=100)
    file.write_bytes(b"0F0,\xff")
    with pytest.raises(ScheduleError, match=r"large.csv is not text: byte 4 is not UTF-8"):
        read_csv(file)
    file.write_text("0F0,0Q0")
    with pytest.raises(ScheduleError, match=r"large.csv: row 1, cell 2"):
        read_csv(file)
    file.write_text("\n" * 20000)
    with pytest.raises(ScheduleError, match="more than 16384 rows"):
        read_csv(file)
    with pytest.raises(FileNotFoundError):
        read_csv(tmp_path / "none.csv")


def test_random_files_are_read_or_refused():
    texts = [format_csv(build(name), communication=True) for name in SCHEDULES]

    odd = ["", "\x00", '"', ",", "\n", ";", "9" * 30, "W", "\u0665", "\r"]

    def case(rng: random.Random) -> None:
        text = list(rng.choice(texts))
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(text))
            text[at : at + rng.randint(0, 8)] = rng.choice(odd)
        verify(parse_csv("".join(text)))

    fuzz(case, 300, ScheduleError)


def test_unshard_cannot_be_written_where_torch_refuses_it():
    with pytest.raises(ScheduleError, match="has 0UNSHARD, which takes the format with communication"):
        format_csv(add_unshard_actions(build("1f1b")))


def test_a_schedule_that_deadlocks_has_no_order_of_messages():
    backward = PipelineOperation.BACKWARD
    made = build_schedule("1f1b", 2, 1)
    last = tuple(action for action in made.ranks[0] if action.operation is backward)
    broken = PipelineSchedule("bad", made.stage_ranks, 1, ((*last, *made.ranks[0][:1]), made.ranks[1]))
    with pytest.raises(ScheduleError, match="bad deadlocks"):
        format_csv(broken, communication=True)

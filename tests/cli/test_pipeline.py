# SPDX-License-Identifier: Apache-2.0
"""`stretto pipeline`: what it draws, writes and refuses."""

import json
import os

import pytest
from typer.testing import CliRunner

from stretto.cli import app
from stretto.cli.pipeline import draw_characters
from stretto.schedules import (
    StageCosts,
    StageLinks,
    add_unshard_actions,
    build_schedule,
    read_csv,
    simulate,
    simulate_message_driven,
    write_csv,
)


def pipeline(*arguments):
    """The exit status, and what was printed on either stream."""
    result = CliRunner().invoke(app, ["pipeline", *map(str, arguments)], env={"COLUMNS": "120"})
    return result.exit_code, result.output


def drawn(schedule, width, **costs):
    timeline = simulate(schedule, StageCosts.uniform(schedule.stages, **costs))
    return [line.split(maxsplit=2)[2] for line in draw_characters(timeline, width)[:-1]]


def test_the_drawing_has_a_column_for_each_slice_of_time():
    assert drawn(build_schedule("1f1b", 2, 3), 80) == [
        "F0-F1-......B0----F2-B1----...B2----",
        "...F0-B0----F1-B1----F2-B2----......",
    ]


def test_without_room_for_numbers_the_drawing_has_letters():
    assert drawn(build_schedule("1f1b", 2, 10), 60) == [
        "FF..B-FB-FB-FB-FB-FB-FB-FB-FB-.B-",
        ".FB-FB-FB-FB-FB-FB-FB-FB-FB-FB-..",
    ]
    assert drawn(build_schedule("zb-v", 2, 3), 40, forward=3)[1].startswith("...F0-f0-F1-f1-iwF2-")


def test_a_long_timeline_is_drawn_as_wide_as_the_terminal():
    lines = drawn(build_schedule("1f1b", 4, 400), 100)
    assert len({len(line) for line in lines}) == 1
    assert len(lines[0]) == 100 - len("rank 0  ")
    assert set(lines[0]) <= set("FB.-")


def test_show_prints_what_the_model_predicts():
    status, text = pipeline("show", "zb-v", "--pipe", 4, "--micro-batches", 8)
    assert status == 0
    for words in ("4 ranks, 8 stages, 8 micro-batches", "makespan                        51", "3 on each", "8 on each"):
        assert words in text
    assert "of it between first and last    0 on each" in text
    assert "waiting for all ranks adds      3, as clipping over all stages does" in text


def test_show_as_json_has_every_action_with_its_times():
    status, text = pipeline("show", "1f1b", "--pipe", 3, "--micro-batches", 5, "--json")
    shown = json.loads(text)
    assert status == 0
    assert (shown["makespan"], shown["idle"]) == (21, [6, 6, 6])
    assert shown["live_micro_batches"] == {"ranks": [3, 2, 1], "stages": [3, 2, 1]}
    assert shown["ranks"][2][:2] == [["2F0", 2.0, 3.0], ["2B0", 3.0, 5.0]]


def test_message_driven_order_is_shown_with_its_options(tmp_path):
    options = ("--limit", 16, "--latency", 0.25, "--serve-first", "backward", "--csv", tmp_path / "order.csv")
    status, text = pipeline("show", "message-driven", "--pipe", 8, "--micro-batches", 64, *options)
    assert (status, "makespan                        216.5" in text) == (0, True), text
    assert read_csv(tmp_path / "order.csv").micro_batches == 64
    assert pipeline("verify", tmp_path / "order.csv", "--max-live", 16)[0] == 0


def test_options_are_those_of_the_model():
    options = ["--forward", 3, "--backward-input", 4, "--backward-weight", 2, "--transmission", 1, "--json"]
    schedule = build_schedule("1f1b", 3, 6, extra_warm_up=2)
    _, text = pipeline("show", "1f1b", "--pipe", 3, "--micro-batches", 6, "--extra-warm-up", 2, *options)
    expected = simulate(schedule, StageCosts.uniform(3, 3, 4, 2), StageLinks(0, 1))
    assert json.loads(text)["makespan"] == expected.makespan
    jittered = ["show", "1f1b", "--pipe", 3, "--micro-batches", 6, "--jitter", 0.2, "--json", "--seed"]
    assert pipeline(*jittered, 1)[1] == pipeline(*jittered, 1)[1] != pipeline(*jittered, 2)[1]


@pytest.mark.long
@pytest.mark.parametrize("gathers", [False, True])
def test_a_written_schedule_is_shown_and_verified_again(tmp_path, gathers):
    schedule = build_schedule("interleaved", 2, 4)
    write_csv(add_unshard_actions(schedule) if gathers else schedule, tmp_path / "a.csv", communication=gathers)
    status, text = pipeline("show", tmp_path / "a.csv", "--csv", tmp_path / "b.csv", "--out", tmp_path / "a.png")
    assert status == 0, text
    assert (tmp_path / "a.csv").read_text() == (tmp_path / "b.csv").read_text()
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    status, text = pipeline("verify", tmp_path / "b.csv", "--pipe", 2, "--micro-batches", 4, "--json")
    assert json.loads(text) == {
        "ok": True, "pipe": 2, "stages": 4, "micro_batches": 4, "buffers_needed": 1,
        "live_micro_batches": {"ranks": [5, 3], "stages": [4, 3, 2, 1]},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["verify", "1f1b", "--pipe", 2, "--micro-batches", 8, "--extra-warm-up", 2, "--buffers", 1], 1, "deadlock"),
        (["verify", "1f1b", "--pipe", 2, "--micro-batches", 8, "--max-live", 1], 1, "max_live is 1"),
        (["verify", "1f1b", "--pipe", 2, "--micro-batches", 8, "--buffers", 0], 2, "buffers is 0"),
        (["verify", "1f1b", "--pipe", 2, "--micro-batches", 8, "--delivery", "any"], 2, "must be one of in_order"),
        (["verify", "message-driven", "--pipe", 2], 2, "has no order to verify before it runs"),
        (
            ["show", "message-driven", "--pipe", 2, "--micro-batches", 4, "--serve-first", "last"],
            2,
            "arrival, backward",
        ),
        (["show", "message-driven", "--pipe", 2, "--micro-batches", 4, "--virtual-stages", 2], 2, "one stage on each"),
        (["show", "1f1b", "--pipe", 2, "--micro-batches", 4, "--jitter", 2], 2, "jitter is 2.0"),
        (["show", "1f1b", "--pipe", 2, "--micro-batches", 4, "--latency", -1], 2, "latency is -1.0"),
        (["show", "1f1b", "--pipe", 64, "--micro-batches", 512, "--out", "a.png"], 2, "too many for a picture"),
    ],
)
def test_invalid_arguments_raise(arguments, status, words):
    for more in ([], ["--json"]):
        found, text = pipeline(*arguments, *more)
        assert (found, words in text) == (status, True), text


def test_a_file_of_other_sizes_is_refused(tmp_path):
    file = tmp_path / "a.csv"
    write_csv(build_schedule("1f1b", 2, 4), file)
    for option, words in (("--micro-batches", "4 micro-batches, but"), ("--virtual-stages", "1 stages on a rank, but")):
        status, text = pipeline("verify", file, option, 3)
        assert (status, words in text) == (2, True), text
    assert "is of 1f1b" in pipeline("verify", file, "--extra-warm-up", 1)[1]


def test_many_ranks_are_summarized():
    text = "\n".join(draw_characters(simulate_message_driven(2, StageCosts.uniform(70)), 100))
    assert "and 6 more ranks" in text


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.csv")
    status, text = pipeline("verify", tmp_path / "pipe.csv")
    assert status == 2
    assert "is not a regular file" in text

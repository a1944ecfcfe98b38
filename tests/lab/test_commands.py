# SPDX-License-Identifier: Apache-2.0
"""What the benches' commands refuse, and what needs no ranks."""

import importlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import pytest
from typer.testing import CliRunner

from stretto.bench.settings import Option
from stretto.cli import app
from stretto.cli.commands import App


def bench(*arguments: object) -> tuple[int, str]:
    """The exit status, and what was printed on either stream."""
    result = CliRunner().invoke(app, ["bench", *(str(argument) for argument in arguments)], env={"COLUMNS": "200"})
    return result.exit_code, result.output


COMMANDS = (
    "train",
    "parity",
    "peers",
    "overlap",
    "plan",
    "schedules",
    "two-level",
    "collectives",
    "ablations",
    "checkouts",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_bench_has_help(command):
    status, text = bench(command, "--help")
    assert (status, "Usage: " in text) == (0, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["overlap", "--ranks", 2], "the grid x=2 z=2 has 4 ranks, but 2 are used"),
        (["peers", "--ranks", 2, "--grids", "z=4"], "the grid z=4 has 4 ranks, but 2 are used"),
        (["peers", "--ranks", 2, "--models", "llama-8b"], "no model is named 'llama-8b'"),
        (["peers", "--ranks", 2, "--batches", "1,two"], "--batches has 'two', but takes whole numbers"),
        (["plan", "--ranks", 2, "--predict", "somewhere.json"], "--predict FILE and --cluster go together"),
        (["plan", "--ranks", 2, "--predictions", "nowhere.json"], "there is no file of predictions at nowhere.json"),
        (["ablations", "--ranks", 2, "--tiles", "many"], "--tiles has 'many'"),
        (["ablations", "--ranks", 2, "--protocol", "LL64"], "there is no protocol 'LL64'"),
        (["ablations", "--ranks", 2, "--step", 1], "by a factor of 1 (at least 2)"),
        (["collectives", "--ranks", 2, "--largest", 16], "sizes go from 1024 (at least 64) to 16"),
        (["collectives", "--ranks", 2, "--dtypes", "fp7"], "there is no dtype 'fp7'"),
        (["collectives", "--ranks", 2, "--only", "allreduce,all"], "there is no collective 'all'"),
        (["compile", "--largest", 1], "more than 1"),
        (["train", "--ranks", 2, "--batch", 0], "batch is 0, but must be at least 1"),
        (["peers", "--ranks", 2, "--rounds", 0], "rounds is 0, but must be at least 1"),
        (["overlap", "--ranks", 4, "--warm-up", -1], "--warm-up is -1, but must be at least 0"),
        (["plan", "--ranks", 2, "--repeats", 0], "repeats is 0, but must be at least 1"),
        (["dlrm", "--ranks", 2, "--batch", 0], "batch is 0, but must be at least 1"),
        (["embedding", "--ranks", 2, "--replays", 0], "replays is 0, but must be at least 1"),
        (["embedding", "--ranks", 2, "--rows", 0], "rows is 0, but must be at least 1"),
        (["embedding", "--ranks", 2, "--studies", "magic"], "there is no study 'magic'"),
        (
            ["embedding", "--ranks", 2, "--skip", "bag"],
            "there is no peer 'bag'; did you mean 'bags'? There are bags",
        ),
        (["embedding", "--ranks", 2, "--cases", "4x2x8x0"], "a case has at least 1 sample, table and row a bag"),
        (["redraw", "nowhere"], "there is no folder nowhere"),
        (["two-level", "--repeats", 0], "repeats is 0, but must be at least 1"),
        (["parity", "--ranks", 0], "parity is shown on 1 rank or more, not 0"),
        (["plan", "--ranks", 2, "--models", "gpt-5b:few"], "the layers in --models has 'few'"),
    ],
)
def test_bad_input_is_refused_before_any_rank_starts(arguments, words):
    status, text = bench(*arguments)
    assert (status, words in text) == (2, True), text


def test_predictions_for_a_preset_are_written_without_a_gpu(tmp_path):
    file = tmp_path / "predictions.json"
    arguments = ["--models", "gpt-5b gpt-10b:16", "--batches", "8,16", "--ranks", 4]
    status, text = bench("plan", "--predict", file, "--cluster", "dgx-h200", *arguments)
    assert status == 0, text
    workloads = {entry["workload"]: entry["grids"] for entry in json.loads(file.read_text())["workloads"]}
    assert set(workloads) == {
        f"{model} layers, batch {batch} x 2048 tokens, 4 ranks"
        for model in ("gpt-5b, 24", "gpt-10b, 16")
        for batch in (8, 16)
    }
    for grids in workloads.values():
        assert len(grids) == 10  # the factorizations of 4 into data, x, y and z
        assert all(row["predicted_milliseconds"] > 0 and row["predicted_gib"] > 0 for row in grids)


@dataclass(frozen=True)
class MadeUpSetting:
    names: Annotated[tuple[str, ...], Option("Names.", "--only")] = ("one", "two")
    sizes: Annotated[tuple[int, ...], Option("Sizes.")] = ()
    fast: Annotated[bool, Option("Whether it is fast.", "--quick/--no-quick")] = False
    seed: Annotated[int, Option("A seed.")] = field(default_factory=lambda: 17)


@pytest.mark.parametrize(
    ("arguments", "setting"),
    [
        ([], MadeUpSetting()),
        (["--only", "three, four", "--sizes", "8 16"], MadeUpSetting(("three", "four"), (8, 16))),
        (["--quick", "--seed", "3"], MadeUpSetting(fast=True, seed=3)),
    ],
)
def test_a_commands_options_are_the_fields_of_its_settings(arguments, setting, monkeypatch, tmp_path):
    commands = importlib.import_module("stretto.cli.bench.command")
    monkeypatch.setattr(commands, "app", made := App())
    monkeypatch.setitem(commands._BENCHES, commands.Needs.NO_GPU, [])
    given = []

    def run(setting: "MadeUpSetting", out: Path) -> list[str]:
        given.append((setting, out))
        return []

    commands.bench_command("made-up", __name__)(run)
    made.callback()(lambda: None)
    result = CliRunner().invoke(made, ["made-up", *arguments, "--out", str(tmp_path), "--json"])
    assert (result.exit_code, json.loads(result.output)) == (0, {"rows": []})
    assert given == [(setting, tmp_path)]


def test_an_empty_list_of_names_is_refused():
    status, text = bench("ops", "--ranks", 2, "--only", "")
    assert (status, "--only is empty" in text) == (2, True), text

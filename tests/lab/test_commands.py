# SPDX-License-Identifier: Apache-2.0
"""Tests of what the benches' commands refuse, and what needs no ranks."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import pytest
from typer.testing import CliRunner

import stretto
from lab.commands import app as lab_app
from stretto.bench.settings import Option
from stretto.cli.bench import app as bench_app
from stretto.cli.settings_command import BenchApp


def bench(*arguments: object) -> tuple[int, str]:
    """The exit status, and what was printed on either stream."""
    app = bench_app if arguments[0] in bench_app.lazy else lab_app
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})
    return result.exit_code, result.output


COMMANDS = ("train", "parity", "overlap", "schedules", "two-level", "collectives")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_bench_has_help(command):
    status, text = bench(command, "--help")
    assert (status, "Usage: " in text) == (0, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["parity", "--ranks", "0"], "0"),
        (["overlap", "--ranks", "2", "--grids", "q=2"], "q"),
        (["layouts", "--file", "nowhere.toml"], "there is no file of layouts nowhere.toml"),
        (["layouts", "--repeats", "0"], "repeats is 0, but must be at least 1"),
        (["compile", "--largest", "4"], "the smallest case has 8 ranks"),
        (["papers", "--only", "gpus"], "there is no part 'gpus'"),
        (["saves", "--hidden", "100"], "hidden is 100, but must be a multiple of 64"),
        (["saves", "--kills", "-1"], "kills is -1, but must be at least 0"),
        (["backend", "--parts", "alnoe"], "did you mean 'alone'"),
        (["muon-curves", "--rates", "x"], "--rates has 'x', which is no number"),
        (["backend", "--ranks", "2"], "this machine has none"),
        (["dlrm", "--tables", "0"], "--tables is 0"),
        (["faults", "--kinds", "kil"], "did you mean 'kill'"),
        (["faults", "--ranks", "3"], "must be one of 2, 4, 8"),
        (["two-level", "--nodes", "1"], "1"),
        (["two-level", "--sizes", "1"], "sizes is 1, but must be at least 2"),
        (["two-level", "--delay", "-1"], "delay is -1.0, but must be at least 0"),
        (["schedules", "--seeds", "0"], "seeds is 0, but must be at least 1"),
        (["blocks", "--ranks", "2", "--models", "unet"], "there is no model 'unet'"),
        (["moe-demo", "--steps", "1"], "1"),
        (["experts", "--layers", "3"], "4 would do"),
        (["flips", "--flips", "0"], "flips is 0, but must be at least 1"),
        (["blocks"], "Without GPUs these run"),
        (["offload", "--layers", "0"], "layers is 0, but must be at least 1"),
        (["memory", "--smallest", "90", "--largest", "60"], "is no range of percents"),
        (["overlap", "--ranks", 2], "the grid x=2 z=2 has 4 ranks, but 2 are used"),
        (["collectives", "--ranks", 2, "--largest", 16], "sizes go from 1024 (at least 64) to 16"),
        (["collectives", "--ranks", 2, "--dtypes", "fp7"], "there is no dtype 'fp7'"),
        (["collectives", "--ranks", 2, "--only", "allreduce,all"], "there is no collective 'all'"),
        (["compile", "--largest", 1], "more than 1"),
        (["train", "--ranks", 2, "--batch", 0], "batch is 0, but must be at least 1"),
        (["train", "--ranks", 2, "--layers", 2**62], "--layers is 4611686018427387904, but must be at most 4,096"),
        (["train", "--ranks", 10**9], "--ranks is 1000000000, but must be at most 1,024"),
        (["train", "--ranks", 2, "--seq-len", 10**9], "--seq-len is 1000000000, but must be at most 16,777,216"),
        (["train", "--ranks", 2, "--repeats", 2**62], "but must be at most 1,000,000"),
        (["overlap", "--ranks", 4, "--warm-up", -1], "--warm-up is -1, but must be at least 0"),
        (["dlrm", "--ranks", 2, "--batch", 0], "batch is 0, but must be at least 1"),
        (["embedding", "--ranks", 2, "--replays", 0], "replays is 0, but must be at least 1"),
        (["embedding", "--ranks", 2, "--rows", 0], "rows is 0, but must be at least 1"),
        (["embedding", "--ranks", 2, "--skip", "bag"], "there is no peer 'bag'; did you mean 'bags'? There are bags"),
        (["embedding", "--ranks", 2, "--cases", "4x2x8x0"], "a case has at least 1 sample, table and row a bag"),
        (["redraw", "nowhere"], "there is no folder nowhere"),
        (["two-level", "--repeats", 0], "repeats is 0, but must be at least 1"),
        (["parity", "--ranks", 0], "--ranks is 0, but must be at least 1"),
    ],
)
def test_bad_input_is_refused_before_any_rank_starts(arguments, words):
    status, text = bench(*arguments)
    assert (status, words in text) == (2, True), text


@pytest.mark.parametrize(
    "arguments", [["train", "--batch", 10**9], ["train", "--layers", 4096], ["embedding", "--rows", 10**9]]
)
def test_a_bench_on_a_cpu_is_refused_where_the_machine_has_no_memory_for_it(arguments: list[object]) -> None:
    status, text = bench(*arguments, "--ranks", 2)
    assert (status, "for the 2 here, but this machine has" in text) == (2, True), text


@pytest.mark.parametrize(("text", "problem"), [('{"rows": [', "Expecting value"), ('{"rows": []}', "has no ")])
def test_redraw_names_a_damaged_result(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "train.json").write_text(text)
    status, output = bench("redraw", tmp_path)
    assert (status, output.count("\n")) == (2, 1), output
    assert f"{tmp_path / 'train.json'} is damaged, and cannot be drawn: {problem}" in output


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
def test_a_commands_options_are_the_fields_of_its_settings(arguments, setting, tmp_path):
    benches = BenchApp("Made up.", str(tmp_path))
    given = []

    def run(setting: "MadeUpSetting", out: Path) -> list[str]:
        given.append((setting, out))
        return []

    benches.command("made-up", __name__)(run)
    result = CliRunner().invoke(benches.app, ["made-up", *arguments, "--out", str(tmp_path), "--json"])
    assert (result.exit_code, json.loads(result.output)) == (0, {"rows": []})
    assert given == [(setting, tmp_path)]


def test_an_empty_list_of_names_is_refused():
    status, text = bench("ops", "--ranks", 2, "--only", "")
    assert (status, "'--only' is empty" in text) == (2, True), text


def test_the_library_imports_nothing_of_the_lab_or_the_tests():
    source = Path(stretto.__file__).parent
    imports = re.compile(r"^\s*(?:from|import) (?:lab|tests)\b", re.MULTILINE)
    assert [path for path in source.rglob("*.py") if imports.search(path.read_text())] == []

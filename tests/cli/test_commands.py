# SPDX-License-Identifier: Apache-2.0
"""Tests of what the commands print and refuse, without starting a run."""

import errno
import io
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from docs.configuration import reference
from tests.cli.answers import walk_commands
from typer.testing import CliRunner

import stretto
from lab.commands import app as lab_app
from stretto.cli import app
from stretto.cli.bench import app as bench_app
from stretto.cli.console import print_any_text
from stretto.huggingface.public_models import PUBLIC_MODELS
from stretto.launch.run_lock import command_lock
from stretto.train.config import TrainConfig, load_config
from stretto.train.preflight import preflight

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "src" / "stretto" / "configs"
RUN = """
out = "{out}"
[model]
layers = 1
hidden = 16
heads = 4
[data]
path = "{data}"
[train]
steps = 2
batch = 4
seq_len = 8
"""


def stretto_command(*arguments: object) -> tuple[int, str]:
    """The exit status, and what was printed on either stream, in one line without a frame."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})
    return result.exit_code, " ".join(re.sub(r"[│╭╮╰╯─]", " ", result.output).split())


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("a text to train on, long enough for a sequence or two" * 20)
    file = tmp_path / "run.toml"
    file.write_text(RUN.format(out=tmp_path / "out", data=tmp_path / "text.txt"))
    return file


def test_help_names_every_command() -> None:
    status, text = stretto_command("--help")
    assert status == 0
    for command in ("train", "demo", "cluster", "export"):
        assert command in text


@pytest.mark.parametrize("command", ["", *walk_commands()])
def test_every_commands_help_fits_80_columns_with_whole_names(command: str) -> None:
    result = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "80"})
    lines = result.output.splitlines()
    assert (result.exit_code, lines[0].startswith("Usage: ")) == (0, True)
    assert max(map(len, lines)) <= 80
    made: Any = walk_commands()[command] if command else typer.main.get_command(app)
    names = [name for each in made.params for name in (*each.opts, *each.secondary_opts) if not each.hidden]
    shown = {word.strip(",") for line in lines for word in line.split()}
    assert {name for name in names if name.startswith("-")} <= shown
    commands = getattr(made, "commands", ())
    assert set(commands) <= {line.split()[0] for line in lines if line.startswith("  ")}
    assert not commands or not [line for line in lines[1:] if line.endswith(("...", "…"))]


def test_help_shows_options_under_the_headings_that_they_name_and_lists_line_by_line() -> None:
    text = CliRunner().invoke(app, ["plan", "--help"], env={"COLUMNS": "80"}).output
    assert re.search(r"^Pipelines:\n  --pipe N\|auto ", text, re.MULTILINE)
    assert re.search(r"^  - stretto plan --model .*\n    --seq-len 2048\n  - stretto plan demo", text, re.MULTILINE)
    assert text.count("\n") < 115


def test_the_version_is_the_packages() -> None:
    assert stretto_command("--version") == (0, f"stretto {stretto.__version__}")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("ranks=4", "ranks is 4, but the grid data=1 x=1 y=1 z=1 has 1"),
        ("train.seq_len=5000", "seq_len"),
        ("model.max_seq_len=4", "train.seq_len is 8, but the model's max_seq_len is 4"),
        ("train.resume=nowhere", "there is no checkpoint at nowhere"),
        ("out=/proc/foo", "out is '/proc/foo', where nothing can be written"),
        ("model.hidden=1000000000000", "model.hidden is 1000000000000, but must be at most 1048576"),
        ("train.batch=2147483647", "a batch of train.batch=2147483647"),
    ],
)
def test_bad_input_is_refused_in_one_message_before_anything_is_made(run_file: Path, override: str, words: str) -> None:
    status, text = stretto_command("train", run_file, "--set", override)
    assert status == 2
    assert words in text
    assert "Traceback" not in text
    assert not (run_file.parent / "out").exists()


def test_a_run_inside_its_data_is_refused_unless_it_is_hidden(run_file: Path) -> None:
    data = run_file.parent / "data"
    data.mkdir()
    (run_file.parent / "text.txt").rename(data / "text.txt")
    for out in (data, data / "runs" / "one"):
        status, text = stretto_command("train", run_file, "--set", f"data.path={data}", "--set", f"out={out}")
        assert (status, f"lies in the folder of data '{data}'" in text) == (2, True)
    assert [path.name for path in data.iterdir()] == ["text.txt"]
    preflight(load_config(run_file, [f"data.path={data}", f"out={data / '.runs'}"]))


def test_a_file_in_the_place_of_the_checkpoints_is_found_before_the_first_of_them(run_file: Path) -> None:
    (run_file.parent / "out").mkdir()
    (run_file.parent / "out" / "checkpoints").touch()
    status, text = stretto_command("train", run_file)
    assert (status, "checkpoints is not a folder" in text) == (2, True)


def test_a_history_that_a_resumed_run_cannot_keep_is_found_before_it_starts(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run_file.parent / "out").mkdir()
    (run_file.parent / "out" / "metrics.jsonl").write_bytes(b'[]\n{"st')
    monkeypatch.setattr("stretto.train.gpt.preflight.find_checkpoint", lambda out, resume: out)
    monkeypatch.setattr("stretto.train.gpt.preflight.read_index", lambda path: SimpleNamespace(step=1))
    monkeypatch.setattr("stretto.train.gpt.preflight.check_description", lambda *_: None)
    monkeypatch.setattr("stretto.train.gpt.preflight.fit_to_model", lambda *_: None)
    monkeypatch.setattr("stretto.train.checkpoint.state.check_shapes", lambda *_: None)
    status, text = stretto_command("train", run_file, "--set", "train.resume=latest")
    assert (status, "metrics.jsonl: line 1 is no step" in text) == (2, True)


def fail_to_train(config: TrainConfig, **options: str) -> None:
    raise RuntimeError("no luck\nat all")


def test_a_failure_of_one_rank_is_reported_like_that_of_several_and_keeps_nothing_of_an_earlier_one(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = run_file.parent / "out"
    out.mkdir()
    for earlier in ("summary.md", "loss.png", "rank-3-error.txt"):
        (out / earlier).touch()
    monkeypatch.setattr("stretto.cli.running.train", fail_to_train)
    result = CliRunner().invoke(app, ["train", str(run_file), "--json"])
    assert result.exit_code == 1
    message = "rank 0 of 1 failed: RuntimeError: no luck\nthere is no checkpoint to continue from"
    assert json.loads(result.stdout)["error"].startswith(message)
    assert f"stretto: {message}" in result.stderr
    assert "Traceback" not in result.output
    assert {path.name for path in out.iterdir()} == {"config.toml", "rank-0-error.txt"}


def test_a_second_run_in_one_folder_is_refused_and_changes_nothing(run_file: Path) -> None:
    out = run_file.parent / "out"
    with command_lock(out):
        status, text = stretto_command("train", run_file)
        assert (status, "where a run is going on" in text) == (2, True)
    assert not out.exists()


def test_a_full_disk_leaves_an_earlier_runs_configuration_as_it_was(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = run_file.parent / "out"
    out.mkdir()
    (out / "config.toml").write_text("earlier")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    status, text = stretto_command("train", run_file)
    assert (status, f"out is '{out}', where nothing can be written: No space left" in text) == (2, True)
    assert [path.name for path in out.iterdir()] == ["config.toml"]
    assert (out / "config.toml").read_text() == "earlier"


def test_a_size_of_files_that_is_no_number_is_refused(tmp_path: Path) -> None:
    status, text = stretto_command("export", tmp_path, "--to", "a.safetensors", "--max-file-gigabytes", "inf")
    assert (status, "'--max-file-gigabytes' is inf, but must be a finite number" in text) == (2, True)


def test_a_name_that_the_terminal_cannot_show_is_shown_in_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", screen)
    print_any_text()
    print("see ü", flush=True)
    assert screen.buffer.getvalue() == b"see \\xfc\n"


def test_another_number_of_ranks_than_torchrun_started_is_refused(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    status, text = stretto_command("train", run_file)
    assert (status, "ranks is 1, but torchrun started 2; ranks=2 would do" in text) == (2, True)
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    status, text = stretto_command("train", run_file)
    assert (status, "MASTER_ADDR is ''" in text) == (2, True)


def test_with_json_an_error_is_json_too(run_file: Path) -> None:
    result = CliRunner().invoke(app, ["train", str(run_file), "--set", "train.steps=0", "--json"])
    assert result.exit_code == 2
    assert "train.steps is 0" in json.loads(result.output.splitlines()[-1])["error"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("train", "--ranks", "-1"), "--ranks is -1, but must be at least 1"),
        (("grouped", "--tokens", "few"), "--tokens has 'few', but takes whole numbers, at least 1"),
        (("collectives", "--ranks", "99"), "takes 2 GPUs or more, one a rank"),
        (("ops", "--ranks", "99"), "takes 2 GPUs or more, one a rank"),
        (("embedding", "--dtype", "int8"), "--dtype is float32, float16 or bfloat16, not 'int8'"),
        (("dlrm", "--tables", "0"), "--tables is 0, but must be at least 1"),
    ],
)
def test_a_bench_refuses_what_it_cannot_measure_in_json_too(arguments: tuple[str, ...], words: str) -> None:
    benches = bench_app if arguments[0] in bench_app.lazy else lab_app
    result = CliRunner().invoke(benches, [*arguments, "--json"])
    assert result.exit_code == 2
    assert words in json.loads(result.output.splitlines()[-1])["error"]


def test_clusters_are_shown() -> None:
    assert "A100" in stretto_command("cluster", "show", "perlmutter")[1]
    assert json.loads(stretto_command("cluster", "show", "perlmutter", "--json")[1])["gpus_per_node"] == 4
    assert json.loads(stretto_command("cluster", "detect", "--json")[1])["nodes"] == 1


def test_a_cluster_file_is_shown(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('name = "mine"\ngpus_per_node = 4\n[gpu]\nname = "NVIDIA H200"\n')
    assert "mine" in stretto_command("cluster", "show", file)[1]


def test_the_demos_configuration_runs_on_the_grid_of_the_readme() -> None:
    overrides = ["ranks=4", "grid.x=2", "grid.z=2", "train.steps=5", "out=somewhere"]
    config = load_config(CONFIGS / "demo.toml", overrides)
    assert (config.ranks, config.train.steps, config.out) == (4, 5, Path("somewhere"))


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.toml")), ids=lambda file: file.name)
def test_every_example_configuration_can_be_read_as_each_of_its_own_commands_sets_it(file: Path) -> None:
    header = file.read_text().partition("\n\n")[0].replace("\\\n#", " ")
    commands = re.findall(r"stretto train \S+\.toml(.*)", header)
    assert commands
    for options in commands:
        assert load_config(file, re.findall(r"--set (\S+)", options)).train.steps > 0


def test_the_page_on_configuration_is_current() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == reference(), (
        "options have changed: python docs/configuration.py"
    )


def test_init_writes_a_configuration_with_its_comments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert stretto_command("init", "moe")[0] == 0
    assert stretto_command("init", "llama", "mine.toml", "--json") == (0, '{"file": "mine.toml"}')
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.toml", "moe.toml"]
    assert (tmp_path / "moe.toml").read_bytes() == (CONFIGS / "moe.toml").read_bytes()
    assert load_config(tmp_path / "mine.toml") == load_config(CONFIGS / "llama.toml")
    assert stretto_command("init", "qwen3-8b")[0] == 0
    config = load_config(tmp_path / "qwen3-8b.toml")
    assert (config.model.name, config.out) == ("qwen3-8b", Path("runs/qwen3-8b"))
    assert stretto_command("init", "gpt2-xl")[0] == 0
    assert load_config(tmp_path / "gpt2-xl.toml").train.seq_len == 1024  # as many positions as it has
    status, text = stretto_command("plan", "qwen3-8b.toml", "--cluster", "dgx-h200", "--gpus", 8, "--json")
    assert (status, json.loads(text)[0]["fits"]) == (0, True)


def test_init_lists_the_configurations() -> None:
    names = sorted({path.stem for path in CONFIGS.glob("*.toml")} - {"public"} | set(PUBLIC_MODELS))
    listed = json.loads(stretto_command("init", "--json")[1])["configurations"]
    assert list(listed) == names
    status, text = stretto_command("init", "lama")
    assert (status, text) == (
        2,
        f"stretto: there is no configuration 'lama'; did you mean 'llama'? There are {', '.join(names)}",
    )


def test_init_overwrites_nothing_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "moe.toml").write_text("mine")
    status, text = stretto_command("init", "moe", tmp_path / "moe.toml")
    assert (status, "exists already" in text) == (2, True)
    assert (tmp_path / "moe.toml").read_text() == "mine"
    assert "is not a folder" in stretto_command("init", "moe", tmp_path / "none" / "moe.toml")[1]

    def link_on_a_full_disk(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "link", link_on_a_full_disk)
    status, text = stretto_command("init", "moe", tmp_path / "other.toml")
    assert (status, "other.toml cannot be written: No space left on device" in text) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["moe.toml"]

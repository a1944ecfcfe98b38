# SPDX-License-Identifier: Apache-2.0
"""`stretto train` from the first step to the last, with real ranks."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from safetensors import safe_open
from tests.cli.commands import children, finish, start, wait_for_step
from typer.testing import CliRunner

from stretto.cli import app

CONFIG = """
ranks = 2
[grid]
x = 2
[model]
layers = 1
hidden = 16
heads = 2
[data]
path = "{data}"
[train]
steps = 3
batch = 4
seq_len = 8
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text("a text to train on, long enough for many sequences" * 100)
    (folder / "run.toml").write_text(f'out = "{folder / "out"}"\n' + CONFIG.format(data=folder / "text.txt"))
    return folder / "run.toml"


@pytest.fixture(scope="module")
def finished(config: Path) -> tuple[Path, dict[str, object]]:
    """A run of two ranks that has ended, and what --json printed."""
    status, output, errors = finish(start("train", config, "--json"))
    assert status == 0, errors
    (line,) = output.splitlines()
    return config.parent / "out", json.loads(line)


@pytest.mark.long
def test_a_run_leaves_everything_in_its_folder(finished: tuple[Path, dict[str, object]]) -> None:
    out, result = finished
    for name in ("config.toml", "metrics.jsonl", "summary.json", "loss.png", "summary.md"):
        assert (out / name).stat().st_size > 0
    assert (result["step"], result["ranks"], result["stopped_by"]) == (3, 2, None)
    assert result["checkpoint"] == str(out / "checkpoints" / "step-00000003")
    assert result["loss"] == json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])["loss"]


def test_a_run_is_exported_under_the_models_names(finished: tuple[Path, dict[str, object]], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["export", str(finished[0]), "--to", str(tmp_path / "model.safetensors")])
    assert result.exit_code == 0
    assert "wrote" in result.output
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        sizes = [file.get_tensor(name).numel() for name in file.keys()]  # noqa: SIM118  (no mapping)
    assert sum(sizes) == finished[1]["parameters"]


@pytest.mark.long
def test_a_rank_that_is_killed_ends_the_job_with_its_name_and_the_last_checkpoint(config: Path, tmp_path: Path) -> None:
    process = start("train", config, "--set", "train.steps=100000", "--set", "train.checkpoint_every=2",
                    "--set", f"out={tmp_path / 'out'}")  # fmt: skip
    wait_for_step(tmp_path / "out", 5, process)
    ranks = children(process)
    os.kill(ranks[1], signal.SIGKILL)
    status, _, errors = finish(process)
    assert status == 1
    assert "rank 1 of 2 failed: it was killed by SIGKILL" in errors
    assert f"the last checkpoint is {tmp_path / 'out' / 'checkpoints' / 'step-0000'}" in errors
    assert "Traceback" not in errors
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]


@pytest.mark.long
def test_ctrl_c_writes_a_checkpoint_that_another_number_of_ranks_continues(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start("train", config, "--set", "train.steps=100000", "--set", f"out={out}", "--json")
    wait_for_step(out, 2, process)
    process.send_signal(signal.SIGINT)
    status, output, errors = finish(process)
    assert status == 130, errors
    stopped = json.loads(output)
    assert stopped["stopped_by"] == "SIGINT"
    assert stopped["checkpoint"] == str(out / "checkpoints" / f"step-{stopped['step']:08d}")

    steps = stopped["step"] + 2
    status, output, errors = finish(
        start("train", out / "config.toml", "--set", "grid={x=1}", "--set", "ranks=1", "--set", f"train.steps={steps}",
              "--set", "train.resume=latest")
    )  # fmt: skip
    assert status == 0, errors
    assert f"after {steps} steps" in output
    assert [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()] == list(
        range(1, steps + 1)
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_truncated", [True, False])
def test_a_damaged_checkpoint_is_mentioned_once_and_the_one_before_is_taken(
    config: Path, tmp_path: Path, is_truncated: bool
) -> None:
    """Truncated, the launcher sees it before any rank starts; with a flipped bit, the ranks do."""
    out = tmp_path / "out"
    options = ("--set", f"out={out}", "--set", "train.checkpoint_every=1", "--set", "train.keep_checkpoints=3")
    status, _, errors = finish(start("train", config, *options))
    assert status == 0, errors
    shard = sorted((out / "checkpoints" / "step-00000003").glob("*.distcp"))[0]
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 4
    shard.write_bytes(content[:-1] if is_truncated else content)
    status, output, errors = finish(start("train", config, *options, "--set", "train.resume=latest"))
    assert status == 0, errors
    assert (output + errors).count("passing over a checkpoint") == 1, errors
    assert shard.name in errors
    assert "Traceback" not in errors
    assert [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]
    assert (out / "checkpoints" / "earlier-run-1" / "step-00000003").is_dir()


@pytest.mark.long
@pytest.mark.parametrize("how", ["removed", "moved"])
def test_a_run_whose_folder_is_gone_saves_what_there_is_and_says_so(config: Path, tmp_path: Path, how: str) -> None:
    out = tmp_path / "out"
    process = start("train", config, "--set", f"out={out}", "--set", "train.steps=100000")
    wait_for_step(out, 3, process)
    out.rename(tmp_path / "moved")
    if how == "removed":
        shutil.rmtree(tmp_path / "moved")
    status, _, errors = finish(process)
    assert status == 1, errors
    assert f"{out} or its config.toml was removed while the run trained: it was stopped after step" in errors
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, steps[-1] + 1))
    assert (out / "config.toml").is_file()
    assert (out / "checkpoints" / f"step-{steps[-1]:08d}").is_dir()


@pytest.mark.long
def test_resuming_where_there_is_nothing_to_resume_is_told(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    status, output, errors = finish(start("train", config, "--set", f"out={out}", "--set", "train.resume=latest"))
    assert status == 0, errors
    assert f"train.resume is 'latest', but {out} has no checkpoint: starts at step 0" in output

# SPDX-License-Identifier: Apache-2.0
"""`stretto tune`: what it would measure, what it refuses, and what it keeps."""

import json
import os
import subprocess
import sys

import pytest
from tests.cli.test_commands import stretto_command


def test_the_list_has_what_this_machine_can_measure_and_says_what_it_cannot(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    status, text = stretto_command("tune", "--ranks", 2, "--list")
    assert status == 0
    for kind in ("collectives", "operators", "experts", "embedding"):
        assert f"{kind} left out: this takes 2 GPUs or more" in text
    assert "gpt-5b 4 x 2048 bf16 on x=2" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "this machine has no GPU: say how many CPU --ranks to use"),
        (["operators", "--list"], "this machine has none"),
        (["embedding", "--ranks", "2"], "this machine has none"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(arguments, words, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    status, text = stretto_command("tune", *arguments)
    assert (status, words in text) == (2, True), text


@pytest.mark.exhaustive
def test_products_are_measured_and_kept(tmp_path):
    command = [
        sys.executable, "-m", "stretto", "tune", "products", "--ranks", "2", "--model", "gpt2-small", "--vocab", "256",
        "--seq-len", "16", "--batch", "2", "--dtype", "fp32", "--json",
    ]  # fmt: skip
    environment = os.environ | {"STRETTO_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    (kept,) = json.loads((tmp_path / "tuning.json").read_text()).values()
    measured = [row for row in found["rows"] if row["seconds"] is not None]
    assert {row["problem"] for row in measured} == {key for key in kept if key.startswith("matmul ")}
    assert all(row["seconds"] == min(kept[row["problem"]]) for row in measured)

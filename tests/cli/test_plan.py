# SPDX-License-Identifier: Apache-2.0
"""Tests of what `stretto plan` prints of plans that differ."""

import pytest
from typer.testing import CliRunner

from stretto.cli import app
from stretto.cli.plan_tables import print_table
from stretto.cluster import Cluster
from stretto.planner import predict


def test_plans_with_several_modes_of_recomputation_are_printed_with_all_of_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Pipelines keep the inputs of every k-th block, where k depends on the stages."""
    cluster = Cluster.preset("perlmutter")
    sizes = {"batch": 8, "seq_len": 512}
    plans = [predict("gpt2-small", cluster, grid={"data": 8}, recompute=mode, **sizes) for mode in ("full", "every:2")]
    print_table(plans, cluster, "full", 2, has_memory=False)
    assert "* with activation checkpointing: every:2, full" in capsys.readouterr().out


def test_explanations_are_wrapped_at_the_terminals_width() -> None:
    arguments = ["--model", "gpt-20b", "--cluster", "perlmutter", "--gpus", "32", "--batch", "64", "--seq-len", "512"]
    printed = CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "80"}).output.splitlines()
    texts = printed[next(number for number, line in enumerate(printed) if line.startswith("fits: ")) :]
    assert len(texts) > 20
    assert max(map(len, texts)) <= 80
    assert any(line.startswith("  2. ") for line in texts)

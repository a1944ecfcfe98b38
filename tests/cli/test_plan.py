# SPDX-License-Identifier: Apache-2.0
"""What `stretto plan` prints of plans that differ."""

import pytest

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

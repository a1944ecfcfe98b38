# SPDX-License-Identifier: Apache-2.0
"""`python -m lab dlrm` measures each implementation in turn."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.lab.workloads import start_on_pool

from lab.training import dlrm
from lab.training.dlrm import DlrmSetting
from stretto.recommendation import pooled_exchange

TINY = DlrmSetting("small", max_rows=50, ranks=2, batch=64, warm_up=1, repeats=2, rounds=2)


def test_both_implementations_are_rows_and_a_missing_kernel_has_a_reason(
    ranks: Callable[[int], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_on_pool(monkeypatch, dlrm, ranks)
    dlrm.BENCH(TINY, tmp_path)
    result = json.loads((tmp_path / "dlrm.json").read_text())
    rows = {row["name"]: row for row in result["rows"]}
    library = rows["library"]
    assert len(library["seconds"]) == 2
    assert library["samples_per_second"] == pytest.approx(64 / min(library["seconds"]))
    assert 0.5 < library["loss"] < 1.2
    assert library["last_loss"] != library["loss"]
    if pooled_exchange._find_operators() is None:
        assert "there is no stretto.ops.embedding_all_to_all here" in rows["kernel"]["error"]
    assert result["setting"]["batch"] == 64
    assert (tmp_path / "dlrm.png").stat().st_size > 1000
    assert (tmp_path / "dlrm.md").stat().st_size > 100


def test_a_batch_that_cannot_be_cut_and_an_unknown_implementation_are_refused() -> None:
    with pytest.raises(ValueError, match="a batch of 64 cannot be cut into 3 parts"):
        replace(TINY, ranks=3)
    with pytest.raises(ValueError, match="there is no implementation 'auto': there are library"):
        replace(TINY, implementations=("auto",))

# SPDX-License-Identifier: Apache-2.0
"""`python -m lab dlrm` measures each implementation in turn, and keeps what it has as it goes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.lab.workloads import start_on_pool

from lab.training import dlrm
from lab.training.dlrm import DlrmWorkload, bench_dlrm
from stretto.recommendation import DLRMConfig, pooled_exchange

TINY = DlrmWorkload(DLRMConfig.preset("small").capped(50), batch=64, warm_up=1, repeats=2, rounds=2)


def test_both_implementations_are_rows_and_a_missing_kernel_has_a_reason(
    ranks: Callable[[int], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_on_pool(monkeypatch, dlrm, ranks)
    written: list[int] = []
    write_result = dlrm.write_result
    monkeypatch.setattr(dlrm, "write_result", lambda *args, **about: written.append(1) or write_result(*args, **about))
    bench_dlrm(TINY, 2, tmp_path)
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


def test_a_batch_that_cannot_be_cut_and_an_unknown_implementation_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a batch of 64 cannot be cut into 3 parts"):
        bench_dlrm(TINY, 3, tmp_path)
    with pytest.raises(ValueError, match="there is no implementation 'auto' to measure"):
        DlrmWorkload(TINY.model, 64, ("auto",))

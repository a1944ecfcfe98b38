# SPDX-License-Identifier: Apache-2.0
from pathlib import Path
from typing import Any

import pytest
from tests.train.test_stored_optimizer import configure, differences, run_all, weights_of

S=["train.sparsity=0.75","train.optimizer_state=device","train.schedule=constant","train.dtype=fp32","train.batch=16"]

def test_e2e(ranks: Any, tmp_path: Path) -> None:
    ranks(1).run(run_all, str(tmp_path), {}, {"whole": S}, timeout=300)
    for k,v in weights_of(tmp_path/"whole").items():
        if "mask" in k or "spars" in k: print(k, v.float().mean())
    ranks(4).run(run_all, str(tmp_path), {"data":2,"z":2}, {"parts": [*S, "train.steps=2"]}, timeout=300)
    ranks(2).run(run_all, str(tmp_path), {"pipe": 2}, {"parts": [*S, "train.resume=latest", "train.optimizer_state=host"]}, timeout=300)
    found = differences(weights_of(tmp_path / "parts"), weights_of(tmp_path / "whole"))
    print(max(found.values(), default=0), found)
    ranks(2).run(run_all, str(tmp_path), {"z": 2}, {"late": [*S, "train.prune_at=2"]}, timeout=300)
    ranks(2).run(run_all, str(tmp_path), {"z": 2}, {"late2": [*S, "train.prune_at=2", "train.steps=2"]}, timeout=300)
    ranks(2).run(run_all, str(tmp_path), {"z": 2}, {"late2": [*S, "train.prune_at=2", "train.resume=latest"]}, timeout=300)
    found = differences(weights_of(tmp_path / "late"), weights_of(tmp_path / "late2"))
    print(max(found.values(), default=0), found)
    ranks(2).run(run_all, str(tmp_path), {"z": 2}, {"eb": [*S, "train.prune_at=1", "train.prune_method=early-bird","train.prune_scope=global","train.lr=1e-5", "train.steps=4"]}, timeout=300)

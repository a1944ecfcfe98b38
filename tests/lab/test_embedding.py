# SPDX-License-Identifier: Apache-2.0
"""The bench of embedding look-ups: what a case is, where tables go, and a run of it all with tiny tables."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is for Linux alone", allow_module_level=True)

from stretto.bench.embedding.run import compare_outputs, place_tables
from stretto.bench.embedding.settings import EmbeddingSetting, LookupShape
from stretto.recommendation.model_config import MLPERF_POOLING, MLPERF_ROWS


def test_cases_are_read_as_they_are_written():
    assert LookupShape.parse("1024x64x256x70") == LookupShape(1024, 64, 256, 70)
    assert LookupShape.parse("mlperf").batch == 65536
    for name in ("8x2x8x3", "mlperf", "mlperf:512"):
        assert str(LookupShape.parse(name)) == name
    for text, words in (("8x2x8", "BATCHxTABLESxDIMxPOOLING or mlperf"), ("8x2x6x1", "a multiple of 4")):
        with pytest.raises(ValueError, match=words):
            LookupShape.parse(text)
    with pytest.raises(ValueError, match="there is no peer 'magic': there are bags"):
        EmbeddingSetting(skip=("magic",))


def test_mlperfs_tables_go_where_the_least_is_looked_up():
    owned = place_tables(MLPERF_ROWS, MLPERF_POOLING, 4)
    loads = sorted(sum(pooling for _, pooling in tables) for tables in owned)
    assert sum(loads) == 214
    assert loads == [38, 38, 38, 100]  # one table is looked up nearly as often as all others
    assert sorted(rows for tables in owned for rows, _ in tables) == sorted(MLPERF_ROWS)


def test_a_peer_of_other_numbers_is_named():
    ours = torch.ones(2, 3)
    others = {"far": ours + 0.1, "missing": ours / 0 * 0, "near": ours + 1e-5, "stretto": ours}
    assert compare_outputs(others) == {"error": "other numbers: far, missing"}


@pytest.mark.exhaustive
def test_a_tiny_run_compares_all_peers_and_writes_what_it_has(tmp_path):
    command = [
        sys.executable, "-m", "stretto", "bench", "embedding", "--ranks", "2", "--cases", "4x2x8x2", "--rows", "9",
        "--out", str(tmp_path),
    ]  # fmt: skip
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads((tmp_path / "embedding.json").read_text())["rows"]
    assert [row["what"] for row in rows] == ["forward", "backward"]
    assert {"bags", "batched", "alone", "exchange", "stretto"} <= rows[0].keys()
    assert "error" not in rows[0]  # all peers' numbers are ours

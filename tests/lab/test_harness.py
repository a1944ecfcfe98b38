# SPDX-License-Identifier: Apache-2.0
"""What all benches have in common: ranks of their own, and an end."""

import tempfile

import pytest

from stretto.bench.harness import run_ranks

pytestmark = pytest.mark.usefixtures("forks_processes")


def test_ranks_give_what_rank_0_returns_and_leave_no_files(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert run_ranks(2, abs, -3) == 3
    assert list(tmp_path.iterdir()) == []

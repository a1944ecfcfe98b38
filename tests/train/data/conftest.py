# SPDX-License-Identifier: Apache-2.0
"""Tests of data keep what Stretto caches in a folder of their own."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("STRETTO_CACHE", str(folder))
    return folder

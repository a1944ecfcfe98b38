# SPDX-License-Identifier: Apache-2.0
"""A run's folder with two checkpoints, and a copy of it to damage."""

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import Ranks
from tests.train import runs


@pytest.fixture(scope="module")
def saved(pool: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with checkpoints of steps 1 and 2, written by one rank."""
    out = tmp_path_factory.mktemp("saved")
    Ranks(pool, 1).run(runs.save_steps, out, [1, 2], 5)
    return out


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """A copy of the run's folder, to damage."""
    return shutil.copytree(saved, tmp_path / "run")


@pytest.fixture
def seed() -> random.Random:
    number = random.randrange(1 << 32)
    print(f"seed {number}")
    return random.Random(number)

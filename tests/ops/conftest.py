# SPDX-License-Identifier: Apache-2.0
"""Ranks whose kernels are interpreted, for programs of this folder."""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
from tests.pool import Pool

# Triton is for Linux alone: elsewhere there is nothing here to test.
collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*.py"]


@pytest.fixture
def interpret(interpreted_pool: Pool) -> Callable[..., list[Any]]:
    """`interpret(ranks, "name", *arguments)` runs a function of tests.ops.programs; its results in rank order."""

    def run(ranks: int, name: str, *arguments: Any, module: str = "programs", timeout: float = 120.0) -> list[Any]:
        return interpreted_pool.run(ranks, _interpret, module, name, arguments, timeout=timeout)

    return run


def _interpret(module: str, name: str, arguments: tuple[Any, ...]) -> Any:
    return getattr(importlib.import_module(f"tests.ops.{module}"), name)(*arguments)

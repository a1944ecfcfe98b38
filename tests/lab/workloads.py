# SPDX-License-Identifier: Apache-2.0
"""Tiny workloads for tests of the benches, and a way to run them on the session's pool."""

from collections.abc import Callable
from typing import Any

import pytest

from stretto.bench.training.settings import TrainingWorkload
from stretto.models import GPTConfig

TINY = GPTConfig(
    layers=2,
    hidden=32,
    heads=4,
    kv_heads=2,
    ffn=48,
    vocab=64,
    max_seq_len=16,
    positions="rotary",
    activation="swiglu",
    norm="rmsnorm",
    bias=False,
    tie_embeddings=False,
)
WORKLOAD = TrainingWorkload(TINY, batch=2, seq_len=16, warm_up=1, repeats=2, rounds=1)


def start_on_pool(monkeypatch: pytest.MonkeyPatch, module: Any, ranks: Callable[[int], Any]) -> list[Any]:
    """Let a bench's jobs run on the pool instead of on processes of their own. Returns a list that fills with calls."""
    calls: list[Any] = []

    def run_ranks(count: int, entry: Callable[..., Any], *args: Any) -> Any:
        calls.append(args)
        return ranks(count).run(entry, *args)[0]

    monkeypatch.setattr(module, "run_ranks", run_ranks)
    return calls

# SPDX-License-Identifier: Apache-2.0
"""Starts ranks that print every thread's traceback and end when they hang."""

import faulthandler
from collections.abc import Callable
from typing import Any

from stretto.bench.harness import run_ranks

SECONDS = 90


def run_watched(ranks: int, entry: Callable[..., Any], *args: Any) -> Any:
    """Run `entry` on ranks as `run_ranks` does; each rank may take 90 seconds."""
    return run_ranks(ranks, _watched, entry, *args)


def _watched(entry: Callable[..., Any], *args: Any) -> Any:
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    try:
        return entry(*args)
    finally:
        faulthandler.cancel_dump_traceback_later()

"""Captured steps whose collectives are NCCL's, in memory that NCCL cannot register."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from stretto.parallel import CapturedStep, Grid
from stretto.parallel.capture import REGISTERS

RANKS = max((n for n in (2, 4) if n <= torch.cuda.device_count()), default=0)


def exchange(taken: Tensor, given: Tensor) -> tuple[Tensor, ...]:
    dist.all_to_all_single(taken, given)
    return (taken,)


def capture_where_segments_grow() -> None:
    device = Grid(data=RANKS, device="cuda").device
    torch.cuda.empty_cache()
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    before = os.environ.pop(REGISTERS, None)
    try:
        given = torch.ones(32 << 20, dtype=torch.bfloat16, device=device)
        taken = torch.empty_like(given)
        step = CapturedStep(partial(exchange, taken, given))
        for _ in range(3):
            step()
        with pytest.raises(RuntimeError, match="set NCCL_GRAPH_REGISTER=0 before the job starts"):
            step()
        step.close()
        del step, given, taken
    finally:
        torch.cuda.empty_cache()
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")
        if before is not None:
            os.environ[REGISTERS] = before


def test_a_graph_whose_replays_would_hang_is_not_captured(run_ranks: Callable[..., list[Any]]) -> None:
    if RANKS == 0:
        pytest.skip("NCCL registers for peers, and there is one GPU at most")
    run_ranks(RANKS, capture_where_segments_grow)

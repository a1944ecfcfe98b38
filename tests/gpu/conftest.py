"""Ranks on GPUs, from one pool of processes: to start ranks takes longer than most tests."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.pool import Pool


@pytest.fixture(scope="session")
def gpu_pool() -> Iterator[Pool]:
    """A process a GPU, up to four, started by the first test that uses them."""
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU on this machine")
    pool = Pool(min(4, torch.cuda.device_count()), backend="cpu:gloo,cuda:nccl")
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def run_ranks(gpu_pool: Pool) -> Callable[..., list[Any]]:
    """`run_ranks(4, function, *arguments)` runs a module's function on 4 ranks, in a process group of their own."""
    return lambda ranks, function, *arguments, timeout=100.0: gpu_pool.run(ranks, function, *arguments, timeout=timeout)

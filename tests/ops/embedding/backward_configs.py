# SPDX-License-Identifier: Apache-2.0
"""Backward passes launched with another config than the default. Only ranks import this: see conftest."""

import contextlib
from collections.abc import Iterator

import torch

from stretto.ops.embedding import backward
from stretto.ops.embedding.backward import BackwardConfig


@contextlib.contextmanager
def push_by_copies() -> Iterator[None]:
    """Inside, copies push gradients, and not a kernel's programs; on all ranks."""
    choose = backward.choose_backward_config

    def choose_copies(block_bytes: int, device: torch.device) -> BackwardConfig:
        return choose(block_bytes, device)._replace(push_programs=0)

    backward.choose_backward_config = choose_copies  # type: ignore[assignment]
    try:
        yield
    finally:
        backward.choose_backward_config = choose

# SPDX-License-Identifier: Apache-2.0
"""Engines of one rank run in pytest's process, whose process group ends with the test."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True, scope="module")
def _end_process_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()

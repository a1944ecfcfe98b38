# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory on GPUs checks its arguments before it touches one."""

import pytest
import torch
import torch.distributed as dist

from stretto.memory import cuda


def allocate_where(refusals, sizes):
    """Rank r has no memory for the reason refusals[r], and allocates sizes[r] bytes; returns its error."""
    rank = dist.get_rank()

    def allocate(total, device):
        if refusals[rank]:
            raise RuntimeError(refusals[rank])
        return torch.zeros(total, dtype=torch.uint8)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(cuda, "_allocate", allocate)
        with pytest.raises(ValueError) as caught:
            cuda.CudaMemory.allocate(sizes[rank], 2, None, 30.0)
    return str(caught.value)


def test_all_ranks_raise_where_one_has_no_memory(ranks):
    errors = ranks(3).run(allocate_where, ["", "CUDA error: out of memory", ""], [64] * 3, timeout=30)
    assert errors == ["rank 1 has no symmetric memory to give: CUDA error: out of memory"] * 3


def test_sizes_that_differ_raise_even_if_one_has_no_memory(ranks):
    errors = ranks(2).run(allocate_where, ["CUDA error: out of memory", ""], [64, 128], timeout=30)
    assert all("64" in message and "128" in message for message in errors)

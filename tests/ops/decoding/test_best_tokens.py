# SPDX-License-Identifier: Apache-2.0
"""The highest of each row's numbers, of which each rank has some columns, and sums of few rows."""

import pytest
import torch
import torch.distributed as dist

from stretto.ops.decoding.best_tokens import find_best, suits_kernels
from stretto.ops.row_sums.kernel import sum_rows

CASES = [(3, 5000, torch.bfloat16), (1, 7, torch.float32), (2, 4099, torch.float16)]


def scores_of(rows, columns, dtype):
    """Few numbers, so that many are the highest."""
    return torch.randint(-3, 4, (rows, columns), generator=torch.Generator().manual_seed(columns)).to(dtype)


def find_on_ranks():
    group, rank, found = dist.group.WORLD, dist.get_rank(), []
    for case in CASES:
        longest = -(-case[1] // group.size())
        here = scores_of(*case)[:, longest * rank : longest * (rank + 1)].contiguous()
        found.append(find_best(here, longest * rank, group).tolist())
    nan, inf = torch.nan, torch.inf
    empty = torch.empty(3, 0) if rank else torch.tensor([[1.0, nan, inf], [1.0, inf, 2.0], [-inf] * 3])
    found.append(find_best(empty, 3 * rank, group).tolist())
    x = torch.full((3, 10), float(rank + 1))
    return found, sum_rows(x, group.group_name)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_first_of_the_highest_is_found_however_ranks_divide_the_columns(interpret, count):
    expected = [scores_of(*case).float().argmax(1).tolist() for case in CASES]
    for found, total in interpret(count, find_on_ranks):
        assert found == [*expected, [-1, 1, -1]]
        assert torch.equal(total, torch.full((3, 10), count * (count + 1) / 2))


def test_what_fp32_cannot_number_takes_no_kernel():
    assert not suits_kernels(torch.zeros(1, 2), 1 << 25)
    assert not suits_kernels(torch.zeros(1, 2, dtype=torch.float64), 2)

# SPDX-License-Identifier: Apache-2.0
"""The exchange by kernels in Triton's interpreter: beside the library's and a loop over tokens, in several processes."""

import pytest
import torch
import torch.distributed as dist
from tests.ops.moe import test_exchange
from tests.ops.moe.test_exchange import CASES, EXACT, Case

BY_KERNEL = {"implementation": "kernel"}


def find_differences(case, spare):
    """Those of rows as many as there are, summed in both ways, and of a fixed number if `spare` is not None."""
    found = [test_exchange.find_differences(case, reduce=how, **BY_KERNEL) for how in ("rank", "choice")]
    if spare is not None:
        most = max(max(test_exchange.count_needed(case)) + spare, 1)
        found.append(test_exchange.find_differences(case, most, **BY_KERNEL))
    return [one for differences in found for one in differences]


@pytest.mark.parametrize(
    ("case", "spare"),
    [
        (CASES["as many tokens each"], 0),
        (CASES["a rank without tokens"], None),
        (CASES["all to the experts of one rank"], None),
        (Case((3, 3, 3), 3, 6), 5),
        (CASES["no tokens at all"], 1),
    ],
    ids=str,
)
def test_output_and_gradients_are_those_of_a_loop_over_tokens(interpret, case, spare):
    found = interpret(case.ranks, find_differences, case, spare)
    assert all(difference < EXACT for differences in found for difference in differences), found

# SPDX-License-Identifier: Apache-2.0
"""Moving averages of weights under the guard of steps."""

from unittest import mock

import pytest
import torch

from stretto.memory import failures
from stretto.optim.averages import move_averages


@pytest.mark.parametrize("failed", [None, torch.tensor([0]), torch.tensor([7])], ids=["no flag", "flag", "failed"])
def test_a_step_that_changes_nothing_leaves_averages_in_bits(failed: torch.Tensor | None) -> None:
    averages = [torch.randn(5), torch.randn(3, 4), torch.randn(())]
    before = [each.clone() for each in averages]
    with mock.patch.object(failures, "find_flag", return_value=failed):
        spoilt = [torch.full_like(each, torch.nan) for each in averages]
        for skip in (torch.tensor(True), torch.tensor([1], dtype=torch.int32)):
            move_averages(averages, spoilt, 0.25, skip)
            assert all(map(torch.equal, averages, before))
        is_failed = failed is not None and bool(failed)
        for skip in (None, torch.tensor(False)):
            weights, before = [torch.randn_like(each) for each in averages], [each.clone() for each in averages]
            move_averages(averages, weights, 0.25, skip)
            for average, weight, old in zip(averages, weights, before, strict=True):
                torch.testing.assert_close(average, old if is_failed else 0.25 * old + 0.75 * weight)

# SPDX-License-Identifier: Apache-2.0
"""Tests of what configurations of `python -m tests.stress` wait for.
A wait too few would only be seen when a copy is slow.
"""

from unittest import mock

import pytest
from tests.stress import primitives


@pytest.mark.parametrize("waits", ["kernel", "each", "all"])
def test_copies_are_awaited_once_for_every_rank(waits):
    case = object.__new__(primitives.CopyCase)
    case._waits, case.channel, case.channels, case.world, case.rank = waits, "channel", 2, 4, 1
    with mock.patch.object(primitives, "tiles") as tiles:
        case._await()
    called = [(name, *arguments[1:]) for name, arguments, _ in tiles.mock_calls]
    assert (
        called
        == {
            "kernel": [],  # its tiles wait
            "each": [("rank_wait", peer * 2 + 1, peer) for peer in (2, 3, 0)],
            "all": [("rank_wait_all", 1, 2)],
        }[waits]
    )

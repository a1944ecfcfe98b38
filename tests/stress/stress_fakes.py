# SPDX-License-Identifier: Apache-2.0
"""Configurations for the tests of stress runs: one that is right, and others that are broken on purpose."""

import time

import torch
from tests.stress.harness.catalogue import Check, Configuration, StressCase


class FakeCase(StressCase):
    """Calls that sum whole numbers; `fault` says what the third call of the last rank does."""

    entries = 4

    def __init__(self, team, fault):
        self._is_faulty = team.rank == team.world - 1
        self._fault = fault
        self._calls = 0

    def call(self, entry):
        self._calls += 1
        expected = torch.arange(5) + entry
        found = expected.clone()
        if self._is_faulty and self._calls == 3:
            match self._fault:
                case "wrong":
                    found[2] += 1
                case "raises":
                    raise RuntimeError("broken on purpose")
                case "hangs":
                    time.sleep(600)
        return [Check(found, expected)]


def list_configurations():
    return [
        Configuration(
            f"fake/{fault}", "fakes", (), "a fake", lambda team, fault=fault: FakeCase(team, fault), takes_groups=False
        )
        for fault in ("right", "wrong", "raises", "hangs")
    ]

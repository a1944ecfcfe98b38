# SPDX-License-Identifier: Apache-2.0
"""Collectives as messages: textbook algorithms on any network, with their closed forms.

Modules: `patterns` (which messages an algorithm sends, round by round), `algorithms` (adds them to an execution graph),
`times` (closed forms, and times in both fidelities).
"""

from stretto.simulator.collectives.algorithms import ALL_ALGORITHMS, add_collective
from stretto.simulator.collectives.patterns import COLLECTIVES
from stretto.simulator.collectives.times import (
    CollectiveOptions,
    CollectiveTime,
    closed_form_seconds,
    simulate_collective,
)

__all__ = [
    "ALL_ALGORITHMS",
    "COLLECTIVES",
    "CollectiveOptions",
    "CollectiveTime",
    "add_collective",
    "closed_form_seconds",
    "simulate_collective",
]

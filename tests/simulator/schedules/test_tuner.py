# SPDX-License-Identifier: Apache-2.0
"""The tuner without a machine: what it tries, and that it finds the fastest."""

import subprocess
import sys

import pytest

from stretto.simulator.network.shapes import fully_connected
from stretto.simulator.schedules import ExecutorCosts, MachineCosts, ProtocolCosts, ScheduleTuner

COSTS = MachineCosts(
    "a machine whose LL has a low latency and whose Simple has a high bandwidth",
    "a test",
    {
        "interpreter": ExecutorCosts(
            1e-6,
            {
                "LL": ProtocolCosts(1e-6, 0.5, 10e9, 1e-6, is_streaming=True),
                "Simple": ProtocolCosts(9e-6, 1.0, 10e9, 1e-6),
            },
            tile_bytes=128 << 10,
            max_blocks=64,
        ),
        "nccl": ExecutorCosts(0.0, {"Simple": ProtocolCosts(0.0, 1.0)}),
    },
    0.0,
    0.0,
)


@pytest.fixture(scope="module")
def tuner() -> ScheduleTuner:
    return ScheduleTuner("allreduce", fully_connected(4, 100e9, 1e-6), COSTS)


def test_small_buffers_go_in_few_steps_by_ll(tuner):
    best, seconds = tuner.tune(256)[0]
    assert (best.algorithm, best.protocol) == ("one-shot-all-reduce", "LL")
    assert seconds < 30e-6


@pytest.mark.long
def test_large_buffers_go_by_simple_and_many_instances(tuner):
    best, _ = tuner.tune(64 << 20)[0]
    assert best.protocol == "Simple"
    assert best.instances > 1
    assert best.algorithm != "one-shot-all-reduce"


def test_candidates_are_sorted_and_leave_the_library_out(tuner):
    found = tuner.tune(1 << 16)
    times = [seconds for _, seconds in found]
    assert times == sorted(times)
    assert {candidate.executor for candidate, _ in found} == {"interpreter"}
    assert {"one-shot-all-reduce", "two-shot-all-reduce", "ring-all-reduce"} <= {each.algorithm for each, _ in found}
    assert max(candidate.channels for candidate, _ in found) > 1


def test_unknown_collectives_and_uneven_nodes_are_refused():
    topology = fully_connected(4, 100e9, 1e-6)
    with pytest.raises(ValueError, match="no algorithm for 'allreduc' is known on 4 ranks; did you mean 'allreduce'"):
        ScheduleTuner("allreduc", topology, COSTS)
    with pytest.raises(ValueError, match="4 ranks are not equally many on 3 nodes"):
        ScheduleTuner("allreduce", topology, COSTS, nodes=3)


@pytest.mark.long
def test_it_imports_no_torch():
    code = "import sys, stretto.simulator.schedules; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"

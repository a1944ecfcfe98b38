# SPDX-License-Identifier: Apache-2.0
"""Chakra traces of traced steps: made by hand with known times, on a GPU and on CPUs."""

from typing import Any

import pytest
from tests.report.test_timeline import cpu_trace, event, gpu_trace, product

from stretto.simulator import EventDrivenNetwork, execute
from stretto.simulator.chakra import NodeTimes, NodeType, trace_graph
from stretto.simulator.network.shapes import fully_connected
from stretto.train.observe.chakra import step_trace
from stretto.train.observe.messages import SentMessage
from stretto.train.observe.timeline import read_timeline


def gather(group: str, start: float, end: float, elements: int | None = 1000) -> dict[str, Any]:
    about: dict[str, Any] = {"Collective name": "_allgather_base", "Process Group Name": group, "dtype": "BFloat16"}
    if elements is not None:
        about["In msg nelems"] = elements
    return event("kernel", "ncclDevKernel_AllGather_RING_LL", start, end, thread=20, **about)


def seconds(trace: Any, bandwidth: float = 1e30, **options: Any) -> float:
    network = EventDrivenNetwork(fully_connected(4, bandwidth, 0.0))
    return execute(trace_graph(trace, **options), network).makespan


def test_a_step_becomes_the_trace_of_every_rank_of_its_grid() -> None:
    # x=2, z=2; a gather over z from 20 to 60 beside a product until 40, for which one from 60 to 90 waits
    timeline = read_timeline(gpu_trace(product(0, 40), gather("9", 20, 60), product(60, 90)))
    trace = step_trace(timeline)
    assert trace.ranks == 4
    assert sorted(trace.groups.values()) == [(0, 1), (0, 2), (1, 3), (2, 3)]
    for rank, nodes in enumerate(trace.nodes):
        (collective,) = [node for node in nodes if node.type == NodeType.COMM_COLL_NODE]
        assert collective.get("comm_type") == 2  # ALL_GATHER
        assert collective.get("comm_size") == 2000
        assert collective.duration_micros == 40_000
        assert trace.group(collective.get("pg_name")) == ((0, 2) if rank % 2 == 0 else (1, 3))
    # As measured; with a network that takes no time, the second product begins at 40 and there are 10 more after it.
    assert seconds(trace, times=NodeTimes(is_replayed=True)) == pytest.approx(0.100)
    assert seconds(trace) == pytest.approx(0.040 + 0.030 + 0.010)
    # 2,000 bytes at 20,000 bytes/s take 100 ms from 20 on.
    assert seconds(trace, bandwidth=2e4) == pytest.approx(0.020 + 0.100 + 0.030 + 0.010)


def test_communication_of_unknown_size_keeps_its_duration() -> None:
    timeline = read_timeline(gpu_trace(product(0, 40), gather("9", 20, 60, elements=None), product(60, 90)))
    trace = step_trace(timeline)
    assert not [node for node in trace.nodes[0] if node.type == NodeType.COMM_COLL_NODE]
    assert seconds(trace, bandwidth=1.0) == pytest.approx(0.100)


def test_a_step_is_chosen_by_its_number() -> None:
    timeline = read_timeline(gpu_trace(product(0, 40), product(50, 70), steps=((0, 50), (50, 90))))
    assert seconds(step_trace(timeline)) == pytest.approx(0.040)
    assert seconds(step_trace(timeline, 4)) == pytest.approx(0.050)
    with pytest.raises(ValueError, match="step 9 was not traced; traced are 4, 5"):
        step_trace(timeline, 9)


def test_a_grid_on_which_ranks_differ_is_refused() -> None:
    content = gpu_trace(product(0, 40))
    content["stretto"] = content["stretto"] | {"grid": {"data": 1, "pipe": 2}}
    with pytest.raises(ValueError, match="pipe=2, whose ranks do different things; pipe=1 would do"):
        step_trace(read_timeline(content))


def test_gloos_work_has_the_shapes_of_the_calls() -> None:
    def call(name: str, start: float, dims: Any, types: Any) -> dict[str, Any]:
        return event("cpu_op", f"c10d::{name}", start, start + 1, **{"Input Dims": dims, "Input type": types})

    content = cpu_trace(
        call("allreduce_", 20, [[[5, 2], [3]], []], ["TensorList", ""]),
        call("allreduce_", 20.5, [[[7]], []], ["TensorList", ""]),  # within the call before it: not another
        event("user_annotation", "gloo:all_reduce", 21, 25, thread=31),
        call("_allgather_base_", 30, [[8, 4], [4, 4]], ["c10::BFloat16", "c10::BFloat16"]),
        event("user_annotation", "gloo:all_gather", 31, 33, thread=33),
        call("_reduce_scatter_base_", 40, [[4, 4], [8, 4]], ["float", "float"]),
        event("user_annotation", "gloo:all_reduce", 41, 44, thread=33),
        event("user_annotation", "gloo:all_gather", 50, 51, thread=33),  # which no call has asked for
    )
    spans = {span.start: span for span in read_timeline(content).spans if span.row in ("x", "z")}
    origin = min(spans)
    sent = {round((start - origin) * 1e3): span.sent for start, span in spans.items()}
    assert sent == {
        0: SentMessage("all_reduce", 13 * 4),
        10: SentMessage("all_gather", 16 * 2),
        20: SentMessage("reduce_scatter", 32 * 4),
        29: None,
    }

# SPDX-License-Identifier: Apache-2.0
"""Execution graphs: what waits for what, streams, exposed communication, and graphs that cannot run."""

import gc

import pytest

from stretto.simulator import ClosedFormNetwork, EventDrivenNetwork, GraphBuilder, execute
from stretto.simulator.network import fully_connected, switch

# A message of 1000 bytes takes 1 us, and latency adds 1 us.
PAIR = fully_connected(2, bandwidth=1e9, latency=1e-6)


def test_operations_begin_when_those_before_them_have_ended():
    builder = GraphBuilder()
    first = builder.compute(0, 3e-6)
    sent = builder.message(0, 1, 1000, after=[first])
    other = builder.compute(1, 1e-6)
    last = builder.compute(1, 2e-6, after=[sent])
    both = builder.join([last, other])
    execution = execute(builder.build(), ClosedFormNetwork(PAIR))
    assert execution.fidelity == "closed-form"
    assert execution.starts == pytest.approx([0, 3e-6, 0, 5e-6, 7e-6])
    assert execution.ends[[first, sent, other, last, both]] == pytest.approx([3e-6, 5e-6, 1e-6, 7e-6, 7e-6])
    assert execution.makespan == pytest.approx(7e-6)


def test_a_stream_runs_its_operations_one_at_a_time_and_streams_run_together():
    builder = GraphBuilder()
    for _ in range(3):
        builder.compute(0, 2e-6)
    builder.compute(0, 5e-6, stream="side")
    builder.compute(1, 1e-6)
    execution = execute(builder.build(), ClosedFormNetwork(PAIR))
    assert execution.ends == pytest.approx([2e-6, 4e-6, 6e-6, 5e-6, 1e-6])
    assert execution.busy(0, "compute") == pytest.approx(6e-6)
    assert execution.busy(0, "side") == pytest.approx(5e-6)
    with pytest.raises(ValueError, match="no stream 'copy'; it has compute, side"):
        execution.busy(0, "copy")


def test_messages_on_a_stream_are_ordered_with_what_else_is_there():
    builder = GraphBuilder()
    builder.message(0, 1, 1000, stream="group")
    builder.message(0, 1, 1000, stream="group")
    builder.message(1, 0, 1000, stream="group", is_ordered=False)
    builder.message(1, 0, 1000, stream="group")
    ends = execute(builder.build(), ClosedFormNetwork(PAIR)).ends
    assert ends == pytest.approx([2e-6, 4e-6, 2e-6, 2e-6])


def test_exposed_communication_is_when_messages_run_and_the_rank_computes_nothing():
    builder = GraphBuilder()
    builder.compute(0, 1.5e-6)
    builder.message(0, 1, 3000)  # until 4 us
    builder.message(1, 0, 1000)  # until 2 us, beneath the other
    execution = execute(builder.build(), EventDrivenNetwork(PAIR))
    assert execution.exposed(0) == pytest.approx(2.5e-6)
    assert execution.exposed(1) == pytest.approx(4e-6)
    assert sum(execution.link_busy) == pytest.approx(4e-6)


def test_a_network_can_run_several_graphs_one_after_another():
    builder = GraphBuilder()
    builder.message(0, 1, 1000)
    graph, network = builder.build(), EventDrivenNetwork(PAIR)
    assert execute(graph, network).makespan == execute(graph, network).makespan == pytest.approx(2e-6)


@pytest.mark.parametrize(
    ("add", "message"),
    [
        (lambda builder: builder.compute(0, -1.0), "has -1.0 s of computation"),
        (lambda builder: builder.compute(0, float("nan")), "has nan s of computation"),
        (lambda builder: builder.message(0, 1, float("inf")), "has inf bytes in a message"),
        (lambda builder: builder.compute(2, 1.0), "is on rank 2, but there are ranks 0 to 1"),
        (lambda builder: builder.compute(-1, 1.0), "is on rank -1"),
        (lambda builder: builder.message(1, 1, 8), "from rank 1 to itself"),
        (lambda builder: builder.compute(0, 1.0, after=[7]), "waits for operation 7, but there are 0"),
        (lambda builder: builder.join([], stream="group"), "needs a rank"),
    ],
)
def test_invalid_operations_raise_when_they_are_added(add, message):
    with pytest.raises(ValueError, match=message):
        add(GraphBuilder(ranks=2))


def test_a_graph_of_more_ranks_than_the_network_has_is_refused():
    builder = GraphBuilder(4)
    with pytest.raises(ValueError, match="has 4 ranks, but the network switch:3 has 3 devices; 4 would do"):
        execute(builder.build(), ClosedFormNetwork(switch(3, 1e9, 0.0)))


def test_garbage_collection_is_as_it_was_after_an_execution():
    assert gc.isenabled()
    execute(GraphBuilder(2).build(), ClosedFormNetwork(PAIR))
    assert gc.isenabled()


def test_an_empty_graph_takes_no_time():
    assert execute(GraphBuilder(2).build(), EventDrivenNetwork(PAIR)).makespan == 0.0

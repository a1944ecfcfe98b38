# SPDX-License-Identifier: Apache-2.0
"""Chakra traces as execution graphs: known times, what cannot be simulated, and graphs that come back as they went."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.simulator import ClosedFormNetwork, EventDrivenNetwork, GraphBuilder, add_collective, execute
from stretto.simulator.chakra import (
    Attribute,
    ChakraNode,
    ChakraTrace,
    CollectiveType,
    NodeTimes,
    NodeType,
    graph_trace,
    read_chakra,
    trace_graph,
    write_chakra,
)
from stretto.simulator.network.shapes import fully_connected, ring

GB = 1e9
LINK = (1 * GB, 1e-6)  # bytes/s, seconds


def attributes(**values):
    return tuple(
        Attribute(name, "string" if isinstance(value, str) else "bool" if isinstance(value, bool) else "int64", value)
        for name, value in values.items()
    )


def compute(id, micros, *after, **values):
    return ChakraNode(
        id,
        f"c{id}",
        NodeType.COMP_NODE,
        data_dependencies=after,
        duration_micros=micros,
        attributes=attributes(**values),
    )


def send(id, target, size, *after, tag=0):
    about = attributes(comm_dst=target, comm_size=size, comm_tag=tag)
    return ChakraNode(id, f"s{id}", NodeType.COMM_SEND_NODE, data_dependencies=after, attributes=about)


def receive(id, source, size, *after, tag=0):
    about = attributes(comm_src=source, comm_size=size, comm_tag=tag)
    return ChakraNode(id, f"r{id}", NodeType.COMM_RECV_NODE, data_dependencies=after, attributes=about)


def collective(id, kind, size, *after, micros=0, **values):
    about = attributes(comm_type=int(kind), comm_size=size, **values)
    return ChakraNode(
        id, f"a{id}", NodeType.COMM_COLL_NODE, data_dependencies=after, duration_micros=micros, attributes=about
    )


def run(trace, network=None, **options):
    network = network or EventDrivenNetwork(fully_connected(max(trace.ranks, 2), *LINK))
    return execute(trace_graph(trace, **options), network)


def seconds(*ranks, network=None, **options):
    return run(ChakraTrace(ranks), network, **options).makespan


def test_computations_of_a_rank_run_one_at_a_time_and_concurrently_with_those_of_the_cpu():
    assert seconds((compute(1, 300), compute(2, 200))) == pytest.approx(500e-6)
    assert seconds((compute(1, 300), compute(2, 200, is_cpu_op=True))) == pytest.approx(300e-6)
    assert seconds((compute(1, 300), compute(2, 200, 1, is_cpu_op=True))) == pytest.approx(500e-6)
    assert seconds((compute(1, 300),), (compute(1, 400),)) == pytest.approx(400e-6)


def test_a_free_computation_does_not_wait_behind_one_that_is_not():
    # Node 1 waits for 2 and 3 on the same stream; by the order of the file it would block it.
    assert seconds((compute(1, 100, 2), compute(2, 300), compute(3, 50))) == pytest.approx(450e-6)


def test_a_receive_ends_when_its_message_has_arrived():
    # 100 us of work, then 50,000 bytes at 1 GB/s and 1 us of latency, then 10 us
    sender = (compute(1, 100), send(2, 1, 50_000, 1))
    receiver = (receive(1, 0, 50_000), compute(2, 10, 1))
    assert seconds(sender, receiver) == pytest.approx(161e-6)


def test_messages_of_one_tag_are_received_in_the_order_in_which_they_are_sent():
    sender = (send(1, 1, 10_000), send(2, 1, 90_000, 1, tag=5), send(3, 1, 20_000, 2))
    receiver = (receive(1, 0, 10_000), receive(2, 0, 20_000), receive(3, 0, 90_000, tag=5), compute(4, 7, 2))
    assert seconds(sender, receiver) == pytest.approx(11e-6 + 91e-6 + 21e-6 + 7e-6)


@pytest.mark.parametrize(
    ("kind", "microseconds"),
    [
        # On a ring of 4 by the ring algorithm: rounds of (b / n) / B + a; comm_size is a rank's input.
        (CollectiveType.ALL_REDUCE, 6 * (10 + 1)),
        (CollectiveType.REDUCE_SCATTER, 3 * (10 + 1)),
        (CollectiveType.ALL_GATHER, 3 * (40 + 1)),
        (CollectiveType.BARRIER, 0),
    ],
)
def test_collectives_take_their_textbook_times(kind, microseconds):
    ranks = [(compute(1, 100), collective(2, kind, 40_000, 1), compute(3, 5, 2)) for _ in range(4)]
    network = EventDrivenNetwork(ring(4, *LINK))
    assert seconds(*ranks, network=network) == pytest.approx((105 + microseconds) * 1e-6)


def test_a_collective_waits_for_all_ranks_of_its_group_and_for_the_one_before_it():
    first = collective(2, CollectiveType.ALL_REDUCE, 20_000, 1, pg_name="7")
    second = collective(3, CollectiveType.ALL_REDUCE, 20_000, pg_name="7")  # depends on nothing
    ranks = ((compute(1, 100), first, second), (compute(1, 400), first, second), (compute(1, 50),))
    trace = ChakraTrace(ranks, {"7": (0, 1)})
    # twice two rounds of 10,000 bytes after 400 us
    assert run(trace, EventDrivenNetwork(fully_connected(3, *LINK))).makespan == pytest.approx(400e-6 + 4 * 11e-6)


def test_work_without_a_duration_takes_the_roofline():
    node = compute(1, 0, num_ops=2_000_000, tensor_size=1000)
    times = NodeTimes(flops=1e9, memory_bandwidth=1e9)
    assert seconds((node,), times=times) == pytest.approx(2e-3)
    memory = ChakraNode(1, "load", NodeType.MEM_LOAD_NODE, attributes=attributes(tensor_size=5000))
    assert seconds((memory,), times=times) == pytest.approx(5e-6)
    with pytest.raises(ValueError, match=r"rank 0's node 1 'c1' has no duration, but 2,000,000 operations: give flops"):
        seconds((node,))
    with pytest.raises(ValueError, match="5,000 bytes: give memory_bandwidth"):
        seconds((memory,))


def test_a_replay_takes_measured_times_and_no_network():
    ranks = [
        (compute(1, 100), collective(2, CollectiveType.ALL_REDUCE, 1 << 30, 1, micros=30), compute(3, 5, 2))
        for _ in range(2)
    ]
    assert seconds(*ranks, times=NodeTimes(is_replayed=True)) == pytest.approx(135e-6)


BROKEN = {
    "a cycle": (
        [(compute(1, 1, 2), compute(2, 1, 3), compute(3, 1, 1))],
        "the trace has a cycle: rank 0's node 1 'c1' waits for rank 0's node 2 'c2' waits for rank 0's node 3 'c3' "
        "waits for rank 0's node 1 'c1'",
    ),
    "ranks that wait for each other": (
        [(receive(1, 1, 8), send(2, 1, 8, 1)), (receive(1, 0, 8), send(2, 0, 8, 1))],
        "the trace has a cycle: rank 0's node 1 'r1' waits for rank 1's node 2 's2' waits for",
    ),
    "a node that waits for itself": ([(compute(1, 1, 1),)], "the trace has a cycle: rank 0's node 1 'c1' waits for"),
    "a receive that nobody sends": (
        [(compute(1, 1),), (receive(7, 0, 8, tag=3),)],
        "rank 1's node 7 'r7' receives from rank 0 with tag 3, but no rank sends it",
    ),
    "a send that nobody receives": (
        [(send(4, 1, 8),), ()],
        "rank 0's node 4 's4' sends to rank 1 with tag 0, but no rank receives it",
    ),
    "sizes that differ": (
        [(send(1, 1, 8),), (receive(1, 0, 9),)],
        "rank 1's node 1 'r1' receives 9 bytes, but rank 0's node 1 's1' sends 8",
    ),
    "a rank that is not there": ([(send(1, 2, 8),), ()], "has comm_dst 2, but the trace has ranks 0 to 1"),
    "a dependency that is not there": (
        [(compute(1, 1, 9),)],
        "rank 0's node 1 'c1' waits for node 9, which rank 0 does",
    ),
    "two nodes of one id": ([(compute(1, 1), compute(1, 2))], "rank 0's node 1 'c1' has the id of another node"),
    "an unknown type": ([(ChakraNode(1, "x", 42),)], "rank 0's node 1 'x' has the unknown type 42; known are 0 to 10"),
    "a type that is not simulated": ([(ChakraNode(1, "x", NodeType.STORAGE_NODE),)], "is a STORAGE_NODE, which is not"),
    "a collective that a rank lacks": (
        [(collective(1, CollectiveType.ALL_REDUCE, 8),), ()],
        "rank 0's node 1 'a1' is collective 1 of group '', of which rank 1 runs 0",
    ),
    "different collectives": (
        [(collective(1, CollectiveType.ALL_REDUCE, 8),), (collective(5, CollectiveType.ALL_TO_ALL, 8),)],
        "rank 1's node 5 'a5' has comm_type 6, but rank 0's node 1 'a1', of the same collective, 0",
    ),
    "a group without ranks": (
        [(collective(1, CollectiveType.ALL_REDUCE, 8, pg_name="3"),), ()],
        "the trace has no group '3'",
    ),
    "an unknown collective": ([(collective(1, 10, 8),), (collective(1, 10, 8),)], "has the unknown comm_type 10"),
    "a collective that is not simulated": (
        [(collective(1, CollectiveType.SCATTER, 8),), (collective(1, CollectiveType.SCATTER, 8),)],
        "is a SCATTER, which is not simulated; simulated are ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BARRIER",
    ),
    "a message without a size": (
        [(ChakraNode(1, "s", NodeType.COMM_SEND_NODE, attributes=attributes(comm_dst=1)),), (receive(1, 0, 8),)],
        "rank 0's node 1 's' has no comm_size, which must be a whole number of at least 0",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_trace_is_refused_in_one_line(what):
    ranks, message = BROKEN[what]
    with pytest.raises(ValueError, match=r"rank|trace") as error:
        seconds(*ranks)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def random_graph(draw):
    """A graph of computation on two streams, messages, joins and a collective, whose dependencies a trace can say."""
    ranks = draw(st.integers(2, 4))
    builder = GraphBuilder(ranks)
    on = {rank: [] for rank in range(ranks)}  # operations that have a node there
    for _ in range(draw(st.integers(1, 12))):
        rank = draw(st.integers(0, ranks - 1))
        after = draw(st.lists(st.sampled_from(on[rank]), max_size=2, unique=True)) if on[rank] else []
        match draw(st.integers(0, 3)):
            case 0 | 1:
                duration = draw(st.integers(0, 5_000_000)) * 1e-9
                stream = draw(st.sampled_from(["compute", "copies"]))
                on[rank].append(builder.compute(rank, duration, stream=stream, after=after, name="gemm"))
            case 2:
                target = (rank + draw(st.integers(1, ranks - 1))) % ranks
                stream = draw(st.sampled_from([None, "sends"]))
                number = builder.message(rank, target, draw(st.integers(0, 10**7)), after=after, stream=stream)
                on[rank].append(number)
                on[target].append(number)
            case _:
                on[rank].append(builder.join(after, rank))
    waits = [on[rank][-1:] for rank in range(ranks)]
    add_collective(builder, "all_reduce", draw(st.sampled_from(["ring", "direct"])), range(ranks), 12_000, after=waits)
    return builder.build()


graphs = st.composite(random_graph)()


def test_messages_and_collectives_are_matched_by_ids_and_not_by_places_in_files():
    step = (
        compute(0, 10),
        collective(1, CollectiveType.ALL_REDUCE, 1000, 0),
        compute(2, 5, 1),
        collective(3, CollectiveType.ALL_REDUCE, 2000, 2),
    )
    sender = (compute(0, 10), send(1, 1, 1000, 0), compute(2, 5, 1), send(3, 1, 1000, 2))
    receiver = (receive(1, 0, 1000), compute(2, 100, 1), receive(3, 0, 1000, 2))
    # Ids may contradict dependencies, which then decide, as in ASTRA-sim: 7, 3, 9, 1.
    renamed = (
        compute(7, 10),
        collective(3, CollectiveType.ALL_REDUCE, 1000, 7),
        compute(9, 5, 3),
        collective(1, CollectiveType.ALL_REDUCE, 2000, 9),
    )
    # On a ring of 2 with 1 GB/s and 1 us: 15 us of work, then twice two rounds of half of the bytes each.
    for ranks, micros in (((step, step), 15 + 2 * 1.5 + 2 * 2), ((renamed, step), 22), ((sender, receiver), 112)):
        for orders in itertools.product([1, -1], repeat=2):
            files = [nodes[::order] for nodes, order in zip(ranks, orders, strict=True)]
            network = EventDrivenNetwork(ring(2, *LINK))
            assert seconds(*files, network=network) == pytest.approx(micros * 1e-6), orders


@settings(max_examples=25, deadline=None, print_blob=True)
@given(graphs, st.randoms(use_true_random=False))
def test_a_graph_takes_the_same_time_after_it_was_a_trace_in_any_order(tmp_path_factory, graph, random):
    network = fully_connected(graph.world, 1 * GB, 700e-9)
    prefix = tmp_path_factory.mktemp("trace") / "graph"
    execution = execute(graph, ClosedFormNetwork(network))
    nodes = graph_trace(graph, execution).nodes
    write_chakra(ChakraTrace(tuple(tuple(random.sample(rank, len(rank))) for rank in nodes)), prefix)
    again = execute(trace_graph(read_chakra(prefix)), ClosedFormNetwork(network))
    assert again.makespan == pytest.approx(execution.makespan, rel=1e-9, abs=2e-12)
    for kind in (0, 1):  # computations and messages
        ends, came_back = (np.sort(each.ends[each.graph.kinds == kind]) for each in (execution, again))
        np.testing.assert_allclose(came_back, ends, rtol=1e-9, atol=2e-12)


def test_a_trace_has_a_node_of_each_computation_and_two_of_each_message():
    builder = GraphBuilder(2)
    first = builder.compute(0, 1.5e-6, name="gemm")
    message = builder.message(0, 1, 1000, after=[first])
    builder.compute(1, 2e-6, after=[message], stream="copies", category="copy")
    trace = graph_trace(builder.build())
    assert [node.type for node in trace.nodes[0]] == [NodeType.COMP_NODE, NodeType.COMM_SEND_NODE]
    assert [node.type for node in trace.nodes[1]] == [NodeType.COMM_RECV_NODE, NodeType.COMP_NODE]
    gemm, sent = trace.nodes[0]
    assert (gemm.name, gemm.duration_micros, gemm.get("duration_ns")) == ("gemm", 2, pytest.approx(1500.0))
    assert sent.data_dependencies == (gemm.id,)
    assert (sent.get("comm_size"), sent.get("comm_dst"), sent.get("is_cpu_op")) == (1000, 1, False)
    received, copy = trace.nodes[1]
    assert received.get("comm_src") == 0
    assert received.get("comm_tag") == sent.get("comm_tag")
    assert copy.data_dependencies == (received.id,)
    assert (copy.get("stretto_stream"), copy.get("stretto_category")) == ("copies", "copy")


def test_unsupported_content_of_a_trace_raises():
    builder = GraphBuilder(2)
    first = builder.compute(0, 1e-6, name="gemm")
    builder.compute(1, 1e-6, after=[first])
    with pytest.raises(ValueError, match=r"operation 1 on rank 1 waits for operation 0 \(gemm\) of another rank"):
        graph_trace(builder.build())

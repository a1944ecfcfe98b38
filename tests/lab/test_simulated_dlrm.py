# SPDX-License-Identifier: Apache-2.0
"""A DLRM's simulated step: times worked out by hand, what is sent, and how fusing bounds the step."""

import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.simulated_dlrm.exchange import MessageExchange
from lab.simulated_dlrm.kernels import H200, MI210, KernelRates, RecommendationStep
from lab.simulated_dlrm.step import simulate_recommendation
from stretto.simulator import EventDrivenNetwork, GraphBuilder, execute
from stretto.simulator.network.shapes import fully_connected, ring, torus

MS = 1e-3
# 2 ranks. A vector has 4 bytes; a rank pools 2,000 of 10 rows; 4,000 bytes go to the other rank.
STEP = RecommendationStep(batch=1000, tables=1, dim=1, pooling=10, layers=3, width=1, bottom_layers=1)
# Look-up 80,000 bytes at 8 MB/s = 10 ms, update 20 ms; a layer 2,000 FLOP at 2 MFLOP/s = 1 ms, its backward pass 2 ms.
RATES = KernelRates(name="round", lookup=8e6, update_factor=2, memory=1e30, flops=2e6, launch=0.0, source="a test")
ROUND = ring(64, 1e9, 0.0)
PAIR = fully_connected(2, 1e6, 0.0)  # 4,000 bytes in 4 ms; an all-reduce of a layer takes microseconds


@pytest.mark.parametrize("fidelity", ["closed-form", "event-driven"])
@pytest.mark.parametrize(
    ("fused", "milliseconds"),
    [
        # look-up 10, exchange 4 beside the bottom MLP's 1, top MLP 2 and 4, exchange 4 beside 2, update 20
        ("none", 10 + 4 + 2 + 4 + 4 + 20),
        # The other rank's half of the look-up is sent while the own half runs, and the bottom MLP comes after them.
        ("forward", 10 + 1 + 2 + 4 + 4 + 20),
        # The update of the own half begins after the bottom MLP's backward pass, and then all slices are there.
        ("both", 10 + 1 + 2 + 4 + 2 + 20),
    ],
)
def test_a_step_of_two_ranks_takes_what_its_timeline_adds_up_to(fused, fidelity, milliseconds):
    found = simulate_recommendation(STEP, RATES, PAIR, fused=fused, fidelity=fidelity, slice_vectors=10)
    assert found.seconds == pytest.approx(milliseconds * MS, abs=0.05 * MS)
    assert found.lookup == pytest.approx(10 * MS)
    assert found.update == pytest.approx(20 * MS)
    assert found.compute == pytest.approx(39 * MS, abs=0.05 * MS)


@pytest.mark.parametrize("fidelity", ["closed-form", "event-driven"])
def test_a_slow_network_hides_the_look_up_behind_the_exchange(fidelity):
    slow = fully_connected(2, 1e5, 0.0)  # an exchange takes 40 ms
    separate, fused = (
        simulate_recommendation(STEP, RATES, slow, fused=fused, fidelity=fidelity, slice_vectors=10)
        for fused in ("none", "forward")
    )
    # Only the first slice's look-up is left of 10 ms: 10 of 1,000 vectors, half a hundredth of 10 ms.
    assert separate.seconds - fused.seconds == pytest.approx(10 * MS, rel=0.02)


def test_table_2_of_the_paper_is_the_default():
    step = RecommendationStep()
    assert (step.dim, step.pooling, step.layers, step.width) == (92, 70, 43, 682)
    assert step.pooled_vectors(128) == 512 * 128 * 4
    assert step.pair_bytes() == 512 * 4 * 92 * 4


def test_an_mi210s_times_are_its_datasheets():
    # 262,144 vectors of 70 rows of 368 bytes at 1.638 TB/s, and 5 us of launch
    assert MI210.lookup_seconds(RecommendationStep(), 128) == pytest.approx(4.1277e-3, rel=1e-4)
    # 2 x 512 x 682^2 FLOP at half of 45.3 TFLOP/s
    assert MI210.layer_seconds(RecommendationStep()) == pytest.approx(5e-6 + 21.03e-6, rel=1e-3)
    # lab/results/embedding: 8,192 x 64 tables x 70 rows of 128 numbers in 3.12 ms, the backward pass in 15.29 - 1.01 ms
    measured = RecommendationStep(batch=2048, tables=64, dim=128)
    assert H200.lookup_seconds(measured, 4) == pytest.approx(3.12e-3, rel=0.01)
    assert H200.update_seconds(measured, 4) == pytest.approx(14.27e-3, rel=0.01)


def test_a_rank_sends_each_other_rank_everything_once_and_no_rank_twice_in_a_row():
    exchange = MessageExchange(torus((2, 3), 1e9, 1e-6), "direct", 4, None)
    for rank in range(6):
        slices = list(exchange.slices(rank))
        totals = Counter()
        for each in slices:
            totals[each.peer] += each.part
        assert totals == {peer: 1.0 for peer in range(6) if peer != rank}
        assert [each.peer for each in slices[:5]] == [(rank + distance) % 6 for distance in range(1, 6)]


def test_by_dimension_stops_in_the_senders_row():
    network = torus((2, 3), 1e9, 1e-6)
    exchange = MessageExchange(network, "by-dimension", 1, None)
    builder = GraphBuilder(6)
    for each in exchange.slices(0):
        exchange.send(builder, 0, each, 600.0, [])
    graph = builder.build()
    assert [(int(a), int(b)) for a, b in zip(graph.ranks, graph.targets, strict=True)] == [
        (0, 1),
        (0, 2),
        (0, 3),
        (0, 1),
        (1, 4),
        (0, 2),
        (2, 5),
    ]


@pytest.mark.parametrize("kind", ["direct", "by-dimension"])
def test_all_links_together_carry_each_vector_over_its_shortest_path(kind):
    network = torus((4, 4), 1e9, 0.0)
    exchange = MessageExchange(network, kind, 2, None)
    hops = sum(min(a, 4 - a) + min(b, 4 - b) for a in range(4) for b in range(4))
    for is_fused in (False, True):
        builder = GraphBuilder(16)
        if is_fused:
            for rank in range(16):
                for each in exchange.slices(rank):
                    exchange.send(builder, rank, each, 1000.0, [])
        else:
            exchange.all_to_all(builder, 1000.0, [builder.join([], rank) for rank in range(16)])
        execution = execute(builder.build(), EventDrivenNetwork(network))
        assert sum(execution.link_busy) == pytest.approx(16 * hops * 1000 / 1e9)


@settings(max_examples=30, deadline=None, print_blob=True)
@given(
    st.sampled_from([torus((2, 4), 25e9, 700e-9), ring(5, 25e9, 1e-6), fully_connected(3, 1e9, 0.0)]),
    st.integers(1, 300),
    st.integers(1, 3),
    st.sampled_from([None, 1, 4, 64]),
    st.sampled_from([MI210, H200]),
)
def test_a_step_takes_at_least_its_computation_and_fusing_costs_little(network, batch, tables, window, rates):
    step = RecommendationStep(batch=batch, tables=tables, layers=4, bottom_layers=2)
    found = {
        fused: simulate_recommendation(step, rates, network, fused=fused, slice_vectors=64, window=window)
        for fused in ("none", "forward", "both")
    }
    for each in found.values():
        assert each.seconds >= each.compute > each.lookup + each.update
        assert each.exposed == pytest.approx(each.seconds - each.compute)
        assert each.compute == pytest.approx(found["none"].compute)
    # With any number of slices under way, a fused pass cannot end later than a separate one by more than its latencies.
    if window is None:
        assert found["forward"].seconds <= found["none"].seconds * 1.05 + 50e-6


def test_a_second_simulation_gives_the_same_times():
    network = torus((2, 4), 25e9, 700e-9)
    first, second = (simulate_recommendation(RecommendationStep(), MI210, network, fused="both") for _ in range(2))
    assert first == second


@pytest.mark.long
def test_the_simulator_needs_no_torch():
    code = "import sys, lab.simulated_dlrm.step, stretto.simulator.chakra; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"

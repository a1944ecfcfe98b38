# SPDX-License-Identifier: Apache-2.0
"""The benches of simulated schedules: cases, fits, contests, the socket executor's topology, and committed results."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from lab.papers.msccl import CLAIMS, list_claims
from lab.papers.msccl import Row as StudyRow
from lab.papers.msccl_peers import (
    DGX1_PAIRS,
    chained_trees_all_reduce,
    direct_sends,
    rotated_rings_all_reduce,
    two_step_exchanges,
)
from lab.simulated_schedules.cases import MeasuredSchedule, read_gpu_cases
from lab.simulated_schedules.choices import ALGORITHMS, predict_choices
from lab.simulated_schedules.fit import SchedulePredictor, fit, get, put
from lab.simulated_schedules.run import START, Row, list_groups, list_winners
from lab.simulated_schedules.sockets import RANKS, RANKS_PER_NODE, list_two_level, socket_topology
from stretto.cluster import Cluster
from stretto.collectives.verifier import verify
from stretto.simulator.network.shapes import switch
from stretto.simulator.schedules import ExecutorCosts, MachineCosts, ProtocolCosts

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "lab" / "results"
COSTS = MachineCosts(
    "test",
    "test",
    {"fused": ExecutorCosts(2e-6, {"LL": ProtocolCosts(1e-6, 0.4, is_streaming=True)}, tile_bytes=None)},
    0.5e-6,
    0.5e-6,
)


def case(num_bytes: int, seconds: float = 1.0, executor: str = "fused") -> MeasuredSchedule:
    return MeasuredSchedule(
        "contest", "two-shot-all-reduce", executor, "LL", (("ranks", 4),), num_bytes, "graph", "bf16", seconds
    )


def test_every_second_size_is_fitted():
    sizes = [1024 << power for power in range(0, 21, 2)]
    assert [case(size).is_fitted for size in sizes] == [True, False] * 5 + [True]
    doubling = [16384 << power for power in range(4)]
    assert [case(size, executor="sockets").is_fitted for size in doubling] == [True, False, True, False]


def test_cases_are_read_from_the_committed_results():
    cases = read_gpu_cases(RESULTS)
    assert {each.executor for each in cases} == {"fused", "copy-engine", "interpreter", "nccl"}
    assert {each.ranks for each in cases} == {2, 4}
    nccl = [each for each in cases if each.contest == "allreduce, 4 ranks, bf16, graph, 1 GB"]
    assert [each.seconds for each in nccl] == [pytest.approx(4535.7e-6, rel=1e-4)]  # Stretto called NCCL there


def test_a_fit_finds_the_costs_that_made_the_times():
    predictor = SchedulePredictor(lambda ranks: switch(ranks, 450e9, 250e-9))
    cases = [replace(one, seconds=predictor.predict(one, COSTS)) for one in (case(1 << n) for n in range(10, 28, 3))]
    parameters = [("fused", "", "launch"), ("fused", "LL", "latency"), ("fused", "LL", "bandwidth_factor")]
    start = put(COSTS, dict(zip(parameters, (4e-6, 0.4e-6, 0.2), strict=True)))
    found = fit(cases, start, parameters, predictor.predict)
    # One call has one launch and two messages' latencies, one upon the other: only their sum shows.
    assert get(found, parameters[0]) + 2 * get(found, parameters[1]) == pytest.approx(4e-6, rel=0.02)
    assert get(found, parameters[2]) == pytest.approx(0.4, rel=0.01)


def test_an_eager_call_takes_at_least_the_hosts_time():
    costs = replace(COSTS, executors={"fused": replace(COSTS.executors["fused"], host_seconds=1e-3)})
    predictor = SchedulePredictor(lambda ranks: switch(ranks, 450e9, 250e-9))
    assert predictor.predict(replace(case(1024), mode="eager"), costs) == 1e-3
    assert predictor.predict(case(1024), costs) < 1e-4


def row(contest: str, measured: float, predicted: float, use: str = "predicted", executor: str = "nccl"):
    error = predicted / measured - 1
    return Row(executor, 2, 1024, "graph", contest, "ring", executor, measured, predicted, error, use)


def test_winners_count_only_where_the_best_two_differ():
    rows = [
        *(row("right, 1 KB", 10, 20), row("right, 1 KB", 11, 21)),
        *(row("wrong, 1 KB", 10, 30), row("wrong, 1 KB", 11, 21)),
        *(row("close, 1 KB", 10, 30), row("close, 1 KB", 10.4, 21)),
        row("alone, 1 KB", 10, 10),
    ]
    (every,) = [group for group in list_winners(rows) if group.group.startswith("all")]
    assert (every.contests, every.right, every.share) == (2, 1, 0.5)


@pytest.mark.long
def test_predictions_for_more_gpus_have_every_collective_and_choose_no_slower_one_than_nccl():
    cases = [case for case in read_gpu_cases(RESULTS) if case.num_bytes == 1024]
    predictor = SchedulePredictor(lambda ranks: START.topology(Cluster.preset("dgx-h200"), ranks))
    rows = predict_choices(cases, 8, predictor, MachineCosts.find("h200"))
    assert [row.collective for row in rows] == list(ALGORITHMS)
    assert all(row.speed == row.nccl / row.microseconds >= 1 for row in rows)
    committed = json.loads((RESULTS / "collectives" / "predictions-collectives-8.json").read_text())["rows"]
    assert [asdict(row) for row in rows] == [row for row in committed if row["bytes"] == 1024]


def test_groups_have_the_median_error_of_both_halves():
    rows = [row("a", 10, 11), row("b", 10, 8), row("c", 10, 13), row("d", 10, 10.5, "fitted")]
    (group, _) = list_groups(rows)
    assert group.others_median == pytest.approx(0.2)
    assert group.others_most == pytest.approx(0.3)
    assert (group.fitted, group.others) == (1, 3)
    assert group.fitted_median == pytest.approx(0.05)


def test_the_topology_of_the_namespaces_is_that_of_their_links():
    topology = socket_topology()
    assert topology.devices == RANKS

    def slowest(source: int, target: int) -> float:
        (route,) = topology.routes(source, target)
        return min(topology.links[link].bandwidth for link in route)

    assert slowest(0, 1) == pytest.approx(25e6, rel=0.01)  # one node
    assert slowest(0, RANKS_PER_NODE) == pytest.approx(6.25e6, rel=0.01)
    shared = set(topology.routes(0, RANKS - 1)[0]) & set(topology.routes(2, RANKS - 2)[0])
    assert any(topology.links[link].bandwidth < 7e6 for link in shared)  # the trunk


def test_two_level_rows_take_the_measured_latencies():
    rows = list(list_two_level(RESULTS))
    assert len(rows) == 48
    assert {each["use"] for each in rows} == {"predicted"}


def test_peers_schedules_are_right():
    rings = rotated_rings_all_reduce.compile(nodes=2, gpus=4, rings=2)
    trees = chained_trees_all_reduce.compile(nodes=2, gpus=3)
    for schedule in (rings, trees):
        found = verify(schedule)
        assert found.ok, found.errors
    # Each ring crosses between the nodes at GPUs of its own, so that each has a NIC to itself.
    crossing = {
        (rank, block.send_peer)
        for rank, program in enumerate(rings.ranks)
        for block in program.thread_blocks
        if block.send_peer is not None and rank // 4 != block.send_peer // 4
    }
    assert len({rank for rank, _ in crossing}) == 4


def test_hand_written_exchanges_send_each_block_once():
    inside, between = two_step_exchanges(3, 4)
    sent = [
        sum(step.size for block in own.thread_blocks for step in block.steps if step.type.sends) for own in inside.ranks
    ]
    assert sent == [3 * 3] * 12  # to 3 peers of the node, a chunk for each of 3 nodes
    sent = [
        sum(step.size for block in own.thread_blocks for step in block.steps if step.type.sends)
        for own in between.ranks
    ]
    assert sent == [2 * 4] * 12  # to 2 peers in other nodes, a chunk from each of 4 GPUs
    assert [len(own.thread_blocks) for own in direct_sends(3, 2).ranks] == [1, 2, 1]


def test_a_v100_of_a_dgx1_has_six_links():
    for gpu in range(8):
        assert sum(count for pair, count in DGX1_PAIRS.items() if gpu in pair) == 6


def test_committed_predictions_are_within_15_percent_and_find_the_winners():
    data = json.loads((RESULTS / "simulated-collectives" / "simulated-collectives.json").read_text())
    rows = [Row(**row) for row in data["rows"]]
    groups, winners = ([asdict(each) for each in found] for found in (list_groups(rows), list_winners(rows)))
    assert groups == data["groups"]
    assert winners == data["winners"]
    machines = [group for group in groups if group["group"].startswith("all")]
    assert len(machines) == 2
    assert all(group["others_median"] < 0.15 for group in machines)
    assert all(group["share"] >= 0.9 for group in winners if group["group"].startswith("all"))


def test_costs_that_ship_are_those_of_the_committed_result():
    assert MachineCosts.find(str(RESULTS / "simulated-collectives" / "h200.json")) == MachineCosts.find("h200")


def test_committed_claims_are_those_of_the_bench():
    data = json.loads((RESULTS / "simulated-msccl" / "simulated-msccl.json").read_text())
    claims = list_claims([StudyRow(**row) for row in data["rows"]])
    assert [asdict(each) for each in claims] == data["claims"]
    assert len(data["claims"]) == len(CLAIMS)

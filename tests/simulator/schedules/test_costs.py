# SPDX-License-Identifier: Apache-2.0
"""Costs of protocols and executors: files, and figures that cannot be."""

import json
from pathlib import Path

import pytest

from stretto.cluster import Cluster
from stretto.simulator.schedules import ExecutorCosts, MachineCosts, ProtocolCosts

COSTS = MachineCosts(
    "some machine",
    "a test",
    {"interpreter": ExecutorCosts(1e-6, {"LL": ProtocolCosts(1e-6, 0.5, is_streaming=True)}, tile_bytes=None)},
    1e-6,
    2e-6,
)


def test_written_files_are_read_back(tmp_path: Path):
    file = tmp_path / "costs.json"
    file.write_text(COSTS.to_json())
    assert MachineCosts.find(str(file)) == COSTS


@pytest.mark.parametrize("name", MachineCosts.known())
def test_costs_that_ship_can_be_read(name):
    costs = MachineCosts.find(name)
    assert costs.source
    assert costs.executor("interpreter").protocols


def test_latencies_that_a_cluster_lacks_are_those_of_the_fit():
    cluster = Cluster.preset("dgx-h200")
    assert cluster.in_node.latency is None
    topology = COSTS.topology(cluster, 8)
    assert sum(topology.links[link].latency for link in topology.routes(0, 1)[0]) == pytest.approx(1e-6)


def broken(change) -> str:
    content = json.loads(COSTS.to_json())
    change(content)
    return json.dumps(content)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "costs.json: costs: Invalid JSON"),
        (broken(lambda all_: all_.pop("source")), "source: Missing required argument|source: Field required"),
        (
            broken(lambda all_: all_["executors"]["interpreter"].update(lunch=1)),
            "executors.interpreter.lunch: Unexpected keyword argument",
        ),
        (
            broken(lambda all_: all_["executors"]["interpreter"].update(launch=-1)),
            "executors.interpreter.launch: .* greater than or equal to 0, not -1",
        ),
        (
            broken(lambda all_: all_["executors"]["interpreter"]["protocols"]["LL"].update(bandwidth_factor=0)),
            "bandwidth_factor: .* greater than 0, not 0",
        ),
        (
            broken(lambda all_: all_["executors"]["interpreter"]["protocols"].update(LL3={})),
            r"should match pattern .*Simple\|LL\|LL128\|Copy.*, not LL3",
        ),
        (broken(lambda all_: all_["executors"]["interpreter"].update(tile_bytes="1")), "tile_bytes: .* valid integer"),
        (broken(lambda all_: all_["executors"]["interpreter"].update(slots=2.5)), "slots: .* valid integer, .*not 2.5"),
        (broken(lambda all_: all_["executors"]["interpreter"].update(launch=10**400)), "launch: .* finite number"),
        (broken(lambda all_: all_.update(link_latency=10**400)), "link_latency: .* finite number"),
        ("[" * 100_000, "costs.json: costs: Invalid JSON"),
    ],
)
def test_bad_files_are_refused_with_their_name(tmp_path: Path, text: str, message: str):
    file = tmp_path / "costs.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        MachineCosts.find(str(file))
    assert str(file) in str(caught.value)


def test_unknown_machines_and_executors_are_named():
    with pytest.raises(ValueError, match="no costs are known of the machine 'h2000': there are h200"):
        MachineCosts.find("h2000")
    with pytest.raises(ValueError, match="no costs are known of the executor 'interpeter'"):
        COSTS.executor("interpeter")

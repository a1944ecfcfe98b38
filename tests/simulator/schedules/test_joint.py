# SPDX-License-Identifier: Apache-2.0
"""Simulated joint schedules against times by hand, and what the command prints of them."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from stretto.cli import app
from stretto.cluster import Cluster
from stretto.collectives.algorithms import find
from stretto.collectives.joint import join, pull
from stretto.report.joint import read_call
from stretto.simulator.network import of_cluster, parse_topology
from stretto.simulator.schedules.joint import Interval, ProductCosts, simulate_joint
from stretto.simulator.schedules.simulate import PACKET_BYTES

# A row takes 2 us to multiply. It has 50 bytes where it is gathered, and 80 in the product.
COSTS = ProductCosts(flops=1e9, memory=1e18, columns=40, depth=25, itemsize=2)


def simulate(operator, name, ranks, rows, bandwidth):
    topology = parse_topology(f"switch:{ranks}", bandwidth=bandwidth, latency=0.0)
    return simulate_joint(join(operator, find(name).compile(ranks=ranks), rows, 4), topology, COSTS)


def test_a_gathers_last_rows_come_before_its_product_needs_them():
    found = simulate("all_gather_matmul", "direct-all-gather", 2, 100, 100e6)
    assert found.product == pytest.approx(400e-6)
    assert found.seconds == pytest.approx(400e-6, rel=1e-3)
    assert [(one.rank, one.number) for one in sorted(found.tiles, key=lambda one: one.start)][:2] == [(0, 0), (1, 1)]


def test_the_last_chunk_of_a_sum_travels_behind_its_product():
    found = simulate("matmul_reduce_scatter", "ring-reduce-scatter", 2, 100, 20e6)
    arrival = 50 * 2e-6 + 50 * 80 / 20e6  # the peer's chunk is multiplied first, and then sent
    assert found.exposed == pytest.approx(
        arrival - 200e-6, abs=1.01 * PACKET_BYTES / 20e6
    )  # a switch passes packets on


FLUX_ON_PCIE = 0.41, 0.57
"""The least and the largest overlap efficiency that Flux (section 5.1) reports of 8 A100 that PCIe connects."""
INTERLEAVED = (0, 4, 1, 5, 2, 6, 3, 7)


def overlap_on_pcie(operator, algorithm, m, *, pulls=False, **options):
    """The overlap efficiency (Flux, equation 2) of GPT-3 175B's products (section 5.1) on 8 A100."""
    n, k = (49152 // 8, 12288) if operator == "all_gather_matmul" else (12288, 49152 // 8)
    cluster = Cluster.preset("a100-pcie")
    joint = join(
        operator, find(algorithm).compile(ranks=8, **options), m // 8 if operator == "all_gather_matmul" else m, 128
    )
    costs = ProductCosts.of_gpu(cluster.gpu, n, k)
    together, alone = (
        simulate_joint(pull(joint) if pulls else joint, of_cluster(cluster, 8), each)
        for each in (costs, replace(costs, flops=1e30))
    )
    return 1 - together.exposed / alone.seconds


@pytest.mark.parametrize("m", [1024, 8192])
def test_rings_hide_as_much_over_pcie_as_flux_says_and_other_ways_less(m):
    least, largest = FLUX_ON_PCIE
    for operator, ring, direct in (
        ("all_gather_matmul", "ring-all-gather", "direct-all-gather"),
        ("matmul_reduce_scatter", "ring-reduce-scatter", "direct-reduce-scatter"),
    ):
        found = overlap_on_pcie(operator, ring, m)
        assert least <= found <= largest
        assert overlap_on_pcie(operator, direct, m) < found / 2
        assert overlap_on_pcie(operator, ring, m, order=INTERLEAVED) < found / 2  # each hop crosses
    pulled = overlap_on_pcie("all_gather_matmul", "ring-all-gather", m, pulls=True)
    assert pulled == pytest.approx(overlap_on_pcie("all_gather_matmul", "ring-all-gather", m), abs=0.01)


def test_movers_take_their_part_of_the_product():
    topology = parse_topology("switch:2", bandwidth=1e15, latency=0.0)
    joint = join("all_gather_matmul", find("direct-all-gather").compile(ranks=2), 100, 4)
    slower = ProductCosts(COSTS.flops, COSTS.memory, COSTS.columns, COSTS.depth, movers=0.2)
    assert simulate_joint(joint, topology, slower).seconds == pytest.approx(400e-6 / 0.8, rel=1e-3)


def test_another_number_of_ranks_and_impossible_costs_are_refused():
    joint = join("all_gather_matmul", find("direct-all-gather").compile(ranks=2), 100, 4)
    with pytest.raises(ValueError, match="has 2 ranks, the topology 3 devices"):
        simulate_joint(joint, parse_topology("switch:3", bandwidth=1e9, latency=0.0), COSTS)
    for changes, words in (({"flops": 0.0}, "flops"), ({"movers": 1.0}, "movers"), ({"columns": 0}, "columns")):
        with pytest.raises(ValueError, match=words):
            ProductCosts(**{"flops": 1.0, "memory": 1.0, "columns": 1, "depth": 1} | changes)


def test_the_command_draws_a_schedule_inside_an_operator(tmp_path):
    picture = tmp_path / "joint.svg"
    options = ["--ranks", "4", "--operator", "all_gather_matmul", "--sizes", "1024x512x256", "-o", str(picture)]
    done = CliRunner().invoke(app, ["collective", "show", "ring-all-gather", *options])
    assert done.exit_code == 0, done.output
    assert "ring-all-gather in all_gather_matmul, 1024 x 512 x 256, 4 ranks of dgx-h200" in done.output
    assert "rank 3" in picture.read_text()
    for given, words in (
        (["--operator", "all_gather_matmull"], "takes no schedule"),
        (["--operator", "matmul_all_reduce"], "takes a schedule of an allreduce"),
        (["--operator", "all_gather_matmul", "--sizes", "4x4"], "MxNxK"),
        (["--operator", "all_gather_matmul", "--sizes", "1026x4x4"], "1028 will do"),
        (["--operator", "all_gather_matmul", "--only", "0-1"], "leave it out"),
        (["--operator", "dispatch_grouped_matmul"], "sizes that a call gives"),
        (["--sizes", "8x8x8"], "are of --operator"),
        (["--trace", str(picture)], "are of --operator"),
        (["--operator", "all_gather_matmul", "--trace", str(picture)], "is no trace of torch.profiler"),
        (["--operator", "all_gather_matmul", "--trace", "/dev/zero"], "is not a regular file"),
    ):
        done = CliRunner().invoke(app, ["collective", "show", "ring-all-gather", "--ranks", "4", *given])
        assert done.exit_code == 2
        assert words in done.output


def write_trace(file, mark="all_gather_matmul"):
    """A trace of rank 2: a call that is marked, another one, and one that is marked again, of 90 us."""

    def event(category, name, start, duration, thread=1, **arguments):
        return {"cat": category, "name": name, "ts": start, "dur": duration, "tid": thread, "args": arguments}

    events = [event("user_annotation", mark, start, 10) for start in (0, 200)]
    for correlation, (start, category, name, ran, took) in enumerate(
        (
            (1, "kernel", "joint_gemm", 20, 100),
            (50, "kernel", "joint_gemm", 130, 100),
            (201, "gpu_memcpy", "Memcpy PtoP", 260, 30),
            (202, "kernel", "joint_gemm", 250, 90),
        )
    ):
        events.append(event("cuda_driver", "cuLaunchKernelEx", start, 1, correlation=correlation))
        events.append(event(category, name, ran, took, thread=7, correlation=correlation))
    file.write_text(json.dumps({"traceEvents": [{"name": "process_name"}, *events], "distributedInfo": {"rank": 2}}))


def test_a_call_of_a_gpu_is_laid_beside_the_simulated_one(tmp_path):
    trace, picture = tmp_path / "trace.json", tmp_path / "joint.svg"
    write_trace(trace)
    call = read_call(trace, "all_gather_matmul")
    assert (call.rank, call.seconds) == (2, pytest.approx(90e-6))
    assert call.kernels == (Interval(2, 0, 0.0, pytest.approx(90e-6)),)
    assert call.copies == (Interval(2, 0, pytest.approx(10e-6), pytest.approx(40e-6)),)
    options = ["--ranks", "4", "--operator", "all_gather_matmul", "--sizes", "1024x512x256", "-o", str(picture)]
    done = CliRunner().invoke(app, ["collective", "show", "ring-all-gather", *options, "--trace", str(trace)])
    assert done.exit_code == 0, done.output
    assert "rank 2, traced: 90 us" in done.output
    assert "rank 2, traced" in picture.read_text()
    write_trace(trace, mark="something else")
    with pytest.raises(ValueError, match=r"no kernels of a call that is marked all_gather_matmul: trace `with record"):
        read_call(trace, "all_gather_matmul")

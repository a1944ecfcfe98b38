# SPDX-License-Identifier: Apache-2.0
"""`stretto simulate`: the known answers, tables, and what it refuses."""

import json

import pytest
from typer.testing import CliRunner

from stretto.cli import app


def simulate(arguments):
    """The exit status, and what was printed on either stream."""
    result = CliRunner().invoke(app, ["simulate", *arguments.split()], env={"COLUMNS": "120"})
    return result.exit_code, result.output


def answer(arguments):
    status, output = simulate(f"{arguments} --json")
    assert status == 0, output
    return json.loads(output)


LINKS = "--bandwidth 50GiB/s --latency 500ns"


@pytest.mark.parametrize(
    ("topology", "closed_form", "event_driven"),
    [("ring:16", 21_031, 60_093), ("full:16", 20_031, 20_031), ("switch:16", 20_531, 40_062)],
)
def test_a_message_takes_the_known_times(topology, closed_form, event_driven):
    found = answer(f"message --topology {topology} {LINKS} --bytes 1MiB --src 1 --dst 4")
    assert (found["closed_form_ns"], found["event_driven_ns"]) == (closed_form, event_driven)


def test_a_ring_all_reduce_takes_the_known_time_in_both_fidelities():
    found = answer(f"collective all_reduce --algorithm ring --topology ring:8 {LINKS} --bytes 1MiB")
    assert (found["closed_form_ns"], found["event_driven_ns"]) == (41_180, 41_180)


@pytest.mark.long
def test_a_direct_all_to_all_on_a_torus_waits_for_its_links():
    """512 KiB to each of 127 ranks. Without contention they leave by four links. The links along 16 carry 4 hops a
    message, 254 messages each on average: no order of sending can take less."""
    links = "--topology torus:16x8 --bandwidth 25GiB/s --latency 700ns"
    found = answer(f"collective all_to_all --algorithm direct {links} --bytes 64MiB")
    message = 2**19 / (25 * 2**30) * 1e9
    assert found["closed_form_ns"] == round(127 * message / 4 + 12 * 700)
    assert found["event_driven_ns"] > 254 * message


@pytest.mark.long
def test_packets_and_clusters_can_be_asked_for():
    whole = answer(f"message --topology switch:4 {LINKS} --bytes 1MiB --src 0 --dst 1")
    packets = answer(f"message --topology switch:4 {LINKS} --bytes 1MiB --src 0 --dst 1 --packet-bytes 4KiB")
    assert packets["closed_form_ns"] == whole["closed_form_ns"] < packets["event_driven_ns"] < whole["event_driven_ns"]
    found = answer("collective all_gather --algorithm two-level-ring --cluster perlmutter --gpus 16 --bytes 1MB")
    assert (found["topology"], found["ranks"]) == ("perlmutter:16", 16)
    once = answer("collective all_gather --algorithm ring --cluster perlmutter --gpus 256 --bytes 64MB --symmetry")
    all_of_it = answer("collective all_gather --algorithm ring --cluster perlmutter --gpus 256 --bytes 64MB")
    assert once["event_driven_ns"] == all_of_it["event_driven_ns"]
    assert once["events"] < all_of_it["events"] / 4


def test_a_table_names_both_fidelities():
    status, output = simulate(f"collective all_reduce --topology ring:8 {LINKS} --bytes 1MiB")
    assert status == 0
    assert "all_reduce (ring) of 1MiB among 8 ranks of ring:8" in output
    assert "closed form, no contention" in output
    assert "event-driven, whole messages" in output
    assert output.count("41,180 ns") == 2


def test_a_graph_from_a_file_is_a_topology(tmp_path):
    path = tmp_path / "line.edgelist"
    path.write_text("0 1 1e9 1e-6\n1 2 1e9 1e-6\n")
    found = answer(f"message --topology {path} --bytes 1MB --src 0 --dst 2")
    assert (found["closed_form_ns"], found["event_driven_ns"]) == (1_002_000, 2_002_000)
    path.write_text("0 1 1e9 1e-6\n2 3 1e9 1e-6\n")
    status, output = simulate(f"message --topology {path} --bytes 1MB --src 0 --dst 2")
    assert (status, output.count("\n")) == (2, 1)
    assert "is not connected: no route leads from device 0 to device 2" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (f"message --topology rign:16 {LINKS} --bytes 1MiB --src 0 --dst 1", "did you mean 'ring'"),
        (f"message --topology ring:16 {LINKS} --bytes nan --src 0 --dst 1", "'nan' is not finite"),
        (f"message --topology ring:16 {LINKS} --bytes 1MiB --src 0 --dst 1 --packet-bytes 0", "packets of 0 bytes"),
        (f"message --topology ring:16 --cluster dgx-h100 {LINKS} --bytes 8 --src 0 --dst 1", "both are given"),
        (f"message --topology ring:16 --gpus 4 {LINKS} --bytes 8 --src 0 --dst 1", "--gpus is an option of --cluster"),
        (f"message --cluster dgx-h100 --gpus 8 {LINKS} --bytes 8 --src 0 --dst 1", "a cluster has its own"),
        ("message --topology ring:4 --bytes 8 --src 0 --dst 1", "--bandwidth and --latency"),
        ("message --topology ring:4 --bandwidth 0GB/s --latency 0 --bytes 8 --src 0 --dst 1", "must be more than 0"),
        ("message --topology ring:4 --bandwidth infGB/s --latency 0 --bytes 8 --src 0 --dst 1", "is not finite"),
        ("message --topology ring:4 --bandwidth 1e-9B/s --latency 0 --bytes 8 --src 0 --dst 1", "1 is the least"),
        (f"message --topology ring:4 {LINKS} --bytes 1e300B --src 0 --dst 1", "more than 2^60 bytes"),
        (f"message --topology ring:1 {LINKS} --bytes 8 --src 0 --dst 0", "ring:1 has no other"),
        (f"collective all_to_all --algorithm direct --topology switch:6000 {LINKS} --bytes 8", "35994000 messages"),
        ("message --topology ring:4 --bandwidth 5 --latency 0 --bytes 8 --src 0 --dst 1", "is no bandwidth"),
        ("message --topology ring:4 --bandwidth 1GB/s --latency 5 --bytes 8 --src 0 --dst 1", "is no time"),
        (f"collective all_reduce --algorithm recursive --topology ring:6 {LINKS} --bytes 8", "4 or 8 would do"),
        (f"collective all_reduce --topology ring:4 {LINKS} --bytes 8 --splits 2 --symmetry", "splits share links"),
        (f"collective all_reduce --topology ring:4 {LINKS} --bytes 8 --in-node direct", "are of two-level algorithms"),
        (f"collective all_to_all --topology ring:60000 {LINKS} --bytes 8", "sends 3599940000 messages"),
    ],
)
def test_unsupported_simulations_raise_in_one_line(arguments, message):
    status, output = simulate(arguments)
    assert (status, output.count("\n")) == (2, 1), output
    assert message in output

# SPDX-License-Identifier: Apache-2.0
"""The bench between network namespaces: what it sets up and removes, its delay, and what it predicts and writes."""

import json
import os
import shutil
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.processes import LIMIT
from typer.testing import CliRunner

from lab.commands import app
from lab.two_level import between_nodes, namespaces
from lab.two_level import run as two_level
from lab.two_level.between_nodes import KINDS, BetweenNodesSetting, make_topology, measure_kinds
from lab.two_level.between_nodes_rank import SCHEDULES
from lab.two_level.namespaces import Network, list_leftovers, namespace_of, shaped_network
from lab.two_level.rank import DelayedTransport
from lab.two_level.run import BENCH, TwoLevelSetting, run_processes
from stretto.collectives import verify
from stretto.collectives.two_level import GroupTransport, Message, predict
from stretto.simulator.schedules import ExecutorCosts, ProtocolCosts
from stretto.simulator.schedules.simulate import simulate_schedule

NETWORK = Network(nodes=2, leaf_nodes=1, node_bandwidth=1e6, loopback_bandwidth=2e6, trunk_bandwidth=1e6)
OVERHEADS = {"inside": 1e-3, "between": 2e-3, "library": 1e-3}


def can_make_namespaces() -> bool:
    if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
        return False
    try:
        with shaped_network(NETWORK):
            return True
    except ValueError:
        return False


@pytest.fixture
def network():
    """Two namespaces, or a skipped test where they cannot be made."""
    if not can_make_namespaces():
        pytest.skip("needs root, and a Linux kernel with network namespaces, veth, bridge and tbf")
    with shaped_network(NETWORK):
        yield


@pytest.mark.long
def test_nodes_reach_each_other_over_shaped_links_and_nothing_is_left(network):
    in_node = ["ip", "netns", "exec", namespace_of(0)]
    text = subprocess.run([*in_node, "tc", "qdisc"], capture_output=True, text=True, check=True).stdout
    assert "tbf" in text
    assert "rate 8Mbit" in text  # its own link: 1 MB/s
    assert "rate 16Mbit" in text  # its loopback
    server = (
        "import socket; s = socket.create_server(('10.213.77.2', 4000)); print(flush=True); s.accept()[0].send(b'x')"
    )
    client = "import socket; print(socket.create_connection(('10.213.77.2', 4000), 10).recv(1))"
    with subprocess.Popen(
        ["ip", "netns", "exec", namespace_of(1), "python3", "-c", server], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline()
        output = subprocess.run([*in_node, "python3", "-c", client], capture_output=True, text=True, check=True).stdout
    assert output == "b'x'\n"
    assert len(list_leftovers()) == 2 + 2 + 2 + 2  # namespaces, switches, ports, both ends of the trunk


@pytest.mark.long
def test_nothing_is_left_after_an_error_and_a_killed_runs_rest_is_removed(monkeypatch):
    if not can_make_namespaces():
        pytest.skip("needs root, and a Linux kernel with network namespaces, veth, bridge and tbf")
    with pytest.raises(KeyboardInterrupt):
        with shaped_network(NETWORK):
            raise KeyboardInterrupt
    assert list_leftovers() == []
    subprocess.run(["ip", "netns", "add", namespace_of(0)], check=True)
    subprocess.run(["ip", "link", "add", "strt-leaf0", "type", "bridge"], check=True)
    with shaped_network(NETWORK):
        with pytest.raises(ValueError, match="another process uses Stretto's network namespaces"):
            with shaped_network(NETWORK):
                pass
        assert len(list_leftovers()) == 8  # what another run has is not removed
    assert list_leftovers() == []


def test_a_rank_that_dies_is_named_and_the_others_are_ended(tmp_path):
    file = tmp_path / "pid"
    lives = f"import os, pathlib, sys; pathlib.Path({str(file)!r}).write_text(str(os.getpid())); sys.stdin.read()"
    dies = f"import os, time\nwhile not os.path.exists({str(file)!r}): time.sleep(0.01)\nraise SystemExit(3)"
    with pytest.raises(ValueError, match="rank 1 of the bench died"):
        run_processes([[sys.executable, "-c", program] for program in (lives, dies)], LIMIT)
    with pytest.raises(ProcessLookupError):
        os.kill(int(file.read_text()), 0)


def test_the_answer_is_rank_0s(capfd):
    programs = ("import json; print(json.dumps({'a': 1}))", "print('noise')")
    assert run_processes([[sys.executable, "-c", program] for program in programs], LIMIT) == {"a": 1}
    with pytest.raises(ValueError, match="rank 0 of the bench did not answer within 0 s"):
        run_processes([[sys.executable, "-c", "import time; time.sleep(60)"]], 0.0)


def test_without_root_the_command_raises(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(shutil, "which", lambda name: f"/sbin/{name}")
    result = CliRunner().invoke(app, ["two-level", "--out", str(tmp_path)])
    assert (result.exit_code, "needs root" in result.output) == (2, True), result.output
    monkeypatch.setattr(shutil, "which", lambda name: None)
    result = CliRunner().invoke(app, ["two-level", "--out", str(tmp_path)])
    assert (result.exit_code, "ip and tc not found: install iproute2" in result.output) == (2, True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"nodes": 3}, "3 nodes have no two halves; 4 would do"),
        ({"nodes": 128}, "a network of 128 nodes: 2 to 64 will do"),
        ({"bandwidth": 0}, "node_bandwidth is 0 bytes/s"),
    ],
)
def test_settings_that_cannot_be_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        TwoLevelSetting(**change)


def test_the_model_is_given_the_links_as_they_were_set():
    links = TwoLevelSetting().links(OVERHEADS)
    assert links.latency == pytest.approx(0.042)
    assert (links.node_bandwidth, links.in_node_bandwidth) == (6.25e6, 12.5e6)  # 50 Mbit/s; 200 for two ranks
    assert (links.leaf_nodes, links.oversubscription) == (2, 2.0)


def send_with_delay() -> tuple[float, float, bool]:
    """Seconds until messages with a delay of 0.2 s and with none have come, and whether sending returned before."""
    group = dist.group.WORLD
    transport = DelayedTransport(GroupTransport(group), lambda peer: 0.2 if peer == 1 else 0.0)
    rank = dist.get_rank()
    limit = timedelta(seconds=20)
    dist.barrier()
    begin = time.monotonic()
    if rank == 0:
        data = [torch.full((1000,), number, dtype=torch.uint8) for number in range(3)]
        sends, _ = transport.start([Message(data[0], 1), Message(data[1], 1)], [])
        direct, _ = transport.start([Message(data[2], 2)], [])
        sent = time.monotonic() - begin
        assert all(send.wait(limit) for send in [*sends, *direct])
        return sent, time.monotonic() - begin, True
    found = [torch.empty(1000, dtype=torch.uint8) for _ in range(2 if rank == 1 else 1)]
    _, receives = transport.start([], [Message(data, 0) for data in found])
    assert all(receive.wait(limit) for receive in receives)
    return time.monotonic() - begin, 0.0, [int(data[0]) for data in found] == ([0, 1] if rank == 1 else [2])


def test_a_delayed_message_arrives_later_and_in_order_while_the_sender_continues(ranks):
    (sent, waited, _), (delayed, _, in_order), (_, _, is_whole) = ranks(3).run(send_with_delay)
    assert (in_order, is_whole) == (True, True)
    assert sent < 0.2 <= waited  # starting does not wait; the buffer is in use until the message has left
    assert delayed > 0.15  # after the barrier, which the ranks leave at slightly different times


@pytest.mark.long
def test_tables_have_the_prediction_the_measurement_and_both_crossovers(monkeypatch, tmp_path):
    setting = TwoLevelSetting(sizes=6)
    links = setting.links(OVERHEADS)

    def run(given: TwoLevelSetting) -> dict[str, object]:
        """Measure as a machine would that is as the model says, but 10% slower, and ring 5% more."""
        rows = []
        for collective in ("all_gather", "reduce_scatter"):
            for size in given.shard_bytes:
                seconds = {}
                for name, factor in (("recursive", 1.1), ("ring", 1.15), ("flat", 1.1)):
                    value = factor * predict(collective, name, size, 4, 2, links)
                    seconds[name] = {"median": value, "least": value, "most": value}
                rows.append(
                    {"collective": collective, "shard_bytes": size, "seconds": seconds | {"library": seconds["flat"]}}
                )
        return {"overheads": OVERHEADS, "rows": rows}

    monkeypatch.setattr(two_level, "run_nodes", run)
    monkeypatch.setattr(two_level, "require_namespaces", lambda: None)
    monkeypatch.setattr(two_level, "shaped_network", lambda network: namespaces.contextlib.nullcontext())
    result = BENCH(setting, tmp_path)
    written = json.loads((tmp_path / "two-level.json").read_text())
    assert written["rows"] == result["rows"]
    first = written["rows"][0]
    assert first["recursive_ms"] == pytest.approx(1.1 * first["recursive_model_ms"])
    assert (first["fastest"], first["chosen"], first["chosen_loss"]) == ("recursive", "recursive", 0)
    crossing = written["crossovers"][0]
    # 42 ms = 2 blocks of 2 L / 6.25 MB/s at L = 64 KiB (65,625 bytes); a slower ring wins later
    assert crossing["predicted_kib"] == pytest.approx(65_625 / 1024, rel=0.01)
    assert 1.05 < crossing["ratio"] < 1.5
    assert "| all_gather | recursive, ring |" in (tmp_path / "two-level.md").read_text()
    assert (tmp_path / "two-level.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("kind", "messages", "at_least"), [("all-to-next", (2, 8), 3.4), ("all-to-all", (96, 24), 0.99)]
)
def test_schedules_between_nodes_send_as_many_messages_as_the_papers_say_and_are_as_fast_as_links_allow(
    kind, messages, at_least
):
    costs, seconds = ExecutorCosts(1e-3, {"Simple": ProtocolCosts(0.0, 1.0)}, tile_bytes=64 << 10), []
    for schedule, count in zip(SCHEDULES[kind](), messages, strict=True):
        assert not verify(schedule).errors
        crossing = [
            step
            for rank, program in enumerate(schedule.ranks)
            for block in program.thread_blocks
            for step in block.steps
            if step.type.sends and block.send_peer // 4 != rank // 4
        ]
        assert len(crossing) == count
        seconds.append(simulate_schedule(schedule, 8e6, make_topology(12.5e6), costs, ranks_per_node=4).seconds)
    assert seconds[0] / seconds[1] > at_least


def test_rows_between_namespaces_say_what_was_asked_and_predicted(monkeypatch):
    """Of ranks that take as long as their links do."""

    def run(setting, network, ranks_per_node, **given):
        match setting.only[0]:
            case "puts":
                return [(8, size * 8 / setting.link) for size in between_nodes.PUT_SIZES]
            case "all-reduce":
                return {"seconds": [1.0, 0.8, 0.6, 0.5], "overhead": 1e-3}
            case "training":
                overheads = {"inside": 1e-3, "between": 2e-3, "library": 1e-3}
                return {"z": {"seconds": {"alone": 0.1, "flat": 1.0, "auto": 0.5}, "overheads": overheads}}
        return {one.name: {"seconds": 1.0, "overhead": 1e-3, "messages": 4} for one in SCHEDULES[setting.only[0]]()}

    monkeypatch.setattr(between_nodes, "require_namespaces", lambda: None)
    monkeypatch.setattr(between_nodes, "_run", run)
    rows = list(measure_kinds(BetweenNodesSetting()))
    assert {row.kind for row in rows} == set(KINDS)
    assert [row.ratio for row in rows if row.kind == "puts"] == pytest.approx([1.0] * 3)
    assert [row.ratio for row in rows if row.kind == "all-reduce"] == pytest.approx([1.25, 1 / 0.6, 2.0])
    assert [row.asked for row in rows if row.what == "all-to-next"] == [3.0]
    flat, auto, *_, without, other = (row.predicted_ms for row in rows if row.kind == "training")
    assert flat > auto > 800  # the fewest bytes over a link take so long: 6.4 MB to and fro
    assert without is other is None  # `plan` knows no trunk
    with pytest.raises(ValueError, match="there is no kind 'put'; did you mean 'puts'"):
        BetweenNodesSetting(only=("put",))

# SPDX-License-Identifier: Apache-2.0
"""Lost peers are found by the kernel's tables of TCP."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from stretto.launch.watching import connections
from stretto.launch.watching.connections import Connections, count_connections, describe_lost

CONNECT = """
import socket, sys
host, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
sockets = [socket.create_connection((host, port)) for _ in range(count)]
print("connected", flush=True)
for line in sys.stdin:
    sockets.pop().close()
    print("closed", flush=True)
"""


class Peer:
    """A process that opens connections to a server, and closes them one by one."""

    def __init__(self, host: str, port: int, count: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CONNECT, host, str(port), str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._answer() == "connected\n"

    def close_one(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        assert self._answer() == "closed\n"

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(params=[(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")], ids=["IPv4", "IPv6"])
def server(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    family, host = request.param
    if family == socket.AF_INET6 and not socket.has_dualstack_ipv6():
        family, host = socket.AF_INET, "127.0.0.1"  # this machine has no IPv6: the same again
    with socket.create_server((host, 0), family=family) as server:
        yield server


def test_connections_between_processes_are_counted_and_a_lost_one_is_found(server: socket.socket) -> None:
    host, port = server.getsockname()[:2]
    one, three = Peer(host, port, 1), Peer(host, port, 2)
    accepted = [server.accept()[0] for _ in range(3)]
    pids = {0: os.getpid(), 1: one.process.pid, 3: three.process.pid}
    try:
        assert count_connections(pids) == {(0, 1): 1, (0, 3): 2}
        watched = Connections()
        watched.look(pids, 0.0)
        assert watched.find_lost(pids, [0, 1, 3]) == []
        three.close_one()
        assert watched.find_lost(pids, [3]) == [(0, 3)]
        assert watched.find_lost(pids, [1]) == [], "rank 1 has lost nothing"
        watched.look(pids, 2.0)
        one.end()
        assert watched.find_lost(pids, [0]) == [(0, 3)]
        watched.look(pids, 4.0)
        assert watched.find_lost(pids, [0]) == [(0, 3)]
    finally:
        for each in accepted:
            each.close()
        one.end()
        three.end()


def test_listening_sockets_and_connections_to_others_do_not_count(server: socket.socket) -> None:
    host, port = server.getsockname()[:2]
    peer, other = Peer(host, port, 1), Peer(host, port, 1)
    accepted = [server.accept()[0] for _ in range(2)]
    try:
        assert count_connections({0: peer.process.pid, 1: other.process.pid}) == {}
        assert count_connections({0: os.getpid()}) == {}, "a rank's connections to itself are none"
    finally:
        for each in accepted:
            each.close()
        peer.end()
        other.end()
    assert count_connections({0: os.getpid(), 1: peer.process.pid}) == {}, "one process is gone"


def test_connections_are_counted_once_a_period(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[object] = []
    monkeypatch.setattr(connections, "count_connections", lambda pids: looks.append(pids) or {})
    watched = Connections()
    for now in (0.0, 0.5, 0.9, 1.0, 1.1, 2.5):
        watched.look({}, now)
    assert len(looks) == 3


def test_a_rank_that_loses_all_its_connections_is_the_one_that_is_named() -> None:
    assert describe_lost([(0, 2), (1, 2), (2, 3)], [0, 1, 2, 3]) == (
        2,
        "rank 2 lost its connections to ranks 0, 1 and 3, and all processes live",
    )
    rank, text = describe_lost([(1, 3)], [1, 3])
    assert (rank, text) == (1, "ranks 1 and 3 lost their connection to each other, and all processes live")
    rank, text = describe_lost([], [3])
    assert (rank, text) == (3, "rank 3 lost its connection to another rank, and all processes live")
    rank, text = describe_lost([(0, 1), (2, 3)], [0, 1, 2, 3])
    assert (rank, text) == (0, "pairs of ranks lost their connections, and all processes live: 0 and 1, 2 and 3")

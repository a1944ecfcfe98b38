# SPDX-License-Identifier: Apache-2.0
"""Who lost whom, from gloo's errors and the addresses that ranks have written."""

import os
import socket

import pytest
import torch.distributed as dist

from stretto.train.health import connections


@pytest.fixture
def connected():
    """Two connected sockets, one for each of two ranks."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
        yield one, other
        one.close()
        other.close()


def error_at(other):
    """The error of the rank at the other end, with the port as gloo prints it."""
    host, port = other.getpeername()
    return f"RuntimeError: [pair.cc:553] Connection closed by peer [{host}]:{port % 256 * 256 + port // 256}. GLHF!"


def test_addresses_are_known_after_their_connection_is_lost(connected):
    one, other = connected
    store, known = dist.HashStore(), set()
    connections.write_addresses(store, 1, known)
    reasons = {2: error_at(other)}
    one.close()
    connections.write_addresses(store, 1, known)  # a later group's
    assert connections.find_lost_pairs(store, reasons, 4) == [(1, 2)]


def test_a_quoted_error_is_the_other_ranks(connected):
    _, other = connected
    store = dist.HashStore()
    connections.write_addresses(store, 3, set())
    quoting = f"PeerError: rank 0 of the pipe: waited in vain; noticed first by rank 1 of the pipe: {error_at(other)}"
    assert connections.find_lost_pairs(store, {0: quoting, 2: error_at(other)}, 4) == [(2, 3)]


def test_a_rank_that_loses_all_its_connections_is_the_one_that_is_named():
    assert connections.describe_lost([(0, 2), (1, 2), (2, 3)], [0, 1, 2, 3]) == (
        2,
        "rank 2 lost its connections to ranks 0, 1 and 3, and all processes live",
    )
    rank, text = connections.describe_lost([(1, 3)], [1, 3])
    assert (rank, text) == (1, "ranks 1 and 3 lost their connection to each other, and all processes live")
    rank, text = connections.describe_lost([], [3])
    assert (rank, text) == (3, "rank 3 lost its connection to another rank, and all processes live")


def test_connections_keep_blocking_whatever_time_limit_python_gives_to_sockets(connected):
    """gloo reads from blocking sockets, and `socket.setdefaulttimeout` is for those that Python makes."""
    one, _ = connected
    socket.setdefaulttimeout(5.0)
    try:
        connections.write_addresses(dist.HashStore(), 0, set())
    finally:
        socket.setdefaulttimeout(None)
    assert os.get_blocking(one.fileno())


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_addresses_are_those_of_connections_and_not_of_listening_sockets(family, host):
    if family == socket.AF_INET6 and not socket.has_dualstack_ipv6():
        host = "127.0.0.1"  # this machine has no IPv6: the same again
        family = socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        with socket.create_connection(server.getsockname()[:2]) as one, server.accept()[0] as other:
            store, known = dist.HashStore(), set()
            connections.write_addresses(store, 0, known)
            assert {f"{host} {each.getsockname()[1]}" for each in (one, other)} <= known
            listening = server.getsockname()[1]
        known.clear()
        connections.write_addresses(store, 0, known)
        assert f"{host} {listening}" not in known

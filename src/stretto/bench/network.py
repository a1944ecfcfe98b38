# SPDX-License-Identifier: Apache-2.0
"""`stretto bench network`: two ranks of this machine, declared to be two nodes, put to each other and send by sockets.

Both go over loopback, both ways at once. The rates are of whole puts with their signals, with as many in flight as fit
into 2 MiB, up to four; sockets send from one buffer. Larger sizes are also measured from four slots, and four buffers:
memory that a CPU's cache does not hold costs both of them a good part of their rate. The latency is half of a round
trip of 8 bytes. An idle proxy also looks at a FIFO that kernels could write to.
"""

import os
import socket
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from stretto.bench.harness import Column, print_row, print_table, run_ranks, write_result
from stretto.bench.interleaved import name_size
from stretto.bench.settings import NetworkSetting
from stretto.memory import Backoff, HostMemory, allocate
from stretto.memory.network.descriptors import Fifo
from stretto.memory.network.endpoint import PROXY_VARIABLE
from stretto.memory.network.native import NativeProxy
from stretto.memory.network.proxy import Proxy
from stretto.memory.plain_data import all_gather_data

COLUMNS = (
    Column("what", "what"),
    Column("size", "size"),
    Column("sockets", "plain sockets", "{:.3g}"),
    Column("native", "puts", "{:.3g}"),
    Column("python", "puts, proxy in Python", "{:.3g}"),
    Column("ratio", "puts / sockets", "{:.2f}"),
)
IN_FLIGHT = 4
_IN_FLIGHT_BYTES = 2 << 20
_ROUND_TRIPS = 500
_ROUNDS = 7
_TIMEOUT = 60.0


def bench_network(out: Path, setting: NetworkSetting) -> list[dict[str, Any]]:
    """Measure, print the table, write the JSON. Returns the rows."""
    rows: list[dict[str, Any]] = run_ranks(2, _measure_all, setting, trains=False)
    print_table("Puts between two declared nodes of this machine, over loopback", COLUMNS, rows)
    write_result(out, "network", COLUMNS, rows)
    return rows


def _measure_all(setting: NetworkSetting) -> list[dict[str, Any]]:
    dist.init_process_group("gloo")
    os.environ["STRETTO_NODES"] = "2x1"
    peer = 1 - dist.get_rank()
    connection = _connect(peer)
    rows = []
    slots: dict[str, PutStream] = {}
    idle: dict[str, float] = {}
    for name in setting.proxies:
        os.environ[PROXY_VARIABLE] = name
        group = dist.new_group()  # whose endpoint has this proxy
        memory = allocate(2 * IN_FLIGHT * setting.largest, group, signals=3, timeout=_TIMEOUT)
        assert isinstance(memory, HostMemory)
        slots[name] = PutStream(memory, peer)
        idle[name] = _measure_idle(memory, setting.idle_seconds)
    for size in setting.sizes:
        count = max(setting.megabytes * 1_000_000 // size, 2 * IN_FLIGHT)
        fitting = min(max(_IN_FLIGHT_BYTES // size, 1), IN_FLIGHT)
        for what, buffers, in_flight in (
            ("both ways, GB/s", 1, fitting),
            ("from 4 buffers, GB/s", IN_FLIGHT, IN_FLIGHT),
        ):
            if buffers == 1 or fitting < IN_FLIGHT:
                runs: dict[str, Callable[[], float]] = {"sockets": partial(_send_all, connection, size, count, buffers)}
                for name in slots:
                    runs[name] = partial(slots[name].put_all, size, count, in_flight)
                rates = {name: 2 * size * count / seconds / 1e9 for name, seconds in _time(runs).items()}
                rows.append(_row(what, rates, name_size(size)))
                print_row(rows[-1])
    runs = {"sockets": partial(_bounce, connection)}
    for name in slots:
        runs[name] = slots[name].bounce
    found = _time(runs)
    rows.append(_row("latency, us", {name: seconds / _ROUND_TRIPS / 2 * 1e6 for name, seconds in found.items()}, "8 B"))
    print_row(rows[-1])
    calls = {name: one.count_calls() for name, one in slots.items() if isinstance(one.proxy, NativeProxy)}
    rows.append(_row("system calls a put", calls, "8 B"))
    print_row(rows[-1])
    rows.append(_row("idle proxy, % of a core", idle, None))
    print_row(rows[-1])
    connection.close()
    return rows


def _row(what: str, values: dict[str, float], size: str | None) -> dict[str, Any]:
    puts = values.get("native", values.get("python"))
    ratio = puts / values["sockets"] if puts is not None and "sockets" in values else None
    return {"what": what, "size": size, **values, "ratio": ratio}


def _time(runs: dict[str, Callable[[], float]]) -> dict[str, float]:
    """The median seconds of each run, in rounds over all of them."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(_ROUNDS):
        for name, run in runs.items():
            dist.barrier()
            times[name].append(run())
    return {name: statistics.median(found) for name, found in times.items()}


def _connect(peer: int) -> socket.socket:
    """A TCP connection between the two ranks, over loopback."""
    listener = socket.create_server(("127.0.0.1", 0))
    ports = all_gather_data(listener.getsockname()[1], None, int)
    if peer == 1:
        connection = socket.create_connection(("127.0.0.1", ports[1]))
    else:
        connection, _ = listener.accept()
    listener.close()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _send_all(connection: socket.socket, size: int, count: int, buffers: int) -> float:
    """Seconds to send and receive so many messages, at once, each way from and to so many buffers in turn."""
    outgoing = [b"\1" * size for _ in range(buffers)]  # zeros would all be read from one page
    incoming = [memoryview(bytearray(size)) for _ in range(buffers)]
    started = time.perf_counter()

    def send() -> None:
        for number in range(count):
            connection.sendall(outgoing[number % buffers])

    sender = threading.Thread(target=send)
    sender.start()
    for number in range(count):
        buffer = incoming[number % buffers]
        while buffer:
            buffer = buffer[connection.recv_into(buffer) :]
    sender.join()
    return time.perf_counter() - started


@dataclass
class PutStream:
    """This rank's end of puts to its peer, and how many slices have come and been given back in all runs so far."""

    memory: HostMemory
    peer: int
    taken: int = 0
    sent: int = 0
    bounced: int = 0

    def put_all(self, size: int, count: int, in_flight: int = IN_FLIGHT) -> float:
        """Seconds to put and to receive so many slices, at once, in slots that the peer gives back."""
        memory, peer = self.memory, self.peer
        sent, taken = self.sent + count, self.taken + count
        backoff, started = Backoff(memory.pause), time.perf_counter()
        while self.sent < sent or self.taken < taken:
            if self.sent < sent and memory.has_reached(peer, 1, self.sent + 1 - in_flight):
                slot = self.sent % in_flight * size
                memory.put(peer, slot, in_flight * size + slot, size, 0)
                self.sent += 1
            elif self.taken < taken and memory.has_reached(peer, 0, self.taken + 1):
                self.taken += 1
                memory.signal(peer, 1)
            else:
                backoff.pause()
                continue
            backoff.reset()
        memory.wait(peer, 1, sent, _TIMEOUT)
        return time.perf_counter() - started

    @property
    def proxy(self) -> Proxy | NativeProxy:
        assert self.memory.endpoint is not None
        return self.memory.endpoint.proxy

    def count_calls(self) -> float:
        """The system calls of this rank's proxy, and of waking it, for each put of `bounce`, which goes to and fro."""
        assert isinstance(self.proxy, NativeProxy)
        before = sum(self.proxy.count_calls())
        self.bounce()
        return (sum(self.proxy.count_calls()) - before) / _ROUND_TRIPS

    def bounce(self) -> float:
        """Seconds of so many round trips of puts with a signal, which takes no slot."""
        memory, peer = self.memory, self.peer
        started = time.perf_counter()
        for number in range(2 * _ROUND_TRIPS):
            if number % 2 == memory.rank:
                memory.put(peer, 0, 8, 8, 2)
            else:
                self.bounced += 1
                memory.wait(peer, 2, self.bounced, _TIMEOUT)
        return time.perf_counter() - started


def _bounce(connection: socket.socket) -> float:
    """Seconds of so many round trips of 8 bytes."""
    is_first = dist.get_rank() == 0
    started = time.perf_counter()
    for _ in range(_ROUND_TRIPS):
        if is_first:
            connection.sendall(bytes(8))
        connection.recv(8)
        if not is_first:
            connection.sendall(bytes(8))
    return time.perf_counter() - started


def _measure_idle(memory: HostMemory, seconds: int) -> float:
    """The share of a core, in percent, of this process while nothing happens, and a FIFO of kernels is looked at."""
    endpoint = memory.endpoint
    assert endpoint is not None
    fifo = Fifo.allocate()
    endpoint.proxy.add_fifo(fifo, True)
    dist.barrier()
    time.sleep(0.2)
    before = time.process_time()
    time.sleep(seconds)
    share = (time.process_time() - before) / seconds * 100
    endpoint.proxy.remove_fifo(fifo)
    dist.barrier()
    return share

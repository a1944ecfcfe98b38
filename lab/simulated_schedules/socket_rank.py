# SPDX-License-Identifier: Apache-2.0
"""One rank that runs schedules over TCP sockets: a thread for each thread block, a socket for each connection.

The CPU measurement of `python -m lab simulated-collectives` times this program: the links between network namespaces
have a given bandwidth, and it moves schedules' messages over them, tile by tile through FIFO slots. It does not import
torch, so that eight ranks start quickly on few cores. Numbers are fp32, and the results are checked.
"""

import json
import os
import socket
import sys
import threading
import time
from typing import Any

import numpy as np

from stretto.collectives.algorithms import find
from stretto.collectives.collective import Buffer
from stretto.collectives.schedule import PROTOCOLS, Schedule, Step, StepType

_HELLO = 16  # bytes: the sender and the channel
_SLOT_FREE = b"\0"
_WAIT = 60.0  # seconds that a rank waits for a peer


def main() -> None:
    """Run one rank. argv: the job as JSON and the rank. Obeys orders from stdin: to connect, and to run once."""
    job: dict[str, Any] = json.loads(sys.argv[1])
    rank = int(sys.argv[2])
    listener = socket.create_server((job["addresses"][rank], job["ports"][rank]), backlog=1024)
    print("{}", flush=True)
    executor: RankExecutor | None = None
    for line in sys.stdin:
        order = json.loads(line)
        if executor is None or order["do"] == "connect":
            if executor is not None:
                executor.close()
            schedule = find(order["algorithm"]).compile(in_place=False, **order["parameters"])
            executor = RankExecutor(schedule, rank, listener, job["addresses"], job["ports"])
            print("{}", flush=True)
            continue
        ended, is_right = executor.run(order["elements"], order["tile_elements"], order["start"])
        print(json.dumps({"ended": ended, "is_right": is_right}), flush=True)


class RankExecutor:
    """A schedule's part of one rank, with its connections."""

    def __init__(
        self, schedule: Schedule, rank: int, listener: socket.socket, addresses: list[str], ports: list[int]
    ) -> None:
        self.schedule = schedule
        self.rank = rank
        self._blocks = schedule.ranks[rank].thread_blocks
        self._sockets: dict[tuple[str, int, int], socket.socket] = {}
        listener.settimeout(_WAIT)
        incoming = {(block.receive_peer, block.channel) for block in self._blocks if block.receive_peer is not None}
        for block in self._blocks:
            if block.send_peer is not None:
                to = socket.create_connection((addresses[block.send_peer], ports[block.send_peer]), timeout=_WAIT)
                to.sendall(f"{rank:8d}{block.channel:8d}".encode())
                self._sockets["send", block.send_peer, block.channel] = to
        for _ in incoming:
            accepted, _ = listener.accept()
            hello = read_exactly(accepted, _HELLO).decode()
            self._sockets["receive", int(hello[:8]), int(hello[8:])] = accepted
        for each in self._sockets.values():
            each.settimeout(_WAIT)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def close(self) -> None:
        """Close all connections."""
        for each in self._sockets.values():
            each.close()

    def run(self, elements: int, tile_elements: int, start: float) -> tuple[float, bool]:
        """Run once, from a moment of the clock on. Returns when it ended, and whether its output is right.

        elements: of a chunk.
        """
        collective, program = self.schedule.collective, self.schedule.ranks[self.rank]
        self.chunks: dict[Buffer, np.ndarray[Any, np.dtype[np.float32]]] = {
            Buffer.IN: np.empty((collective.input_chunks, elements), np.float32),
            Buffer.OUT: np.empty((collective.output_chunks, elements), np.float32),
            Buffer.SCRATCH: np.empty((program.scratch_chunks, elements), np.float32),
        }
        for index in range(collective.input_chunks):
            self.chunks[Buffer.IN][index] = value_of(self.rank, index)
        for source, destination in program.copies:
            self.chunks[Buffer.OUT][destination] = self.chunks[Buffer.IN][source]
        self._ended = [0] * len(self._blocks)
        self._changed = threading.Condition()
        tiles = [slice(at, min(at + tile_elements, elements)) for at in range(0, elements, tile_elements)]
        threads = [
            threading.Thread(target=self._run_block, args=(number, tiles, start), daemon=True)
            for number in range(len(self._blocks))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ended = time.monotonic()
        return ended, self._is_right()

    def _is_right(self) -> bool:
        for index in range(self.schedule.collective.output_chunks):
            expected = self.schedule.collective.expected(self.rank, index)
            if expected is not None:
                wanted = sum(value_of(rank, chunk) for rank, chunk in expected)
                if not np.all(self.chunks[Buffer.OUT][index] == wanted):
                    return False
        return True

    def _run_block(self, number: int, tiles: list[slice], start: float) -> None:
        block = self._blocks[number]
        to = self._sockets.get(("send", -1 if block.send_peer is None else block.send_peer, block.channel))
        of = self._sockets.get(("receive", -1 if block.receive_peer is None else block.receive_peer, block.channel))
        slots = PROTOCOLS[self.schedule.protocol]
        in_flight = 0
        time.sleep(max(0.0, start - time.monotonic()))
        for turn, tile in enumerate(tiles):
            for step in block.steps:
                if step.waits_for is not None:
                    other, at = step.waits_for
                    target = turn * len(self._blocks[other].steps) + at
                    with self._changed:
                        self._changed.wait_for(lambda: self._ended[other] > target, _WAIT)  # noqa: B023
                if step.type.sends and to is not None:
                    if in_flight == slots:
                        read_exactly(to, 1)
                        in_flight -= 1
                    in_flight += 1
                self._do(step, tile, of, to)
                with self._changed:
                    self._ended[number] += 1
                    if step.awaited:
                        self._changed.notify_all()
        while in_flight and to is not None:
            read_exactly(to, 1)
            in_flight -= 1

    def _do(self, step: Step, tile: slice, of: socket.socket | None, to: socket.socket | None) -> None:
        if step.type is StepType.NOP:
            return
        source = destination = None
        if step.type.reads_source:
            source = self.chunks[step.source_buffer][step.source : step.source + step.size, tile]
        if step.type.writes_destination:
            destination = self.chunks[step.destination_buffer][step.destination : step.destination + step.size, tile]
        value = source
        if step.type.receives and of is not None:
            shape = (step.size, tile.stop - tile.start)
            received = np.frombuffer(read_exactly(of, 4 * shape[0] * shape[1]), np.float32).reshape(shape)
            of.sendall(_SLOT_FREE)
            value = received + source if step.type.reduces and source is not None else received
        elif step.type is StepType.REDUCE and destination is not None and source is not None:
            value = destination + source
        assert value is not None
        if destination is not None:
            destination[...] = value
        if step.type.sends and to is not None:
            to.sendall(np.ascontiguousarray(value).data)


def value_of(rank: int, index: int) -> float:
    """The number that fills an input chunk; sums of them are exact."""
    return float(rank * 64 + index + 1)


def read_exactly(connection: socket.socket, count: int) -> bytearray:
    """Read `count` bytes. Raises ConnectionError if the peer has closed the connection."""
    content = bytearray(count)
    view = memoryview(content)
    while view:
        got = connection.recv_into(view)
        if not got:
            raise ConnectionError("a peer has closed its connection")
        view = view[got:]
    return content


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError) as error:
        print(f"rank {sys.argv[2]}: {error}", file=sys.stderr, flush=True)
        os._exit(1)

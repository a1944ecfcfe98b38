# SPDX-License-Identifier: Apache-2.0
"""Two proxies over a network that reorders, delays and breaks; mutated frames and descriptors; strangers."""

import contextlib
import ctypes
import os
import random
import resource
import runpy
import signal
import socket
import struct
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
from tests.memory.network.relay import Relay
from tests.processes import LIMIT

from stretto.memory.network import native
from stretto.memory.network.descriptors import PHASE, Fifo, Put, pack, unpack
from stretto.memory.network.frames import (
    HEADER_BYTES,
    NO_SIGNAL,
    FrameError,
    FrameKind,
    PutFrame,
    pack_frame,
    unpack_frame,
)
from stretto.memory.network.interfaces import find_interface
from stretto.memory.network.native import NativeProxy, find_library
from stretto.memory.network.proxy import Proxy
from stretto.memory.network.transport import LOCAL_REGIONS, PutRegion

TOKEN = bytes(range(16))
SEED = random.randrange(2**31)
SIGNALS, PAD, SIZE, CANARY = 4, 64, 1 << 16, 4096
KINDS = {"native": (NativeProxy, NativeProxy), "python": (Proxy, Proxy), "mixed": (NativeProxy, Proxy)}
each_proxy = pytest.mark.parametrize("kind", ["native", "python"])


def wait_for(condition):
    """Wait until the condition holds; pytest's limit ends what never does."""
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Pair:
    """Ranks 0 and 1 in this process, whose regions lie between canaries. Rank 0 connects through a relay, if any."""

    def __init__(self, kind, limit=30.0, **relay):
        self.proxies = [make(rank, 2, TOKEN, "127.0.0.1", limit) for rank, make in enumerate(KINDS[kind])]
        self.relay = Relay(self.proxies[1].address, SEED, **relay) if relay else None
        addresses = [self.proxies[0].address, self.relay.address if relay else self.proxies[1].address]
        self.memories = [torch.full((PAD + SIZE + 2 * CANARY,), 0xCA, dtype=torch.uint8) for _ in range(2)]
        self.regions = [memory[CANARY : CANARY + PAD + SIZE] for memory in self.memories]
        self.fifos = [Fifo.allocate(64) for _ in range(2)]
        for rank, proxy in enumerate(self.proxies):
            self.regions[rank].zero_()
            proxy.connect({1 - rank: addresses[1 - rank]})
            proxy.add_region(PutRegion(0, self.regions[rank], PAD, SIGNALS, {}))
            proxy.add_fifo(self.fifos[rank], False)

    def post(self, rank, put):
        self.proxies[rank].put(self.fifos[rank], put, LIMIT)

    def seen(self, rank, signal):
        """The counter of the other rank's signal at this rank."""
        return int(self.regions[rank][:PAD].view(torch.int32)[(1 - rank) * SIGNALS + signal])

    def buffer(self, rank):
        return self.regions[rank][PAD:]

    def are_canaries_alive(self):
        ends = [part for memory in self.memories for part in (memory[:CANARY], memory[-CANARY:])]
        return all(bool((end == 0xCA).all()) for end in ends)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        if self.relay is not None:
            self.relay.bring_up()
        for proxy in self.proxies:
            proxy.close(1.0)
        if self.relay is not None:
            self.relay.close()
        assert self.are_canaries_alive()


@pytest.mark.parametrize("kind", list(KINDS))
def test_signals_come_in_order_after_their_bytes_whatever_the_network_does(kind):
    """Both ranks put small and large slices through a relay that reorders them and cuts connections in mid-frame."""
    print(f"seed {SEED}")
    rng, puts = random.Random(SEED), 150
    cuts = sorted(rng.sample(range(1, SIZE // 2), puts - 1))
    bounds = [0, *cuts, SIZE // 2]
    with Pair(kind, window=5, cut_every=40) as pair:
        source = torch.randint(1, 255, (SIZE // 2,), dtype=torch.uint8, generator=torch.Generator().manual_seed(SEED))
        for rank in range(2):
            pair.buffer(rank)[SIZE // 2 :] = source
        for number in range(puts):
            start, end = bounds[number], bounds[number + 1]
            for rank in range(2):
                pair.post(rank, Put(1 - rank, 0, SIZE // 2 + start, 0, start, end - start, 1))
            for rank in range(2):
                there = bounds[pair.seen(rank, 1)]
                assert torch.equal(pair.buffer(rank)[:there], source[:there])
        for rank in range(2):
            wait_for(lambda rank=rank: pair.seen(rank, 1) == puts)
            assert torch.equal(pair.buffer(rank)[: SIZE // 2], source)
            assert pair.proxies[rank].failure(1 - rank) is None
        assert min(pair.relay.cuts, pair.relay.reordered) > 0


@pytest.mark.parametrize("window", [1, 3])
def test_much_that_kernels_put_both_ways_arrives_whole_past_broken_connections(window, monkeypatch):
    """2 MB are in a FIFO at once, more than a socket takes, which a second thread sends."""
    monkeypatch.setattr(NativeProxy, "SENDS_APART", True)
    print(f"seed {SEED}")
    rng, half, puts = random.Random(SEED), SIZE // 2, 60
    with Pair("native", window=window) as pair:
        fifos = [Fifo.allocate(64) for _ in range(2)]
        for proxy, fifo in zip(pair.proxies, fifos, strict=True):
            proxy.add_fifo(fifo, True)
        for number in range(12):
            for rank in range(2):
                pair.buffer(rank)[half:] = torch.randint(256, (half,), dtype=torch.uint8)
                for _ in range(puts):
                    fifos[rank].post(Put(1 - rank, 0, half, 0, 0, half, 2), LIMIT)
                pair.proxies[rank].wake()
            if number % 3 == 2:
                time.sleep(rng.choice((0.0, 0.001, 0.005)))
                breaking = rng.randrange(2)
                pair.proxies[breaking].break_connection(1 - breaking)
            for rank in range(2):
                wait_for(lambda rank=rank, number=number: pair.seen(rank, 2) == (number + 1) * puts)
                assert torch.equal(pair.buffer(rank)[:half], pair.buffer(1 - rank)[half:])
        assert pair.relay.accepted <= 1 + 4  # no frame was refused, after which a connection would be opened again
        for proxy, fifo in zip(pair.proxies, fifos, strict=True):
            proxy.remove_fifo(fifo)


def test_a_proxy_ends_whose_second_thread_fails_to_send_at_that_moment(tmp_path):
    """The thread then has nothing left to send, and has been told of the end while it sent."""
    program = tmp_path / "failing_send"
    source = Path(__file__).with_name("failing_send.c")
    subprocess.run(["cc", "-rdynamic", "-o", program, source, "-ldl", "-pthread"], check=True)
    done = subprocess.run([program, find_library()], capture_output=True, text=True, timeout=LIMIT)
    assert (done.returncode, done.stdout) == (0, "ended\n")


@pytest.mark.exhaustive
@pytest.mark.parametrize("sanitizer", ["thread", "address"])
def test_a_sanitizer_finds_no_race_and_no_wrong_access_while_two_proxies_put_break_and_end(sanitizer, tmp_path):
    compiler = ["c++", f"-fsanitize={sanitizer}", "-O1", "-std=c++20", "-pthread", "-o", tmp_path / "two_proxies"]
    (tmp_path / "empty.cpp").write_text("int main() {}")
    if subprocess.run([*compiler, tmp_path / "empty.cpp"], capture_output=True).returncode:
        pytest.skip(f"the compiler has no sanitizer of {sanitizer}s")
    source = Path(__file__).with_name("two_proxies.cpp")
    code = Path(native.__file__).with_name("native")
    subprocess.run([*compiler, "-w", "-I", code, source], check=True)
    done = subprocess.run([tmp_path / "two_proxies"], capture_output=True, text=True, timeout=LIMIT)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["400"] * 12


@each_proxy
def test_what_a_fifo_has_is_sent_before_it_is_removed_or_the_proxy_ends(kind):
    """A kernel's last puts and credits, of which no wake tells: the peers wait for them."""
    with Pair(kind) as pair:
        pair.post(0, Put(1, 0, 0, 0, 0, 0, 0))
        wait_for(lambda: pair.seen(1, 0) == 1)
        for fifo in (first := Fifo.allocate(1024), last := Fifo.allocate(1024)):
            pair.proxies[0].add_fifo(fifo, False)
        for fifo in (first, last):
            for _ in range(1000):
                fifo.post(Put(1, 0, 0, 0, 0, 8, 0), LIMIT)
            if fifo is first:
                pair.proxies[0].remove_fifo(fifo)
                wait_for(lambda: pair.seen(1, 0) == 1001)
        pair.proxies[0].close(LIMIT)
        wait_for(lambda: pair.seen(1, 0) == 2001)


def test_who_waits_receives_in_place_of_the_thread_which_goes_on_when_nobody_waits():
    with Pair("native") as pair:
        first, second = pair.proxies
        waker = threading.Thread(target=lambda: (time.sleep(0.1), pair.post(0, Put(1, 0, 0, 0, 0, 8, 1))))
        waker.start()
        while pair.seen(1, 1) == 0:  # asleep already when it comes
            second.pause(LIMIT)
        waker.join()
        before = first.count_calls().wakes
        for number in range(1, 201):
            pair.post(0, Put(1, 0, 0, 0, 0, SIZE, 0))
            while pair.seen(1, 0) < number:
                second.pause(LIMIT)
        assert first.count_calls().wakes - before < 100  # who posts, sends: once a put, if the thread did
        # Nobody waits any more: the threads send and receive what is left, whose acknowledgements come, too.
        for number in range(50):
            pair.post(number % 2, Put(1 - number % 2, 0, 0, 0, 0, SIZE, 2))
        wait_for(lambda: pair.seen(0, 2) == pair.seen(1, 2) == 25)
        # Two that wait at once both end: by a put, by a lost peer, and when the proxy ends.
        pausing = [threading.Thread(target=lambda: [first.pause(0.01) for _ in range(20)]) for _ in range(2)]
        for each in pausing:
            each.start()
        for _ in range(100):
            pair.post(0, Put(1, 0, 0, 0, 0, SIZE, 3))
            pair.post(1, Put(0, 0, 0, 0, 0, 8, 3))
        wait_for(lambda: pair.seen(0, 3) == pair.seen(1, 3) == 100)
        for each in pausing:
            each.join()
        second.close(1.0)
        while first.failure(1) is None:
            first.pause(LIMIT)
        last = threading.Thread(target=first.pause, args=(LIMIT,))
        last.start()
        first.close(0.0)
        last.join(LIMIT)
        assert not last.is_alive()


def test_a_native_wait_compares_counters_that_wrap_and_a_full_fifo_takes_no_put():
    with Pair("native") as pair:
        proxy, word = pair.proxies[0], torch.empty(1, dtype=torch.int32)
        for seen, target, has_come in ((-1, 2**32, False), (2, 2**32 - 1, True), (7, 8, False), (7, 7, True)):
            word[0] = seen
            assert proxy.await_counter(word.data_ptr(), target, 0.001) == has_come
        capacity = pair.fifos[0].capacity
        put = proxy._handle, capacity, 1, 0, 0, 0, 0, 0, 0
        assert proxy._library.proxy_put(*put) == -1  # no descriptor was read before this one, whose place has the first
        assert not pair.fifos[0].words.any()


def test_the_native_proxys_module_is_imported_where_python_knows_no_affinity(monkeypatch):
    """As on macOS, where plans are made and models are tried."""
    monkeypatch.delattr(os, "sched_getaffinity")
    assert runpy.run_path(native.__file__)["NativeProxy"].count_lanes(1) >= 1


def use_in_a_child(proxy, fifo):
    """Release what a forked process has of its parent's proxy, whose thread it has not."""
    proxy.remove_fifo(fifo)
    proxy.remove_region(0, 60.0)
    proxy.wake()
    proxy.close(60.0)


@each_proxy
def test_a_forked_process_and_one_whose_proxy_has_ended_release_at_once(kind):
    with Pair(kind) as pair:
        pair.post(0, Put(1, 0, 0, 0, 0, 100, 0))
        wait_for(lambda: pair.seen(1, 0) == 1)  # a peer that was never met may still come
        pair.proxies[1].close(0.0)
        wait_for(lambda: pair.proxies[0].failure(1))
        listener = KINDS[kind][0](0, 2, TOKEN, "127.0.0.1", 30.0)  # never started
        listener.close(60.0)
        with pytest.raises(ConnectionError):
            socket.create_connection(listener.address, timeout=LIMIT)
        if (child := os.fork()) == 0:
            signal.alarm(20)
            status = 1
            try:
                use_in_a_child(pair.proxies[0], pair.fifos[0])
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        use_in_a_child(pair.proxies[1], pair.fifos[1])
        with pytest.raises(RuntimeError, match="the proxy has ended"):
            pair.proxies[1].add_fifo(pair.fifos[1], False)


@pytest.mark.long
@each_proxy
def test_a_short_outage_harms_nothing_and_a_longer_one_is_reported_on_both_sides(kind):
    with Pair(kind, limit=1.5, window=1) as pair:
        pair.post(0, Put(1, 0, 0, 0, 0, 100, 0))
        wait_for(lambda: pair.seen(1, 0) == 1)
        pair.relay.take_down()
        pair.post(0, Put(1, 0, 0, 0, 0, 100, 0))
        time.sleep(0.2)
        assert pair.seen(1, 0) == 1
        pair.relay.bring_up()
        wait_for(lambda: pair.seen(1, 0) == 2)
        assert pair.proxies[0].failure(1) is None
        pair.relay.take_down()
        for rank, proxy in enumerate(pair.proxies):
            wait_for(lambda proxy=proxy, rank=rank: proxy.failure(1 - rank))
            assert proxy.failure(1 - rank).startswith("there was no connection for ")


@each_proxy
def test_a_connection_that_one_side_has_lost_unknown_to_the_other_is_opened_again(kind):
    """Only rank 0 opens connections, and it has nothing to send."""
    with Pair(kind, limit=2.0, window=1) as pair:
        pair.post(1, Put(0, 0, 0, 0, 0, 8, 0))
        wait_for(lambda: pair.seen(0, 0) == 1)
        pair.relay.hides_ends = True
        pair.proxies[1].break_connection(0)
        pair.post(1, Put(0, 0, 0, 0, 0, 8, 0))
        wait_for(lambda: pair.seen(0, 0) == 2)
        pair.relay.hides_ends = False
        assert pair.proxies[1].failure(0) is None


@contextlib.contextmanager
def no_file_to_open():
    """A process that can open no file more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@each_proxy
def test_where_no_file_can_be_opened_a_proxy_rests_goes_on_later_and_names_the_reason(kind):
    with Pair(kind, limit=2.0) as pair, socket.socket() as first, socket.socket() as second:
        pair.post(0, Put(1, 0, 0, 0, 0, 0, 0))
        wait_for(lambda: pair.seen(1, 0) == 1)
        with no_file_to_open():
            pair.proxies[0].break_connection(1)
            first.connect(pair.proxies[1].address)
            before = time.process_time()
            time.sleep(0.3)
            took = time.process_time() - before
        pair.post(0, Put(1, 0, 0, 0, 0, 0, 0))
        wait_for(lambda: pair.seen(1, 0) == 2 or pair.proxies[0].failure(1))
        assert pair.proxies[0].failure(1) is pair.proxies[1].failure(0) is None
        assert took < 0.1
        with no_file_to_open():
            pair.proxies[0].break_connection(1)
            second.connect(pair.proxies[1].address)
            for rank, proxy in enumerate(pair.proxies):
                wait_for(lambda proxy=proxy, rank=rank: proxy.failure(1 - rank))
        for rank, proxy in enumerate(pair.proxies):
            assert "there was no connection for " in (why := proxy.failure(1 - rank))
            assert "Too many open files" in why


def greet(pair, source=0, token=TOKEN):
    """A connection to rank 1's proxy that has greeted as rank 0."""
    client = socket.create_connection(pair.proxies[1].address, timeout=LIMIT)
    client.sendall(pack_frame(PutFrame(FrameKind.HELLO, source), token))
    return client


def read_all(client):
    """What the other side sends before it closes the connection."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while part := client.recv(4096):
            data += part
    return data


@each_proxy
def test_strangers_are_closed_and_disturb_nobody(kind):
    with Pair(kind) as pair:
        pair.post(0, Put(1, 0, 0, 0, 0, 0, 0))
        wait_for(lambda: pair.seen(1, 0) == 1)
        assert read_all(greet(pair, token=bytes(16))) == b""
        for source in (1, 2, 2**32 - 1):
            assert read_all(greet(pair, source=source)) == b""
        first_put = socket.create_connection(pair.proxies[1].address, timeout=LIMIT)
        first_put.sendall(pack_frame(PutFrame(FrameKind.PUT, 0, 2, size=8, signal=0), TOKEN) + bytes(8))
        assert read_all(first_put) == b""
        silent = [socket.create_connection(pair.proxies[1].address, timeout=LIMIT) for _ in range(80)]
        assert read_all(silent[0]) == b""  # the oldest of more than 64
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.2", pair.proxies[1].address[1]), timeout=LIMIT)  # another address
        pair.post(0, Put(1, 0, 0, 0, 0, 0, 0))
        wait_for(lambda: pair.seen(1, 0) == 2)
        for client in silent:
            client.close()


def mutate(rng, header):
    """Change a few bytes or a whole field of a header, mostly behind the token."""
    changed = bytearray(header)
    for _ in range(rng.randint(1, 3)):
        at = rng.choice((rng.randrange(24), rng.randrange(24, 64), rng.randrange(24, 64)))
        changed[at] = rng.randrange(256)
    if rng.random() < 0.5:
        at, width = rng.choice(((28, "<I"), (32, "<Q"), (40, "<Q"), (48, "<Q"), (56, "<I"), (60, "<I")))
        values = (0, 1, SIZE - 1, SIZE, LOCAL_REGIONS, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1)
        value = rng.choice([value for value in values if value < 1 << 8 * struct.calcsize(width)])
        struct.pack_into(width, changed, at, value)
    return bytes(changed)


class Target:
    """A proxy of rank 1 without its rank 0, which is played by `send`; its region lies between canaries."""

    def __init__(self, kind):
        self.proxy = KINDS[kind][1](1, 2, TOKEN, "127.0.0.1", 30.0)
        self.memory = torch.full((PAD + SIZE + 2 * CANARY,), 0xCA, dtype=torch.uint8)
        self.region = self.memory[CANARY : CANARY + PAD + SIZE]
        self.region.zero_()
        self.proxy.connect({0: ("127.0.0.1", 9)})
        self.proxy.add_region(PutRegion(0, self.region, PAD, SIGNALS, {}))
        self.own = torch.zeros(SIZE, dtype=torch.uint8)  # a source of puts
        self.proxy.add_region(PutRegion(LOCAL_REGIONS, self.own, 0, 0, {}))

    def send(self, *frames):
        """Send headers and payloads on a new connection; returns once all were read."""
        with socket.create_connection(self.proxy.address, timeout=LIMIT) as client:
            with contextlib.suppress(OSError):  # it may be closed at any point
                client.sendall(pack_frame(PutFrame(FrameKind.HELLO, 0), TOKEN))
                for frame in frames:
                    client.sendall(frame)
                client.shutdown(socket.SHUT_WR)
            read_all(client)

    def end(self):
        self.proxy.close(0.0)
        assert bool((self.memory[:CANARY] == 0xCA).all())
        assert bool((self.memory[-CANARY:] == 0xCA).all())


def send_mutated_frames(kind, count):
    """Frames of a peer that knows the token, each changed; nothing is written outside, and the proxy lives."""
    rng = random.Random(SEED)
    for _ in range(count // 20):
        target, frames = Target(kind), []
        for number in range(1, 21):
            size = rng.choice((0, 1, 100, SIZE))
            frame = PutFrame(FrameKind.PUT, 0, number, 0, 0, rng.randrange(SIZE - size + 1), size, 1)
            header = pack_frame(frame, TOKEN)
            frames.append((mutate(rng, header) if rng.random() < 0.2 else header) + bytes(size))
        target.send(*frames)
        target.end()


OUTSIDE = {
    "an end behind the region's": {"offset": SIZE - 7, "size": 8},
    "an offset that overflows": {"offset": 2**64 - 8, "size": 8},
    "a signal behind the last": {"signal": SIGNALS},
    "a region that there is not": {"region": 1},
    "a region of the receiver's own": {"region": LOCAL_REGIONS, "size": 8, "signal": NO_SIGNAL},
    "a number far ahead": {"number": 1 << 40},
    "an acknowledgement of what was not sent": {"received": 1},
}


@each_proxy
def test_a_frame_outside_of_its_region_is_refused_and_its_sender_given_up(kind):
    for fields in OUTSIDE.values():
        target = Target(kind)
        frame = PutFrame(FrameKind.PUT, 0, 1, signal=0)._replace(**fields)
        target.send(pack_frame(frame, TOKEN) + b"\1" * frame.size)
        assert target.proxy.failure(0).startswith("a frame of it is invalid: "), fields
        assert not target.region.any()
        assert not target.own.any()
        target.end()


@each_proxy
def test_a_put_that_has_come_before_is_not_written_again(kind):
    target = Target(kind)
    for value in (1, 2):
        target.send(pack_frame(PutFrame(FrameKind.PUT, 0, 1, size=8, signal=0), TOKEN) + bytes([value] * 8))
    assert target.region[PAD : PAD + 8].tolist() == [1] * 8
    assert target.region[:PAD].view(torch.int32)[0] == 1
    target.end()


def read_mutated_descriptors(kind, count):
    """Descriptors with changed words: refused, or puts within the regions."""
    rng = random.Random(SEED)
    while count > 0:
        with Pair(kind) as pair:
            fifo = pair.fifos[0]
            for _ in range(min(count, 500)):
                words = list(pack(Put(1, 0, rng.randrange(SIZE), 0, rng.randrange(SIZE), rng.randrange(SIZE), 1)))
                for _ in range(rng.randint(0, 2)):
                    words[rng.randrange(4)] ^= 1 << rng.randrange(63)
                if rng.random() < 0.1:
                    words[rng.randrange(4)] = rng.randrange(PHASE)
                assert fifo.wait_until_read(LIMIT)
                at, phase = fifo.posted % fifo.capacity, 0 if fifo.posted // fifo.capacity & 1 else PHASE
                for index in (3, 2, 1, 0):
                    fifo._words[4 * at + index] = words[index] | phase
                fifo.posted += 1
                pair.proxies[0].wake()
                count -= 1
            assert fifo.wait_until_read(LIMIT)
            assert pair.proxies[0].failure(1).startswith("a descriptor is invalid: ")


@each_proxy
def test_mutated_frames_and_descriptors_write_nothing_outside_and_end_nobody(kind):
    print(f"seed {SEED}")
    send_mutated_frames(kind, 300)
    read_mutated_descriptors(kind, 200)


@pytest.mark.exhaustive
@each_proxy
def test_100_000_mutated_frames_and_descriptors_write_nothing_outside(kind):
    print(f"seed {SEED}")
    send_mutated_frames(kind, 50_000)
    read_mutated_descriptors(kind, 50_000)


@pytest.mark.long
@pytest.mark.parametrize("seconds", [1, pytest.param(10, marks=pytest.mark.exhaustive)])
def test_the_native_proxy_works_while_python_holds_the_interpreter(seconds):
    """Descriptors are written, and seconds pass, in calls that do not release the GIL."""
    holding = ctypes.PyDLL(None)
    with Pair("native") as pair:
        pair.post(0, Put(1, 0, 0, 0, 0, 0, 0))
        wait_for(lambda: pair.seen(1, 0) == 1)
        pair.proxies[0].add_fifo(fifo := Fifo.allocate(64), True)
        prepared = Fifo.allocate(64)
        for _ in range(60):
            prepared.post(Put(1, 0, 0, 0, 0, 1000, 0), LIMIT)
        counters = memoryview(pair.regions[1][:PAD].numpy()).cast("I")
        target, source = ctypes.c_void_p(fifo.words.data_ptr()), ctypes.c_void_p(prepared.words.data_ptr())
        before = [proxy.count_calls() for proxy in pair.proxies]
        holding.memmove(target, source, ctypes.c_size_t(60 * 32))
        holding.usleep(seconds * 1_000_000)
        assert counters[0] == 61
        after = [proxy.count_calls() for proxy in pair.proxies]
        # A call sends, or receives, several small puts, and acknowledges many.
        assert after[0].sends - before[0].sends < 20
        assert after[1].receives - before[1].receives < 30
        assert after[1].sends - before[1].sends < 5
        pair.proxies[0].remove_fifo(fifo)


def test_the_interface_is_the_jobs(monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "MASTER_ADDR", "STRETTO_NICS"):
        monkeypatch.delenv(name, raising=False)
    assert find_interface(is_one_machine=True) == ("lo", "127.0.0.1")
    with pytest.raises(ValueError, match="neither GLOO_SOCKET_IFNAME nor MASTER_ADDR says"):
        find_interface(is_one_machine=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(ValueError, match="which this machine reaches over loopback: set GLOO_SOCKET_IFNAME"):
        find_interface(is_one_machine=False)
    monkeypatch.setenv("MASTER_ADDR", "node-7.invalid")
    with pytest.raises(ValueError, match=r"MASTER_ADDR is 'node-7.invalid', which .* finds no way to .*: set GLOO"):
        find_interface(is_one_machine=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert find_interface(is_one_machine=False) == ("lo", "127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    with pytest.raises(ValueError, match=r"names 'eth77', which is no interface with an IPv4 address: .*lo.* have"):
        find_interface(is_one_machine=True)
    monkeypatch.setenv("STRETTO_NICS", "mlx5_77")
    with pytest.raises(ValueError, match="STRETTO_NICS names 'mlx5_77', no network interface"):
        find_interface(is_one_machine=True)


def test_descriptors_and_frames_are_read_as_they_were_written():
    rng = random.Random(SEED)
    for _ in range(200):
        numbers = [rng.randrange(1 << bits) for bits in (20, 23, 40, 23, 40, 40)]
        put = Put(*numbers, rng.choice((None, rng.randrange(1 << 20))), rng.randrange(1 << 20))
        assert unpack(tuple(word | PHASE for word in pack(put))) == put
        frame = PutFrame(FrameKind.PUT, *(rng.randrange(1 << bits) for bits in (32, 64, 64, 32, 64, 30, 32)))
        assert unpack_frame(pack_frame(frame, TOKEN), TOKEN) == frame
    with pytest.raises(ValueError, match="a put's offset is 1099511627776, and must have 40 bits: 1099511627775 would"):
        pack(Put(0, 0, 0, 0, 1 << 40, 0, None))
    with pytest.raises(FrameError, match="token"):
        unpack_frame(pack_frame(PutFrame(FrameKind.ACK, 0), bytes(16)), TOKEN)
    assert len(pack_frame(PutFrame(FrameKind.ACK, 0), TOKEN)) == HEADER_BYTES == 64

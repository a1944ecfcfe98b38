# SPDX-License-Identifier: Apache-2.0
"""The proxy in C++ (native/proxy.cpp), called through ctypes: one thread that never takes the GIL."""

import ctypes
import functools
import os
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from stretto.cluster.detection import usable_cores
from stretto.memory.compilation import note_loaded_kernel
from stretto.memory.network.descriptors import Fifo, Put
from stretto.memory.network.frames import NO_SIGNAL
from stretto.memory.network.transport import PutRegion
from stretto.memory.symmetric import MASK
from stretto.native_code import NativeLibrary

_FAILURE_BYTES = 512
_CORES_TO_SEND_APART = 4  # on two, another thread only takes the first one's place
_MOST_LANES = 4
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "proxy_open": (
        ctypes.c_void_p,
        (ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_double, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p),
    ),
    "proxy_add_peer": (None, (ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_int)),
    "proxy_start": (None, (ctypes.c_void_p,)),
    "proxy_add_region": (None, (ctypes.c_void_p, *[ctypes.c_uint64] * 5, ctypes.c_void_p, ctypes.c_int)),
    "proxy_remove_region": (None, (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_double)),
    "proxy_add_fifo": (None, (ctypes.c_void_p, *[ctypes.c_uint64] * 3, ctypes.c_int)),
    "proxy_remove_fifo": (None, (ctypes.c_void_p, ctypes.c_uint64)),
    "proxy_put": (ctypes.c_int, (ctypes.c_void_p, *[ctypes.c_uint64] * 8)),
    "proxy_await": (ctypes.c_int, (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_double)),
    "proxy_wake": (ctypes.c_int, (ctypes.c_void_p,)),
    "proxy_pause": (None, (ctypes.c_void_p, ctypes.c_double)),
    "proxy_failure": (ctypes.c_int, (ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_int)),
    "proxy_count_calls": (None, (ctypes.c_void_p, ctypes.c_void_p)),
    "proxy_drop_payloads": (None, (ctypes.c_void_p, ctypes.c_int)),
    "proxy_break_connection": (None, (ctypes.c_void_p, ctypes.c_int)),
    "proxy_close": (None, (ctypes.c_void_p, ctypes.c_double)),
    "proxy_free": (None, (ctypes.c_void_p,)),
}


def find_library() -> Path:
    """The compiled file; compiles it first, in a few seconds, if none has. CompilerError if that fails."""
    return NativeLibrary(
        name="stretto_proxy",
        main=Path(__file__).parent / "native" / "proxy.cpp",
        arguments=("-O2", "-fPIC", "-shared", "-std=c++20", "-fvisibility=hidden", "-pthread"),
        key=(os.uname().machine,),
        owner="the proxy of puts between nodes",
        what="the proxy of puts between nodes",
        seconds="4 seconds",
        needs="a C++20 compiler, and Linux",
        instead="or set STRETTO_PROXY=python, which takes more of a core",
    ).find()


@functools.cache
def load_library() -> ctypes.CDLL:
    """The library, loaded; compiled first, as `find_library`. OSError where it cannot be loaded."""
    note_loaded_kernel()  # the other ranks wait for one that compiles
    library = ctypes.CDLL(str(find_library()))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class SystemCalls(NamedTuple):
    """Numbers of system calls: of the thread, and `wakes` of those that post and wake it."""

    polls: int
    sends: int
    receives: int
    wakes: int


class NativeProxy:
    """The proxy of one rank of a group, as `proxy.Proxy`, with the same arguments and methods.

    _handle: the C++ object; None once it is closed, and in a forked process, which has not the thread.
    """

    LONGEST_PAUSE: float | None = 0.02
    SENDS_APART = usable_cores() >= _CORES_TO_SEND_APART
    """True on machines where a second thread sends what kernels put much of."""

    @staticmethod
    def count_lanes(ranks_here: int) -> int:
        """Count the proxies that carry what a rank's kernels put, on a node with so many of the group's ranks.

        Each has a connection a peer and up to two threads, which copy 3 GB/s a way where sockets take more.
        """
        return min(max(usable_cores() // (_CORES_TO_SEND_APART * ranks_here), 1), _MOST_LANES)

    def __init__(self, rank: int, world: int, token: bytes, address: str, limit: float) -> None:
        self._library = load_library()
        self._world = world
        port = ctypes.c_int(0)
        self._handle: int | None = self._library.proxy_open(
            rank, world, token, limit, self.SENDS_APART, address.encode(), ctypes.byref(port)
        )
        if port.value < 0:
            self._library.proxy_free(self._handle)
            raise OSError(-port.value, f"{os.strerror(-port.value)}: the proxy listens on {address}")
        self.address = address, port.value
        self._kept: dict[object, object] = {}  # the memory that the thread reads and writes
        _open.add(self)

    def _require_open(self) -> int:
        if (handle := self._handle) is None:
            raise RuntimeError("the proxy has ended: it was closed")
        return handle

    def connect(self, far: Mapping[int, tuple[str, int]]) -> None:
        """Start the thread, and connect to the peers with these addresses; the others' regions are mapped here."""
        for peer, (host, port) in far.items():
            self._library.proxy_add_peer(self._handle, peer, host.encode(), port)
        self._library.proxy_start(self._handle)

    def add_region(self, region: PutRegion) -> None:
        """Let puts read and write a region."""
        handle, near = self._require_open(), (ctypes.c_uint64 * self._world)()
        for peer, whole in region.near.items():
            near[peer] = whole.data_ptr()
        self._kept[region.number] = region
        self._library.proxy_add_region(
            handle,
            region.number,
            region.whole.data_ptr(),
            region.pad_bytes,
            region.size,
            region.signals,
            near,
            self._world,
        )

    def remove_region(self, number: int, seconds: float) -> None:
        """Forget a region, once what was put from it has arrived, or after so many seconds."""
        if self._handle is not None:
            self._library.proxy_remove_region(self._handle, number, seconds)
            self._kept.pop(number, None)

    def add_fifo(self, fifo: Fifo, is_polled: bool) -> None:
        """Read a FIFO. is_polled: kernels write to it, which wake nobody."""
        handle = self._require_open()
        self._kept[fifo] = fifo
        self._library.proxy_add_fifo(handle, fifo.words.data_ptr(), fifo.capacity, fifo.tail.data_ptr(), is_polled)

    def remove_fifo(self, fifo: Fifo) -> None:
        """Read a FIFO no more."""
        if self._handle is not None:
            self._library.proxy_remove_fifo(self._handle, fifo.words.data_ptr())
            self._kept.pop(fifo, None)

    def put(self, fifo: Fifo, put: Put, timeout: float) -> bool:
        """Post a put to the host's FIFO, as `Fifo.post`; send what can be sent. Returns what `wake` does."""
        peer, source_region, source, region, offset, size, signal, _ = put
        if (handle := self._handle) is not None:
            index = NO_SIGNAL if signal is None else signal
            found = self._library.proxy_put(
                handle, fifo.posted, peer, source_region, source, region, offset, size, index
            )
            if found >= 0:
                fifo.posted += 1
                return bool(found)
        fifo.post(put, timeout)  # it waits for room, and says what is wrong
        return self.wake()

    def await_counter(self, counter: int, target: int, seconds: float) -> bool:
        """`pause` until the counter at an address has reached a target; False after so many seconds, or for a lost
        peer."""
        handle = self._handle
        return handle is not None and bool(self._library.proxy_await(handle, counter, target & MASK, seconds))

    def wake(self) -> bool:
        """Have the FIFOs looked at now, here or by the thread. Returns whether a peer may be lost: see `failure`."""
        handle = self._handle
        return handle is None or bool(self._library.proxy_wake(handle))

    def pause(self, seconds: float) -> None:
        """Wait until a signal has counted up since the last call, or so many seconds have passed; the caller receives
        and sends meanwhile, in place of the thread."""
        if (handle := self._handle) is None:
            time.sleep(seconds)
        else:
            self._library.proxy_pause(handle, seconds)

    def failure(self, peer: int) -> str | None:
        """Say why the peer cannot be reached, or this proxy is broken; None as long as neither is known."""
        if self._handle is None:
            return "the group's proxy has ended"
        text = ctypes.create_string_buffer(_FAILURE_BYTES)
        length = self._library.proxy_failure(self._handle, peer, text, _FAILURE_BYTES)
        return text.raw[:length].decode(errors="replace") if length else None

    def count_calls(self) -> SystemCalls:
        """The system calls that the thread has made."""
        counts = (ctypes.c_uint64 * len(SystemCalls._fields))()
        self._library.proxy_count_calls(self._require_open(), counts)
        return SystemCalls(*counts)

    def drop_payloads(self, drops: bool) -> None:
        """Send puts of more than a word without their bytes, or with them again, for a bench of what kernels pay."""
        self._library.proxy_drop_payloads(self._require_open(), drops)

    def break_connection(self, peer: int) -> None:
        """Break the connection to a peer, for tests: it is opened again."""
        self._library.proxy_break_connection(self._require_open(), peer)

    def close(self, seconds: float) -> None:
        """End the thread once all puts have arrived, or after so many seconds; tells the peers."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._library.proxy_close(handle, seconds)
            self._library.proxy_free(handle)
            self._kept.clear()


_open: "weakref.WeakSet[NativeProxy]" = weakref.WeakSet()


def _forget_all() -> None:
    for proxy in _open:
        proxy._handle = None


os.register_at_fork(after_in_child=_forget_all)

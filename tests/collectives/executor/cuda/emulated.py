# SPDX-License-Identifier: Apache-2.0
"""Kernels of all ranks in this process: their CUDA C++ compiled by the C++ compiler, a thread for each block."""

import ctypes
import hashlib
import re
import shutil
import subprocess
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from stretto.collectives.executor.cuda.copy_engine.executor import CopyEngineExecutor
from stretto.collectives.executor.cuda.workspace import (
    MAX_BLOCKS,
    STATE_WORDS,
    CopyArea,
    describe_report,
    lay_out,
    require_lines,
    words_of_broken_off,
)
from stretto.memory import PeerError
from stretto.memory.copy_engine import SIDE_STREAMS
from stretto.memory.failures import RECORD_WORDS, SUMMARY_ADDRESS

HERE = Path(__file__).parent
COMPILER = shutil.which("g++") or shutil.which("c++")
THREADS = 8
OPTIONS = ("-std=c++20", "-O1", "-w", "-fPIC", "-pthread")
LAUNCH = """
extern "C" void launch(u32 first, u32 end, u32 blocks, u32 threads, u64* a) {
  launch_blocks(first, end, blocks, threads, [](u64* a) { %s(%s); }, a);
}
"""


LOCK = threading.Lock()


class Places:
    """The multiprocessors of a rank's GPU, of which a block holds one from its start to its end.

    Blocks start in the order of launches, and of their indices, as GPUs do it: none before all of an earlier launch.
    """

    def __init__(self, count):
        self._free = threading.Semaphore(count)
        self._dispatching = threading.Lock()

    def run(self, function, blocks, *arguments):
        def run_block(block):
            function(block, block + 1, blocks, *arguments)
            self._free.release()

        running = []
        with self._dispatching:
            for block in range(blocks):
                self._free.acquire()
                running.append(threading.Thread(target=run_block, args=(block,)))
                running[-1].start()
        for thread in running:
            thread.join()


class EmulatedFunction:
    """A kernel whose launch runs all its threads to their end. places: None for as many as there are blocks."""

    def __init__(self, source, names, folder, entry="run", places=None):
        self._places = places
        signature = re.search(rf"\b{entry}\((.*?)\)\s*\{{", source, re.S).group(1)
        kinds = _spread(signature)
        arguments = ", ".join(f"({kind})a[{index}]" for index, kind in enumerate(kinds))
        assert len(kinds) == len(names)
        own = (
            source[: source.index("// Instructions that C++ lacks")],
            source[source.index("// Building blocks of") :],
        )
        text = own[0] + '#include "emulation.h"\n' + own[1] + LAUNCH % (entry, arguments)
        text = text.replace('extern "C" __global__ void', "static void")
        # A GPU's blocks have a thread for each message of a level: here a thread has several.
        text = re.sub(r"threadIdx\.x == (\d+)", lambda found: f"threadIdx.x == {int(found[1]) % THREADS}", text)
        text, count = re.subn(r"((?:Pack load|void store)\(.*\) \{)", r"\1 part();", text)
        assert count == 2
        key = hashlib.sha256(text.encode()).hexdigest()[:16]
        library = folder / f"{key}.so"
        if not library.exists():
            emulation = _compile_emulation(folder)
            with tempfile.TemporaryDirectory(dir=folder) as own:  # other processes may compile the same
                source, made = Path(own, "kernel.cpp"), Path(own, "kernel.so")
                source.write_text(text)
                _compile(source, made, emulation)
                made.rename(library)
        self._launch = ctypes.CDLL(str(library)).launch
        self._at = {name: index for index, name in enumerate(names)}
        self._values = (ctypes.c_uint64 * len(names))()

    handle = 1

    def parameters(self):
        return tuple(self._values)

    def place(self, name):
        return self._at[name]

    def set(self, name, value):
        self._values[self._at[name]] = value

    def launch(self, blocks, threads, *, is_cooperative=False, stream=None):
        values = type(self._values)(*self._values)  # as they are now, whenever it runs
        if self._places is None:
            (stream or _run)(self._launch, 0, blocks, blocks, THREADS, values)
        else:
            self._places.run(self._launch, blocks, THREADS, values)


def _run(function, *arguments):
    function(*arguments)


def _compile_emulation(folder):
    """The library of what is the same for all kernels, which takes most of a compiler's time."""
    library = folder / "emulation.so"
    with LOCK:
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=folder) as own:
                made = Path(own, library.name)
                _compile(HERE / "emulation.cpp", made)
                made.rename(library)
    return library


def _compile(source, library, *others):
    subprocess.run([COMPILER, *OPTIONS, "-shared", f"-I{HERE}", source, *others, "-o", library], check=True)


def _spread(signature):
    """The types of parameters, also of those that share one: `char *a, *b`."""
    kinds = []
    for part in signature.split(","):
        match = re.fullmatch(r"\s*(.*?)\s*(\w+)\s*", part, re.S)
        kinds.append(match.group(1))
    return kinds


class EmulatedWorkspace:
    """A rank's workspace in this process's memory. memories: None for other nodes'. check raises a real one's words."""

    def __init__(self, rank, memories, regions, half, folder, limit=60.0, has_nvlink=True, macros=""):
        self.rank, self.world_size = rank, len(memories)
        self.memories = memories  # kept as long as peers may write there
        self.device = torch.device("cpu")
        self.multiprocessors = self.max_blocks = 2
        self.places = None
        self.limit = int(limit * 1e9)
        self.regions, self.half, self.folder, self.macros = regions, half, folder, macros
        self.has_nvlink = has_nvlink
        self.peers = [0 if memory is None else memory.data_ptr() for memory in memories]
        self.state = torch.zeros(STATE_WORDS, dtype=torch.int32)
        # Of this rank alone, as if it were a process.
        self.failed = torch.zeros(1, dtype=torch.int32)
        self.summary = torch.zeros(1, dtype=torch.int32)
        self.report = torch.zeros(RECORD_WORDS, dtype=torch.int32)
        self.report[SUMMARY_ADDRESS : SUMMARY_ADDRESS + 2].view(torch.int64).fill_(self.summary.data_ptr())
        self.kernels = {}
        self.late = {}
        self.symmetric = {}
        self._queues = None

    def load(self, source, names, entry="run"):
        return EmulatedFunction(self.macros + source, names, self.folder, entry, self.places)

    def register(self, kernel):
        self.kernels[len(self.kernels) + 1] = kernel
        return len(self.kernels)

    def require_lines_for(self, protocol, name):
        require_lines(protocol, name, has_nvlink=self.has_nvlink)

    def copy_area(self):
        return self.area

    is_capturing = False
    nodes = ()

    def find_symmetric(self, tensor):
        return self.symmetric.get(tensor.data_ptr())

    def copy_streams(self):
        if self._queues is None:
            self._queues = EmulatedQueues(self.late)
        return self._queues

    def drain(self):
        """Wait for the queues, as a synchronized stream does."""
        if self._queues is not None:
            self._queues.drain()

    def follow_stream(self):
        return None  # there is one

    def check(self):
        description = describe_report(self.report.tolist(), self.kernels)
        assert description is not None or not self.summary[0]
        if description is not None:
            raise PeerError(description)

    def abort(self, kernel):
        words = words_of_broken_off(kernel)
        self.report[: len(words)] = torch.tensor(words, dtype=torch.int64).to(torch.int32)
        self.summary.fill_(1)
        self.failed.fill_(1)

    def set_calls(self, count):
        """As if there had been so many calls."""
        self.state[:MAX_BLOCKS] = torch.tensor(count, dtype=torch.uint32).view(torch.int32)

    def mend(self):
        """Forget a wait that was given up."""
        self.report[:SUMMARY_ADDRESS] = 0
        self.summary.zero_()
        self.failed.zero_()
        self.state[MAX_BLOCKS] = 0
        self.state[-2:] = 0


class EmulatedQueues:
    """CudaCopyStreams as threads: one after another in each, and between them only what events put in order.

    As on a GPU, the host goes on meanwhile, to the next call perhaps, and waits in `drain`. late: {a queue: seconds
    that it waits before everything it does}.
    """

    def __init__(self, late):
        self._late = late
        self._threads = {queue: ThreadPoolExecutor(1) for queue in ("caller", *SIDE_STREAMS)}
        self._events = {}

    def fork(self):
        self.mark("forked", "caller")
        for queue in SIDE_STREAMS:
            self.follow("forked", queue)

    def handle(self, queue):
        return lambda function, *arguments: self._put(queue, function, *arguments)

    def mark(self, event, queue):
        self._events[event] = threading.Event()
        self._put(queue, self._events[event].set)

    def follow(self, event, queue):
        self._put(queue, self._events[event].wait)

    def copy(self, target, source, num_bytes, queue):
        self._put(queue, ctypes.memmove, target, source, num_bytes)

    def join(self):
        for queue in SIDE_STREAMS:
            self.mark("joined", queue)
            self.follow("joined", "caller")

    def drain(self):
        """Wait for what the caller's queue has."""
        self._put("caller", int).result()

    def _put(self, queue, function, *arguments):
        late = self._late.get(queue, 0)
        return self._threads[queue].submit(lambda: (time.sleep(late), function(*arguments)))


class EmulatedGraph(EmulatedQueues):
    """CudaCopyStreams of a captured call: `drain` executes it one operation after another, in an order of its own.

    Each time that is another order that the events allow, as CUDA's may be. rng: draws it.
    """

    def __init__(self, rng):
        super().__init__({})
        self._rng = rng
        self._operations = []  # (queue, function and arguments, the numbers of those before it)
        self._last = {}
        self._marks = {}

    def mark(self, event, queue):
        self._marks[event] = self._last.get(queue)

    def follow(self, event, queue):
        self._put(queue, int, after=self._marks[event])

    def drain(self):
        operations, done = self._operations, set()
        self._operations, self._last = [], {}
        first = self._rng.sample(("caller", *SIDE_STREAMS), 4)  # the queues that go first, or in any order
        while len(done) < len(operations):
            ready = [
                number for number, (_, _, before) in enumerate(operations) if number not in done and before <= done
            ]
            chosen = self._rng.choice(ready)
            if self._is_sorted():
                chosen = min(ready, key=lambda number: first.index(operations[number][0]))
            function, *arguments = operations[chosen][1]
            function(*arguments)
            done.add(chosen)

    def _is_sorted(self):
        return self._rng.random() < 0.8

    def _put(self, queue, function, *arguments, after=None):
        before = {self._last.get(queue), after} - {None}
        self._last[queue] = len(self._operations)
        self._operations.append((queue, (function, *arguments), before))


def add_copy_areas(workspaces, size):
    memories = [torch.zeros(size, dtype=torch.uint8) for _ in workspaces]
    for workspace in workspaces:
        workspace.area = CopyArea(size, [memory.data_ptr() for memory in memories], torch.device("cpu"))
        workspace.area_memories = memories


def make_workspaces(ranks, folder, bytes_each=1 << 19, **options):
    regions, half = lay_out(dict.fromkeys(("LL", "LL128", "Simple"), bytes_each))
    memories = [torch.zeros(2 * half, dtype=torch.uint8) for _ in range(ranks)]
    return [EmulatedWorkspace(rank, memories, regions, half, folder, **options) for rank in range(ranks)]


def run_all(kernels, tensors):
    """Call every rank's kernel at once, each in a thread of its own."""
    with ThreadPoolExecutor(len(kernels)) as pool:
        calls = [pool.submit(_run_to_end, *call) for call in zip(kernels, tensors, strict=True)]
    for call in calls:
        call.result()


def _run_to_end(kernel, arguments):
    kernel(*arguments)
    if isinstance(kernel, CopyEngineExecutor):  # all others run where they are launched
        kernel.workspace.drain()

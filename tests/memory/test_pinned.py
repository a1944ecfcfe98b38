# SPDX-License-Identifier: Apache-2.0
"""Pinned host memory, with CUDA's runtime replaced: what is registered, when it is freed, and what errors say."""

import ctypes
import gc
import mmap
import multiprocessing
import os
import signal
import weakref
from pathlib import Path

import pytest
import torch
from tests.processes import LIMIT

from stretto.memory import pinned
from stretto.memory.pinned import HostMemoryLimit, allocate_pinned

GPU = torch.device("cuda", 0)
BLOCK = 1 << 20
_MAP_FIXED_NOREPLACE = 0x100000


class Runtime:
    """A CUDA runtime that registers anything but the `failing` call, and records each call."""

    def __init__(self, failing: int | None = None) -> None:
        self.failing = failing
        self.calls: list[tuple[str, int, int]] = []
        self.is_capturing = False
        self.cleared = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert is_mapped(address) and is_mapped(address + size - 1)  # noqa: PT018
        self.calls.append(("register", address, size))
        return 2 if len(self.calls) - 1 == self.failing else 0

    def cudaHostUnregister(self, address: int) -> int:
        assert is_mapped(address)
        assert self.calls[-1][0] in ("synchronize", "unregister")
        self.calls.append(("unregister", address, 0))
        return 0

    def cudaGetErrorString(self, error: int) -> str:
        return "out of memory"

    def install(self, patch: pytest.MonkeyPatch) -> "Runtime":
        patch.setattr(pinned, "BLOCK_BYTES", BLOCK)
        patch.setattr(torch.cuda, "cudart", lambda: self)
        patch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
        patch.setattr(torch.cuda, "synchronize", lambda device: self.calls.append(("synchronize", 0, 0)))
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.is_capturing)
        patch.setattr(pinned, "_clear_error", self.clear)
        return self

    def clear(self, device: torch.device) -> None:
        self.cleared += 1

    def took(self, what: str) -> list[tuple[int, int]]:
        return [(address, size) for name, address, size in self.calls if name == what]


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    return Runtime().install(monkeypatch)


def find_map(address: int) -> str | None:
    """The line of /proc/self/maps that has the address; None if it is not mapped."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(number, 16) for number in line.split()[0].split("-"))
        if start <= address < end:
            return line
    return None


def is_mapped(address: int) -> bool:
    return find_map(address) is not None


def test_it_has_as_many_zero_bytes_as_asked_for_all_registered_in_blocks(runtime: Runtime) -> None:
    tensor = allocate_pinned(2 * BLOCK + 77, GPU)
    assert (tensor.dtype, tensor.shape, tensor.device.type) == (torch.uint8, (2 * BLOCK + 77,), "cpu")
    assert not tensor.any()
    start = tensor.data_ptr()
    assert start % mmap.PAGESIZE == 0
    assert runtime.took("register") == [(start, BLOCK), (start + BLOCK, BLOCK), (start + 2 * BLOCK, 77)]


def test_its_pages_are_there_before_they_are_registered(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "_TOUCHED_AT_ONCE", 3 * mmap.PAGESIZE)
    size, resident = 20 * BLOCK, []

    def register(address: int, size: int, flags: int) -> int:
        resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE)
        return 0

    monkeypatch.setattr(runtime, "cudaHostRegister", register)
    before = int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    tensor = allocate_pinned(size, GPU)
    assert resident[0] - before > 0.9 * tensor.numel()


def test_it_is_freed_with_the_last_view_and_not_before(runtime: Runtime) -> None:
    tensor = allocate_pinned(2 * BLOCK, GPU)
    start = tensor.data_ptr()
    view = tensor[BLOCK:].view(torch.float32)
    del tensor
    gc.collect()
    view.fill_(1.5)
    assert runtime.took("unregister") == []
    del view
    assert sorted(address for address, _ in runtime.took("unregister")) == [start, start + BLOCK]
    assert not is_mapped(start)
    assert not pinned._registered


def test_a_failed_registration_is_undone_and_raises_with_the_available_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(failing=3).install(monkeypatch)
    other = allocate_pinned(BLOCK, GPU)
    with pytest.raises(RuntimeError) as raised:
        allocate_pinned(4 * BLOCK, GPU)
    text = str(raised.value)
    assert f"bytes {2 * BLOCK} to {3 * BLOCK} of an allocation of {4 * BLOCK} bytes: out of memory" in text
    assert f"this process has pinned {BLOCK} bytes" in text
    registered = runtime.took("register")
    assert sorted(address for address, _ in runtime.took("unregister")) == [address for address, _ in registered[1:3]]
    assert runtime.cleared == 1  # torch would raise the error after another kernel
    assert pinned._registered == {other.data_ptr(): BLOCK}
    del raised, other


def test_memory_that_is_released_during_a_graph_capture_is_freed_after_it(runtime: Runtime) -> None:
    tensor = allocate_pinned(BLOCK, GPU)
    start, runtime.is_capturing = tensor.data_ptr(), True
    del tensor
    assert is_mapped(start)
    assert runtime.took("unregister") == []
    runtime.is_capturing = False
    other = allocate_pinned(BLOCK, GPU)
    assert runtime.took("unregister") == [(start, 0)]
    assert pinned._registered == {other.data_ptr(): BLOCK}


def test_more_than_is_left_is_refused_before_anything_is_mapped(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = HostMemoryLimit(1000, "what is left of the cgroup limit /a/memory.max")
    monkeypatch.setattr(pinned, "host_memory_available", lambda: left)
    for device in (GPU, torch.device("cpu")):
        with pytest.raises(ValueError, match=r"1001 bytes .* more than the 1000 left .*the cgroup limit /a/memory.max"):
            allocate_pinned(1001, device)
    assert runtime.calls == []
    with pytest.raises(ValueError, match="must be 0 or more"):
        allocate_pinned(-1, GPU)


def test_on_a_cpu_it_is_ordinary_memory(runtime: Runtime) -> None:
    tensor = allocate_pinned(1000, torch.device("cpu"))
    assert tensor.shape == (1000,)
    assert not tensor.any()
    assert allocate_pinned(0, GPU).shape == (0,)
    assert runtime.calls == []


def hold_memory(folder: str, how: str) -> None:
    """Allocate, write the map and what was unregistered into files, and end as `how` says."""
    with pytest.MonkeyPatch.context() as patch:
        runtime = Runtime().install(patch)
        tensor = allocate_pinned(3 * BLOCK, GPU)
        Path(folder, "map").write_text(find_map(tensor.data_ptr()) or "")
        Path(folder, "shared").write_text(str(Path("/proc/self/maps").read_text().count("/dev/shm")))
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        libc = ctypes.CDLL(None)
        if (child := os.fork()) == 0:
            start = tensor.data_ptr()
            has_none = not is_mapped(start)
            fixed = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED_NOREPLACE
            libc.mmap(ctypes.c_void_p(start), mmap.PAGESIZE, mmap.PROT_READ, fixed, -1, 0)  # takes the free addresses
            del tensor
            Path(folder, "child").write_text(f"{has_none} {is_mapped(start)} {len(runtime.calls)}")
            os._exit(0)
        os.waitpid(child, 0)
        weakref.finalize._exitfunc()  # as the interpreter does when it ends
        Path(folder, "unregistered").write_text(str(len(runtime.took("unregister"))))


@pytest.fixture
def server(ranks) -> multiprocessing.context.ForkServerContext:
    ranks(1).run(int)  # the pool is up, and so is the server that processes are forked from
    return multiprocessing.get_context("forkserver")


def test_a_killed_process_leaves_nothing_behind(server, tmp_path: Path) -> None:
    process = server.Process(target=hold_memory, args=(str(tmp_path), "kill"))
    process.start()
    process.join(LIMIT)
    assert process.exitcode == -signal.SIGKILL
    _, permissions, _, device, inode, *name = (tmp_path / "map").read_text().split()
    assert (permissions, device, inode, name) == ("rw-p", "00:00", "0", [])  # anonymous, and of this process alone
    assert (tmp_path / "shared").read_text() == "0"


def test_memory_is_unregistered_when_the_process_ends_and_not_by_a_forked_one(server, tmp_path: Path) -> None:
    process = server.Process(target=hold_memory, args=(str(tmp_path), "end"))
    process.start()
    process.join(LIMIT)
    assert process.exitcode == 0
    assert (tmp_path / "child").read_text() == "True True 3"  # the three are the parent's registrations
    assert (tmp_path / "unregistered").read_text() == "3"

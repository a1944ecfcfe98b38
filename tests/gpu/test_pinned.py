# SPDX-License-Identifier: Apache-2.0
"""Pinned host memory with CUDA: copies are asynchronous, freed memory is gone, `ulimit -l` does not bound it."""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto.bench.harness import time_steps
from stretto.cluster import HostLink
from stretto.cluster.probe import measure_host_link
from stretto.memory.pinned import allocate_pinned

Run = Callable[..., list[Any]]
pytestmark = pytest.mark.ranks(1, own=(1,), among=(1,))
SIZE = 192 << 20
LONG = 200_000_000  # cycles that a kernel waits: more than 50 ms


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) << 12


def copy_there_and_back() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    there = torch.randint(0, 256, (SIZE,), dtype=torch.uint8, device=device)
    torch.cuda.synchronize()
    before = resident_bytes()
    host = allocate_pinned(SIZE + 5, device)
    assert host.is_pinned()
    assert host[SIZE // 2 :].is_pinned()
    assert SIZE <= resident_bytes() - before < 1.2 * SIZE  # not rounded up to a power of two

    part, done = host[5:], torch.cuda.Event()
    torch.cuda._sleep(LONG)
    part.copy_(there, non_blocking=True)
    done.record()
    assert not done.query()  # the call returned while the kernel before it still ran
    done.synchronize()
    assert torch.equal(part, there.cpu())

    back = torch.empty_like(there)
    torch.cuda._sleep(LONG)
    back.copy_(part, non_blocking=True)
    done.record()
    assert not done.query()
    held = resident_bytes()
    del part, host  # waits for the copy
    assert held - resident_bytes() > 0.9 * SIZE
    assert done.query()
    assert torch.equal(back, there)


@pytest.mark.usefixtures("world")
def test_copies_return_before_they_end_and_freeing_waits_for_them(run_ranks: Run) -> None:
    run_ranks(1, copy_there_and_back)


UNDER_A_LIMIT = """
import ctypes, os, resource, torch
from stretto.bench.harness import time_steps
from stretto.cluster.probe import measure_host_link
from stretto.cluster import HostLink
from stretto.memory.pinned import allocate_pinned
device = torch.device("cuda", 0)
torch.zeros(1, device=device)
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
if os.geteuid() == 0:
    os.seteuid(65534)  # root may lock any amount
page = torch.zeros(1 << 20, dtype=torch.uint8)
libc = ctypes.CDLL(None)
assert libc.mlock(ctypes.c_void_p(page.data_ptr()), ctypes.c_size_t(page.numel())) != 0
host = allocate_pinned(64 << 20, device)
assert host.is_pinned()
"""


@pytest.mark.usefixtures("world")
def test_the_limit_of_locked_memory_does_not_bound_it() -> None:
    run = subprocess.run([sys.executable, "-c", UNDER_A_LIMIT], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr


def ask_for_what_cuda_refuses() -> str:
    device = torch.device("cuda", torch.cuda.current_device())
    host = allocate_pinned(1 << 20, device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stretto.memory.pinned._PORTABLE", 1 << 20)  # no such flag
        with pytest.raises(RuntimeError) as raised:
            allocate_pinned(1 << 20, device)
    assert torch.ones(4, device=device).sum().item() == 4  # the error is not raised by what comes after
    del host
    return str(raised.value)


@pytest.mark.usefixtures("world")
def test_an_error_of_cuda_is_raised_once_and_not_by_later_calls(run_ranks: Run) -> None:
    assert f"this process has pinned {1 << 20} bytes" in run_ranks(1, ask_for_what_cuda_refuses)[0]


def probe_host_link() -> HostLink:
    return measure_host_link(
        torch.device("cuda", torch.cuda.current_device()), partial(time_steps, warm_up=2, repeats=7)
    )


@pytest.mark.usefixtures("world")
@pytest.mark.alone
def test_both_directions_of_a_host_link_are_measured_faster_at_once_than_one_alone(run_ranks: Run) -> None:
    (link,) = run_ranks(1, probe_host_link)
    print(link)
    assert min(link.to_device_bandwidth, link.to_host_bandwidth) > 2e9
    assert max(link.to_device_bandwidth, link.to_host_bandwidth) < link.duplex_bandwidth

# SPDX-License-Identifier: Apache-2.0
"""Shared memory between real processes: what peers write is seen, waits end, and nothing is left behind."""

import os
import signal
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.pool import run_processes
from tests.processes import LIMIT

from stretto import counters, memory
from stretto.memory import host, symmetric


def mapped() -> int:
    """Count the regions of shared memory that this process maps."""
    return Path("/proc/self/maps").read_text().count("memfd:stretto")


def named_memory() -> int:
    """Count this process's maps of memory with a name, which could stay behind; others than ours may be there."""
    return Path("/proc/self/maps").read_text().count("/dev/shm")


def open_descriptors() -> int:
    """Count the open descriptors of shared memory."""
    return sum("memfd:stretto" in os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink())


def write_to_all(group, size, round):
    """Every rank writes to every peer and signals it; returns what it found in its own buffer, by writer."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    named_before = named_memory()
    with memory.allocate(size * world_size, group, signals=2) as mine, memory.allocate(8, group) as other:
        assert not mine.buffer()[rank * size : (rank + 1) * size].any()  # nobody else writes there
        other.buffer().fill_(255)  # another allocation is other memory
        for peer in range(world_size):
            mine.buffer(peer)[rank * size : (rank + 1) * size] = 16 * round + rank + 1
            mine.signal(peer, 1)
        for peer in range(world_size):
            mine.wait(peer, 1, 1, timeout=LIMIT)
        assert mapped() >= 2 * world_size
        assert named_memory() == named_before
        kept = mine.buffer().view(world_size, size)
    return kept.tolist()  # still there after the end


def use_memory_in_groups():
    world_size = dist.get_world_size()
    of_all = write_to_all(None, 5, 1)
    assert of_all == [[16 + writer + 1] * 5 for writer in range(world_size)]
    members = [3, 1]
    group = dist.new_group(members)
    if dist.get_rank() in members:
        assert write_to_all(group, 100_000, 2) == [[33] * 100_000, [34] * 100_000]
    else:
        with pytest.raises(ValueError, match="is not in the group"):
            memory.allocate(8, group)
    dist.barrier()
    assert (mapped(), open_descriptors()) == (0, 0)


def test_ranks_see_what_peers_wrote_and_keep_nothing(ranks):
    ranks(4).run(use_memory_in_groups)


def send_back_and_forth(rounds):
    """A buffer goes from rank 0 to rank 1 and back, each time with another content; returns the first bad round."""
    rank = dist.get_rank()
    with memory.allocate(1 << 16, signals=1) as mine:
        numbers = mine.buffer(0).view(torch.int32)
        for round in range(1, rounds + 1):
            for writer in (0, 1):
                if rank != writer:
                    mine.wait(writer, 0, round, timeout=LIMIT)
                    if not torch.equal(numbers, torch.full_like(numbers, 2 * round + writer)):
                        return round
                else:
                    numbers.fill_(2 * round + writer)
                    mine.signal(1 - rank, 0)
    return None


def test_a_signal_is_not_seen_before_what_was_written_before_it(ranks):
    assert ranks(2).run(send_back_and_forth, 200) == [None, None]


def ask_for_different_sizes():
    with pytest.raises(ValueError, match="all ranks must allocate the same: rank"):
        memory.allocate(8 if dist.get_rank() == 0 else 9)
    with pytest.raises(ValueError, match="signals"):
        memory.allocate(8, signals=dist.get_rank())
    assert mapped() == 0
    memory.allocate(8).close()  # the group is still good


def wait_for_one_who_does_not_come():
    rank = dist.get_rank()
    if rank != 1:
        with pytest.raises(memory.PeerError, match="Rank 1 failed" if rank == 0 else f"rank {rank} of 3"):
            memory.allocate(8, timeout=0.5)
    assert mapped() == 0


def test_ranks_that_disagree_or_are_missing_are_named(ranks):
    ranks(2).run(ask_for_different_sizes)
    ranks(3).run(wait_for_one_who_does_not_come)


def live_beside_a_rank_that_is_killed(rank, folder):
    """Rank 1 is killed while its peers use its memory; rank 0 says what it saw."""
    store = dist.FileStore(f"{folder}/store", 3)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    mine = memory.allocate(1 << 20, signals=1)
    if rank == 1:
        mine.buffer(0)[7] = 42
        mine.signal(0, 0)
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        mine.wait(1, 0, 1, timeout=LIMIT)
    started = time.monotonic()
    try:
        mine.wait(1, 0, 2, timeout=LIMIT)
    except memory.PeerError as error:
        text = f"{mine.buffer(0)[7]} {time.monotonic() - started < LIMIT / 2} {error}"
    mine.close()
    Path(folder, f"rank-{rank}").write_text(f"{mapped()} {text}")


def test_a_rank_that_is_killed_is_named_and_leaves_nothing(ranks, tmp_path):
    ranks(1).run(int)  # the pool is up, and so is the server that processes are forked from
    run_processes(live_beside_a_rank_that_is_killed, tmp_path)
    for rank in (0, 2):
        seen = (tmp_path / f"rank-{rank}").read_text()
        assert seen.startswith("0 42 True"), seen
        assert f"rank {rank} of 3 waits for signal 0 of rank 1 to reach 2" in seen
        assert "its process has ended" in seen


def test_counters_are_met_around_the_end_of_32_bits():
    first, second = memory.allocate_in_process(2, 0, signals=3)
    second._pads[1][0 * 3 + 2] = 2**32 - 1  # what rank 0 has counted so far
    assert second.has_reached(0, 2, -1)
    assert second.has_reached(0, 2, 2**32 - 2)
    assert not second.has_reached(0, 2, 2**32)
    first.signal(1, 2)
    assert second.seen(0, 2) == 0
    assert second.has_reached(0, 2, 2**32)
    assert second.has_reached(0, 2, 2**32 - 1)
    assert not second.has_reached(0, 2, 1)
    assert second.has_reached(0, 1, 0)
    assert not second.has_reached(0, 1, 1)


def test_a_wait_without_a_signal_names_the_waiting_and_the_awaited_rank():
    _, second = memory.allocate_in_process(2, 16, signals=3)
    with pytest.raises(
        memory.PeerError, match=r"rank 1 of 2 waits for signal 2 of rank 0 to reach 5: it is at 0, .*0.05 s"
    ):
        second.wait(0, 2, 5, timeout=0.05)


def test_a_fence_stands_between_data_and_counter(monkeypatch):
    seen = []
    monkeypatch.setattr(host, "find_fence", lambda: lambda: seen.append(second.seen(0, 0)))
    first, second = memory.allocate_in_process(2, 0, signals=1)
    first.signal(1, 0)
    assert seen == [0]  # before the counter is stored
    assert not second.has_reached(0, 0, 2)
    assert seen == [0]
    assert second.has_reached(0, 0, 1)
    assert seen == [0, 1]  # after it is loaded
    symmetric.membarrier()()


def allocate_too_much():
    for size, signals, message in (
        (-1, 0, "0 to .* bytes, not -1"),
        (memory.MAX_BYTES + 1, 0, "bytes"),
        (8, -1, "signals, not -1"),
        (memory.MAX_BYTES, 0, "this machine has"),
    ):
        with pytest.raises(ValueError, match=message):
            memory.allocate(size, signals=signals)
    with pytest.raises(ValueError, match="backends"):
        memory.allocate(8, backend="tape")


def allocate_where_one_has_none():
    """Only rank 1's machine has no memory left, which it sees before the others."""
    rank, before = dist.get_rank(), open_descriptors()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(host.os, "posix_fallocate", lambda *arguments: os.open("/nowhere", 0))
        message = "No such file" if rank == 1 else "rank 1 has no shared memory to give: .*No such file"
        with pytest.raises((OSError, ValueError), match=message):
            memory.allocate(8, timeout=50)
    assert open_descriptors() == before
    memory.allocate(8).close()


def test_all_ranks_raise_where_one_has_no_memory(ranks):
    ranks(3).run(allocate_where_one_has_none, timeout=30)


def test_sizes_are_checked_before_anything_is_allocated(ranks):
    ranks(1).run(allocate_too_much)
    with pytest.raises(ValueError, match="no process group"):
        memory.allocate(8)


def test_a_rank_tells_for_whom_it_waits_while_it_waits():
    seen = []

    def look(until: str) -> None:
        deadline = time.monotonic() + LIMIT
        while (counters.current_wait() or ("",))[0] != until and time.monotonic() < deadline:
            time.sleep(0.001)
        seen.append(counters.current_wait())
        second.signal(0, 0)

    first, second = memory.allocate_in_process(2, 0, signals=1)
    for number, what in enumerate(("a peer", "the gradient of stage 2"), start=1):
        looking = threading.Thread(target=look, args=(what,))
        looking.start()
        with counters.waiting_for((5,), what) if number == 2 else nullcontext():
            first.wait(1, 0, number, timeout=LIMIT)
        looking.join()
    assert seen == [("a peer", ()), ("the gradient of stage 2", (5,))]
    assert counters.current_wait() is None

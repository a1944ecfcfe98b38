# SPDX-License-Identifier: Apache-2.0
"""Lists of copies make the same calls of CUDA's driver, in the same order, as the functions that they stand for."""

import contextlib

import pytest
import torch

from stretto import tiles
from stretto.memory import copy_engine
from stretto.ops.joint.copies import CopiedRows
from stretto.ops.joint.launch import find_joint
from stretto.ops.joint.registry import name_schedule
from stretto.tiles import host

WORLD, RANK = 3, 1


class Memory:
    """Memory of three ranks, all in this process."""

    rank, world_size = RANK, WORLD

    def __init__(self) -> None:
        self.of_ranks = torch.zeros(WORLD, 1 << 16, dtype=torch.uint8)

    def buffer(self, rank=None):
        return self.of_ranks[self.rank if rank is None else rank]


class Driver:
    """Notes each call."""

    def __init__(self) -> None:
        self.calls = []

    def __getattr__(self, name):
        return lambda *arguments: self.calls.append((name, *arguments))


@pytest.fixture
def driver(monkeypatch):
    """A driver that does nothing; the current stream's handle is 20."""
    made = Driver()
    monkeypatch.setattr(copy_engine, "find_driver", lambda: made)
    monkeypatch.setattr(host, "find_driver", lambda: made)
    monkeypatch.setattr(host, "find_handle", lambda _: 20)
    monkeypatch.setattr(host, "rank_await_count", lambda _, index, count: made.await_count(index, count))
    monkeypatch.setattr(tiles, "copy_engine", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(tiles, "rank_wait", lambda _, index, rank: made.wait(index, rank))
    return made


@pytest.fixture
def channel():
    made = tiles.BlockChannel(Memory(), 32 * WORLD, 0, 30.0)
    made.device = torch.device("cuda", 2)
    made._current = made.describe("x")
    return made


def places(channel):
    """Addresses: of row `to` at a rank, of rows of 8 bytes in the channel's buffers; of signals, and their values."""
    own = channel.tensor((1,), torch.uint8).data_ptr()

    def row(rank, to):
        return own + channel.distances[rank] + 8 * to

    def signal(index, rank):
        counter = channel.signal_words(rank)[RANK * channel.channels + index].data_ptr()
        return "copy", counter, channel.sends()[rank, index].data_ptr(), 4, 20

    return row, signal


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_gather_pushes_its_pieces_and_copies_out_what_has_come_from_wherever_x_lies(driver, channel, pieces):
    direct = name_schedule("all_gather_matmul", "direct-all-gather", "kernel", WORLD)
    joint = find_joint("all_gather_matmul", direct, WORLD, 32, 16, piece_rows=32 // pieces, reads_own=True)
    row, signal = places(channel)
    for _ in range(2):  # the second call finds the lists that the first one has made
        x, out = torch.zeros(32, 4, dtype=torch.float16), torch.zeros(96, 4, dtype=torch.float16)
        scales = torch.zeros(32)
        gathered = channel.tensor((96, 4), torch.float16)
        rows, size = CopiedRows(channel, joint, x, gathered, 0, scales, out), 32 // pieces
        driver.calls.clear()
        rows.place_own_rows()
        assert driver.calls == []  # tiles read x
        rows.make_others()
        behind = [  # the rows, which take 768 bytes
            ("copy", row(peer, 0) + 768 + 4 * 32, scales.data_ptr(), 4 * 32, 20) for peer in (2, 0)
        ]
        assert [driver.calls.pop(at) for at in (2 * pieces + 1, 0)] == behind[::-1]
        assert driver.calls[: 4 * pieces] == [
            call
            for peer in (2, 0)
            for piece in range(pieces)
            for call in (
                ("copy", row(peer, 32 + size * piece), x.data_ptr() + 8 * size * piece, 8 * size, 20),
                signal(RANK * pieces + piece, peer),
            )
        ]
        first = out.data_ptr()
        own = ("copy", first + 8 * 32, x.data_ptr(), 8 * 32, 20)
        of_0 = ("copy", first, row(RANK, 0), 8 * 32, 20)
        of_2 = ("copy", first + 8 * 64, row(RANK, 64), 8 * 32, 20)
        waits = [
            ("wait", pieces * peer + pieces - 1, peer) for peer in (0, 2)
        ]  # for the last piece, which stands for all
        assert driver.calls[4 * pieces :] == [own, waits[0], of_0, waits[1], of_2]


def test_counters_are_cleared_and_awaited_in_stream_order(driver):
    counters = torch.ones(9, dtype=torch.int32, device="meta")
    tiles.rank_await_count(counters, 3, 256)
    tiles.rank_reset_counts(counters, 9)
    assert driver.calls == [("await_count", 12, 256, 20), ("clear", 0, 9, 20)]


def test_a_list_refuses_what_it_cannot_keep(channel):
    copies = tiles.CopyList()
    with pytest.raises(ValueError, match="contiguous ends"):
        copies.copy(torch.zeros(2, 4)[:, :2], torch.zeros(2, 2))
    with pytest.raises(ValueError, match="channels 0 to 95, not 96"):
        copies.notify(channel, 96, 0)
    copies.notify(channel, 5, 0)
    channel._current = None
    with pytest.raises(ValueError, match="no call that `begin` has begun is active"):
        copies.run(channel)

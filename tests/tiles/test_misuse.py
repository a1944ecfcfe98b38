# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments of the primitives, on the host and in kernels: each is refused with words that say what will do."""

import re

import pytest
import torch
import torch.distributed as dist
from tests.tiles import kernels
from tests.tiles.channels import BLOCK, COLUMNS, HALF, make_channel, map_gather
from triton.runtime.errors import InterpreterError

from stretto import tiles


def ask_wrongly():
    """Every misuse, with the words that its error must have."""
    static, table = tiles.shard_tiles, torch.zeros(3, dtype=torch.int32)
    dynamic = tiles.look_up_tiles(*[table] * 5)
    with make_channel(channels=4) as channel:
        producer, consumer = map_gather(24, 2)
        whole = tiles.whole_tiles(24, 2, 8, channel_rows=24)

        def begin(producer, consumer, mode="p2p", **named):
            return lambda: channel.begin("x", producer, consumer, mode, **named)

        def allocate(**named):
            return lambda: tiles.BlockChannel.allocate(**{"channels": 1, "backend": "host", **named})

        for words, call in (
            ("one of local, p2p, broadcast, not 'all'", begin(producer, consumer, "all")),
            ("for 3 ranks", begin(static(24, 3, 8), consumer)),
            ("8 channels each", begin(static(24, 2, 8, channels=8), consumer)),
            ("share their channels", begin(producer, static(24, 2, 32, channels=2))),
            ("use shard_tiles", begin(whole, consumer)),
            ("multiple of the tile's", begin(static(24, 2, 16, channels=2, channel_rows=12), consumer)),
            ("a dynamic mapping needs counts", begin(dynamic, consumer)),
            ("counts must be contiguous int32", begin(producer, consumer, counts=table)),
            ("counts must be contiguous int32 [2, 2, 4]", begin(dynamic, dynamic, counts=table)),
            ("no call that `begin` has begun is active", lambda: tiles.rank_wait(channel, 0, 0)),
            ("channels 0 to 3, not 4", lambda: tiles.rank_notify(channel, 4, 0)),
            ("ranks 0 to 1, not 2", lambda: tiles.rank_notify(channel, 0, 2)),
            ("multiple of 128 bytes, not at 8", lambda: channel.tensor((1,), torch.int8, offset=8)),
            ("do not fit", lambda: channel.tensor((2 * HALF + 1,), torch.int8)),
            ("one shape, dtype and device", lambda: tiles.rank_copy_data(torch.zeros(2), torch.zeros(3))),
            ("contiguous tensors", lambda: tiles.rank_copy_data(torch.zeros(2, 2).T, torch.zeros(2, 2))),
            ("of 3 rows cannot go", lambda: tiles.rank_copy_data(torch.zeros(9), torch.zeros(3), rows=slice(1, 4))),
            ("of 3 rows cannot go", lambda: tiles.rank_copy_data(torch.zeros(9), torch.zeros(3), rows=slice(0, 3, 2))),
            ("to row 8 on of 9", lambda: tiles.rank_copy_data(torch.zeros(9), torch.zeros(3), rows=slice(1, 3), to=8)),
            ("to row -1 on", lambda: tiles.rank_copy_data(torch.zeros(9), torch.zeros(3), rows=slice(1, 3), to=-1)),
            ("to row 7 on of 9", lambda: tiles.rank_copy_data(torch.zeros(9), torch.zeros(3), rows=slice(None), to=7)),
            ("one shape", lambda: tiles.rank_copy_data(torch.tensor(0), torch.tensor(0), rows=slice(0, 1))),
            ("one shape", lambda: tiles.rank_copy_data(torch.zeros(9, 2), torch.zeros(3, 1), rows=slice(1, 3))),
            ("tile_rows is 0, but must be a whole number, at least 1", lambda: static(24, 2, 0)),
            ("rows is -1, but must be a whole number, at least 0", lambda: static(-1, 2, 8)),
            ("12 rows or more will do", lambda: static(24, 2, 8, channels=2, channel_rows=8)),
            ("row_low is torch.float32", lambda: tiles.look_up_tiles(*[torch.zeros(3)] * 5)),
            ("rank [2]", lambda: tiles.look_up_tiles(table, table, table[:2], table, table)),
            ('take backend="host"', allocate(backend="cuda")),
            ("1 or more channels", allocate(channels=0)),
            ("more than 0 seconds", allocate(timeout=0)),
            ("more than 0 seconds", allocate(timeout=float("nan"))),
            ("at most 1048576", allocate(channels=1 << 20)),
            ("slot must be 0 or 1, or None", begin(producer, consumer, slot=2)),
            ("or look_up_tiles, not NoneType", begin(None, consumer)),
            ("local, p2p, broadcast, not 'all'", lambda: channel.enter("x", "all")),
            ("ranks 0 to 1, not 2", lambda: channel.tensor((1,), torch.int8, rank=2)),
            ("ranks 0 to 1, not -1", lambda: channel.tensor((1,), torch.int8, rank=-1)),
            ("rows is 24.5, but must be a whole number, at least 0", lambda: static(24.5, 2, 8)),
            (
                "columns is 0, but must be a whole number",
                lambda: tiles.look_up_tiles(*[table] * 5, columns=0),
            ),
        ):
            with pytest.raises(ValueError, match=re.escape(words)):
                call()
        device = channel.begin("x", producer, consumer, "broadcast")
        x = channel.tensor((64, COLUMNS), torch.float32)
        with pytest.raises(InterpreterError, match="begin has counted for another mode"):
            kernels.pull_tiles[(1,)](device, producer, x, x, COLUMNS, 1, 1, BLOCK)
        with pytest.raises(InterpreterError, match="fewer peer_tiles"):
            kernels.notify_peer[(1,)](device, 8, 1)
        with pytest.raises(InterpreterError, match='"p2p" takes a rank'):
            kernels.notify_peer[(1,)](device, 0, None)
        with pytest.raises(ValueError, match="takes tensors on the CPU, not on meta"):
            kernels.notify_peer[(1,)](device, torch.zeros(1, device="meta"), 1)
        dist.barrier()


def test_misuse_is_refused_before_anything_runs(interpret):
    interpret(2, ask_wrongly)


def launch_wrongly():
    """Kernels that name what there is not, or take what is not theirs, and the words that their errors must have."""
    static, table = tiles.shard_tiles(16, 2, 8, channels=2), torch.full((4,), 6, dtype=torch.int32)
    dynamic, none = tiles.look_up_tiles(*[table % 6] * 4, table % 6 + 1), tiles.look_up_tiles(*[table] * 5)
    with make_channel(channels=6) as channel, make_channel() as other:
        device = channel.begin("x", static, static, "p2p")
        inside = channel.enter("x", "p2p")
        own, packets = channel.tensor((16,), torch.float32), channel.tensor((16,), torch.int32)
        no_rank, no_tile = "no such rank", "none of the mapping's"
        push, notify, wait = kernels.push_16, kernels.notify_tile, kernels.wait_for_tile
        for words, kernel, arguments in (
            (no_rank, push, (device, own, 2)),
            (no_rank, push, (device, own, -1)),
            (no_rank, kernels.pull_16, (device, own, 2)),
            (no_rank, kernels.notify_peer, (device, 0, 2)),
            (no_rank, wait, (device, static, 0, 2, None)),
            (no_rank, kernels.push_packets_16, (device, packets, torch.full((16,), 2))),
            (no_tile, notify, (device, static, 4)),
            (no_tile, notify, (device, static, -1)),
            (no_tile, notify, (device, none, 0)),
            (no_tile, wait, (device, static, 1000, None, None)),
            ("fewer peer_tiles", kernels.notify_peer, (device, -1, 1)),
            ("make the tensor by BlockChannel.tensor", push, (device, torch.zeros(16), 1)),
            ("make the tensor by BlockChannel.tensor", push, (device, other.tensor((16,), torch.float32), 1)),
            ("without rank=", push, (device, channel.tensor((16,), torch.float32, rank=1 - channel.rank), 1)),
            ("make the tensor by BlockChannel.tensor", kernels.pull_16, (device, torch.zeros(16), 1)),
            ("packets are int32", kernels.push_packets_16, (device, own, torch.full((16,), 1))),
            ("the producer's mapping: producer=", wait, (inside, static, 0, None, None)),
            ("static mapping: begin takes counts", wait, (inside, dynamic, 0, 0, dynamic)),
            ("end_call is for calls by enter", kernels.end, (device, static)),
            ("static mapping: begin takes counts", kernels.end, (inside, dynamic)),
        ):
            with pytest.raises(InterpreterError, match=re.escape(words)):
                kernel[(1,)](*arguments)
        for call in (lambda: tiles.rank_notify(channel, 0, 0), lambda: tiles.rank_wait(channel, 0, 0)):
            with pytest.raises(ValueError, match="no call that `begin` has begun is active"):
                call()
        assert channel.tensor([4, 4], torch.float32).shape == (4, 4)
        dist.barrier()
    for call in (
        lambda: channel.begin("x", static, static, "p2p"),
        lambda: channel.enter("x", "p2p"),
        lambda: channel.tensor((1,), torch.int8),
    ):
        with pytest.raises(ValueError, match="the channel is closed"):
            call()


def test_a_kernel_with_an_unknown_name_raises(interpret):
    interpret(2, launch_wrongly)

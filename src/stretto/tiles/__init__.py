# SPDX-License-Identifier: Apache-2.0
"""Tile-centric primitives for overlapped Triton kernels (TileLink). docs/tiles.md is the guide.

A producer stores tiles and notifies; a consumer waits for tiles and loads them; a mapping gives each tile's rows, rank
and signal. The same source is compiled for GPUs and, with TRITON_INTERPRET=1, interpreted by processes that share
memory.

    channel                          `BlockChannel`: signals and a buffer on every rank; begins calls
    mapping                          from a tile to its rows, rank and channels
    call_state, calls                on the device: a call's number and targets; how it begins and ends
    signals, waits                   on the device: notify and wait; time limits and failure records
    data, packets                    on the device: push and pull; data that is its own signal
    puts, put_channel                slices to ranks whose memory is not mapped, through a proxy; their slots and FIFO
    host, streams                    copy engines and their signals, on side streams
    launches                         cheap repeated launches
    intrinsics                       inline assembly and what stands for it in interpreted kernels
    interpreter, compile_only        kernels without a GPU: run by Triton's interpreter, or only compiled
"""

from stretto.tiles.call_state import arrive_produced, call_number, call_slot, claim, claim_move, may_publish
from stretto.tiles.calls import begin_call, end_call, end_unsignalled_call
from stretto.tiles.channel import URGENT, BlockChannel, Channel
from stretto.tiles.data import peer_pointer, tile_pull_data, tile_push_data
from stretto.tiles.host import (
    CopyList,
    copy_engine,
    find_copies,
    join_copies,
    open_side_stream,
    rank_await_count,
    rank_copy_data,
    rank_notify,
    rank_reset_counts,
    rank_set_slot,
    rank_wait,
    rank_wait_all,
)
from stretto.tiles.intrinsics import INTERPRETED
from stretto.tiles.launches import Launches, kind_of
from stretto.tiles.mapping import (
    DynamicMapping,
    Mapping,
    StaticMapping,
    count_tiles,
    look_up_tiles,
    rank_tiles,
    shard_tiles,
    tile_channels,
    tile_column,
    tile_rank,
    tile_rows,
    whole_tiles,
)
from stretto.tiles.packets import (
    await_numbered,
    look_for_packets,
    pack,
    push_numbered,
    push_packets,
    sum_packets,
    take_packets,
    unpack,
)
from stretto.tiles.put_channel import PutChannel
from stretto.tiles.puts import Puts, arrived_slice, await_credit, outgoing_slice, put_slice, release_slice, wait_slice
from stretto.tiles.signals import (
    consumer_tile_poll,
    consumer_tile_wait,
    finish_polls,
    peer_tile_notify,
    peer_tile_wait,
    producer_tile_count,
    producer_tile_notify,
)

__all__ = [
    "INTERPRETED",
    "URGENT",
    "BlockChannel",
    "Channel",
    "CopyList",
    "DynamicMapping",
    "Launches",
    "Mapping",
    "PutChannel",
    "Puts",
    "StaticMapping",
    "arrive_produced",
    "arrived_slice",
    "await_credit",
    "await_numbered",
    "begin_call",
    "call_number",
    "call_slot",
    "claim",
    "claim_move",
    "consumer_tile_poll",
    "consumer_tile_wait",
    "copy_engine",
    "count_tiles",
    "end_call",
    "end_unsignalled_call",
    "find_copies",
    "finish_polls",
    "join_copies",
    "kind_of",
    "look_for_packets",
    "look_up_tiles",
    "may_publish",
    "open_side_stream",
    "outgoing_slice",
    "pack",
    "peer_pointer",
    "peer_tile_notify",
    "peer_tile_wait",
    "producer_tile_count",
    "producer_tile_notify",
    "push_numbered",
    "push_packets",
    "put_slice",
    "rank_await_count",
    "rank_copy_data",
    "rank_notify",
    "rank_reset_counts",
    "rank_set_slot",
    "rank_tiles",
    "rank_wait",
    "rank_wait_all",
    "release_slice",
    "shard_tiles",
    "sum_packets",
    "take_packets",
    "tile_channels",
    "tile_column",
    "tile_pull_data",
    "tile_push_data",
    "tile_rank",
    "tile_rows",
    "unpack",
    "wait_slice",
    "whole_tiles",
]

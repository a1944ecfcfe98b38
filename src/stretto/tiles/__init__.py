"""Tile-centric primitives: overlapped kernels as a page of Triton (TileLink).

A kernel stores tiles and notifies, another waits for tiles and loads them; a mapping says which rows, which rank and
which signal a tile has. The same source is compiled for GPUs and, with TRITON_INTERPRET=1, interpreted by processes
that share memory. docs/tiles.md goes through it all.
"""

from stretto.tiles.call_state import arrive_produced, call_number, call_slot, claim, claim_move, may_publish
from stretto.tiles.calls import begin_call, end_call, end_unsignalled_call
from stretto.tiles.channel import BlockChannel, Channel
from stretto.tiles.data import peer_pointer, peer_rows, tile_pull_data, tile_push_data
from stretto.tiles.host import (
    copy_engine,
    join_copies,
    open_lane,
    rank_await_count,
    rank_copy_data,
    rank_notify,
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
from stretto.tiles.packets import pack, push_packets, sum_packets, take_packets, unpack
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
    "BlockChannel",
    "Channel",
    "DynamicMapping",
    "Launches",
    "Mapping",
    "StaticMapping",
    "arrive_produced",
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
    "finish_polls",
    "join_copies",
    "kind_of",
    "look_up_tiles",
    "may_publish",
    "open_lane",
    "pack",
    "peer_pointer",
    "peer_rows",
    "peer_tile_notify",
    "peer_tile_wait",
    "producer_tile_count",
    "producer_tile_notify",
    "push_packets",
    "rank_await_count",
    "rank_copy_data",
    "rank_notify",
    "rank_set_slot",
    "rank_tiles",
    "rank_wait",
    "rank_wait_all",
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
    "whole_tiles",
]

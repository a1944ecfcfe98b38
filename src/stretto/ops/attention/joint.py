# SPDX-License-Identifier: Apache-2.0
"""Attention to keys that a collective's schedule gathers: a joint schedule whose tiles are blocks of keys.

Copy engines move keys and values as the schedule says; the attention kernels are a library's, so a block of keys waits
in stream order, for the signal of its chunk, and blocks come in the order in which their chunks arrive. Chunks that no
rank behind another needs do not travel: by causality and the window, which hold for every batch. Documents change from
batch to batch, so they only leave out blocks of scores.
"""

from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from stretto import tiles
from stretto.collectives.joint.rewrite import keep_needed
from stretto.collectives.joint.schedule import JointSchedule, RowTile, join
from stretto.ops.attention.kernels import Part, attend
from stretto.ops.attention.merge import merge_parts
from stretto.ops.attention.one_rank import pack, unpack
from stretto.ops.attention.plan import Mask, Range, list_key_blocks, make_plan
from stretto.ops.choices import find_agreed
from stretto.ops.joint.copies import CopiedRows
from stretto.ops.joint.launch import count_signals, find_landing, require_verified
from stretto.ops.joint.registry import find_schedule
from stretto.ops.moe.routes import CollectiveWrapper
from stretto.ops.operator import abandon, count_bytes, find_group, find_known

OPERATOR = "all_gather_attention"


class ScheduledCall(NamedTuple):
    """A call: its group, the schedule's name, the layout of the sequence, the mask and the scale of scores."""

    group: str
    schedule: str
    layout: str
    mask: Mask
    scale: float
    wrap: CollectiveWrapper


def forward_by_schedule(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: ScheduledCall
) -> tuple[Tensor, Tensor]:
    """(this rank's attention, its log-sum-exp with sinks), as `one_rank.forward`.

    Order: own keys first, then each block of keys behind a wait for its chunk.
    Signals: copy engines', a copy of 4 bytes behind each chunk.
    Reuse: chunks land in one of two slots, in turn. Peers write to it only when all ranks have begun the call after
    the last one that used it, and the kernels that read it come before that on this rank's stream.
    """
    members, length = find_group(call.group), q.shape[2]
    rank, ranks, varies = members.rank(), members.size(), call.mask.documents is not None
    joint = find_gather(call.schedule, ranks, length, call.layout, find_lasting(call.mask, call.layout))
    own = make_plan(call.layout, rank, ranks, length, call.mask, "all_gather").own
    if not any(plan.moves for plan in joint.ranks):
        return merge_parts(attend(q, k, v, own, call.scale, varies), length, q.dtype, sinks)
    if obstacle := find_agreed(call.group, q.device).copies_obstacle:
        raise ValueError(f"{OPERATOR}: copy engines cannot move keys by a schedule: {obstacle}; leave schedule out")
    rows, plan = pack(k, v), joint.ranks[rank]
    landing = find_landing(call.group, q.device, count_bytes(joint.landed_rows, *rows.shape[1:], dtype=rows.dtype))
    channel = landing.channel
    landed = channel.tensor((joint.landed_rows, *rows.shape[1:]), rows.dtype, offset=landing.offset)
    copied = CopiedRows(channel, joint, rows, landed, landing.offset)
    key = OPERATOR, call.schedule, length, joint.needs, channel.channels
    counts = find_known(call.group, q.device, key, lambda: count_signals(joint, channel.channels, rank).to(q.device))

    def start() -> Tensor:
        mapping, is_slow = tiles.shard_tiles(1, ranks, 1), find_agreed(call.group, q.device).signals_by_copies
        channel.begin(OPERATOR, mapping, mapping, "p2p", counts=counts, slot=landing.slot, by_copies=is_slow)
        copied.place_own_rows()
        tiles.open_side_stream(channel, 0)
        copied.make_others()
        return landed

    blocks = list_key_blocks(call.layout, rank, ranks, length, call.mask, _list_keys(plan.tiles))
    try:
        gathered = unpack(call.wrap("all_gather", start)[: ranks * length], k.shape[3])
        parts = attend(q, k, v, own, call.scale, varies)
        for tile, needed in zip(plan.tiles, blocks, strict=True):
            if not needed:
                continue
            tiles.rank_wait(channel, tile.channel, tile.sender)
            parts += attend(q, *gathered, needed, call.scale, varies)
            if len(parts) > 1:  # or each block of keys would keep a result
                parts = [Part(Range(0, length), *merge_parts(parts, length, parts[0].lse.dtype))]
    except BaseException:
        abandon(call.group, channel)
        raise
    finally:  # also after a failed launch: rows may be freed once the current stream has passed here
        tiles.join_copies(channel)
    return merge_parts(parts, length, q.dtype, sinks)


@lru_cache(maxsize=256)
def find_gather(schedule: str, ranks: int, length: int, layout: str, mask: Mask | None) -> JointSchedule:
    """The verified joint schedule for so many rows of keys on a rank. mask: for every batch; None: all travel.

    ValueError for a schedule that is refused.
    """
    whole = join(OPERATOR, find_schedule(OPERATOR, schedule, ranks), length, max(length, 1))
    needs = []
    for rank, plan in enumerate(whole.ranks):
        others = [tile for tile in plan.tiles if tile.start // length != rank]
        if mask is not None:
            blocks = list_key_blocks(layout, rank, ranks, length, mask, _list_keys(others))
            others = [tile for tile, needed in zip(others, blocks, strict=True) if needed]
        needs.append({tile.channel for tile in others})
    return require_verified(keep_needed(whole, needs))


def find_lasting(mask: Mask, layout: str) -> Mask | None:
    """Return what is masked in every batch; None where documents decide who has which positions."""
    return None if layout == "balanced" and mask.documents is not None else mask._replace(documents=None)


def _list_keys(row_tiles: "list[RowTile] | tuple[RowTile, ...]") -> tuple[Range, ...]:
    return tuple(Range(tile.start, tile.stop) for tile in row_tiles)

# SPDX-License-Identifier: Apache-2.0
"""The kernel that adds up all ranks' rows, which travel as packets, with a residual and its norm."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto import tiles
from stretto.memory.gpus import limit_waiting
from stretto.ops.choices import find_agreed
from stretto.ops.gemm import divide_up, fixed
from stretto.ops.operator import (
    OperatorWorkspace,
    abandon,
    all_reduce,
    find_group,
    find_workspace,
    require_agreement,
)
from stretto.ops.row_sums.norm import (
    MAX_COLUMNS,
    Norm,
    NormRows,
    add_to_residual,
    describe_norm,
    load_factor,
    normalize_tile,
)
from stretto.ops.small_m import THREADS_OF_A_WARP, count_bytes
from stretto.tiles import kind_of
from stretto.tiles.call_state import load_groups_limit

MAX_PACKET_BYTES = 4 << 20
"""That a rank sends to the others, at most, where every rank adds up all rows: about 10 us of NVLink."""

NO_NORM = Norm("none", 0.0)
_WIRES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


class SumOperands(NamedTuple):
    """What is added to sums over ranks, as in `NormOperands`, and where they go: added [m, n]."""

    bias: Tensor | None
    residual: Tensor | None
    weight: Tensor | None
    norm_bias: Tensor | None
    added: Tensor


class PacketRows(NamedTuple):
    """Rows of packets as the kernel takes them. slot_words: packets between two slots of the staging buffer.

    Compiled in: wire, the type of packets' numbers; by_tree, in_fours, by_words; block, the packets of a row at least.
    """

    slot_words: Any
    wire: Any
    by_tree: Any
    in_fours: Any
    by_words: Any
    block: Any


@triton.jit
def sum_row(channel, packets, form, slot, tensors, row, rows, columns):  # type: ignore[no-untyped-def]
    """Wait for all ranks' packets of a row of [rows, columns], and store their sum, with residual and norm if any."""
    dtype: tl.constexpr = tensors.added.dtype.element_ty
    each: tl.constexpr = 32 // packets.wire.primitive_bitwidth
    pairs = tl.cdiv(columns, each)
    index = tl.arange(0, packets.block)
    column = tl.arange(0, packets.block * each)[None, :]
    there = column < columns
    place = tl.cast(row, tl.int64) * columns + column
    if tensors.residual is not None:  # before it waits: they may have to come from memory
        value = tl.load(tensors.residual + place, mask=there, other=0.0).to(tl.float32)
        factor = load_factor(form, tensors.weight, column, columns)
    low, high, _ = tiles.sum_packets(
        channel, slot, rows * pairs, row * pairs + index, index < pairs, row, packets.wire, by_tree=packets.by_tree
    )
    sums = low
    if each == 2:
        sums = tl.interleave(low, high)
    sums = tl.expand_dims(sums, 0)
    if tensors.residual is None:
        if tensors.bias is not None:
            sums += tl.load(tensors.bias + column, mask=there, other=0.0).to(tl.float32)
        tl.store(tensors.added + place, sums.to(dtype), mask=there)
    else:
        value = add_to_residual(value, sums, tensors.bias, column, columns, dtype)
        tl.store(tensors.added + place, value.to(dtype), mask=there)
        result = normalize_tile(form, value, there, factor, tensors.norm_bias, column, columns)
        tl.store(tensors.normed + place, result.to(dtype), mask=there)


@triton.jit
def sum_and_normalize(channel, packets, form, staging, x, tensors, rows, columns):  # type: ignore[no-untyped-def]
    """added = residual + (the sum of all ranks' x, + bias), [rows, columns]; normed = its norm.

    x: None where the launch before, of the same call, has sent its packets. residual: or None, and then there is no
    norm. A program adds up whole rows, of packets; by_words: x lies in memory as they do.
    Order: programs claim rows of x and send them, as packets, to all ranks; then they add up every so many-th row.
    Signals: none but the packets.
    Waits: for packets. Rows to send are claimed, so running programs send all of them before any of them waits; the
    launch before waits for nothing. There are no more programs than may wait at once (`limit_waiting`).
    Failure: packets are sent only while no wait of this process has failed.
    Reuse: two slots, by the call's number; every rank waits for the sums of all ranks' packets: see `call_slot`.
    """
    each: tl.constexpr = 32 // packets.wire.primitive_bitwidth
    pairs = tl.cdiv(columns, each)
    size = rows * pairs
    slot = staging + tiles.call_slot(channel).to(tl.int64) * packets.slot_words
    index = tl.arange(0, packets.block)
    if x is not None:
        own = slot + tl.cast(channel.rank, tl.int64) * size
        publishes = tiles.may_publish(channel)
        row = tiles.claim(channel)
        while row < rows:
            at = x + row.to(tl.int64) * columns + index * each
            if packets.by_words:
                data = tl.load(at.to(tl.pointer_type(tl.int32), bitcast=True), mask=index < pairs, other=0)
            else:
                low = tl.load(at, mask=index < pairs, other=0).to(tl.float32)
                high = low
                if each == 2:
                    high = tl.load(at + 1, mask=index * 2 + 1 < columns, other=0).to(tl.float32)
                data = tiles.pack(low, high, packets.wire)
            for distance in tl.static_range(1, channel.world + 1):
                peer = (channel.rank + distance) % channel.world
                tiles.push_packets(
                    channel, own, row * pairs + index, data, index < pairs, rank=peer, in_fours=packets.in_fours,
                    publishes=publishes
                )  # fmt: skip
            row = tiles.claim(channel)
    limit = load_groups_limit(channel)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        sum_row(channel, packets, form, slot, tensors, row, rows, columns)
    tiles.end_unsignalled_call(channel, limit=limit)


def sum_rows(x: Tensor, group: str) -> Tensor:
    """The sum of all ranks' x [m, n], bf16, fp16 or fp32, without gradients: of few rows in one launch, as packets.

    Other sums are those of the group's own backend. Collective.
    """
    if find_group(group).size() == 1 or not x.numel():
        return x
    m, n = x.shape
    require_agreement(f"sum_rows {[m, n]} {x.dtype}", False, group, x.device)
    if find_packets_obstacle(group, x.device, m, n, x.dtype, "auto"):
        return all_reduce(x, group)
    return send_and_sum("sum_rows", x, SumOperands(None, None, None, None, torch.empty_like(x)), x.dtype, group)[0]


def send_and_sum(
    operator: str,
    x: Tensor,
    operands: SumOperands,
    wire: torch.dtype,
    group: str,
    *,
    by_tree: bool = False,
    norm: Norm = NO_NORM,
) -> tuple[Tensor, Tensor]:
    """A call of one launch, which sends x [m, n] as packets, as `launch_sums` returns it."""
    (m, n), world = x.shape, find_group(group).size()
    workspace = find_workspace(group, x.device, count_bytes("push", m, n, world, wire), "packets")
    channel = workspace.channel.enter(operator, "p2p")
    try:
        return launch_sums(workspace, channel, x, operands, wire, by_tree=by_tree, norm=norm)
    except BaseException:
        abandon(group, workspace.channel)
        raise


def launch_sums(
    workspace: OperatorWorkspace,
    channel: tiles.Channel,
    x: Tensor | None,
    operands: SumOperands,
    wire: torch.dtype,
    *,
    by_tree: bool = False,
    norm: Norm = NO_NORM,
) -> tuple[Tensor, Tensor]:
    """Launch `sum_and_normalize` on the packets of a call that has begun: (normed, or the sums; added).

    x: this rank's summands, if they have not been sent.
    """
    rows, columns = operands.added.shape
    num_warps = min(16, max(4, triton.next_power_of_2(divide_up(columns * wire.itemsize, 4)) // 256))
    bias, residual, weight, norm_bias, added = operands
    each = 4 // wire.itemsize
    normed = added if residual is None else torch.empty_like(added)
    block = max(triton.next_power_of_2(divide_up(columns, each)), THREADS_OF_A_WARP * num_warps)
    in_fours = columns * wire.itemsize % 16 == 0
    by_words = in_fours and x is not None and x.dtype == wire and x.data_ptr() % 16 == 0
    slot_words = workspace.words(1, torch.int32)
    packets = PacketRows(slot_words, *map(fixed, (_WIRES[wire], by_tree, in_fours, by_words, block)))
    tensors = NormRows(bias, residual, weight, norm_bias, normed, added)
    staging = workspace.channel.tensor((workspace.words(2, torch.int32),), torch.int32)
    workspace.channel.launch(
        sum_and_normalize,
        (added.shape, wire, by_tree, norm, num_warps, kind_of(x), *map(kind_of, tensors)),
        limit_waiting(rows, added.device),
        (channel, packets, describe_norm(norm, 1, block * each), staging, x, tensors, rows, columns),
        num_warps=num_warps,
        enable_fp_fusion=not norm.is_exact,
    )
    return normed, added


def find_packets_obstacle(
    group: str, device: torch.device, rows: int, columns: int, wire: torch.dtype, implementation: str
) -> str:
    """Say why sums over a group do not travel as packets; "" if they do. With implementation="kernel" any rows do."""
    if obstacle := find_agreed(group, device).obstacle:
        return obstacle
    if columns > MAX_COLUMNS:
        return f"rows of packets have up to {MAX_COLUMNS} numbers, not {columns}"
    if implementation != "kernel" and rows > count_rows_at_a_time(columns, wire, find_group(group).size()):
        return "so many rows take a library less time"
    return ""


def count_rows_at_a_time(columns: int, wire: torch.dtype, world: int) -> int:
    """The rows whose sums a call sends as packets, each rank to all: where latency counts, not bandwidth."""
    return max(1, MAX_PACKET_BYTES // (max(1, columns) * wire.itemsize * max(1, world - 1)))


def add_in_parts(run: Callable[[slice], tuple[Tensor, Tensor]], rows: int, step: int) -> tuple[Tensor, Tensor]:
    """Call `run` for `step` rows at a time, and join what it returns."""
    parts = [run(slice(first, first + step)) for first in range(0, rows, step)]
    if len(parts) == 1:
        return parts[0]
    return torch.cat([one for one, _ in parts]), torch.cat([other for _, other in parts])

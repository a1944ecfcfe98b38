# SPDX-License-Identifier: Apache-2.0
"""All-reduce + residual + norm: in one launch for few rows, whose sums travel as packets."""

from typing import NamedTuple

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from stretto import tiles
from stretto.memory.gpus import limit_waiting
from stretto.ops.choices import find_group_obstacle
from stretto.ops.config import encode_implementation
from stretto.ops.decoding.norm import (
    MAX_COLUMNS,
    Norm,
    NormOperands,
    add_norm,
    add_to_residual,
    describe_norm,
    normalize_tile,
    require_norm,
    require_norm_operands,
)
from stretto.ops.gemm import divide_up
from stretto.ops.invariant.matmul import LEAVES, count_leaves
from stretto.ops.invariant.ranks import reduce_by_tree
from stretto.ops.operator import (
    DTYPES,
    OperatorWorkspace,
    abandon,
    all_reduce,
    define_operator,
    find_group,
    find_name,
    find_workspace,
    flatten_rows,
    needs_gradients,
    require_agreement,
    require_place,
    show_shape,
)
from stretto.ops.small_m import THREADS_OF_A_WARP, count_bytes
from stretto.tiles import kind_of

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


def all_reduce_norm(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    eps: float,
    norm: str = "rms",
    bias: Tensor | None = None,
    norm_bias: Tensor | None = None,
    offset: float = 0.0,
    invariant: bool = False,
    implementation: str = "auto",
) -> tuple[Tensor, Tensor]:
    """(norm of the new residual, the new residual), which is residual + (the sum of all ranks' x, + bias): [..., n].

    x, residual: [..., n] of bf16, fp16 or fp32, contiguous; the residual is the same on all ranks. norm: "rms"
    (x / sqrt(mean of squares + eps) * (norm_weight + offset)) or "layer" (of x - mean, + norm_bias); it computes in
    fp32. norm_weight, norm_bias: [n] of bf16, fp16 or fp32, whatever x's dtype; bias: [n] of x's dtype. A sum and a
    residual are rounded to x's dtype, as separate operators round them. All ranks get the same bits. group: None for
    all ranks.

    invariant: a row's bits depend on x, and on no other row, nor on the number of rows, kernel or device; the ranks'
    numbers are added by a binary tree, in fp32. With `implementation`: "auto", "kernel" (in one launch, or it raises)
    or "library" (an all-reduce, then one kernel).

    There are no gradients. ValueError for other input, PeerError for a rank that does not call.
    """
    how, name = encode_implementation(implementation), find_name(group)
    require_no_gradients("all_reduce_norm", x, residual, norm_weight, bias, norm_bias)
    rows = flatten_rows("all_reduce_norm", x)
    require_same_shape("all_reduce_norm", x.shape, residual)
    operands = rows, residual.view_as(rows), norm_weight, bias, norm_bias
    normed, added = _call(*operands, name, float(eps), norm, float(offset), invariant, how)
    return normed.view_as(x), added.view_as(x)


def require_no_gradients(operator: str, *tensors: Tensor | None) -> None:
    """ValueError where gradients would be needed, of which the operator has none."""
    if needs_gradients(*tensors):
        raise ValueError(f"{operator} has no gradients: call it under torch.no_grad(), or detach its operands")


def require_same_shape(operator: str, shape: tuple[int, ...], residual: Tensor) -> None:
    """ValueError unless the residual is contiguous and of this shape."""
    if tuple(residual.shape) != tuple(shape) or not residual.is_contiguous():
        raise ValueError(
            f"{operator}: residual is contiguous, {list(shape)}, not {show_shape(residual)} with strides "
            f"{residual.stride()}"
        )


@triton.jit
def sum_and_normalize(  # type: ignore[no-untyped-def]
    channel, staging, slot_words, x, bias, residual, weight, norm_bias, normed, added, rows, columns,
    WIRE: tl.constexpr, BY_TREE: tl.constexpr, IN_FOURS: tl.constexpr, KIND: tl.constexpr, EPS: tl.constexpr,
    OFFSET: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """added = residual + (the sum of all ranks' x, + bias), [rows, columns]; normed = its norm.

    x: None where the launch before, of the same call, has sent its packets. residual: or None, and then there is no
    norm. A program adds up whole rows, of BLOCK packets of numbers of type WIRE.
    Order: programs claim rows of x and send them, as packets, to all ranks; then they add up every so many-th row.
    Signals: none but the packets.
    Waits: for packets. Rows to send are claimed, so running programs send all of them before any of them waits; the
    launch before waits for nothing. There are no more programs than may wait at once (`limit_waiting`).
    Failure: packets are sent only while no wait of this process has failed.
    Reuse: two slots, by the call's number; every rank waits for the sums of all ranks' packets: see `call_slot`.
    """
    dtype: tl.constexpr = added.dtype.element_ty
    each: tl.constexpr = 32 // WIRE.primitive_bitwidth
    pairs = tl.cdiv(columns, each)
    size = rows * pairs
    slot = staging + tiles.call_slot(channel).to(tl.int64) * slot_words
    index = tl.arange(0, BLOCK)
    if x is not None:
        own = slot + tl.cast(channel.rank, tl.int64) * size
        publishes = tiles.may_publish(channel)
        row = tiles.claim(channel)
        while row < rows:
            at = x + row.to(tl.int64) * columns + index * each
            low = tl.load(at, mask=index < pairs, other=0).to(tl.float32)
            high = low
            if each == 2:
                high = tl.load(at + 1, mask=index * 2 + 1 < columns, other=0).to(tl.float32)
            data = tiles.pack(low, high, WIRE)
            for distance in tl.static_range(1, channel.world + 1):
                peer = (channel.rank + distance) % channel.world
                tiles.push_packets(
                    channel, own, row * pairs + index, data, index < pairs, rank=peer, in_fours=IN_FOURS,
                    publishes=publishes
                )  # fmt: skip
            row = tiles.claim(channel)
    column = tl.arange(0, BLOCK * each)[None, :]
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        low, high, _ = tiles.sum_packets(
            channel, slot, size, row * pairs + index, index < pairs, row, WIRE, by_tree=BY_TREE
        )
        sums = low
        if each == 2:
            sums = tl.interleave(low, high)
        sums = tl.expand_dims(sums, 0)
        place = tl.cast(row, tl.int64) * columns + column
        there = column < columns
        if residual is None:
            if bias is not None:
                sums += tl.load(bias + column, mask=there, other=0.0).to(tl.float32)
            tl.store(added + place, sums.to(dtype), mask=there)
        else:
            value = tl.load(residual + place, mask=there, other=0.0).to(tl.float32)
            value = add_to_residual(value, sums, bias, column, columns, dtype)
            tl.store(added + place, value.to(dtype), mask=there)
            result = normalize_tile(value, there, weight, norm_bias, column, columns, KIND, EPS, OFFSET, EXACT)
            tl.store(normed + place, result.to(dtype), mask=there)
    tiles.end_unsignalled_call(channel)


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
    bias, residual, weight, norm_bias, added = operands
    rows, columns = added.shape
    normed = added if residual is None else torch.empty_like(added)
    each = 4 // wire.itemsize
    pairs = divide_up(columns, each)
    num_warps = min(16, max(4, triton.next_power_of_2(pairs) // 256))
    block = max(triton.next_power_of_2(pairs), THREADS_OF_A_WARP * num_warps)
    programs = limit_waiting(rows, added.device)
    staging = workspace.channel.tensor((workspace.words(2, torch.int32),), torch.int32)
    in_fours = columns * wire.itemsize % 16 == 0
    options = _WIRES[wire], by_tree, in_fours, *describe_norm(norm).values()
    kinds = [kind_of(one) for one in (x, bias, residual, weight, norm_bias, normed, added)]
    workspace.channel.launch(
        sum_and_normalize,
        (added.shape, wire, by_tree, norm, num_warps, *kinds),
        programs,
        (
            channel, staging, workspace.words(1, torch.int32), x, bias, residual, weight, norm_bias, normed, added,
            rows, columns, *options, block,
        ),
        num_warps=num_warps,
        **({} if not norm.is_exact else {"enable_fp_fusion": False}),
    )  # fmt: skip
    return normed, added


def fits_packets(rows: int, columns: int, wire: torch.dtype, world: int) -> bool:
    """True if the sums of all rows are sent as packets, to all ranks: where latency counts, not bandwidth."""
    return columns <= MAX_COLUMNS and rows * columns * wire.itemsize * max(1, world - 1) <= MAX_PACKET_BYTES


def _run(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    bias: Tensor | None,
    norm_bias: Tensor | None,
    group: str,
    eps: float,
    norm: str,
    offset: float,
    invariant: bool,
    implementation: str,
) -> tuple[Tensor, Tensor]:
    operands = NormOperands(bias, residual, norm_weight, norm_bias)
    _require(x, operands, norm, eps)
    world, described = find_group(group).size(), Norm(norm, eps, offset, invariant)
    if invariant:
        count_leaves("all_reduce_norm", LEAVES, world)
    wire = torch.float32 if invariant else x.dtype
    call = f"all_reduce_norm {list(x.shape)} {x.dtype} {(norm, bias is None, invariant, implementation)}"
    require_agreement(call, False, group, x.device)
    obstacle = find_group_obstacle(group, x.device)
    if not obstacle and not fits_packets(*x.shape, wire, world):
        obstacle = f"{list(x.shape)} of {wire} from {world} ranks are more than packets are for"
    if implementation == "kernel" and obstacle:
        raise ValueError(f'all_reduce_norm: no kernel can run: {obstacle}; implementation="library" can')
    if implementation == "library" or obstacle or not x.numel():
        if invariant:
            total, operands = reduce_by_tree(x.float(), bias, x.dtype, group), operands._replace(bias=None)
        else:
            total = all_reduce(x, group)
        return add_norm(total, operands, described)
    workspace = find_workspace(group, x.device, count_bytes("push", *x.shape, world, wire), "packets")
    channel = workspace.channel.enter("all_reduce_norm", "p2p")
    try:
        sums = SumOperands(*operands, torch.empty_like(residual))
        return launch_sums(workspace, channel, x, sums, wire, by_tree=invariant, norm=described)
    except BaseException:
        abandon(group, workspace.channel)
        raise


def _require(x: Tensor, operands: NormOperands, norm: str, eps: float) -> None:
    require_norm("all_reduce_norm", norm, eps)
    if x.dtype not in DTYPES:
        raise ValueError(f"all_reduce_norm takes {', '.join(map(str, DTYPES))}, not {x.dtype}: convert x")
    require_place("all_reduce_norm", x)
    require_norm_operands("all_reduce_norm", x, *x.shape, operands)


def _fake(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    bias: Tensor | None,
    norm_bias: Tensor | None,
    group: str,
    eps: float,
    norm: str,
    *_: object,
) -> tuple[Tensor, Tensor]:
    _require(x, NormOperands(bias, residual, norm_weight, norm_bias), norm, eps)
    return torch.empty_like(x), torch.empty_like(x)


_call = define_operator("all_reduce_norm", _run, fake=_fake, tensors=slice(5))

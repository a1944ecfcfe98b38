# SPDX-License-Identifier: Apache-2.0
"""Every Triton kernel of the library, compiled once for sm_90 by the installed Triton.

Other tests look at the machine code of each kernel in many configurations; this one is for versions that CI only tries.
"""

from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from tests.ops import test_embedding_machine_code as embedding
from tests.ops import test_machine_code as operators
from tests.ops.attention import test_copies
from tests.ops.decoding import launches as decoding
from tests.ops.joint import test_machine_code as joint
from tests.ops.joint import test_routed_machine_code as routed
from tests.ops.moe import test_few_tokens, test_tensor_parallel_kernels, test_tile_order
from tests.stress.kernels import list_kernels
from tests.tiles import test_puts
from tests.tiles.machine_code import make_channel

from stretto import tiles
from stretto.ops import cross_entropy, fp8_casts, rms_norm, rotary, symmetric
from stretto.ops.embedding import backward_kernel, forward_kernel, move_rows
from stretto.ops.gemm import describe_gemm
from stretto.ops.joint.routed import MadeChannels, MadeSignals
from stretto.ops.moe import (
    activation,
    exchange_kernel,
    few_kernels,
    pairs,
    permutation,
    sorting,
    tensor_parallel_kernels,
)
from stretto.ops.moe.grouped import config as grouped_config
from stretto.ops.moe.grouped import kernels as grouped_kernels
from stretto.ops.moe.grouped import tile_order
from stretto.ops.moe.grouped.matmul import clear_empty_experts, clear_padding_rows
from stretto.optim import adamw_kernel
from stretto.optim.sparse import kernels as sparse_kernels
from stretto.optim.state import kernels as state_kernels
from stretto.parallel.comm import copy_engine_scatter
from stretto.tiles import begin_call, calls, signals
from stretto.tiles.compile_only import compile_kernel
from stretto.train import bit_hash_kernel

FLOATS = torch.zeros(256)
WORDS = torch.zeros(256, dtype=torch.int32)
LONGS = torch.zeros(64, dtype=torch.int64)
DECAYS = adamw_kernel.Decays(0.9, 0.1, 0.95, 0.05, 1e-8)
HALVES = torch.zeros(256, 256, dtype=torch.bfloat16)


class Launch(NamedTuple):
    """A kernel with its arguments and options, as a launch gives them."""

    kernel: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]


def launch_operator(name: str, blocks: Any, **sizes: Any) -> Launch:
    kernel, arguments = operators.find_kernel(name, **sizes), operators.KERNELS[name][1]
    return Launch(kernel, arguments(blocks, **sizes), {"num_warps": blocks.num_warps, "num_stages": blocks.num_stages})


def launch_gradients(name: str) -> Launch:
    return Launch(getattr(backward_kernel, name), embedding.backward_launches()[name], {"num_warps": 4})


def launch_adamw() -> Launch:
    arguments = *[FLOATS] * 4, FLOATS.bfloat16(), FLOATS, FLOATS, WORDS, 4096, DECAYS, True, adamw_kernel.BLOCK
    return Launch(adamw_kernel._adamw, arguments, {"enable_fp_fusion": False})


def launch_adamw_of_many() -> Launch:
    addresses = adamw_kernel.AdamWTensors(*[FLOATS] * 4, FLOATS.bfloat16()).addresses() * adamw_kernel.MANY
    constants = True, adamw_kernel.BLOCK, adamw_kernel.MANY
    arguments = addresses, FLOATS.bfloat16(), 5, 2, FLOATS, FLOATS, WORDS, DECAYS, *constants
    return Launch(adamw_kernel._adamw_of_many, arguments, {"enable_fp_fusion": False})


def launch_mixed_adamw() -> Launch:
    numbers = state_kernels._Numbers(FLOATS.bfloat16(), FLOATS.bfloat16(), FLOATS, FLOATS, WORDS.to(torch.int16))
    options = {"IS_SPLIT": True, "BLOCK": state_kernels.BLOCK, "enable_fp_fusion": False}
    return Launch(state_kernels._adamw_mixed, (numbers, FLOATS, FLOATS, WORDS, WORDS, 4096, DECAYS), options)


def launch_mixed_sgd() -> Launch:
    numbers = state_kernels._SGDNumbers(FLOATS.bfloat16(), FLOATS.bfloat16(), FLOATS, FLOATS)
    options = {"IS_SPLIT": False, "BLOCK": state_kernels.BLOCK, "enable_fp_fusion": False}
    return Launch(state_kernels._sgd_mixed, (numbers, FLOATS, FLOATS, WORDS, None, 4096, 0.9, 0.1), options)


def launch_rounding(name: str, *arguments: torch.Tensor) -> Launch:
    return Launch(getattr(state_kernels, name), (*arguments, 4096), {"BLOCK": state_kernels.BLOCK})


def launch_sparse(name: str) -> Launch:
    half, tensors = FLOATS.bfloat16(), sparse_kernels.TensorPlaces(LONGS, LONGS, LONGS)
    index = sparse_kernels.Bitmap(FLOATS.to(torch.uint8), WORDS, LONGS, tensors)
    numbers = 4096, 8, 90, 1, 2, 5
    arguments: tuple[Any, ...] = {
        "_compress": (half, index, half, *numbers, True, 128, 1),
        "_expand": (half, index, half, (WORDS, WORDS), *numbers, False, 1),
        "_note_addresses": (LONGS, 3, (1 << 62,) * 32, 32),
    }[name]
    return Launch(getattr(sparse_kernels, name), arguments, {"num_warps": 1})


CAST = 128 + 4 * 2 + 16 * 3, 57344.0, 64, 128


def launch_cast(name: str) -> Launch:
    half, fp8 = FLOATS.bfloat16(), FLOATS.to(torch.float8_e5m2)
    arguments: tuple[Any, ...] = {
        "measure_tiles": (half, None, WORDS, WORDS, 4096, 1024, 0, 2, 64, 128),
        "cast_tiles": (half, None, fp8, fp8, (WORDS, WORDS), (FLOATS, FLOATS), 4096, 1024, *CAST),
        "find_scales": (FLOATS, FLOATS, 4096, True, 1 / 448, 1024),
        "measure_groups": (half, WORDS, WORDS, WORDS, 1024, 5, 8, 64, 128),
        "cast_group_tiles": (half, WORDS, WORDS, FLOATS, fp8, 1024, 5, 4096, 57344.0, 8, 64, 128),
    }[name]
    return Launch(getattr(fp8_casts, name), arguments, {})


def launch_copies(name: str) -> Launch:
    half = FLOATS.bfloat16()
    arguments: tuple[Any, ...] = {
        "sum_rows": (half, LONGS, FLOATS, FLOATS.to(torch.uint8), half.clone(), 4096, 8, 8, 1024),
        "spread_rows": (half, LONGS, FLOATS, FLOATS.to(torch.uint8), WORDS, half.clone(), 8192, 65536, 4096, 8, 1024),
        "multiply_rows": (half, half, LONGS, None, FLOATS, FLOATS, half.clone(), 4096, 8, 8, 512),
    }[name]
    return Launch(getattr(permutation, name), arguments, {"enable_fp_fusion": False})


def launch_exchange(name: str) -> Launch:
    if name == "exchange_counts":
        unused = tiles.shard_tiles(0, 4, 1, channels=1, fixed=True)
        arguments = make_channel("p2p"), unused, WORDS, WORDS, WORDS, LONGS, 4096, 8, 8, 8
        return Launch(exchange_kernel.exchange_counts, arguments, {"num_warps": 1})
    mapping, half = tiles.shard_tiles(64, 4, 1, channels=32, fixed=True), FLOATS.bfloat16()
    pushed: Any = routed.GivenRows(half, LONGS, 4096)
    tile, options = (0, 32, 1024), {"num_warps": 16}
    if name == "push_rows":
        pushed = exchange_kernel.SummedRows(half, LONGS, 4096, FLOATS, FLOATS.to(torch.uint8))
        tile, options = (8, 8, 1024), {"num_warps": 32, "enable_fp_fusion": False}
    arguments = make_channel("p2p"), mapping, pushed, half.clone(), WORDS, 8192, 8192, 1, True, *tile
    return Launch(exchange_kernel.push_rows, arguments, options)


def launch_pairs(name: str) -> Launch:
    if name == "count_pairs":
        return Launch(pairs.count_pairs, (LONGS, WORDS, 8192, 32, 4, 8), {})
    found = LONGS, FLOATS.to(torch.uint8), LONGS, WORDS, WORDS
    return Launch(pairs.place_pairs, (LONGS, WORDS, WORDS, *found, 8192, 32, 4, 8), {})


def launch_sort(name: str) -> Launch:
    copies = WORDS, 16, 65536, 8, WORDS, WORDS
    if name == "count_copies":
        return Launch(sorting.count_copies, (*copies, 64), {})
    found = LONGS, WORDS, LONGS, FLOATS.to(torch.uint8)
    return Launch(sorting.place_copies, (*copies, *found, 65536, 64), {})


def launch_gates(name: str) -> Launch:
    if name == "differentiate_weighed_rows":
        halves, weighed = [FLOATS.bfloat16() for _ in range(5)], FLOATS.bfloat16()
        arguments = *halves[:3], FLOATS, *halves[3:], weighed, FLOATS.clone(), 8192, 4096, 1024
        return Launch(activation.differentiate_weighed_rows, arguments, {"enable_fp_fusion": False})
    halves = [FLOATS.bfloat16() for _ in range(5 if name == "differentiate_silu_gate" else 3)]
    return Launch(getattr(activation, name), (*halves, 8192, 4096, 1024), {})


def launch_rotation(name: str) -> Launch:
    halves = [FLOATS.bfloat16() for _ in range(4)]
    arguments = (halves[0], FLOATS, FLOATS, *halves[1:], 4096, 8, 4, 64, 64, 16)
    return Launch(getattr(rotary, name), arguments, {})


def launch_clearing(name: str) -> Launch:
    if name == "clear_padding_rows":
        return Launch(clear_padding_rows, (FLOATS.bfloat16(), WORDS, 8, 4096, 4096, 16, 1024), {})
    return Launch(clear_empty_experts, (FLOATS.bfloat16(), WORDS, 4096, 32, 1024), {})


def launch_grouped(name: str) -> Launch:
    half, experts, n = torch.zeros(1, 1, dtype=torch.bfloat16), 8, 4096
    rows, weight, offsets = half.expand(n, 512), half.expand(experts, 256, 512).contiguous(), WORDS[: experts + 1]
    launches: list[Launch] = []

    def note(kernel: Any, programs: int, *arguments: Any, **options: Any) -> None:
        names = [one.name for one in kernel.params[len(arguments) :]]
        launches.append(Launch(kernel, (*arguments, *(options.pop(one) for one in names)), options))

    with mock.patch.object(grouped_kernels, "launch_cached", note):
        if name == "multiply_groups":
            grouped_kernels.multiply(grouped_config.TABLE["product"], rows.contiguous(), weight, offsets)
        else:
            config = grouped_config.TABLE["weight gradient"]
            dtype = torch.float32 if name.endswith("fp32") else None
            grouped_kernels.multiply_transposed(config, rows.contiguous(), rows.contiguous(), offsets, dtype)
    return launches[0]


def launch_in_order(name: str) -> Launch:
    if name == "fill_tile_tables":
        arguments = WORDS, WORDS, WORDS, WORDS, 1, 64, 64, 4, 32, 32, 16, 128
        return Launch(tile_order.fill_tile_tables, arguments, {"num_warps": 4})
    return Launch(tile_order.await_all_channels, (make_channel("p2p"), WORDS, 32, 256), {"num_warps": 8})


def launch_cross_entropy(name: str) -> Launch:
    numbers = (FLOATS, FLOATS.clone(), FLOATS.clone())
    logits = [FLOATS.bfloat16() for _ in range(1 if name == "reduce_rows" else 2)]
    return Launch(getattr(cross_entropy, name), (*logits, LONGS, *numbers, 4096, 4096, 4096), {"num_warps": 8})


def launch_norm(name: str) -> Launch:
    halves = [FLOATS.bfloat16() for _ in range(3)]
    if name == "normalize_rows":
        return Launch(rms_norm.normalize_rows, (*halves, FLOATS, 4096, 4096, 1e-6, 0.0, 1, 4096), {"num_warps": 8})
    arguments = *halves[:2], FLOATS, halves[2], FLOATS.bfloat16(), FLOATS, 4096, 4096, 528, 0.0, 1, 4096
    return Launch(rms_norm.differentiate_norm, arguments, {"num_warps": 8})


def launch_turn() -> Launch:
    return Launch(rotary.turn_heads, (*(FLOATS.bfloat16() for _ in range(6)), 4096, 32, 8, False, 64, 64), {})


def launch_hash() -> Launch:
    return Launch(bit_hash_kernel._add_hash, (WORDS, LONGS, 4096, bit_hash_kernel.GOLDEN, 1024), {"num_warps": 8})


def launch_sum_of_parts() -> Launch:
    arguments = make_channel("p2p"), WORDS, WORDS, FLOATS, FLOATS, FLOATS, 4096, 8192, 0.25, 2048
    return Launch(copy_engine_scatter.sum_parts, arguments, {"num_warps": 8})


def launch_begin_of_pooling() -> Launch:
    return Launch(forward_kernel.begin_pooling, embedding.begin_arguments(), {})


def launch_pooling_alone() -> Launch:
    made = MadeSignals(tiles.look_up_tiles(*[WORDS] * 5), MadeChannels(WORDS, 1))
    arguments = (
        make_channel("p2p"), *made, embedding.look_up(), embedding.pooling(), embedding.Bags(LONGS, LONGS, FLOATS),
        forward_kernel.PooledVectors(FLOATS, FLOATS.clone()), forward_kernel.RingPointers(FLOATS, LONGS, WORDS, WORDS),
        embedding.REPORT, 4, 1, "remote_first",
    )  # fmt: skip
    return Launch(forward_kernel.pool_alone, arguments, {"num_warps": 1})


def launch_begin_of_a_call() -> Launch:
    producer = tiles.shard_tiles(1024, 4, 128, channels=2)
    return Launch(begin_call, (make_channel(), producer, None, 0, True, 32), {"num_warps": 4})


def launch_triangle() -> Launch:
    gemm, a, b, _ = describe_gemm(HALVES, HALVES, None, symmetric.BLOCKS)
    options = {"num_warps": symmetric.BLOCKS.num_warps, "num_stages": symmetric.BLOCKS.num_stages}
    return Launch(symmetric.multiply_triangle, (gemm, a, b, HALVES, HALVES, 2.0, 0.5), options)


LAUNCHES: dict[str, Callable[[], Launch]] = {
    "ops.all_gather_matmul.all_gather_gemm_by_programs": lambda: launch_operator(
        "gather", operators.WIDE, transfer="programs"
    ),
    **{
        f"ops.cross_entropy.{name}": lambda name=name: launch_cross_entropy(name)
        for name in ("reduce_rows", "differentiate_rows")
    },
    **{
        f"ops.embedding.backward_kernel.{name}": lambda name=name: launch_gradients(name)
        for name in embedding.backward_launches()
    },
    "ops.embedding.forward_kernel.begin_pooling": launch_begin_of_pooling,
    "ops.embedding.forward_kernel.pool_alone": launch_pooling_alone,
    "ops.embedding.move_rows.move_tiles": lambda: Launch(
        move_rows.move_tiles, (FLOATS, FLOATS.clone(), LONGS, LONGS, 4096, 128, 8, 128), {"num_warps": 4}
    ),
    "ops.embedding.forward_kernel.pool_and_send": lambda: Launch(
        forward_kernel.pool_and_send, embedding.forward_arguments(weighted=True), {"num_warps": 1, "num_stages": 1}
    ),
    "ops.joint.kernel.joint_gemm": lambda: Launch(
        joint.joint_gemm,
        joint.joint_arguments(operators.NARROW, is_gather=False, puts=joint.make_puts()),
        {"num_warps": operators.NARROW.num_warps, "num_stages": operators.NARROW.num_stages},
    ),
    "ops.joint.kernel.joint_gemm_by_copies": lambda: Launch(
        joint.joint_gemm_by_copies,
        joint.copied_arguments(operators.WIDE, is_gather=True),
        {"num_warps": operators.WIDE.num_warps, "num_stages": operators.WIDE.num_stages},
    ),
    "ops.joint.kernel.add_rows": lambda: Launch(operators.add_rows, operators.sum_arguments(), {"num_warps": 4}),
    "ops.joint.routed.move_rows": lambda: Launch(
        routed.move_rows, routed.move_arguments(puts=joint.make_puts()), {"num_warps": 16}
    ),
    **{
        f"ops.fp8_casts.{name}": lambda name=name: launch_cast(name)
        for name in ("cast_tiles", "measure_tiles", "find_scales", "cast_group_tiles", "measure_groups")
    },
    **{
        f"ops.moe.{module}.{name}": lambda launch=launch, name=name: launch(name)
        for module, launch, names in (
            ("activation", launch_gates, ("gate_by_silu", "differentiate_silu_gate", "differentiate_weighed_rows")),
            ("permutation", launch_copies, ("sum_rows", "spread_rows", "multiply_rows")),
            ("grouped.kernels", launch_grouped, ("multiply_groups", "sum_outer_products")),
            ("grouped.tile_order", launch_in_order, ("fill_tile_tables", "await_all_channels")),
            ("exchange_kernel", launch_exchange, ("exchange_counts", "push_rows")),
            ("pairs", launch_pairs, ("count_pairs", "place_pairs")),
            ("sorting", launch_sort, ("count_copies", "place_copies")),
            ("grouped.matmul", launch_clearing, ("clear_padding_rows", "clear_empty_experts")),
        )
        for name in names
    },
    "ops.attention.merge.add_rows": lambda: Launch(*test_copies.launch_add()),
    "ops.attention.merge.merge_rows": lambda: Launch(*test_copies.launch_merge()),
    **{
        f"ops.moe.few_kernels.{kernel.__name__}": lambda kernel=kernel: Launch(*test_few_tokens.launch_few(kernel))
        for kernel in (few_kernels.dispatch_tokens, few_kernels.combine_sums)
    },
    "ops.moe.tensor_parallel_kernels.multiply_and_send": lambda: Launch(*test_tensor_parallel_kernels.launch_sending()),
    "ops.moe.tensor_parallel_kernels.signal_own_parts": lambda: Launch(
        tensor_parallel_kernels.signal_own_parts,
        (make_channel("p2p"), tiles.shard_tiles(2, 4, 1, channels=2)),
        {"num_warps": 1},
    ),
    **{
        f"ops.rms_norm.{name}": lambda name=name: launch_norm(name) for name in ("normalize_rows", "differentiate_norm")
    },
    **{f"ops.rotary.{name}": lambda name=name: launch_rotation(name) for name in ("join_heads", "split_heads")},
    "ops.moe.grouped.kernels.multiply_groups_in_order": lambda: Launch(*test_tile_order.launch_in_order("product")),
    "ops.rotary.turn_heads": launch_turn,
    "ops.embedding.move_rows.copy_rows_of_ranks": lambda: Launch(
        move_rows.copy_rows_of_ranks, (LONGS, LONGS, FLOATS.bfloat16(), 0, 4096, 1024, 4096, 1024), {"num_warps": 4}
    ),
    **{name: lambda launch=launch: Launch(*launch()) for name, launch in decoding.LAUNCHES.items()},
    "ops.symmetric.multiply_triangle": launch_triangle,
    "ops.small_m.gemm_exchange": lambda: launch_operator("exchange", operators.FEW_ROWS),
    "optim.adamw_kernel._adamw": launch_adamw,
    "optim.adamw_kernel._adamw_of_many": launch_adamw_of_many,
    "train.bit_hash_kernel._add_hash": launch_hash,
    **{
        f"optim.sparse.kernels.{name}": lambda name=name: launch_sparse(name)
        for name in ("_compress", "_expand", "_note_addresses")
    },
    "optim.state.kernels._adamw_mixed": launch_mixed_adamw,
    "optim.state.kernels._join": lambda: launch_rounding("_join", FLOATS.bfloat16(), WORDS.to(torch.int16), FLOATS),
    "optim.state.kernels._round": lambda: launch_rounding("_round", FLOATS, FLOATS.bfloat16(), WORDS.to(torch.int16)),
    "optim.state.kernels._scale": lambda: launch_rounding("_scale", FLOATS.bfloat16(), FLOATS, FLOATS),
    "optim.state.kernels._sgd_mixed": launch_mixed_sgd,
    "parallel.comm.copy_engine_scatter.begin_scatter": lambda: Launch(
        copy_engine_scatter.begin_scatter, (make_channel("p2p"), WORDS, WORDS, 3), {"num_warps": 1}
    ),
    "parallel.comm.copy_engine_scatter.sum_parts": launch_sum_of_parts,
    "tiles.calls.await_beginning": lambda: Launch(calls.await_beginning, (make_channel(),), {"num_warps": 1}),
    "tiles.calls.begin_call": launch_begin_of_a_call,
    "tiles.puts.gather_slices": lambda: Launch(*test_puts.launch_gather()),
    "tiles.signals.wait_for_all": lambda: Launch(signals.wait_for_all, (make_channel(), 2, 9), {"num_warps": 1}),
    "tiles.signals.wait_for_channel": lambda: Launch(
        signals.wait_for_channel, (make_channel(), 1, 2), {"num_warps": 1}
    ),
}


def compile_ptx(name: str, launch: Callable[[], Launch] | None = None) -> str:
    kernel, arguments, options = (launch or LAUNCHES[name])()
    forms = compile_kernel(kernel, arguments, options, "sm_90")
    assert forms["cubin"]
    return forms["ptx"]


def test_no_kernel_is_left_out():
    assert LAUNCHES.keys() == {name for name in list_kernels() if ":" not in name}


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_kernel_compiles(name):
    assert name.rpartition(".")[2] in compile_ptx(name)


def test_rows_are_sent_without_sums_too():
    assert "push_rows" in compile_ptx("push_rows", lambda: launch_exchange("rows alone"))


def test_weights_gradients_leave_in_fp32_too():
    assert "sum_outer_products" in compile_ptx("", lambda: launch_grouped("sum_outer_products in fp32"))


def test_casts_to_fp8_round_to_nearest_and_saturate_in_hardware():
    """As torch's casts on CPUs do, after the same clamp; and factors are divided as IEEE 754 has it."""
    ptx = compile_ptx("ops.fp8_casts.cast_tiles")
    assert "cvt.rn.satfinite.e5m2x2.f32" in ptx
    assert "div.rn.f32" in ptx
    assert "div.full" not in ptx


def test_pruned_rows_are_permuted_in_registers_and_no_warp_waits_for_another():
    ptx = compile_ptx("optim.sparse.kernels._expand")
    assert ptx.count("prmt.b32") >= 16
    assert ptx.count("st.global.wb.v4.b32") == 4  # of one in a table, whatever its end
    assert "bar.sync" not in ptx
    assert "st.shared" not in ptx


def test_sums_of_pruned_gradients_take_few_loads_and_stores_of_neighbouring_lanes():
    ptx = compile_ptx("optim.sparse.kernels._compress")
    assert ptx.count("ld.global.b16") == 8
    assert ptx.count("st.global.b16") == 4
    assert ptx.count("prefetch.global.L2") == 1
    assert "shared" not in ptx


def test_updates_round_each_operation():
    """A fma of either of two products would give a weight another last bit by its place in a range."""
    for name in (
        "adamw_kernel._adamw",
        "adamw_kernel._adamw_of_many",
        "state.kernels._adamw_mixed",
        "state.kernels._sgd_mixed",
    ):
        assert "fma." not in compile_ptx(f"optim.{name}")

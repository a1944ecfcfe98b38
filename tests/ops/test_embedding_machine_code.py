# SPDX-License-Identifier: Apache-2.0
"""Tests of what the embedding kernels are compiled to, without a GPU: wide loads, rows in flight,
signals after stores.
"""

import re

import pytest
import torch
import triton.language as tl
from tests.tiles.machine_code import RELEASE, compile_to_ptx, make_channel

from stretto import tiles
from stretto.ops.embedding import backward_kernel, forward_kernel
from stretto.ops.embedding.forward_kernel import ORDERS
from stretto.ops.embedding.index_errors import IndexErrorReport
from stretto.ops.embedding.launch_config import describe_shapes
from stretto.ops.embedding.placement import common_multiple
from stretto.ops.embedding.pooling_kernel import Bags, KernelTables, PoolingConfig
from stretto.tiles.compile_only import compile_kernel

NVIDIA = ["sm_90", "sm_100"]
WORDS = torch.zeros(64, dtype=torch.int32)
LONGS = torch.zeros(64, dtype=torch.int64)
FLOATS = torch.zeros(64)
REPORT = IndexErrorReport(WORDS, LONGS)
WIDE_LOAD = r"ld\.global\.(nc\.)?(L1.*\.)?v4\.b32"


def constants(*values):
    return (tl.constexpr(value) for value in values)


def look_up(dim=256, block=256, multiple=4, out_multiple=None):
    return KernelTables(LONGS, 64, 1024, 65536, 100_000, *constants(dim, block, multiple, out_multiple or multiple))


def pooling(bags=1, rows=8, is_mean=False, checks=True):
    return PoolingConfig(*constants(bags, rows, max(bags, 8), is_mean, checks))


def forward_arguments(
    lookup=None, way=None, dtype=torch.float32, index=torch.int64, weighted=False, order="by_table", trace=None
):
    mapping = tiles.shard_tiles(32, 4, 1, channels=32, fixed=True)
    indices = torch.zeros(64, dtype=index)
    return (
        make_channel("p2p"), mapping, lookup or look_up(), way or pooling(),
        Bags(indices, indices, FLOATS if weighted else None),
        forward_kernel.RingPointers(torch.zeros(64, dtype=dtype), LONGS, WORDS, WORDS), REPORT,
        trace, 99, order,
    )  # fmt: skip


def begin_arguments():
    mapping, announced = tiles.shard_tiles(4, 4, 1, channels=4, fixed=True), 12345 | 1 << 40
    ring = forward_kernel.RingPointers(FLOATS, LONGS, WORDS, WORDS)
    return make_channel("p2p"), mapping, WORDS, ring, WORDS, REPORT, 4096, announced, None, 4, 16


def backward_launches(action="adagrad", by_number=False, dtype=torch.float32, scaled=True):
    grads = torch.zeros(64, dtype=dtype)
    segments = backward_kernel.Segments(
        WORDS, WORDS, FLOATS if scaled else None, *[WORDS] * 5, LONGS, 100_000, 6_400_000, 4096
    )
    settings = None if action == "store" else FLOATS
    failed = None if action == "store" else WORDS
    by_table, clock = (
        action in ("full-adagrad", "adam"),
        LONGS if dtype != torch.float32 and settings is not None else None,
    )
    target = backward_kernel.Target(
        LONGS, WORDS, settings, FLOATS if action == "adam" else None, clock, failed, WORDS,
        *constants(action, by_number, by_table, 256, 256, 4, action == "adam"),
    )  # fmt: skip
    mapping = tiles.shard_tiles(256, 4, 1, channels=2)
    partials = torch.zeros(64)
    return {
        "begin_push": (make_channel("p2p"), mapping, None, WORDS, 3, 32),
        "push_gradients": (make_channel("p2p"), mapping, grads, LONGS, grads, 1024, 65536, WORDS, 3, 4, 4, 1024),
        "find_keys": (
            look_up(0), pooling(8, 1, True), Bags(LONGS, LONGS, FLOATS), LONGS,
            backward_kernel.LookupKeys(WORDS, WORDS, FLOATS), 4, 640, REPORT, 32,
        ),
        "count_chunks": (WORDS, LONGS, 100_000, 6_400_000, 1024, 2048),
        "place_chunks": (
            WORDS, LONGS, WORDS, FLOATS if scaled else None, WORDS, LONGS, segments, WORDS, 1024, 2048,
        ),
        "reduce_chunks": (segments, target, grads, partials, 1024, 2, 4),
        "combine_chunks": (segments, target, grads, partials, 1024, 4),
    }  # fmt: skip


def to_ptx(target="sm_90", warps=1, **options):
    return compile_to_ptx(
        forward_kernel.pool_and_send, forward_arguments(**options), target, num_warps=warps, num_stages=1
    )


@pytest.mark.long
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_every_kernel_compiles(target):
    forms = compile_kernel(forward_kernel.pool_and_send, forward_arguments(), {"num_warps": 1}, target)
    assert forms.keys() >= {"cubin" if target in NVIDIA else "hsaco"}
    compile_kernel(forward_kernel.begin_pooling, begin_arguments(), {}, target)
    bags, out = Bags(LONGS, LONGS, None), forward_kernel.PooledVectors(FLOATS)
    alone = (
        *[None] * 3,
        look_up(),
        pooling(),
        bags,
        out,
        forward_kernel.RingPointers(None, None, WORDS, None),
        REPORT,
        4,
        0,
        "mixed",
    )
    compile_kernel(forward_kernel.pool_alone, alone, {"num_warps": 1}, target)
    for name, arguments in backward_launches().items():
        compile_kernel(getattr(backward_kernel, name), arguments, {"num_warps": 1}, target)


@pytest.mark.parametrize("order", ORDERS)
def test_all_orders_weights_means_and_traces_compile(order):
    to_ptx(order=order, weighted=True, trace=LONGS, way=pooling(8, 1, is_mean=True, checks=False), index=torch.int32)


@pytest.mark.parametrize(
    ("action", "by_number", "dtype"),
    [
        ("store", False, torch.float32),
        ("store", True, torch.bfloat16),
        ("sgd", False, torch.float16),
        ("full-adagrad", False, torch.float32),
        ("adam", False, torch.bfloat16),
    ],
)
def test_every_target_of_gradients_compiles(action, by_number, dtype):
    launches = backward_launches(action, by_number, dtype, scaled=False)
    for name in ("reduce_chunks", "combine_chunks"):
        compile_kernel(getattr(backward_kernel, name), launches[name], {"num_warps": 1}, "sm_90")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("target", NVIDIA)
@pytest.mark.parametrize(
    ("dtype", "way", "warps", "loads"),
    [
        (torch.float32, pooling(1, 8), 1, 16),
        (torch.float32, pooling(8, 1), 1, 16),
        (torch.float32, pooling(1, 8, checks=False), 1, 16),
        (torch.bfloat16, pooling(1, 8), 1, 8),
    ],
)
def test_rows_are_loaded_by_16_bytes_and_several_together(target, dtype, way, warps, loads):
    lines = to_ptx(target, warps, dtype=dtype, way=way, lookup=look_up(multiple=16 // dtype.itemsize))
    wide = [number for number, line in enumerate(lines) if re.search(WIDE_LOAD, line)]
    assert len(wide) == loads
    between = [line for line in lines[wide[0] : wide[-1]] if re.match(r"(add|fma)(\.rn)?\.f32|bar\.sync|bra", line)]
    assert not between  # no row waits for another one
    assert not any("local" in line for line in lines if re.match(r"(ld|st)\.", line))
    assert any(re.search(r"st\.global\.v4\.b32", line) for line in lines)


def find_wide(lookup):
    """True if fp16 rows of these tables are read by 16 bytes, and whether vectors are stored so."""
    given = lookup._replace(meta=LONGS, count=64, batch=1024, width=65536, total=100_000)
    lines = to_ptx(dtype=torch.float16, lookup=given)
    return tuple(any(re.search(pattern, line) for line in lines) for pattern in (WIDE_LOAD, r"st\.global\.v4\.b32"))


def test_rows_are_read_and_stored_no_wider_than_they_are_aligned():
    cpu = torch.device("cpu")
    assert find_wide(describe_shapes([(1 << 12, 10, 256)], 2, 8, 264, cpu)) == (True, True)
    # Other ranks' dims say where this one's columns begin, and how long a row of the output is.
    assert find_wide(describe_shapes([(1 << 12, 10, 256)], 2, 12, 272, cpu)) == (True, False)
    assert find_wide(describe_shapes([(1 << 12, 10, 256)], 2, 8, 268, cpu)) == (True, False)
    # A table may be a part of another tensor.
    assert find_wide(describe_shapes([((1 << 12) + 8, 10, 256)], 2, 8, 264, cpu)) == (False, True)
    assert find_wide(describe_shapes([((1 << 12) + 2, 10, 256)], 2, 8, 264, cpu)) == (False, True)


def test_rows_that_updates_change_are_stored_no_wider_than_they_are_aligned():
    wide = []
    for address in (1 << 12, (1 << 12) + 4):
        multiple = common_multiple((256, address // 4), 4)
        segments, _, *rest = backward_launches("sgd", scaled=False)["reduce_chunks"]
        target = backward_kernel.Target(
            LONGS, WORDS, FLOATS, None, None, WORDS, WORDS, *constants("sgd", False, False, 256, 256, multiple, False)
        )
        launch = (segments, target, *rest)
        lines = compile_to_ptx(backward_kernel.reduce_chunks, launch, "sm_90", num_warps=1, num_stages=1)
        wide.append(sum(bool(re.search(r"st\.global\.v4\.b32", line)) for line in lines))
    assert wide[0] == 2 * wide[1]  # what is left are the parts of segments that are cut


def test_tables_of_several_dims_are_read_by_16_bytes_too():
    lines = to_ptx(lookup=look_up(dim=0, block=128))
    assert sum(bool(re.search(WIDE_LOAD, line)) for line in lines) == 8


@pytest.mark.parametrize("target", NVIDIA)
def test_a_slice_is_signalled_after_its_stores_and_a_barrier(target):
    lines = to_ptx(target)
    releases = [number for number, line in enumerate(lines) if re.search(RELEASE + r"\.add", line)]
    assert releases
    for release in releases:
        before = [line for line in lines[:release] if re.search(r"st\.global|bar\.sync", line)]
        assert before[-1].startswith("bar.sync"), before[-3:]


@pytest.mark.parametrize(("action", "rows"), [("store", 0), ("sgd", 4)])
def test_gradients_and_rows_that_they_change_are_loaded_by_16_bytes_too(action, rows):
    launch = backward_launches(action, scaled=False)["reduce_chunks"]
    lines = compile_to_ptx(backward_kernel.reduce_chunks, launch, "sm_90", num_warps=1, num_stages=1)
    assert sum(bool(re.search(WIDE_LOAD, line)) for line in lines) >= rows + 16
    assert any(re.search(r"st\.global\.v4\.b32", line) for line in lines)
    assert not any("local" in line for line in lines if re.match(r"(ld|st)\.", line))


@pytest.mark.parametrize("kernel", ["reduce_chunks", "combine_chunks"])
def test_warps_that_share_a_rows_state_have_all_loaded_it_before_one_stores_it(kernel):
    launch = backward_launches("adagrad", scaled=False)[kernel]
    lines = compile_to_ptx(getattr(backward_kernel, kernel), launch, "sm_90", num_warps=4, num_stages=1)
    stores = [number for number, line in enumerate(lines) if re.search(r"st\.global\.b32", line)]
    assert stores
    for store in stores:
        before = [line for line in lines[:store] if re.search(r"ld\.global|bar\.sync", line)]
        assert "bar.sync" in before[-1], before[-3:]

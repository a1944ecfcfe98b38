# SPDX-License-Identifier: Apache-2.0
"""Attention to a paged cache: interpreted kernels beside torch's, and the same bits in every mix of a batch."""

import pytest
import torch
from tests.differences import largest
from tests.ops.decoding.launches import launch_paged
from tests.ops.decoding.sequences import Batch, make_batch

from stretto import ops
from stretto.ops.decoding.paged_kernels import CHUNKS, INVARIANT_CHUNKS, INVARIANT_SINGLES, SINGLES, fit_tiles
from stretto.tiles.compile_only import count_shared_bytes

ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-6}

BATCHES = [
    (Batch([1, 1, 1], [5, 150, 0], size=24, page=8), torch.float32),
    (Batch([1, 3, 20, 0, 1], [130, 70, 20, 4, 9], heads=6, window=9), torch.float32),
    (Batch([1, 2, 40], [280, 2, 300], heads=6, kv_heads=1, page=32), torch.bfloat16),
]
"""Single tokens of few, many and no keys; chunks among them, of several tiles; windows."""

LENGTHS = [300, 257, 64, 1]
"""More than one fixed split of keys, and whole ones."""


def attend_whole(tokens, batch):
    """Softmax over all that a token sees, in fp64, from the sequences' own rows."""
    q, keys, values, table, lengths = tokens.operands
    out, first = [], 0
    for number, (count, length) in enumerate(zip(batch.counts, lengths.tolist(), strict=True)):
        pages = table[number, : -(-length // batch.page)].long()
        own = [cache[pages].flatten(0, 1)[:length].double() for cache in (keys, values)]
        own = [one.repeat_interleave(batch.heads // batch.kv_heads, 1) for one in own]
        for token in range(count):
            position = length - count + token
            low = 0 if batch.window is None else max(0, position - batch.window + 1)
            key, value = (one[low : position + 1] for one in own)
            scores = torch.einsum("hd,shd->hs", q[first + token].double(), key) / batch.size**0.5
            out.append(torch.einsum("hs,shd->hd", scores.softmax(-1), value))
        first += count
    return torch.stack(out)


@pytest.mark.parametrize(
    ("which", "at", "value", "message"),
    [
        (3, (1, 2), 99, "pages are from 0 to"),
        (3, (0, 0), -1, "not from -1 to"),
        (4, 1, 1 << 20, "lengths are from 0 to"),
        (5, 2, 90, "query_offsets fall, but are to grow"),
    ],
)
def test_with_debugging_places_outside_of_the_cache_are_errors(monkeypatch, which, at, value, message):
    tokens = make_batch(Batch([1, 3, 20], [130, 70, 20]), torch.float32)
    operands = [*tokens.operands, tokens.offsets]
    call = lambda: ops.paged_attention(*operands[:5], query_offsets=operands[5])  # noqa: E731
    expected = call()
    monkeypatch.setenv("STRETTO_DEBUG", "1")
    assert torch.equal(call(), expected)
    operands[which][at] = value
    with pytest.raises(ValueError, match=message):
        call()


def compare():
    """The largest error of kernels and of torch, of each batch, and whether an idle row is 0."""
    errors = []
    for batch, dtype in BATCHES:
        tokens = make_batch(batch, dtype)
        expected = attend_whole(tokens, batch)
        for implementation, invariant in (("kernel", False), ("kernel", True), ("library", False)):
            q, *rest = tokens.operands
            if tokens.offsets is not None:  # behind the last sequence
                q = torch.cat([q, torch.full_like(q[:1], torch.nan)])
            options = {"query_offsets": tokens.offsets, "window": batch.window, "implementation": implementation}
            out = ops.paged_attention(q, *rest, invariant=invariant, **options)
            assert not out[len(expected) :].any()
            errors.append(((out[: len(expected)].double() - expected).abs().max() / ROUNDING[dtype]).item())
    return errors


@pytest.mark.long
def test_results_are_those_of_whole_sequences(interpret):
    (errors,) = interpret(1, compare)
    assert largest(errors) < 1, errors


def attend(parts, caches, table, chosen):
    counts = [last - first for _, first, last in chosen]
    offsets = None if set(counts) == {1} else torch.tensor([0, *counts]).cumsum(0).int()
    out = ops.paged_attention(
        torch.cat([parts[number][first:last] for number, first, last in chosen]), *caches,
        table[[number for number, _, _ in chosen]].contiguous(),
        torch.tensor([last for _, _, last in chosen], dtype=torch.int32), query_offsets=offsets, invariant=True,
    )  # fmt: skip
    return out.split(counts)


def mix(dtype):
    """Mixes whose tokens have other bits than in their sequence as one chunk."""
    q, keys, values, table, _ = make_batch(Batch(LENGTHS, LENGTHS), dtype).operands
    parts = q.split(LENGTHS)
    alone = [attend(parts, (keys, values), table, [(number, 0, length)])[0] for number, length in enumerate(LENGTHS)]
    mixes = [
        [(0, 299, 300), (1, 256, 257), (2, 63, 64), (3, 0, 1)],
        [(1, 200, 256), (0, 255, 257), (0, 99, 100)],
        [(2, 7, 40)],
        [(0, 256, 257)],
    ]
    return [
        (chosen, number)
        for chosen in mixes
        for (number, first, last), found in zip(
            chosen, attend(parts, (keys, values), table, chosen), strict=True
        )
        if not torch.equal(found, alone[number][first:last])
    ]  # fmt: skip


@pytest.mark.long
def test_an_invariant_token_has_the_same_bits_in_every_batch_and_chunk(interpret):
    assert interpret(1, mix, torch.bfloat16) == [[]]


def test_torch_compile_traces_it():
    tokens = make_batch(Batch([1, 3], [9, 30]), torch.float32)

    def attend_twice(*operands):
        out = ops.paged_attention(*operands, query_offsets=tokens.offsets)
        return out * 2, out.shape  # of a compiled call the shape that was traced

    compiled = torch.compile(attend_twice, fullgraph=True, backend="eager")
    (found, traced), (expected, shape) = compiled(*tokens.operands), attend_twice(*tokens.operands)
    torch.testing.assert_close(found, expected)
    assert traced == shape


def replace(operands, index, new):
    return *operands[:index], new, *operands[index + 1 :]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda given: replace(given, 0, given[0][:, :3].contiguous()), "q has 3 heads of 16 and the cache 2 of 16"),
        (
            lambda given: replace(given, 0, given[0].half()),
            "key_cache must be of torch.float16 on cpu, not [",
        ),
        (lambda given: replace(given, 3, given[3].long()), "block_table must be int32 [2, "),
        (lambda given: replace(given, 4, given[4][:1]), "2 tokens of 1 sequences: without query_offsets"),
        (lambda given: replace(given, 2, given[2][:, :8]), "caches [pages, page size, kv heads, d] of one shape"),
        (lambda given: replace(given, 0, given[0].requires_grad_()), "paged_attention has no gradients"),
    ],
)
def test_tensors_that_do_not_go_together_are_refused(change, words):
    operands = make_batch(Batch([1, 1], [9, 30]), torch.float32).operands
    with pytest.raises(ValueError) as refused:
        ops.paged_attention(*change(operands))
    assert words in str(refused.value)


@pytest.mark.parametrize(("options", "words"), [
    ({"window": 0}, "window must be a number of tokens from 1 on, or None, not 0"),
    ({"implementation": "fast"}, "implementation must be"),
    ({"implementation": "kernel"}, "on CPUs kernels are interpreted"),
])  # fmt: skip
def test_options_are_refused(options, words):
    with pytest.raises(ValueError) as refused:
        ops.paged_attention(*make_batch(Batch([1, 1], [9, 30]), torch.float32).operands, **options)
    assert words in str(refused.value)


H200, A100, SMALL = 227 << 10, 163 << 10, 99 << 10
"""Shared memory of a block."""


def test_tiles_fit_into_shared_memory_with_every_dtype_and_head():
    configs = [SINGLES, CHUNKS, INVARIANT_SINGLES, INVARIANT_CHUNKS]
    assert [fit_tiles(config, 16, 128, 2, H200) for config in configs] == configs  # what was measured stays
    for limit in (H200, A100, SMALL):
        for dims in (16, 32, 64, 128, 256):
            for itemsize in (2, 4):
                found = [fit_tiles(config, 16, dims, itemsize, limit) for config in configs]
                assert min(config.rows for config in found) >= 16
                assert found[2].keys == found[3].keys  # of which a token's bits depend
    assert fit_tiles(CHUNKS, 16, 256, 4, H200)[:2] == (64, 64)
    with pytest.raises(ValueError, match="a tile of 256 queries with 256 numbers of 4 bytes takes 313344 bytes"):
        fit_tiles(CHUNKS._replace(rows=256), 256, 256, 4, H200)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["attend_singles", "attend_chunks"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [64, 256])
@pytest.mark.parametrize(("target", "limit"), [("sm_90", H200), ("sm_80", SMALL)])
def test_compiled_kernels_take_no_more_shared_memory_than_is_there(name, dtype, size, target, limit):
    plain, invariant = {
        "attend_singles": (SINGLES, INVARIANT_SINGLES), "attend_chunks": (CHUNKS, INVARIANT_CHUNKS)
    }[name]  # fmt: skip
    if dtype == torch.float32:
        invariant = invariant._replace(rows=64, is_turned=False)
    for is_invariant, config in enumerate((plain, invariant)):
        tiles = fit_tiles(config, 16, size, dtype.itemsize, limit)
        kernel, arguments, options = launch_paged(name, tiles, is_invariant=bool(is_invariant), size=size, dtype=dtype)
        assert count_shared_bytes(kernel, arguments, options, target) <= limit

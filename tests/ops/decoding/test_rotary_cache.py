# SPDX-License-Identifier: Apache-2.0
"""One kernel rotates queries and keys, and stores keys and values, as several operators do."""

import pytest
import torch
from tests.differences import largest
from tests.ops.decoding.launches import launch_paged
from tests.ops.operands import random_of
from tests.tiles.machine_code import find

from stretto import ops
from stretto.ops.decoding.paged_kernels import (
    INVARIANT_SINGLES,
    SINGLES,
    PagedCall,
    attend_by_kernels,
    attend_new_tokens,
)
from stretto.ops.decoding.rotary_cache import rotate_and_store, suits_kernel
from stretto.ops.rotary import rotate_halves
from stretto.tiles.compile_only import compile_kernel

CASES = [(5, 6, 2, 20, torch.float32), (1, 3, 1, 16, torch.bfloat16), (7, 8, 8, 64, torch.float16)]
"""(tokens, heads, KV heads, numbers of a head, dtype): not all of powers of two, nor in one program."""


def rotate(cases, device="cpu"):
    """Differences from several operators, and whether places of other tokens were written."""
    errors, others = [], []
    for tokens, heads, kv_heads, size, dtype in cases:
        whole = random_of(1, tokens, (heads + 2 * kv_heads) * size, dtype=dtype).to(device)
        parts = whole.split([heads * size, kv_heads * size, kv_heads * size], 1)
        query, key, value = (each.view(tokens, -1, size) for each in parts)
        cos, sin = (random_of(seed, tokens, size, dtype=dtype).to(device) for seed in (2, 3))
        pages = tokens // 4 + 4
        keys, values = (torch.full((pages, 4, kv_heads, size), 7.0, dtype=dtype, device=device) for _ in range(2))
        places = torch.randperm(4 * pages, generator=torch.Generator().manual_seed(4))[:tokens].to(device)
        assert suits_kernel(query, key, value, cos)
        found = rotate_and_store(query, key, value, cos, sin, keys, values, places)
        turned = rotate_halves(*(each.transpose(0, 1)[None] for each in (query, key)), cos[None], sin[None])
        right = [each[0].transpose(0, 1).float() for each in turned]
        stored = keys.flatten(0, 1)[places].float(), values.flatten(0, 1)[places]
        rounding = torch.finfo(dtype).eps
        errors += [
            ((one - other).abs() / (1 + other.abs())).max().item() / rounding
            for one, other in ((found.float(), right[0]), (stored[0], right[1]))
        ]
        others += [
            torch.equal(stored[1], value),
            all((each.flatten(0, 1) == 7).all((1, 2)).sum() == 4 * pages - tokens for each in (keys, values)),
        ]
    return largest(errors), others


def test_rotated_heads_and_the_cache_are_those_of_several_operators(interpret):
    ((error, others),) = interpret(1, rotate, CASES)
    assert error <= 1
    assert all(others)


NEW = [(6, 2, 24, torch.float32, None), (4, 4, 16, torch.bfloat16, 70)]
"""(heads, KV heads, numbers of a head, dtype, window)."""


def attend(cases, lengths=(270, 1, 70, 64, 129), device="cpu"):
    """Differences of one launch from two, whether caches and replays are the same, and whether counters are 0."""
    errors, same = [], []
    for heads, kv_heads, size, dtype, window in cases:
        count = len(lengths)
        whole = random_of(1, count, (heads + 2 * kv_heads) * size, dtype=dtype).to(device)
        parts = whole.split([heads * size, kv_heads * size, kv_heads * size], 1)
        query, key, value = (each.view(count, -1, size) for each in parts)
        cos, sin = (random_of(seed, count, size, dtype=dtype).to(device) for seed in (2, 3))
        pages = -(-max(lengths) // 8)
        caches = [random_of(seed, count * pages, 8, kv_heads, size, dtype=dtype).to(device) for seed in (5, 6)]
        table = torch.randperm(count * pages, generator=torch.Generator().manual_seed(4)).int().view(count, pages)
        table, lengths_here = table.to(device), torch.tensor(lengths, dtype=torch.int32, device=device)
        last = lengths_here.long() - 1
        places = table.gather(1, (last // 8)[:, None])[:, 0] * 8 + last % 8
        copies, scale = [each.clone() for each in caches], size**-0.5
        turned = rotate_and_store(query, key, value, cos, sin, *copies, places)
        right = ops.paged_attention(turned, *copies, table, lengths_here, window=window, implementation="kernel")
        arrivals = torch.zeros(count * kv_heads, dtype=torch.int32, device=device)
        call = PagedCall(query, *caches, table, lengths_here, None, scale, window or 0, is_invariant=False)
        found = [attend_new_tokens(call, key, value, cos, sin, arrivals) for _ in range(3)]
        errors.append((found[0].float() - right.float()).abs().max().item() / torch.finfo(dtype).eps)
        call = call._replace(is_invariant=True)
        exact = attend_new_tokens(call, key, value, cos, sin, arrivals)
        errors.append((exact.float() - right.float()).abs().max().item() / torch.finfo(dtype).eps)
        call = call._replace(q=turned)
        # Fixed splits of several programs, and of one.
        same += [
            torch.equal(exact, attend_by_kernels(call, INVARIANT_SINGLES._replace(programs_of_processor=many)))
            for many in (4, 0)
        ]
        error = largest(
            (one.float() - other.float()).abs().max().item() for one, other in zip(caches, copies, strict=True)
        )
        errors.append(error / torch.finfo(dtype).eps / 4)
        same += [torch.equal(found[0], each) for each in found] + [not arrivals.any()]
    return largest(errors), same


def test_one_launch_rotates_stores_attends_and_merges(interpret):
    ((error, same),) = interpret(1, attend, NEW)
    assert error <= 10  # of fp32, invariant weights are rounded to 2^-23 of their tile's largest
    assert all(same)


@pytest.mark.long
def test_new_keys_are_stored_before_a_barrier_and_partial_results_before_their_arrival():
    kernel, arguments, options = launch_paged("attend_singles", SINGLES, new=True)
    lines = compile_kernel(kernel, arguments, options, "sm_90")["ptx"].splitlines()
    stored, read, counts = (find(lines, pattern) for pattern in (r"st\.global", r"cp\.async\.cg", r"atom.*acq_rel"))
    barrier = find(lines, r"bar\.sync", find(lines, r"st\.global", stored + 1))
    assert stored < barrier < read
    last = max(number for number in range(counts) if "st.global" in lines[number])
    assert last < find(lines, r"bar\.sync", last) < counts < find(lines, r"bar\.sync", counts)
    assert not any("ld.global" in line for line in lines[counts : find(lines, r"bar\.sync", counts)])


@pytest.mark.parametrize("change", ["size", "dtype", "strides", "angles"])
def test_what_the_kernel_does_not_take_is_told(interpret, change):
    assert interpret(1, suits, change) == [(True, False)]


def suits(change):
    query, key, value, cos = (torch.ones(3, heads, 8) for heads in (4, 2, 2, 1))
    plain = suits_kernel(query, key, value, cos[:, 0])
    match change:
        case "size":
            query, key, value, cos = (torch.ones(3, heads, 7) for heads in (4, 2, 2, 1))
        case "dtype":
            value = value.bfloat16()
        case "strides":
            query = torch.ones(3, 8, 4).transpose(1, 2)
        case "angles":
            cos = cos[..., :4]
    return plain, suits_kernel(query, key, value, cos[:, 0])

# SPDX-License-Identifier: Apache-2.0
"""One kernel rotates queries and keys, and stores keys and values, as several operators do."""

import pytest
import torch
from tests.ops.operands import random_of

from stretto.ops.decoding.rotary_cache import rotate_and_store, suits_kernel
from stretto.ops.rotary import rotate_halves

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
    return max(errors), others


def test_rotated_heads_and_the_cache_are_those_of_several_operators(interpret):
    ((error, others),) = interpret(1, rotate, CASES)
    assert error <= 1
    assert all(others)


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

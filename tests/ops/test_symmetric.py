# SPDX-License-Identifier: Apache-2.0
"""Symmetric products by half: numbers beside fp64, and the mirror image in bits."""

from collections.abc import Callable
from typing import Any

import torch

from stretto.ops.gemm import Blocks
from stretto.ops.symmetric import symmetric_product

SMALL = Blocks(m=16, n=16, k=16, group_rows=1, num_warps=4, num_stages=2, programs=0)


def compare_products() -> list[tuple[Any, ...]]:
    """The products that are wrong: tiles that are cut off at both edges, and the terms that are added."""
    torch.manual_seed(0)
    wrong = []
    for m, k in ((1, 1), (16, 16), (40, 33), (100, 24)):
        for dtype, error in ((torch.float16, 2e-3), (torch.bfloat16, 2e-2), (torch.float32, 1e-5)):
            a, added = torch.randn(m, k).to(dtype), torch.randn(m, m)
            added = (added + added.T).to(dtype)
            for terms, right in (
                ({}, a.double() @ a.double().T),
                ({"alpha": 0.5, "added": added, "beta": -2.0}, 0.5 * a.double() @ a.double().T - 2 * added.double()),
            ):
                found = symmetric_product(a.mT.contiguous().mT, blocks=SMALL, **terms)
                is_near = torch.allclose(found.double(), right, rtol=error, atol=error)
                if not is_near or not torch.equal(found, found.T) or found.dtype != dtype:
                    wrong.append((m, k, dtype, *terms))
    return wrong


def test_symmetric_products_are_those_of_fp64(interpret: Callable[..., Any]) -> None:
    assert interpret(1, compare_products) == [[]]

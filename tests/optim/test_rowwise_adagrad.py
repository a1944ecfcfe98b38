# SPDX-License-Identifier: Apache-2.0
"""Row-wise Adagrad: rows by the formula, sparse and dense alike."""

import copy

import pytest
import torch
from torch import nn

from stretto.optim import RowWiseAdagrad

LR, EPS = 0.1, 1e-3


def by_formula(weight: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
    """Row by row."""
    weight, sums = weight.clone(), [0.0] * len(weight)
    for gradient in gradients:
        for row in range(len(weight)):
            sums[row] += float((gradient[row] ** 2).sum()) / gradient.shape[1]
            weight[row] -= LR * gradient[row] / (sums[row] ** 0.5 + EPS)
    return weight


@pytest.mark.parametrize("is_sparse", [False, True])
def test_rows_are_updated_by_the_formula(is_sparse: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    table, gradients = nn.Parameter(start.clone()), []
    optimizer = RowWiseAdagrad([table], lr=LR, eps=EPS)
    for _ in range(3):
        rows = torch.tensor([1, 4, 1])  # a row twice: added up before it is squared
        values = torch.randn(3, 3, generator=generator, dtype=torch.float64)
        gradient = torch.sparse_coo_tensor(rows[None], values, (5, 3), check_invariants=True)
        gradients.append(gradient.to_dense())
        table.grad = gradient if is_sparse else gradient.to_dense()
        optimizer.step()
    torch.testing.assert_close(table.detach(), by_formula(start, gradients))
    assert torch.equal(table.detach()[[0, 2, 3]], start[[0, 2, 3]])
    assert optimizer.sums(table).shape == (5,)


def test_a_batch_that_looks_nothing_up_changes_nothing() -> None:
    table = nn.Parameter(torch.ones(4, 2))
    optimizer = RowWiseAdagrad([table])
    table.grad = torch.sparse_coo_tensor(
        torch.empty(1, 0, dtype=torch.int64), torch.empty(0, 2), (4, 2), check_invariants=True
    )
    optimizer.step()
    assert torch.equal(table.detach(), torch.ones(4, 2))


def test_invalid_tables_raise() -> None:
    with pytest.raises(ValueError, match=r"shape \[3\], but must be a table"):
        RowWiseAdagrad([nn.Parameter(torch.ones(3))])
    with pytest.raises(ValueError, match="lr is -1"):
        RowWiseAdagrad([nn.Parameter(torch.ones(3, 1))], lr=-1)
    with pytest.raises(ValueError, match="eps is nan"):
        RowWiseAdagrad([nn.Parameter(torch.ones(3, 1))], eps=float("nan"))


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_half_precision_tables_hold_what_squares_need(dtype: torch.dtype, is_sparse: bool) -> None:
    gradient = torch.zeros(3, 4, dtype=dtype)
    gradient[0], gradient[1] = 300.0, 1e-4  # whose squares fp16 does not have
    expected = by_formula(torch.ones(3, 4, dtype=torch.float64), [gradient.double()] * 3)
    table, other = nn.Parameter(torch.ones(3, 4, dtype=dtype)), nn.Parameter(torch.ones(3, 4, dtype=dtype))
    optimizer, again = RowWiseAdagrad([table], lr=LR, eps=EPS), RowWiseAdagrad([other], lr=LR, eps=EPS)
    for _ in range(3):
        table.grad = gradient.to_sparse(1) if is_sparse else gradient
        optimizer.step()
    torch.testing.assert_close(table.detach().double(), expected, atol=3 * torch.finfo(dtype).eps, rtol=0)
    assert optimizer.sums(table).dtype == torch.float32
    again.load_state_dict(optimizer.state_dict())
    assert again.sums(other).dtype == torch.float32
    assert torch.equal(again.sums(other), optimizer.sums(table))


def test_a_resumed_optimizer_goes_on_as_the_first_would() -> None:
    """Also where a table of the state has not been looked up yet."""
    tables = [nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(2, 4, dtype=torch.bfloat16))]
    others = [nn.Parameter(torch.ones_like(table)) for table in tables]
    first, again = RowWiseAdagrad(tables, lr=LR, eps=EPS), RowWiseAdagrad(others, lr=9.0, eps=9.0)
    tables[0].grad = torch.arange(12.0).view(3, 4)
    first.step()
    again.load_state_dict(copy.deepcopy(first.state_dict()))
    others[0].data.copy_(tables[0])
    for optimizer, (one, other) in ((first, tables), (again, others)):
        one.grad, other.grad = torch.ones(3, 4), torch.ones(2, 4, dtype=torch.bfloat16)
        optimizer.step()
    assert all(torch.equal(table, other) for table, other in zip(tables, others, strict=True))


def test_a_rank_without_tables_has_an_optimizer_too() -> None:
    for nothing in ([], iter(()), [{"params": []}]):
        optimizer = RowWiseAdagrad(nothing, lr=LR)
        optimizer.step()
        optimizer.zero_grad()
        RowWiseAdagrad([]).load_state_dict(optimizer.state_dict())


def test_without_an_epsilon_a_gradient_of_zeros_changes_nothing() -> None:
    for sparse in (False, True):
        table = nn.Parameter(torch.ones(3, 4))
        table.grad = torch.tensor([[0.0], [2.0], [0.0]]).expand(3, 4).clone()
        if sparse:
            table.grad = torch.sparse_coo_tensor([[0, 1]], table.grad[:2], (3, 4))
        RowWiseAdagrad([table], lr=LR, eps=0.0).step()
        assert torch.equal(table, torch.tensor([[1.0], [1.0 - LR], [1.0]]).expand(3, 4))

# SPDX-License-Identifier: Apache-2.0
"""Sorting tokens by expert, and summing them back."""

import pytest
import torch
from tests.ops.moe.oracle import draw, list_rows, make_layer
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck

from stretto.ops import moe

SEED = 60


@pytest.mark.parametrize(("tokens", "k", "experts"), [(7, 2, 4), (5, 3, 3), (4, 1, 6), (0, 2, 4)])
def test_rows_are_by_expert_then_token_and_positions_find_them(tokens, k, experts):
    layer = make_layer(SEED, tokens, k, experts)
    rows, offsets, positions = moe.permute(layer.x, layer.ids, experts)
    expected, ends = list_rows([layer.ids.tolist()], range(experts))
    assert torch.equal(rows, layer.x[[token for _, token in expected]])
    assert offsets.tolist() == ends
    assert offsets.dtype == torch.int32
    for token in range(tokens):
        for slot, row in enumerate(positions[token].tolist()):
            assert torch.equal(rows[row], layer.x[token])
            expert = layer.ids[token, slot]
            assert ends[expert] <= row < ends[expert + 1]


def test_gradients_are_those_of_finite_differences():
    layer = make_layer(SEED, 5, 2, 4)
    positions = moe.permute(layer.x, layer.ids, 4).positions
    assert gradcheck(lambda x: moe.permute(x, layer.ids, 4).rows, layer.x.clone().requires_grad_())
    for spare in (0, 3):  # rows that no position names
        rows, weights = draw(SEED, 10 + spare, 6).requires_grad_(), layer.weights.clone().requires_grad_()
        assert gradcheck(moe.unpermute, (rows, positions + spare, weights))


def test_a_sum_of_bf16_rows_is_rounded_once_and_takes_fp32_weights():
    layer = make_layer(SEED, 50, 4, 8)
    rows, _, positions = moe.permute(layer.x.bfloat16(), layer.ids, 8)
    rows = (rows * draw(SEED, len(rows), 6).bfloat16()).requires_grad_()
    weights = layer.weights.float().requires_grad_()
    out = moe.unpermute(rows, positions, weights)
    exact = sum(rows.double()[positions[:, slot]] * weights.double()[:, slot, None] for slot in range(4))
    assert out.dtype == torch.bfloat16
    assert ((out.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()
    out.sum().backward()
    assert rows.grad.dtype == torch.bfloat16
    expected = rows.double()[positions].sum(2)
    assert weights.grad.dtype == torch.float32
    torch.testing.assert_close(weights.grad.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_gradient_of_bf16_copies_is_rounded_once():
    layer = make_layer(SEED, 50, 8, 8)
    x = layer.x.bfloat16().requires_grad_()
    rows, _, positions = moe.permute(x, layer.ids, 8)
    grad = draw(SEED, *rows.shape).bfloat16()
    rows.backward(grad)
    exact = grad.double()[positions].sum(1)
    assert ((x.grad.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-5).all()


def test_ids_may_be_int32_and_an_expert_may_be_chosen_twice():
    ids = torch.tensor([[1, 1], [0, 1]], dtype=torch.int32)
    rows, offsets, positions = moe.permute(torch.tensor([[1.0], [2.0]]), ids, 2)
    assert rows.tolist() == [[2.0], [1.0], [1.0], [2.0]]
    assert offsets.tolist() == [0, 1, 4]
    assert positions.tolist() == [[1, 2], [0, 3]]


def run_layer(x, ids, weights, gate_up, down):
    sent = moe.dispatch(x, ids, 4, None)
    rows = moe.experts_mlp(sent.rows, sent.offsets, gate_up, down)
    return moe.combine(rows, sent.handle, weights, None)


def test_one_rank_reads_nothing_from_the_device():
    layer = make_layer(SEED, 5, 2, 4)
    with FakeTensorMode() as mode:  # whose tensors have no numbers
        inputs = [mode.from_tensor(one) for one in (layer.x, layer.ids, *layer.leaves[1:])]
        assert run_layer(*inputs).shape == (5, 6)
        assert moe.dispatch(*inputs[:2], 4, None, max_rows=12).rows.shape == (12, 6)


@pytest.mark.long
def test_one_rank_compiles_without_a_graph_break():
    layer = make_layer(SEED, 5, 2, 4)
    leaves = [one.clone().requires_grad_() for one in layer.leaves]
    compiled = torch.compile(run_layer, backend="aot_eager", fullgraph=True)
    outs = [run(leaves[0], layer.ids, *leaves[1:]) for run in (run_layer, compiled)]
    grads = [torch.autograd.grad(out.square().sum(), leaves) for out in outs]
    assert torch.equal(*outs)
    assert all(map(torch.equal, *grads))


def test_more_rows_than_one_rank_needs_are_zeros_and_fewer_an_error():
    layer = make_layer(SEED, 5, 2, 4)
    sent = moe.dispatch(layer.x, layer.ids, 4, None, max_rows=13)
    assert sent.offsets[-1] == 10
    assert not sent.rows[10:].any()
    out = moe.combine(sent.rows, sent.handle, layer.weights, None)
    torch.testing.assert_close(out, layer.x * layer.weights.sum(1, keepdim=True))
    with pytest.raises(ValueError, match=r"rank 0 .* needs 10 rows, more than max_rows=9"):
        moe.dispatch(layer.x, layer.ids, 4, None, max_rows=9)


X, IDS, WEIGHTS = torch.zeros(3, 4), torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2)


@pytest.mark.parametrize(
    ("x", "ids", "experts", "message"),
    [
        (X, IDS[:2], 4, "x \\[t, h\\] and topk_ids \\[t, k\\]"),
        (X[0], IDS, 4, "x \\[t, h\\]"),
        (X.long(), IDS, 4, "not torch.int64"),
        (X, IDS.float(), 4, "topk_ids must be torch.int64 or torch.int32, not torch.float32"),
        (X, IDS, 1, "topk_ids has 2 experts a token .* there are 1: 1 to 1"),
        (X, IDS[:, :0], 4, "topk_ids has 0 experts a token"),
        (X, IDS + 4, 4, "topk_ids has 4, but experts are numbered 0 to 3"),
        (X, IDS - 1, 4, "topk_ids has -1, but experts are numbered 0 to 3"),
        (X.to("meta"), IDS, 4, "x is on meta and topk_ids on cpu"),
        (X, IDS, "4", "num_experts must be a whole number, not '4'"),
    ],
)
def test_wrong_tokens_are_refused(x, ids, experts, message):
    for call in (moe.permute, moe.dispatch):
        with pytest.raises(ValueError, match=message):
            call(x, ids, experts)


def test_wrong_rows_and_weights_are_refused():
    sent = moe.dispatch(X, IDS, 4)
    for rows, weights, message in (
        (sent.rows[:5], WEIGHTS, "dispatch returned 6 rows with this handle, not 5"),
        (sent.rows, WEIGHTS[:2], "topk_weights \\[3, 2\\], not"),
        (sent.rows, IDS, "topk_weights of .* not torch.int64"),
        (sent.rows[0], WEIGHTS, "rows \\[n, h\\]"),
    ):
        with pytest.raises(ValueError, match=message):
            moe.combine(rows, sent.handle, weights)
    with pytest.raises(ValueError, match="6 positions need as many rows or more, not 5"):
        moe.unpermute(sent.rows[:5], torch.arange(6).view(3, 2), WEIGHTS)
    with pytest.raises(ValueError, match=r"k of 1 or more, .* not torch.int64 \[3, 0\]"):
        moe.unpermute(sent.rows, IDS[:, :0], WEIGHTS[:, :0])
    few = moe.dispatch_few(X, IDS, WEIGHTS, 4)
    with pytest.raises(ValueError, match="combine: handle must be a DispatchHandle, not FewHandle"):
        moe.combine(sent.rows, few.handle, WEIGHTS)
    with pytest.raises(ValueError, match="combine_few: handle must be a FewHandle, not None"):
        moe.combine_few(rows=few.rows, handle=None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"implementation": "fast"}, '"auto", "kernel" or "library", not \'fast\''),
        ({"max_rows": 0}, "max_rows is 0, but must be a whole number, at least 1, or None for as many as there are"),
        ({"max_rows": 8.0}, "max_rows is 8.0, but must be a whole number"),
        ({"implementation": "kernel"}, "no kernel can run: one rank has all 4 experts, so that nothing is sent"),
        ({"reduce": "token"}, 'reduce must be "rank" or "choice", not \'token\''),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        moe.dispatch(X, IDS, 4, **options)

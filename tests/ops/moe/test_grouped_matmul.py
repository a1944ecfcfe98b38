# SPDX-License-Identifier: Apache-2.0
"""Products of each expert's rows with its weight, and what is built on them."""

from functools import partial
from importlib import import_module
from itertools import pairwise
from unittest import mock

import pytest
import torch
from tests.ops.moe.oracle import draw
from torch.autograd import gradcheck
from torch.nn.functional import gelu, silu

from stretto.ops import moe
from stretto.ops.moe.grouped.matmul import clear_empty, clear_padding

grouped_matmul = import_module("stretto.ops.moe.grouped.matmul")  # the package has a function of that name
SEED = 80
OFFSETS = {
    "some rows each": [0, 2, 5, 7],
    "an expert without rows": [0, 3, 3, 7],
    "all rows to one": [0, 0, 7, 7],
    "padding": [0, 2, 4, 5],
    "padding alone": [0, 0, 0, 0],
}


def as_offsets(numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def multiply(rows, weight, offsets):
    """Row by row."""
    out = rows.new_zeros(len(rows), weight.shape[1])
    for expert in range(len(weight)):
        for row in range(offsets[expert], offsets[expert + 1]):
            out[row] = weight[expert] @ rows[row]
    return out


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("numbers", OFFSETS.values(), ids=OFFSETS)
def test_each_expert_multiplies_its_rows(numbers, is_captured, monkeypatch):
    monkeypatch.setattr(grouped_matmul, "_is_captured", lambda rows: is_captured)
    rows, weight, grad = draw(SEED, 7, 4), draw(SEED + 1, 3, 5, 4), draw(SEED + 2, 7, 5)
    leaves = [one.clone().requires_grad_() for one in (rows, weight)]
    out = moe.grouped_matmul(*leaves, as_offsets(numbers))
    torch.testing.assert_close(out, multiply(rows, weight, numbers), rtol=0, atol=1e-13)
    grad_rows, grad_weight = torch.autograd.grad(out, leaves, grad)
    expected = torch.zeros_like(weight)
    for expert in range(3):
        for row in range(numbers[expert], numbers[expert + 1]):
            expected[expert] += grad[row][:, None] * rows[row]
    torch.testing.assert_close(grad_weight, expected, rtol=0, atol=1e-13)
    assert torch.equal(grad_weight, moe.grouped_weight_gradient(grad, rows, as_offsets(numbers)))
    torch.testing.assert_close(grad_rows, multiply(grad, weight.mT, numbers), rtol=0, atol=1e-13)


def test_gradients_are_those_of_finite_differences():
    rows, weight = draw(SEED, 5, 3).requires_grad_(), draw(SEED + 1, 3, 2, 3).requires_grad_()
    offsets = as_offsets([0, 2, 2, 4])
    assert gradcheck(lambda rows, weight: moe.grouped_matmul(rows, weight, offsets), (rows, weight))
    down = draw(SEED + 2, 3, 3, 1).requires_grad_()
    assert gradcheck(lambda *all: moe.experts_mlp(all[0], offsets, *all[1:]), (rows, weight, down))


@pytest.mark.parametrize(("rows", "experts", "inner"), [(0, 3, 4), (5, 1, 4), (5, 2, 0)])
def test_nothing_to_multiply_gives_zeros(rows, experts, inner):
    offsets = as_offsets([0] * experts + [rows])
    leaves = [draw(SEED, rows, inner).requires_grad_(), draw(SEED, experts, 2, inner).requires_grad_()]
    out = moe.grouped_matmul(*leaves, offsets)
    assert out.shape == (rows, 2)
    grads = torch.autograd.grad(out.sum(), leaves)
    assert [one.shape for one in grads] == [one.shape for one in leaves]
    if rows == 0 or inner == 0:
        assert not out.any()
        assert not any(one.any() for one in grads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_products_are_summed_in_fp32(dtype):
    offsets = [0, 6, 16]
    rows, weight = draw(SEED, 16, 256).to(dtype), draw(SEED, 2, 8, 256).to(dtype)
    out = moe.grouped_matmul(rows, weight, as_offsets(offsets))
    assert out.dtype == dtype
    exact = multiply(rows.double(), weight.double(), offsets)
    assert ((out.double() - exact).abs() <= exact.abs() * torch.finfo(dtype).eps + 1e-4).all()


def test_only_gradients_that_are_needed_are_computed_and_only_their_operands_kept():
    rows, weight = draw(SEED, 5, 3), draw(SEED, 2, 4, 3)
    kept = []
    for of_rows, of_weight in ((True, False), (False, True)):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one.shape) or one, lambda one: one):
            out = moe.grouped_matmul(
                rows.clone().requires_grad_(of_rows), weight.clone().requires_grad_(of_weight), as_offsets([0, 2, 5])
            )
        assert (rows.shape in kept) == of_weight
        assert (weight.shape in kept) == of_rows
        out.sum().backward()


@pytest.mark.long
def test_torch_finds_nothing_wrong_with_the_operators():
    inputs = (
        draw(SEED, 5, 3).requires_grad_(),
        draw(SEED, 2, 4, 3).requires_grad_(),
        as_offsets([0, 2, 5]),
        None,
        None,
        "auto",
        0,
    )
    torch.library.opcheck(torch.ops.stretto.grouped_matmul.default, inputs)
    inputs = draw(SEED, 5, 4), draw(SEED, 5, 3), as_offsets([0, 2, 5]), None, None, "auto", 0, torch.float32, 0.5
    torch.library.opcheck(torch.ops.stretto.grouped_matmul_weight_gradient.default, inputs)
    projections = draw(SEED, 2, 8, 3).requires_grad_(), draw(SEED, 2, 3, 4).requires_grad_()
    inputs = draw(SEED, 5, 3).requires_grad_(), as_offsets([0, 2, 5]), *projections, None, None, None, True, "auto"
    torch.library.opcheck(torch.ops.stretto.experts_mlp.default, inputs)


def test_flops_are_those_of_one_product_of_all_rows():
    from torch.utils.flop_counter import FlopCounterMode

    rows, weight = draw(SEED, 5, 3).requires_grad_(), draw(SEED, 2, 4, 3).requires_grad_()
    with FlopCounterMode(display=False) as counter:
        moe.grouped_matmul(rows, weight, as_offsets([0, 2, 5])).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 5 * 3 * 4
    up, down = draw(SEED, 2, 8, 3).requires_grad_(), draw(SEED, 2, 3, 4).requires_grad_()
    with FlopCounterMode(display=False) as counter:
        moe.experts_mlp(rows, as_offsets([0, 2, 5]), up, down).sum().backward()
    assert counter.get_total_flops() == 3 * (2 * 5 * 3 * 8 + 2 * 5 * 4 * 3)


def route_plainly(x, ids, weights, gate_up, down):
    """Token by token."""
    tokens = []
    for token in range(len(x)):
        outputs = []
        for expert in ids[token].tolist():
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            outputs.append(down[expert] @ (silu(gate) * up))
        tokens.append((weights[token][:, None] * torch.stack(outputs)).sum(0))
    return torch.stack(tokens)


def test_routed_experts_are_a_weighted_sum_of_each_tokens_experts():
    leaves = [draw(SEED, 5, 3), draw(SEED + 1, 5, 2), draw(SEED + 2, 4, 4, 3), draw(SEED + 3, 4, 3, 2)]
    x, weights, gate_up, down = leaves = [one.requires_grad_() for one in leaves]
    ids = torch.tensor([[0, 2], [2, 0], [0, 3], [3, 2], [2, 0]])  # expert 1 has no tokens
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        found = moe.routed_experts(x, ids, weights, gate_up, down)
    rows = [one.shape for one in kept if one.is_floating_point() and one.shape[:1] == (10,)]
    assert rows == [(10, 4)]  # gate and up: no copies of tokens, nor outputs
    expected = route_plainly(x, ids, weights, gate_up, down)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    grad = draw(SEED + 4, 5, 3)
    pairs = zip(torch.autograd.grad(found, leaves, grad), torch.autograd.grad(expected, leaves, grad), strict=True)
    for one, right in pairs:
        torch.testing.assert_close(one, right, rtol=0, atol=1e-12)
    tanh = moe.routed_experts(x, ids, weights, gate_up, down, torch.tanh)
    rows, offsets, positions = moe.permute(x, ids, 4)
    assert torch.equal(
        tanh, moe.unpermute(moe.experts_mlp(rows, offsets, gate_up, down, torch.tanh), positions, weights)
    )


def test_rows_are_gathered_by_tokens():
    x, weight = draw(SEED, 4, 3).requires_grad_(), draw(SEED + 1, 2, 5, 3).requires_grad_()
    rows, offsets, positions = moe.permute(x, torch.tensor([[0, 1], [1, 0], [0, 1], [1, 0]]), 2)
    tokens = torch.empty(8, dtype=torch.int32).scatter_(0, positions.flatten(), torch.arange(8, dtype=torch.int32) // 2)
    found = moe.grouped_matmul(x, weight, offsets, tokens=tokens, positions=positions)
    expected = moe.grouped_matmul(rows, weight, offsets)
    assert torch.equal(found, expected)
    grad = draw(SEED + 2, 8, 5)
    for one, right in zip(*(torch.autograd.grad(out, (x, weight), grad) for out in (found, expected)), strict=True):
        assert torch.equal(one, right)
    with pytest.raises(ValueError, match="needs positions"):
        moe.grouped_matmul(x, weight, offsets, tokens=tokens)
    with pytest.raises(ValueError, match=r"tokens must be torch.int32 \[n\] on cpu, not torch.int64 \[8\]"):
        moe.grouped_weight_gradient(grad, x, offsets, tokens=tokens.long())


def test_an_implementation_that_is_unknown_or_cannot_run_is_refused():
    offsets = as_offsets([0, 2, 5])
    with pytest.raises(ValueError, match="one of auto, kernel, library, not 'triton'"):
        moe.grouped_matmul(ROWS, WEIGHT, offsets, implementation="triton")
    with pytest.raises(ValueError, match=r"take torch.bfloat16 or torch.float16, not torch.float32"):
        moe.experts_mlp(ROWS, offsets, WEIGHT, torch.zeros(2, 3, 2), implementation="kernel")
    with pytest.raises(ValueError, match="run on GPUs, not on cpu"):
        moe.grouped_matmul(ROWS.bfloat16(), WEIGHT.bfloat16(), offsets, implementation="kernel")


@pytest.mark.parametrize(("name", "function"), [("silu", silu), ("gelu", gelu), (torch.tanh, torch.tanh)])
def test_gates_come_first(name, function):
    x = draw(SEED, 3, 8)
    torch.testing.assert_close(moe.gated_activation(x, name), function(x[:, :4]) * x[:, 4:])


@pytest.mark.parametrize("is_gated", [True, False])
def test_an_experts_mlp_is_each_experts_mlp(is_gated):
    rows, up, down = draw(SEED, 5, 3), draw(SEED + 1, 2, 8 if is_gated else 4, 3), draw(SEED + 2, 2, 3, 4)
    out = moe.experts_mlp(rows, as_offsets([0, 2, 5]), up, down, "gelu")
    for row, expert in enumerate((0, 0, 1, 1, 1)):
        hidden = up[expert] @ rows[row]
        hidden = gelu(hidden[:4]) * hidden[4:] if is_gated else gelu(hidden)
        torch.testing.assert_close(out[row], down[expert] @ hidden)


ROWS, WEIGHT = torch.zeros(5, 3), torch.zeros(2, 4, 3)


@pytest.mark.parametrize(
    ("rows", "weight", "offsets", "message"),
    [
        (ROWS[:, :2], WEIGHT, as_offsets([0, 2, 5]), "rows \\[n, a\\] and weight \\[experts, b, a\\]"),
        (ROWS, WEIGHT[0], as_offsets([0, 2, 5]), "rows \\[n, a\\] and weight"),
        (ROWS.double(), WEIGHT, as_offsets([0, 2, 5]), "not torch.float64 and torch.float32"),
        (ROWS, WEIGHT, as_offsets([0, 5]), "offsets must be \\[2 experts \\+ 1\\], not \\[2\\]"),
        (ROWS, WEIGHT, as_offsets([0, 2, 5]).long(), "not torch.int64"),
        (ROWS, WEIGHT.to("meta"), as_offsets([0, 2, 5]), "rows is on cpu, weight on meta"),
    ],
)
def test_wrong_operands_are_refused(rows, weight, offsets, message):
    with pytest.raises(ValueError, match=message):
        moe.grouped_matmul(rows, weight, offsets)


@pytest.mark.parametrize(
    ("grad", "offsets", "message"),
    [
        (ROWS[:4], as_offsets([0, 2, 5]), "takes grad \\[n, b\\], and rows \\[n, a\\] .* not \\[4, 3\\]"),
        (ROWS.double(), as_offsets([0, 2, 5]), "not torch.float64 and torch.float32"),
        (ROWS, as_offsets([[0, 2, 5]]), "offsets must be \\[experts \\+ 1\\]"),
        (ROWS, as_offsets([0, 2, 5]).long(), "offsets must be torch.int32, not torch.int64"),
    ],
)
def test_wrong_operands_of_a_weight_gradient_are_refused(grad, offsets, message):
    with pytest.raises(ValueError, match=message):
        moe.grouped_weight_gradient(grad, ROWS, offsets)


def test_a_weight_gradient_in_fp32_is_not_rounded_to_its_operands_dtype():
    grad, rows = draw(SEED, 5, 4).bfloat16(), draw(SEED + 1, 5, 3).bfloat16()
    found = moe.grouped_weight_gradient(grad, rows, as_offsets([0, 2, 5]), dtype=torch.float32, factor=1 / 3)
    exact = [grad[part].double().T @ rows[part].double() / 3 for part in (slice(2), slice(2, 5))]
    torch.testing.assert_close(found, torch.stack(exact).float(), rtol=1e-6, atol=1e-7)
    with pytest.raises(ValueError, match=r"dtype is torch\.bfloat16 or torch\.float32, not torch\.float64"):
        moe.grouped_weight_gradient(grad, rows, as_offsets([0, 2, 5]), dtype=torch.float64)


@pytest.mark.parametrize("count", [4, 6])
def test_a_weight_gradient_takes_a_row_of_grad_for_each_token(count):
    tokens = torch.zeros(5, dtype=torch.int32)
    with pytest.raises(ValueError, match=f"\\[{count}, 3\\] and \\[5, 3\\] with \\[5\\]"):
        moe.grouped_weight_gradient(torch.zeros(count, 3), ROWS, as_offsets([0, 2, 5]), tokens=tokens)


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (None, "needs positions, int64 \\[3, k\\], .* not None"),
        (torch.zeros(3, 2), "not torch.float32 \\[3, 2\\]"),
        (torch.zeros(2, 3, dtype=torch.int64), "not torch.int64 \\[2, 3\\]"),
        (torch.tensor([[0, 9], [1, 2], [4, 5]]), "rows of token i"),
        (torch.tensor([[0, 1], [2, 3], [4, 5]]), "rows of token i"),  # of other tokens
    ],
)
def test_positions_that_would_give_other_tokens_the_gradient_are_refused(positions, message):
    rows, tokens = torch.zeros(3, 3, requires_grad=True), torch.tensor([0, 1, 1, 0, 2, 2], dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        moe.grouped_matmul(rows, WEIGHT, as_offsets([0, 2, 6]), tokens=tokens, positions=positions)


def test_an_activation_that_changes_a_tensors_shape_is_refused():
    with pytest.raises(ValueError, match="made \\[1, 2\\] of \\[5, 2\\]"):
        moe.gated_activation(torch.zeros(5, 4), lambda gate: gate[:1])
    with pytest.raises(ValueError, match="room is -1, but must be a whole number, at least 0"):
        moe.grouped_matmul(ROWS, WEIGHT, as_offsets([0, 2, 5]), room=-1)


def test_projections_that_do_not_fit_and_unknown_activations_are_refused():
    offsets = as_offsets([0, 2, 5])
    with pytest.raises(ValueError, match="down \\[e, h, f\\], not \\[2, 4, 3\\] and \\[2, 3, 3\\]"):
        moe.experts_mlp(ROWS, offsets, WEIGHT, torch.zeros(2, 3, 3))
    with pytest.raises(ValueError, match=r"one of gelu, .*, not 'swish'"):
        moe.experts_mlp(ROWS, offsets, WEIGHT, torch.zeros(2, 3, 2), "swish")
    with pytest.raises(ValueError, match="x \\[n, 2 \\* F\\], not \\[5, 3\\]"):
        moe.gated_activation(ROWS)


def clear():
    """(rows, experts) that the kernels have cleared."""
    found = []
    for offsets in ([0, 30, 30, 37], [0, 0, 0, 0], [0, 20, 40, 40]):
        rows = torch.ones(40, 1030, dtype=torch.bfloat16)
        clear_padding(rows, as_offsets(offsets))
        experts = torch.ones(3, 9, 5000, dtype=torch.bfloat16)
        clear_empty(experts, as_offsets(offsets))
        for one in (rows, experts.flatten(1)):
            assert ((one == 0).all(1) | (one == 1).all(1)).all()
        found.append(((rows == 0).all(1).nonzero().flatten().tolist(), (experts == 0).all(2).all(1).tolist()))
    return found


@pytest.mark.exhaustive
def test_kernels_clear_padding_and_experts_without_rows(interpret):
    expected = [
        (list(range(37, 40)), [False, True, False]),
        (list(range(40)), [True, True, True]),
        ([], [False, False, True]),
    ]
    assert interpret(1, clear) == [expected]


def test_torchs_grouped_gemm_is_told_of_multiprocessors_that_stay_free_only_while_it_is_launched():
    seen = []

    def multiply_by_torch(grad, rows, offs):
        seen.append(torch._C._get_sm_carveout_experimental())
        return torch.zeros(len(offs), len(grad), rows.shape[1])

    grad, rows = draw(SEED, 7, 5), draw(SEED + 1, 7, 4)
    replaced = {"_takes_grouped_gemm": lambda *_: True, "_find_quack": lambda *_: None, "clear_empty": lambda *_: None}
    with mock.patch.multiple(grouped_matmul, _grouped_mm=multiply_by_torch, **replaced):
        for room in (22, 0):
            moe.grouped_weight_gradient(grad, rows, as_offsets([0, 2, 5, 7]), room=room)
    assert seen == [22, None]
    assert torch._C._get_sm_carveout_experimental() is None


def multiply_as_quack(a, b, *, cu_seqlens_m=None, cu_seqlens_k=None, A_idx=None, tuned=True):
    """What quack's GEMM computes of ragged rows, or of a ragged sum; it leaves padding, and sums of no rows, as is."""
    assert not tuned  # it would time configurations at a first call
    if cu_seqlens_k is not None:
        bounds = pairwise(cu_seqlens_k.tolist())
        sums = [a[:, begin:end] @ b[begin:end] if end > begin else a @ b * torch.nan for begin, end in bounds]
        return torch.stack(sums)
    rows = a if A_idx is None else a[A_idx.long()]
    out = rows.new_full((len(rows), b.shape[2]), torch.nan)
    for expert, (begin, end) in enumerate(pairwise(cu_seqlens_m.tolist())):
        out[begin:end] = rows[begin:end] @ b[expert]
    return out


@pytest.mark.parametrize("numbers", OFFSETS.values(), ids=OFFSETS)
def test_the_library_is_quacks_gemm_where_it_is_installed(numbers):
    offsets, tokens = as_offsets(numbers), as_offsets([4, 0, 3, 1, 1, 2, 0])
    x, weight, grad = draw(SEED, 5, 8), draw(SEED + 1, 3, 16, 8), draw(SEED + 2, 7, 16)
    product = partial(grouped_matmul.compute_product, x, weight, offsets, tokens, "library")
    gradient = partial(grouped_matmul.compute_weight_gradient, grad, x, offsets, None, tokens, "library")
    right = product(), gradient()
    gemm, clears = mock.Mock(side_effect=multiply_as_quack), {"clear_padding": fill_padding, "clear_empty": fill_empty}
    with mock.patch.multiple(grouped_matmul, _find_quack=lambda *operands: gemm, **clears):
        found = product(), gradient()
    assert gemm.call_count == 2
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


def fill_padding(out, offsets):
    out[int(offsets[-1]) :] = 0


def fill_empty(out, offsets):
    out[offsets.diff() == 0] = 0


def test_a_quack_that_cannot_be_imported_is_said_and_torchs_gemm_taken(tmp_path, monkeypatch):
    package = tmp_path / "quack"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('no CuTe here')")
    monkeypatch.syspath_prepend(tmp_path)
    find = grouped_matmul._import_quack.__wrapped__
    with pytest.warns(UserWarning, match="take torch's GEMM, since quack cannot be imported: no CuTe here"):
        assert find() is None
    (package / "__init__.py").write_text("")
    (package / "gemm_interface.py").write_text("def gemm(): pass")
    assert find().__name__ == "gemm"

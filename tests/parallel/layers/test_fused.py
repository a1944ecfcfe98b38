# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding and SwiGLU: beside complex numbers and formulas in fp64, and their kernels interpreted."""

from contextlib import nullcontext

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid, count_collectives, recomputation_contexts
from stretto.parallel.layers.fused import _is_watched, _rotate, rotary_angles, rotate_heads, swiglu
from tests.differences import largest
from tests.tiles.machine_code import compile_to_ptx, find_spills

SEED = 3
SHAPES = [(2, 5, 2, 3, 8), (1, 7, 3, 1, 6), (1, 1, 1, 4, 2), (3, 4, 1, 1, 130), (2, 0, 2, 1, 4)]
"""Of (batch, seq, groups, queries of a group, head_dim)."""
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
CPU = torch.device("cpu")


def draw(seed, *shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def rotate_by_complex_numbers(heads, angles):
    """heads [batch, seq, heads, head_dim] in fp64: feature i and i + head_dim / 2 as one complex number."""
    numbers = torch.complex(*heads.double().chunk(2, -1))
    turned = numbers * torch.complex(*(angle.double() for angle in angles))[None, :, None]
    return torch.cat((turned.real, turned.imag), -1)


def expect_heads(qkv, angles, queries):
    batch, seq, groups, _, dim = qkv.shape
    query, key, value = qkv.double().split((queries, 1, 1), 3)
    query, key, value = (part.reshape(batch, seq, groups * part.shape[3], dim) for part in (query, key, value))
    return rotate_by_complex_numbers(query, angles), rotate_by_complex_numbers(key, angles), value


@pytest.mark.parametrize(("batch", "seq", "groups", "queries", "dim"), SHAPES)
def test_heads_are_rotated_as_complex_numbers_are(batch, seq, groups, queries, dim):
    qkv = draw(SEED, batch, seq, groups, queries + 2, dim)
    angles = rotary_angles(torch.arange(seq), dim)
    for found, right in zip(rotate_heads(qkv, angles, queries), expect_heads(qkv, angles, queries), strict=True):
        torch.testing.assert_close(found, right, rtol=0, atol=1e-14)


def test_gradients_of_any_order_are_right():
    qkv = draw(SEED, 1, 3, 2, 4, 6).requires_grad_()
    angles = tuple(angle.double() for angle in rotary_angles(torch.arange(3), 6))
    assert torch.autograd.gradcheck(lambda x: rotate_heads(x, angles, 2), qkv)
    assert torch.autograd.gradgradcheck(lambda x: rotate_heads(x, angles, 2), qkv)
    gate, up = draw(1, 4, 5).requires_grad_(), draw(2, 4, 5).requires_grad_()
    assert torch.autograd.gradcheck(swiglu, (gate, up))
    assert torch.autograd.gradgradcheck(swiglu, (gate, up))
    torch.testing.assert_close(swiglu(gate, up), gate * gate.sigmoid() * up)


def test_16_bits_on_cpus_are_those_of_the_operators():
    angles = rotary_angles(torch.arange(5), 8)
    qkv = draw(SEED, 2, 5, 2, 4, 8, dtype=torch.bfloat16).requires_grad_()
    gate, up = (draw(seed, 3, 40, dtype=torch.bfloat16).requires_grad_() for seed in (1, 2))
    found = [*rotate_heads(qkv, angles, 2), swiglu(gate, up)]
    query, key, value = qkv.split((2, 1, 1), 3)
    right = [_rotate(query, angles).flatten(2, 3), _rotate(key, angles).flatten(2, 3), value.flatten(2, 3)]
    right.append(F.silu(gate) * up)
    weights = [draw(seed, *one.shape, dtype=torch.bfloat16) for seed, one in enumerate(right)]
    gradients = [torch.autograd.grad(outputs, (qkv, gate, up), weights) for outputs in (found, right)]
    for one, other in zip([*found, *gradients[0]], [*right, *gradients[1]], strict=True):
        assert torch.equal(one, other)


def test_backward_passes_need_only_angles_and_the_two_factors():
    """The linear's output is freed once heads are rotated; of SwiGLU, silu(gate) is computed again."""
    saved = []
    qkv = draw(SEED, 2, 5, 2, 4, 8).requires_grad_()
    gate, up = draw(1, 3, 4).requires_grad_(), draw(2, 3, 4).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        heads = rotate_heads(qkv, rotary_angles(torch.arange(5), 8), 2)
        assert [list(one.shape) for one in saved] == [[5, 4], [5, 4]]
        saved.clear()
        swiglu(gate, up)
    assert {one.data_ptr() for one in saved} == {gate.data_ptr(), up.data_ptr()}
    assert all(one.untyped_storage().data_ptr() != qkv.untyped_storage().data_ptr() for one in heads)


def test_transformed_and_traced_calls_are_right():
    angles = rotary_angles(torch.arange(3), 4)
    qkv, gate, up = draw(SEED, 6, 1, 3, 2, 3, 4), draw(1, 6, 5), draw(2, 6, 5)
    for one, tensor in zip(torch.func.vmap(lambda x: rotate_heads(x, angles, 1)[0])(qkv), qkv, strict=True):
        torch.testing.assert_close(one, rotate_heads(tensor, angles, 1)[0])
    torch.testing.assert_close(torch.func.vmap(swiglu)(gate, up), swiglu(gate, up))
    _, tangent = torch.func.jvp(swiglu, (gate, up), (torch.zeros_like(gate), up))
    torch.testing.assert_close(tangent, swiglu(gate, up))
    compiled = torch.compile(
        lambda x, a, b: (*rotate_heads(x, angles, 1), swiglu(a, b)), backend="eager", fullgraph=True
    )
    for found, right in zip(
        compiled(qkv[0], gate, up), (*rotate_heads(qkv[0], angles, 1), swiglu(gate, up)), strict=True
    ):
        torch.testing.assert_close(found, right)


def test_gradients_of_batched_and_dual_gradients_are_right():
    """The forward pass is plain: only the backward pass is transformed."""
    angles = rotary_angles(torch.arange(3), 4)
    qkv = draw(SEED, 1, 3, 2, 3, 4).requires_grad_()
    gate, up = draw(1, 6, 5).requires_grad_(), draw(2, 6, 5).requires_grad_()
    for outputs, inputs in ((rotate_heads(qkv, angles, 1), (qkv,)), ((swiglu(gate, up),), (gate, up))):
        weights = [[draw(10 * batch + place, *one.shape) for place, one in enumerate(outputs)] for batch in range(3)]
        right = [torch.autograd.grad(outputs, inputs, one, retain_graph=True) for one in weights]
        batches = list(map(torch.stack, zip(*weights, strict=True)))
        expected = list(map(torch.stack, zip(*right, strict=True)))

        def differentiate(*weights, outputs=outputs, inputs=inputs):
            return torch.autograd.grad(outputs, inputs, weights, retain_graph=True, create_graph=True)

        found = torch.autograd.grad(
            outputs, inputs, batches, is_grads_batched=True, retain_graph=True, create_graph=True
        )
        torch.testing.assert_close(list(found), expected)
        torch.testing.assert_close(list(torch.func.vmap(differentiate)(*batches)), expected)
        with forward_ad.dual_level():
            found = differentiate(*map(forward_ad.make_dual, *weights[:2]))
            tangents = [forward_ad.unpack_dual(one).tangent for one in found]
        torch.testing.assert_close(tangents, list(right[1]))


def test_angles_that_are_trained_have_gradients():
    angles = tuple(angle.double() for angle in rotary_angles(torch.arange(3), 4))
    qkv = draw(SEED, 1, 3, 2, 3, 4).requires_grad_()
    trained = [angle.requires_grad_() for angle in angles]
    assert torch.autograd.gradcheck(lambda x, cos, sin: rotate_heads(x, (cos, sin), 1), (qkv, *trained))


def test_heads_may_be_changed_in_place_and_be_none():
    angles = rotary_angles(torch.arange(3), 4)
    qkv = draw(SEED, 1, 3, 2, 3, 4).requires_grad_()
    for one, weight in zip(rotate_heads(qkv, angles, 1), (2.0, 3.0, 4.0), strict=True):
        right = one.detach() * weight
        assert torch.equal(one.mul_(weight), right)
    nothing = torch.zeros(1, 3, 0, 3, 4, requires_grad=True)
    heads = rotate_heads(nothing, angles, 1)
    assert [list(one.shape) for one in heads] == [[1, 3, 0, 4]] * 3
    assert torch.autograd.grad(sum(one.sum() for one in heads), nothing)[0].shape == nothing.shape


def test_a_gate_of_another_dtype_or_shape_is_promoted_and_broadcast():
    gate, up = draw(1, 3, 4), draw(2, 1, 4, dtype=torch.float32)
    assert torch.equal(swiglu(gate, up), F.silu(gate) * up)


def test_shapes_that_do_not_fit_are_refused():
    """On a GPU a kernel would read beyond them."""
    angles = rotary_angles(torch.arange(5), 8)
    for shape, queries in (((2, 5, 2, 4, 8), 3), ((2, 5, 2, 4, 7), 2), ((2, 5, 8, 8), 2)):
        with pytest.raises(ValueError, match="qkv must be"):
            rotate_heads(torch.zeros(shape), angles, queries)
    for seq, dim in ((6, 8), (5, 6)):
        with pytest.raises(ValueError, match="are two tensors"):
            rotate_heads(torch.zeros(2, seq, 2, 4, dim), angles, 2)


def far_from(found, right, sizes):
    """The largest error in units of one rounding to the dtype, beside that of sums in fp32 (fp64)."""
    exact = torch.finfo(torch.float64 if found.dtype == torch.float64 else torch.float32).eps
    allowed = right.abs() * torch.finfo(found.dtype).eps / 2 * 1.01 + 8 * exact * sizes
    allowed += 2**-24 if found.dtype == torch.float16 else 0  # below the normal numbers
    return ((found.double() - right).abs() / allowed.clamp(min=1e-300)).max().item() if found.numel() else 0.0


def rotate_and_gate_by_kernels():
    """Errors of each kernel, of all shapes and dtypes."""
    from stretto.ops.moe.activation import differentiate_swiglu, multiply_by_silu
    from stretto.ops.rotary import rotate_and_split, rotate_back_and_join

    errors = []
    for batch, seq, groups, queries, dim in SHAPES:
        for dtype in KERNEL_DTYPES:
            angles = rotary_angles(torch.arange(seq), dim)
            qkv = draw(SEED, batch, seq, groups, queries + 2, dim, dtype=dtype)
            expected = expect_heads(qkv, angles, queries)
            found = rotate_and_split(qkv, *angles, queries)
            grads = [draw(seed, *one.shape, dtype=dtype) for seed, one in enumerate(expected)]
            wide = qkv.double().requires_grad_()
            (right,) = torch.autograd.grad(expect_heads(wide, angles, queries), wide, [one.double() for one in grads])
            strided = [one.transpose(1, 2).contiguous().transpose(1, 2) for one in grads]
            joined = rotate_back_and_join(*strided, *angles)
            most = qkv.double().abs().max().item() if qkv.numel() else 0.0
            errors += [far_from(one, other, 2 * most) for one, other in zip(found, expected, strict=True)]
            errors.append(far_from(joined, right, 2 * max([4.0, most])))
            assert [one.dtype for one in (*found, joined)] == [dtype] * 4
    for shape in ((3, 40), (2, 3, 1), (1, 300), (0, 4), (2, 0)):
        for dtype in KERNEL_DTYPES:
            gate, up, grad = (draw(seed, *shape, dtype=dtype) for seed in range(3))
            wide = [one.double().requires_grad_() for one in (gate, up)]
            expected = wide[0] * wide[0].sigmoid() * wide[1]
            right = torch.autograd.grad(expected, wide, grad.double())
            strided = gate.mT.contiguous().mT
            errors.append(
                far_from(multiply_by_silu(strided, up), expected.detach(), expected.detach().abs() + up.abs())
            )
            pairs = zip(differentiate_swiglu(strided, up, grad), right, strict=True)
            errors += [far_from(one, other, 3 * grad.abs().double() * (1 + up.abs())) for one, other in pairs]
    return errors


@pytest.mark.long
def test_kernels_round_once(interpret):
    ((*errors,),) = interpret(1, rotate_and_gate_by_kernels)
    assert len(errors) == len(KERNEL_DTYPES) * (4 * len(SHAPES) + 3 * 5)
    assert largest(errors) <= 1.0


def test_a_model_trains_as_with_the_operators(monkeypatch):
    """A whole GPT, with grouped queries: the loss and all gradients in fp64."""
    shape = {"layers": 2, "hidden": 48, "heads": 6, "kv_heads": 2, "vocab": 31, "max_seq_len": 9}
    config = GPTConfig(**shape, positions="rotary", activation="swiglu", norm="rmsnorm")
    torch.manual_seed(SEED)
    model = GPT(config).double()
    tokens = torch.randint(31, (3, 10), generator=torch.Generator().manual_seed(SEED))

    def run():
        model.zero_grad()
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]

    found = run()
    monkeypatch.setattr("stretto.parallel.layers.fused._needs_operators", lambda *tensors: True)
    for one, other in zip(found, run(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


class WatchingMode(TorchDispatchMode):
    """A user's mode, which has to see all operators."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("watched", ["forward", "backward"])
def test_a_block_is_recomputed_right_if_a_mode_sees_only_one_of_both_passes(watched):
    """A mode around one of them, say a FLOP counter, changes neither what is saved nor its order."""
    angles = rotary_angles(torch.arange(5), 8)
    qkv, up = draw(SEED, 1, 5, 2, 4, 8).requires_grad_(), draw(1, 1, 5, 4, 8).requires_grad_()

    def compute(qkv, up):
        return swiglu(rotate_heads(qkv, angles, 2)[0], up).sin().sum()

    right = torch.autograd.grad(compute(qkv, up), (qkv, up))
    with WatchingMode() if watched == "forward" else nullcontext():
        output = checkpoint(compute, qkv, up, use_reentrant=False)
    with WatchingMode() if watched == "backward" else nullcontext():
        found = torch.autograd.grad(output, (qkv, up))
    assert all(map(torch.equal, found, right))


def note_functions():
    """Of plain calls, under Stretto's modes, and under a user's: whether kernels may run.

    Rotated heads and SwiGLU come from one function each in any case, so that the same tensors are saved.
    """
    qkv, angles = draw(SEED, 1, 5, 2, 4, 8).requires_grad_(), rotary_angles(torch.arange(5), 8)
    modes = {
        "none": nullcontext(),
        "counted": count_collectives(Grid()),
        **dict(zip(("kept", "recomputed"), recomputation_contexts("products"), strict=True)),
        "user's": WatchingMode(),
    }
    found = {}
    for name, mode in modes.items():
        with mode:
            functions = rotate_heads(qkv, angles, 2)[0].grad_fn.name(), swiglu(qkv, qkv).grad_fn.name()
            found[name] = not _is_watched()
        assert functions == ("_RotateHeadsBackward", "_SwiGLUBackward")
    return found


def test_steps_that_are_counted_or_recomputed_use_the_kernels(ranks):
    """A resumed run counts another step than the whole one, and has to have its bits."""
    expected = {"none": True, "counted": True, "kept": True, "recomputed": True, "user's": False}
    assert ranks(1).run(note_functions) == [expected]


@pytest.mark.long
@pytest.mark.parametrize("name", ["split_heads", "join_heads"])
def test_rotation_compiles_to_wide_accesses_without_spills(name, tmp_path):
    from stretto.ops import rotary

    half, angles = torch.zeros(256, dtype=torch.bfloat16), (torch.zeros(256), torch.zeros(256))
    arguments = half, *angles, half.clone(), half.clone(), half.clone(), 4096, 8
    lines = compile_to_ptx(getattr(rotary, name), arguments, QUERIES=4, HALF=64, LANES=64, HEADS=16)
    assert find_spills(lines, tmp_path) == 0
    assert any("ld.global.v4" in line for line in lines)

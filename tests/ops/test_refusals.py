# SPDX-License-Identifier: Apache-2.0
"""Options, tuning and MLPs that the operators refuse, with words that say what will do."""

import inspect
import types
from collections.abc import Callable
from typing import get_args, get_origin

import pytest
import torch
import torch.distributed as dist
from tests.ops.leaves import OPERATORS, make_leaves
from torch.distributed.device_mesh import init_device_mesh

from stretto import ops
from stretto.ops import moe
from stretto.ops.embedding.backward import TableUpdate
from stretto.ops.operands import takes_tensors
from stretto.ops.scaled import FP8, all_gather_scaled_matmul_gathered


def list_tensors(function):
    """A public function's parameters, by name: the kinds of each that may be a tensor, and a value of the others."""
    parameters = inspect.signature(function).parameters.values()
    tensors, others = {}, {}
    for one in parameters:
        kinds = get_args(one.annotation) if isinstance(one.annotation, types.UnionType) else (one.annotation,)
        if torch.Tensor in kinds:
            tensors[one.name] = kinds
        elif one.default is inspect.Parameter.empty and one.kind is not inspect.Parameter.VAR_KEYWORD:
            others[one.name] = None
    return tensors, others


NO_TENSORS = {
    "nothing": (lambda: None, "None of type NoneType"),
    "numbers": (lambda: 3.5, "3.5 of type float"),
    "text": (lambda: "x", "'x' of type str"),
    "sparse": (lambda: torch.eye(2).to_sparse(), r"layout torch.sparse_coo: call to_dense\(\)"),
    "compressed": (lambda: torch.eye(2).to_sparse_csr(), r"layout torch.sparse_csr: call to_dense\(\)"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "a nested one: pad it"),
    "jagged": (lambda: torch.nested.nested_tensor([torch.ones(2)] * 2, layout=torch.jagged), "a nested one"),
    "negated": (lambda: torch._neg_view(torch.ones(2, 2)), r"negates when it is read: call resolve_neg\(\)"),
    "uninitialized": (torch.nn.UninitializedParameter, "an uninitialized one: call its lazy module"),
}
"""What is no tensor that an operator can read, and the words that refuse it."""

FUNCTIONS = [
    function
    for module in (ops, moe)
    for function in map(vars(module).get, module.__all__)
    if inspect.isfunction(function) and list_tensors(function)[0]
]


@pytest.mark.filterwarnings("ignore:.*(prototype|beta) stage")
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_what_is_no_dense_tensor_is_refused_by_its_name_before_anything_else(function):
    tensors, others = list_tensors(function)
    plain = {name: torch.ones(2, 2) for name in tensors}
    for name, kinds in tensors.items():
        for what, (make, words) in NO_TENSORS.items():
            if what == "nothing" and types.NoneType in kinds:
                continue
            with pytest.raises(ValueError, match=rf"\w+: {name} must be a dense tensor, not .*{words}"):
                function(**plain | others | {name: make()})
        if not any(get_origin(kind) is Callable for kind in kinds):
            with pytest.raises(ValueError, match=rf"\w+: {name} must be a dense tensor, not .*print"):
                function(**plain | others | {name: print})
    first = next(iter(inspect.signature(function).parameters))
    with pytest.raises(ValueError, match=rf"\w+: {first} must be a dense tensor, not .*layout torch.sparse_coo"):
        function(torch.eye(2).to_sparse(), **{name: one for name, one in (plain | others).items() if name != first})


def test_each_tensor_of_a_list_is_named_by_its_place():
    x = torch.ones(2, 2)
    with pytest.raises(ValueError, match=r"all_gather_matmul: weight\[1\] must be a dense tensor, not None"):
        ops.all_gather_matmul(x, [x, None])
    with pytest.raises(ValueError, match=r"all_gather_matmul: bias\[0\] must be a dense tensor, not 3 of type int"):
        ops.all_gather_matmul(x, [x, x], bias=[3, None])


def transform():
    """Check that transforms of torch.func that no operator supports are named as such, and give no wrong numbers."""
    x, weight, _ = make_leaves("")
    q, ids = torch.ones(1, 2, 4, 8), torch.zeros(4, 1, dtype=torch.int64)
    for run in (lambda x: ops.matmul_all_reduce(x, weight), lambda x: moe.permute(x, ids, 2).rows):
        for transformed in (torch.func.grad(lambda x, run=run: run(x).sum()), torch.func.jacrev(run)):
            with pytest.raises(NotImplementedError, match=r"does not support this transform of torch.func: .*backward"):
                transformed(x)
    for run in (ops.ulysses_attention, ops.ring_attention):
        with pytest.raises(NotImplementedError, match="no forward-mode derivatives"):
            torch.func.jvp(lambda q, run=run: run(q, q, q), (q,), (q,))


def test_transforms_without_a_rule_are_refused(interpret):
    interpret(2, transform)


def test_offsets_and_tokens_that_name_no_row_are_refused_on_cpus():
    rows, weight, offsets = torch.ones(4, 8), torch.ones(2, 6, 8), torch.tensor([0, 2, 4], dtype=torch.int32)
    for wrong in ([0, 2, 5], [1, 2, 4], [0, 3, 2], [0, -1, 4]):
        wrong = torch.tensor(wrong, dtype=torch.int32)
        for call in (
            lambda: moe.grouped_matmul(rows, weight, wrong),  # noqa: B023
            lambda: moe.grouped_weight_gradient(torch.ones(4, 6), rows, wrong),  # noqa: B023
            lambda: moe.experts_mlp(rows, wrong, torch.ones(2, 12, 8), torch.ones(2, 8, 6)),  # noqa: B023
        ):
            with pytest.raises(ValueError, match=r"offsets begin at 0, in ascending order, and end by the 4 rows, not"):
                call()
    for tokens in ([0, 1, 2, 4], [-1, 0, 1, 2]):
        with pytest.raises(ValueError, match=r"tokens number the 4 rows from 0 on, not (0 to 4|-1 to 2)"):
            moe.grouped_matmul(rows, weight, offsets, tokens=torch.tensor(tokens, dtype=torch.int32))


OF_ANOTHER_KIND = {
    "integers have no norm": (
        lambda: ops.invariant_norm(torch.ones(2, 8, dtype=torch.int32), torch.ones(8), eps=1e-6),
        r"invariant_norm takes floating-point x \[..., n\], not torch.int32",
    ),
    "a complex weight": (
        lambda: ops.invariant_norm(torch.ones(2, 8), torch.ones(8, dtype=torch.complex64), eps=1e-6),
        r"invariant_norm: weight must be \[8\] of a floating-point dtype on cpu, not \[8\] of torch.complex64",
    ),
    "positions elsewhere": (
        lambda: moe.unpermute(torch.ones(4, 8), torch.zeros(2, 2, dtype=torch.int64, device="meta"), torch.ones(2, 2)),
        r"positions must be int64 or int32 \[t, k\], k of 1 or more, on cpu, not torch.int64 \[2, 2\] on meta",
    ),
    "a gradient of a gradient": (
        lambda: moe.grouped_weight_gradient(
            torch.ones(4, 6), torch.ones(4, 8, requires_grad=True), torch.tensor([0, 4], dtype=torch.int32)
        ),
        r"grouped_weight_gradient has no gradients: call it under torch.no_grad",
    ),
    "gates of whole numbers": (
        lambda: moe.gated_activation(torch.ones(2, 8, dtype=torch.int32)),
        r"gated_activation takes x \[n, 2 \* F\], not \[2, 8\] of torch.int32: .* floating-point dtype",
    ),
    "no dims": (
        lambda: moe.experts_mlp(torch.ones(4, 8), torch.tensor([0, 4]).int(), torch.ones(1, 8, 8), torch.tensor(1.0)),
        r"experts_mlp takes gate_up .* and down \[e, h, f\], not \[1, 8, 8\] and \[\]",
    ),
}


def test_a_record_that_may_be_left_out_is_none_or_one_of_its_class():
    @takes_tensors
    def read(x: torch.Tensor, ahead: TableUpdate | None = None) -> TableUpdate | None:
        return ahead

    update = TableUpdate("sgd", torch.ones(2))
    assert (read(torch.ones(1)), read(torch.ones(1), update)) == (None, update)
    with pytest.raises(ValueError, match="read: ahead must be a TableUpdate, not 3"):
        read(torch.ones(1), 3)


@pytest.mark.parametrize("name", OF_ANOTHER_KIND)
def test_tensors_of_another_kind_are_refused(name):
    call, words = OF_ANOTHER_KIND[name]
    with pytest.raises(ValueError, match=words):
        call()


def refuse_in_groups():
    x, weight, _ = make_leaves("")
    with torch.inference_mode():
        out = torch.empty(4, 6)
    with pytest.raises(ValueError, match=r"out was made in inference mode, and is written to only there: clone\(\) it"):
        ops.matmul_all_reduce(x, weight, out=out)
    ids = torch.tensor([[0], [1], [0], [1]])
    for wrong, words in (
        (ids, "topk_weights of .*, not torch.int64"),
        (torch.ones(4, 2), r"topk_weights \[4, 1\], not"),
    ):
        with pytest.raises(ValueError, match=words):
            moe.dispatch(x, ids, 2, topk_weights=wrong)
    table, places = torch.ones(4, 4), torch.zeros(3, dtype=torch.int32)
    for wrong in (None, [1.0], table.to_sparse()):
        with pytest.raises(ValueError, match=r"embedding_all_to_all: tables\[1\] must be a dense tensor, not "):
            ops.embedding_all_to_all(places, places, [table, wrong])
    zero = torch.tensor(0.0)
    with pytest.raises(ValueError, match=r"matmul_all_reduce_norm takes x .* not \[4, 8\] and \[\]"):
        ops.matmul_all_reduce_norm(x, zero, x, zero, eps=1e-6)


def test_what_a_call_would_find_too_late_is_refused(interpret):
    interpret(2, refuse_in_groups)


def refuse_gradients():
    """Check that operators without gradients say so of each operand that would need one, and else run."""
    x, weight, one = torch.ones(4, 16), torch.ones(6, 16), torch.ones(())
    norm = {
        "residual": torch.ones(4, 6),
        "norm_weight": torch.ones(6),
        "norm_bias": torch.ones(6),
        "bias": torch.ones(6),
    }
    scaled = {"x": x.to(FP8), "weight": weight.to(FP8), "x_scale": one, "weight_scale": one}
    biased = {**scaled, "bias": torch.ones(6, dtype=torch.bfloat16)}
    options = {"eps": 1e-6, "norm": "layer"}
    pages = {"q": torch.ones(2, 1, 16), **dict.fromkeys(("key_cache", "value_cache"), torch.ones(1, 4, 1, 16))}
    places = {"block_table": torch.zeros(2, 1, dtype=torch.int32), "lengths": torch.ones(2, dtype=torch.int32)}
    for operator, operands, others in (
        (ops.all_gather_scaled_matmul, biased, {}),
        (all_gather_scaled_matmul_gathered, scaled, {}),
        (ops.scaled_matmul_reduce_scatter, biased, {}),
        (ops.scaled_matmul_all_reduce, biased, {}),
        (ops.scaled_matmul_all_reduce_norm, {**norm, **scaled}, options),
        (ops.matmul_all_reduce_norm, {"x": x, "weight": weight, **norm}, options),
        (ops.all_reduce_norm, {"x": torch.ones(4, 6), **norm}, options),
        (ops.paged_attention, pages, places),
    ):
        operator(**operands, **others)
        for name, tensor in operands.items():
            needing = {**operands, name: tensor.clone().requires_grad_()}
            with pytest.raises(ValueError, match=rf"{operator.__name__} has no gradients: call it under torch.no_grad"):
                operator(**needing, **others)
            with torch.no_grad():
                operator(**needing, **others)


def test_gradients_that_there_are_not_are_refused(interpret):
    interpret(2, refuse_gradients)


def refuse_options():
    """Check that what is no implementation, and what is no group, is named as such."""
    x, weight, _ = make_leaves("")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    for operator in OPERATORS:
        for given in ("kernels", "KERNEL", "", None, 3, True):
            with pytest.raises(
                ValueError, match=r'implementation must be "auto", "kernel", "library" or a KernelConfig, not'
            ):
                operator(x, weight, implementation=given)
        for group in (mesh, dist.group.WORLD.group_name, 0, [0, 1]):
            with pytest.raises(ValueError, match=r"group must be a torch.distributed.ProcessGroup, .*get_group"):
                operator(x, weight, group)
        assert len(operator(x, weight, mesh.get_group("tensor"))) > 0
        for bias in (torch.ones(12)[::2], torch.ones(1).expand(6)):
            with pytest.raises(ValueError, match=r"bias must be \[6\] .*, contiguous, not .* with strides \([20],\)"):
                operator(x, weight, bias=bias)


def test_options_that_there_are_not_are_refused_by_name(interpret):
    interpret(2, refuse_options)


def refuse_to_tune():
    for wrong, words in (
        (("all_gather_matmul", 0, 8, 8), "m, n and k must be whole numbers, 1 or more, not 0, 8 and 8"),
        (("all_gather_matmul", 8, -8, 8), "m, n and k must be whole numbers"),
        (("matmul_all_reduce", 8.0, 8, 8), "m, n and k must be whole numbers"),
        (("matmul_all_gather", 8, 8, 8), "the operators are all_gather_matmul, .*, not 'matmul_all_gather'"),
    ):
        with pytest.raises(ValueError, match=words):
            ops.tune(*wrong, dtype=torch.float32, device="cpu")
    for operator, routing in (
        ("all_gather_moe", {}),
        ("all_gather_moe", {"experts": 2, "top_k": 3}),
        ("matmul_all_reduce", {"experts": 2, "top_k": 1}),
    ):
        with pytest.raises(ValueError, match=r"all_gather_moe and moe_reduce_scatter take experts, and top_k of up to"):
            ops.tune(operator, 8, 8, 8, device="cpu", **routing)
    with pytest.raises(ValueError, match=r"kernels take torch.bfloat16, .*, not torch.int8"):
        ops.tune("all_gather_matmul", 8, 8, 8, dtype=torch.int8, device="cpu")


def test_unsupported_tuning_raises(interpret):
    interpret(2, refuse_to_tune)


def refuse_mlps():
    """Check that what any product of an MLP would refuse is refused before the first, with gradients and without."""
    x, up, _ = make_leaves("")
    down, ran = up.T.contiguous(), dict(ops.counts())
    wrong = [
        ({"up_bias": torch.ones(1)}, r"mlp's up: bias must be \[6\] of .*, not \[1\] of"),
        ({"up_bias": torch.tensor(1.0)}, r"mlp's up: bias .* not \[\]"),
        ({"up_bias": torch.ones(7), "gate_bias": torch.ones(5)}, "mlp's (up|gate): bias must be"),
        ({"up_bias": torch.ones(6).half()}, "mlp's up: bias must be .* of torch.float32 on cpu, .* of torch.float16"),
        (
            {"gate_bias": torch.ones(6).half()},
            "mlp's gate: bias must be .* of torch.float32 on cpu, .* of torch.float16",
        ),
        ({"gate": up.half()}, "mlp's gate: weight must be .* of torch.float32 on cpu, not .* of torch.float16"),
        ({"up": up.half()}, "mlp's up: weight must be .* of torch.float32 on cpu, not .* of torch.float16"),
        ({"up": up.to("meta")}, "mlp's up: weight must be .* on cpu, not .* on meta"),
        ({"up": torch.ones(6, 16)[:, ::2]}, "mlp's up takes a contiguous weight"),
        ({"up": up[:, :7], "gate": up[:, :7]}, r"mlp's up .*contiguous weight|differ in k"),
        ({"down": down[:, :5]}, r"its down \[n, hidden\], not \[6, 8\] and \[8, 5\]"),
        ({"down": down.half()}, "mlp's down: weight must be .* of torch.float32 on cpu, not .* of torch.float16"),
        ({"down": torch.ones(8, 12)[:, ::2]}, "mlp's down takes a contiguous weight"),
        ({"down_bias": torch.ones(6)}, r"mlp's down: bias must be \[8\] of .*, not \[6\] of"),
    ]
    for given, words in wrong:
        for needs_gradients in (False, True):
            operands = {"x": x.clone().requires_grad_(needs_gradients), "up": up, "down": down, "gate": up, **given}
            with pytest.raises(ValueError, match=words):
                ops.mlp(**operands)
    assert ops.counts() == ran


def test_an_mlp_is_refused_before_its_first_product(interpret):
    interpret(2, refuse_mlps)

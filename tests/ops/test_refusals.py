# SPDX-License-Identifier: Apache-2.0
"""Options, tuning and MLPs that the operators refuse, with words that say what will do."""

import pytest
import torch
import torch.distributed as dist
from tests.ops.leaves import OPERATORS, make_leaves
from torch.distributed.device_mesh import init_device_mesh

from stretto import ops


def refuse_options():
    """Check that what is no implementation, and what is no group, is named as such."""
    x, weight, _ = make_leaves("")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    for operator in OPERATORS:
        for given in ("kernels", "KERNEL", "", None, 3, True):
            with pytest.raises(
                ValueError, match=r'implementation is "auto", "kernel", "library" or a KernelConfig, not'
            ):
                operator(x, weight, implementation=given)
        for group in (mesh, dist.group.WORLD.group_name, 0, [0, 1]):
            with pytest.raises(ValueError, match=r"group is a torch.distributed.ProcessGroup, or None .*get_group"):
                operator(x, weight, group)
        assert len(operator(x, weight, mesh.get_group("tensor"))) > 0
        for bias in (torch.ones(12)[::2], torch.ones(1).expand(6)):
            with pytest.raises(ValueError, match=r"takes a contiguous bias, not strides \([20],\)"):
                operator(x, weight, bias=bias)


def test_options_that_there_are_not_are_refused_by_name(interpret):
    interpret(2, refuse_options)


def refuse_to_tune():
    for wrong, words in (
        (("all_gather_matmul", 0, 8, 8), "m, n and k are whole numbers, 1 or more, not 0, 8 and 8"),
        (("all_gather_matmul", 8, -8, 8), "m, n and k are whole numbers"),
        (("matmul_all_reduce", 8.0, 8, 8), "m, n and k are whole numbers"),
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
        ({"up_bias": torch.ones(1)}, r"mlp's up: a bias for weight \[6, 8\] is \[6\], not \[1\]"),
        ({"up_bias": torch.tensor(1.0)}, r"mlp's up: a bias .* not \[\]"),
        ({"up_bias": torch.ones(7), "gate_bias": torch.ones(5)}, "mlp's (up|gate): a bias"),
        ({"up_bias": torch.ones(6).half()}, "mlp's up: x is torch.float32 and bias torch.float16"),
        ({"gate_bias": torch.ones(6).half()}, "mlp's gate: x is torch.float32 and bias torch.float16"),
        ({"gate": up.half()}, "mlp's gate: x is torch.float32 and weight torch.float16"),
        ({"up": up.half()}, "mlp's up: x is torch.float32 and weight torch.float16"),
        ({"up": up.to("meta")}, "mlp's up: x is on cpu and weight on meta"),
        ({"up": torch.ones(6, 16)[:, ::2]}, "mlp's up takes a contiguous weight"),
        ({"up": up[:, :7], "gate": up[:, :7]}, r"mlp's up .*contiguous weight|differ in k"),
        ({"down": down[:, :5]}, r"its down \[n, hidden\], not \[6, 8\] and \[8, 5\]"),
        ({"down": down.half()}, "mlp's down: x is torch.float32 and weight torch.float16"),
        ({"down": torch.ones(8, 12)[:, ::2]}, "mlp's down takes a contiguous weight"),
        ({"down_bias": torch.ones(6)}, r"mlp's down: a bias for weight \[8, 6\] is \[8\]"),
    ]
    for given, words in wrong:
        for needs_gradients in (False, True):
            operands = {"x": x.clone().requires_grad_(needs_gradients), "up": up, "down": down, "gate": up, **given}
            with pytest.raises(ValueError, match=words):
                ops.mlp(**operands)
    assert ops.counts() == ran


def test_an_mlp_is_refused_before_its_first_product(interpret):
    interpret(2, refuse_mlps)

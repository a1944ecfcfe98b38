# SPDX-License-Identifier: Apache-2.0
"""An MLP of two overlapped products: tensor parallelism with activations sharded by rows (sequence parallelism)."""

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from stretto.ops.all_gather_matmul import all_gather_matmul, all_gather_matmul_gathered
from stretto.ops.matmul_reduce_scatter import matmul_reduce_scatter
from stretto.ops.operands import require_out, require_weight, takes_tensors
from stretto.ops.operator import without_autocast
from stretto.suggestions import require_one_of


def _square_relu(x: Tensor) -> Tensor:
    rectified = functional.relu(x)
    return rectified * rectified  # not square(): that is a power, which autocast runs in fp32 on GPUs


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu-tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "relu": functional.relu,
    "relu-squared": _square_relu,
}


@takes_tensors
def mlp(
    x: Tensor,
    up: Tensor,
    down: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    gate: Tensor | None = None,
    activation: str = "gelu",
    up_bias: Tensor | None = None,
    gate_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    saves_gathered: bool = True,
    out: Tensor | None = None,
    implementation: str = "auto",
) -> Tensor:
    """x's rows of activation(gather(x) @ up.T) @ down.T, summed over the group: [m / world, k] -> [m / world, n].

    up: [hidden / world, k], this rank's part of the first weight; down: [n, hidden / world], of the second. gate, of
    up's shape: the hidden is activation(gather(x) @ gate.T) * (gather(x) @ up.T), as in LLaMA; x is gathered once, and
    where there are gradients both weights are joined into one (a copy). activation: "gelu", "gelu-tanh", "silu", "relu"
    or "relu-squared". Biases: [hidden / world] and, of the second product, [n], added once.
    x may have more dims, [d / world, ..., k] -> [d / world, ..., n]. out: where to write the output, without gradients.
    saves_gathered, implementation, dtypes and errors are those of `all_gather_matmul` and `matmul_reduce_scatter`.
    ValueError for an unknown activation, and for a gate of another shape.
    """
    _require(x, up, down, gate, activation, {"up": up_bias, "gate": gate_bias, "down": down_bias})
    if out is not None:
        require_out(
            "mlp", out, (*x.shape[:-1], down.shape[0]), x.dtype, x, up, down, gate, up_bias, gate_bias, down_bias
        )
    act = ACTIVATIONS[activation]
    if gate is None:
        hidden = act(
            all_gather_matmul(x, up, group, bias=up_bias, saves_gathered=saves_gathered, implementation=implementation)
        )
    elif torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (x, up, gate, up_bias, gate_bias)
    ):
        # One product with both weights, so that x's gradient is one reduce-scatter.
        bias = _join_biases(gate_bias, up_bias, gate)
        both = all_gather_matmul(
            x, _join((gate, up)), group, bias=bias, saves_gathered=saves_gathered, implementation=implementation
        )
        left, right = both.chunk(2, dim=-1)
        hidden = act(left) * right
    else:  # the first product hides the gather, and no weight is copied
        left, gathered = all_gather_matmul_gathered(x, gate, group, bias=gate_bias, implementation=implementation)
        with torch.autocast(x.device.type, enabled=False):  # as in the first product
            hidden = act(left).mul_(functional.linear(gathered, up, up_bias))
    return matmul_reduce_scatter(hidden, down, group, bias=down_bias, out=out, implementation=implementation)


def _require(
    x: Tensor, up: Tensor, down: Tensor, gate: Tensor | None, activation: str, biases: Mapping[str, Tensor | None]
) -> None:
    """ValueError for arguments that the second product would refuse only after the first has run, which checks x."""
    require_one_of(ACTIVATIONS, "an mlp's ", activation=activation)
    if gate is not None and gate.shape != up.shape:
        raise ValueError(f"an mlp's gate must be of up's shape, {list(up.shape)}, not {list(gate.shape)}")
    if gate is None and biases["gate"] is not None:
        raise ValueError("an mlp has a gate_bias only with a gate")
    if up.dim() != 2 or down.dim() != 2 or down.shape[1] != up.shape[0]:
        raise ValueError(
            f"an mlp's up must be [hidden, k] and its down [n, hidden], not {list(up.shape)} and {list(down.shape)}"
        )
    for name, weight in (("up", up), ("gate", gate), ("down", down)):
        if weight is not None:
            require_weight(f"mlp's {name}", x, weight, biases[name])


def _join_biases(gate_bias: Tensor | None, up_bias: Tensor | None, gate: Tensor) -> Tensor | None:
    if gate_bias is None and up_bias is None:
        return None
    parts = (gate.new_zeros(gate.shape[0]) if bias is None else bias for bias in (gate_bias, up_bias))
    return _join(list(parts))


_join = without_autocast(torch.cat)  # which refuses fp64 under autocast

# SPDX-License-Identifier: Apache-2.0
"""The experts' MLPs, on rows that are sorted by expert."""

from collections.abc import Callable

from torch import Tensor

from stretto.ops.mlp import ACTIVATIONS
from stretto.ops.moe.grouped_matmul import grouped_matmul

Activation = str | Callable[[Tensor], Tensor]


def gated_activation(x: Tensor, activation: Activation = "silu") -> Tensor:
    """activation(gate) * up, of x [n, 2 * F] whose first F columns are the gate, and the others up: [n, F].

    activation: a function of a tensor, or a name: "gelu", "gelu-tanh", "silu", "relu" or "relu-squared". Of x's dtype.
    ValueError for an odd number of columns and for an unknown name. Shazeer, GLU Variants Improve Transformer.
    """
    if x.dim() < 1 or x.shape[-1] % 2:
        raise ValueError(f"gated_activation takes x [n, 2 * F], not {list(x.shape)}: gate columns first, then up")
    gate, up = x.chunk(2, dim=-1)
    return _find_activation(activation)(gate) * up


def experts_mlp(
    rows: Tensor, offsets: Tensor, gate_up: Tensor, down: Tensor, activation: Activation = "silu"
) -> Tensor:
    """Each expert's MLP on its rows: rows [n, h], gate_up [e, 2 * F, h], down [e, h, F] -> [n, h].

    rows and offsets are those of `Dispatched`. down[i] @ (activation(gate) * up), where gate and up are the first and
    the last F columns of rows @ gate_up[i].T; with an up projection [e, F, h] in gate_up's place, which has no gate,
    down[i] @ activation(rows @ up[i].T). All of one dtype. `gated_activation` says what activation may be; errors are
    those of `grouped_matmul`, and ValueError for projections that do not fit each other.
    """
    inner = down.shape[-1]
    if gate_up.dim() != 3 or down.dim() != 3 or gate_up.shape[1] not in (inner, 2 * inner):
        raise ValueError(
            "experts_mlp takes gate_up [e, 2 * F, h], or [e, F, h] without a gate, and down [e, h, F], not "
            f"{list(gate_up.shape)} and {list(down.shape)}"
        )
    hidden = grouped_matmul(rows, gate_up, offsets)
    is_gated = gate_up.shape[1] != inner
    hidden = gated_activation(hidden, activation) if is_gated else _find_activation(activation)(hidden)
    return grouped_matmul(hidden, down, offsets)


def _find_activation(activation: Activation) -> Callable[[Tensor], Tensor]:
    if not isinstance(activation, str):
        return activation
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is a function or one of {', '.join(ACTIVATIONS)}, not {activation!r}")
    return ACTIVATIONS[activation]

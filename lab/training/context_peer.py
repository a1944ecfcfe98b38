# SPDX-License-Identifier: Apache-2.0
"""Torch's context parallelism of transformers' models, for `python -m lab transformers --context`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import experimental
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.nn.attention import SDPBackend, sdpa_kernel

from stretto.huggingface.context import register_attention

NAME = "torch_context"
_KERNELS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]


def prepare(model: Any) -> None:
    """Have a model attend causally, without masks, by the function that torch's context parallelism replaces."""
    register_attention(NAME, _attend)
    model.set_attn_implementation(NAME)


@contextmanager
def cut_batch(rows: Tensor, masked: int, mesh: DeviceMesh, method: str) -> Iterator[dict[str, Any]]:
    """A causal model's arguments for this rank's part, cut zig-zag, of tokens [batch, seq] that all ranks are given.

    The mean of the ranks' losses is that of the tokens. Forward and backward passes run inside. method: "allgather", or
    "alltoall", a ring of sends.
    """
    set_rotate_method(method)
    targets = nn.functional.pad(rows[:, 1:], (0, 1), value=masked)
    positions = torch.arange(rows.shape[1], device=rows.device).expand_as(rows).clone()
    buffers = [rows.clone(), targets, positions]
    count = rows.shape[0] * (rows.shape[1] - 1) / mesh.size()
    with (
        experimental.context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1] * 3),
        sdpa_kernel(_KERNELS, set_priority=True),
    ):
        ids, targets, positions = buffers
        yield {
            "input_ids": ids, "position_ids": positions, "labels": targets, "shift_labels": targets,
            "num_items_in_batch": count,
        }  # fmt: skip


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    groups = query.shape[1] // key.shape[1]  # torch's context parallelism takes no grouped queries
    key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    out = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return out.transpose(1, 2).contiguous(), None

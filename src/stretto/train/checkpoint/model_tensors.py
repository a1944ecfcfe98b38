# SPDX-License-Identifier: Apache-2.0
"""Which tensors of a model are saved: its parameters and its persistent buffers."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn


def persistent_buffers(model: "nn.Module") -> dict[str, "Tensor"]:
    """The buffers that belong to a model's state, by name: the bias of each expert's score (DeepSeek-V3), say."""
    return {
        f"{name}.{key}".removeprefix("."): buffer
        for name, module in model.named_modules()
        for key, buffer in module.named_buffers(recurse=False)
        if key not in module._non_persistent_buffers_set
    }


def saved_tensors(model: "nn.Module") -> dict[str, "Tensor"]:
    """The parameters of a model and its persistent buffers, by name; a parameter held twice has its first name."""
    return {**dict(model.named_parameters()), **persistent_buffers(model)}

# SPDX-License-Identifier: Apache-2.0
"""Counts the bytes of tensors that are alive, on the CPU too."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class PeakMemory(TorchDispatchMode):
    """The most bytes that were alive in tensors at once."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.now = self.peak = 0

    def note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.alive:
            self.alive[storage._cdata] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.forget, storage._cdata)

    def forget(self, key: int) -> None:
        self.now -= self.alive.pop(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for item in tree_iter(output):
            if type(item) is torch.Tensor:
                self.note(item)
        return output

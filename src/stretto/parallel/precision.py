# SPDX-License-Identifier: Apache-2.0
"""The dtypes of a parallelized model's computation and communication."""

from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Precision:
    """The dtypes of a parallelized module's computation and communication. ValueError for one that is none of DTYPES.

    `compute` is the dtype of activations, and of weights as they are sent (None: the parameter's own); `reduce` that of
    weight gradients as they are sent (None: as computed). Parameters and their accumulated gradients keep their own.
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name, dtype in (("dtype", self.compute), ("reduce_dtype", self.reduce)):
            if dtype is not None and dtype not in DTYPES:
                known = ", ".join(map(str, DTYPES))
                raise ValueError(f"{name} is {dtype!r}, but must be one of {known} (None: as the parameters are)")

    def cast(self, tensor: Tensor) -> Tensor:
        """The tensor in the compute dtype; integers stay what they are."""
        if self.compute is None or tensor.dtype == self.compute or not tensor.is_floating_point():
            return tensor
        return tensor.to(self.compute)

    def cast_operand(self, tensor: Tensor) -> Tensor:
        """The tensor as products take it: in the dtype of a `torch.autocast` around them, else as `cast`."""
        device = tensor.device.type
        if self.compute is not None or tensor.dtype == torch.float64 or not torch.is_autocast_enabled(device):
            return self.cast(tensor)
        return tensor.to(torch.get_autocast_dtype(device))

    def sent(self, dtype: torch.dtype) -> torch.dtype | None:
        """The dtype in which a parameter of this one is gathered (None: its own)."""
        return self.compute if dtype.is_floating_point else None

    def wire(self, gradient: Tensor) -> torch.dtype:
        """The dtype in which a gradient is sent."""
        return self.reduce or self.compute or gradient.dtype

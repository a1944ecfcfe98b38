"""In which dtypes a parallelized model works."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Precision:
    """In which dtypes a parallelized module works.

    `compute` is the dtype of activations and of weights on the wire (None: the parameter's own); `reduce` that of
    weight gradients on the wire (None: as computed). Parameters and their accumulated gradients keep their own dtype.
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None

    def cast(self, tensor: Tensor) -> Tensor:
        return tensor if self.compute is None else tensor.to(self.compute)

    def wire(self, gradient: Tensor) -> torch.dtype:
        """The dtype in which a weight's gradient travels."""
        return self.reduce or self.compute or gradient.dtype

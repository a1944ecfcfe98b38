"""Options of `parallelize` that its parts share: which collectives overlap, and the dtypes."""

import warnings
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
        return tensor if self.compute is None else tensor.to(self.compute)

    def wire(self, gradient: Tensor) -> torch.dtype:
        """The dtype in which a gradient is sent."""
        return self.reduce or self.compute or gradient.dtype


@dataclass(frozen=True)
class Overlap:
    """Which collectives `parallelize` overlaps with computation (Singh, section 5.1.4).

    Switching one off changes when data is sent, never what: results keep their bits, except for copy_engines.

    all_reduce: the sum of an input's gradient, under the weight gradient's product ("OAR").
    reduce_scatter: the reduce-scatter of weight gradients, under the rest of the backward pass ("ORS").
    all_gather: the all-gather of the next weight, under this one's product ("OAG").
    data: the sum over data of buckets of gradients, under the backward pass, otherwise after it.
    copy_engines: where NVLink links z's GPUs, copy engines reduce-scatter linears' gradients
        (`stretto.parallel.comm.copy_engine_scatter`), and, where all_gather is on and weights stay gathered for the
        backward pass, gather all weights of a forward pass from its beginning on
        (`stretto.parallel.comm.copy_engine_gather`). Over more than two ranks gradients are then added in another order
        than NCCL's: off, they may differ in their last bit.
    """

    all_reduce: bool = True
    reduce_scatter: bool = True
    all_gather: bool = True
    data: bool = True
    copy_engines: bool = True

    @classmethod
    def parse(cls, value: "Overlap | bool") -> "Overlap":
        """The switches that `parallelize(overlap=...)` means: True is all of them, False none.

        False waits for every collective where it is issued; copy engines still bring gradients, so that bits are those
        of True.
        """
        if isinstance(value, Overlap):
            return value
        return cls() if value else cls(all_reduce=False, reduce_scatter=False, all_gather=False, data=False)

    @classmethod
    def none(cls) -> "Overlap":
        """The old name of `Overlap.parse(False)`."""
        warnings.warn("Overlap.none() is now Overlap.parse(False), or overlap=False", DeprecationWarning, stacklevel=2)
        return cls.parse(False)

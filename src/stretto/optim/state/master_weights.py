# SPDX-License-Identifier: Apache-2.0
"""fp32 master weights of 16-bit ones: rounded, or split in two halves of which the upper one is the bf16 weight.

A bf16 number is the upper half of an fp32 number. If the bf16 weight is the fp32 weight rounded, the fp32 weight is the
bf16 weight's bits shifted up, plus the difference of the bits, which fits into a signed 16-bit number:

    bits32 = (bits16 << 16) + low          -2^15 <= low < 2^15

That holds for one way of rounding alone: the bits are rounded to the nearest, and ties upwards (away from zero in
value). With ties to even, as `Tensor.bfloat16` rounds, low = 2^15 would be needed as well as -2^15. So only `low`
travels beside the bf16 weight: 2 bytes a number in place of 4, exactly.
"""

import torch
from torch import Tensor

_HALF = 1 << 15


def round_to_bf16(master: Tensor, out: Tensor, low: Tensor | None = None) -> Tensor:
    """Round fp32 numbers to bf16 `out`, ties upwards in their bits; NaN is preserved. Returns `out`.

    low: gets the differences of the bits, int16, from which `join` makes the fp32 numbers again (0 of a NaN).
    """
    if master.is_cuda and master.numel():
        from stretto.optim.state.kernels import launch_round  # imported here, since Triton comes with GPUs

        launch_round(master, out, low)
        return out
    bits, is_nan = master.view(torch.int32), master.isnan()
    # Rounding up the payload of a NaN would turn it into infinity or zero.
    upper = ((bits + _HALF) >> 16).masked_fill_(is_nan, 0x7FC0)
    out.view(torch.int16).copy_(upper)
    if low is not None:
        low.copy_((bits - (upper << 16)).masked_fill_(is_nan, 0))
    return out


def join(weight: Tensor, low: Tensor, out: Tensor | None = None) -> Tensor:
    """The fp32 numbers that `round_to_bf16` has split into a bf16 `weight` and an int16 `low`."""
    out = torch.empty_like(low, dtype=torch.float32) if out is None else out
    if weight.is_cuda and weight.numel():
        from stretto.optim.state.kernels import launch_join

        launch_join(weight, low, out)
        return out
    bits = (weight.view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)
    return out.copy_(bits.view(torch.float32))


def round_to(master: Tensor, out: Tensor) -> Tensor:
    """Round fp32 numbers into a 16-bit tensor: bf16 with ties upwards, so that split state has the same weights."""
    return round_to_bf16(master, out) if out.dtype == torch.bfloat16 else out.copy_(master)

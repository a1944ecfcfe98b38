# SPDX-License-Identifier: Apache-2.0
"""Masks of pruned parameters: how they are chosen, and kept as a bit a number.

By magnitude, the largest numbers of a layer, or of all layers together, are left; of equal ones those that come first,
so that masks depend on the weights alone. Early-bird tickets (You et al. 2020) are masks that have stopped changing
while a dense model trains: once the last few, drawn at intervals, differ in less than a tolerance, the model is pruned.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stretto.quantities import require_whole


@dataclass(frozen=True)
class WeightMask:
    """Marks the numbers of a tensor of `shape` that are left: `bits`, uint8, eight numbers a byte, lowest bit first."""

    bits: Tensor
    shape: torch.Size

    @classmethod
    def of(cls, is_left: Tensor) -> "WeightMask":
        """Pack a tensor that is true, or not zero, where a number is left."""
        return cls(pack(is_left.flatten() != 0), is_left.shape)

    def unpacked(self) -> Tensor:
        """bool, of the tensor's shape."""
        return unpack(self.bits, self.shape.numel()).view(self.shape)

    def unpacked_bytes(self) -> Tensor:
        """uint8, 1 where a number is left."""
        return self.unpacked().byte()


@dataclass(frozen=True)
class Masks:
    """Masks by the names of parameters, of this rank's shards; what is not named is not pruned.

    sparsity: the part of the numbers of these parameters that was to be pruned.
    """

    masks: Mapping[str, WeightMask]
    sparsity: float

    def cpu(self) -> "Masks":
        """The same masks, in host memory."""
        found = {name: WeightMask(mask.bits.cpu(), mask.shape) for name, mask in self.masks.items()}
        return Masks(found, self.sparsity)


def count_left(size: int, sparsity: float) -> int:
    """Count the numbers, of `size`, that a sparsity leaves: rounded to the nearest."""
    return size - round(size * sparsity)


def select_largest(weight: Tensor, count: int) -> Tensor:
    """True for the `count` numbers of largest magnitude of a tensor, as fp32; of equal ones for the first. bool."""
    bits = magnitude_bits(weight)
    return select_above(weight, *find_threshold(lambda at_least: int((bits >= at_least).sum()), count))


def magnitude_bits(weight: Tensor) -> Tensor:
    """The bits of magnitudes in fp32, flat: int32, ordered as they are."""
    return weight.detach().float().abs().flatten().view(torch.int32)


def find_threshold(count: Callable[[int], int], left: int) -> tuple[float, int]:
    """The smallest magnitude of the `left` largest, and how many of those that equal it are among them.

    count: how many have at least so large `magnitude_bits`, which are bisected: a few passes over all numbers, where a
    GPU selects the k-th of them by one multiprocessor.
    """
    low, high = 0, 0x7F800001  # as many as are left reach `low`, fewer reach `high`
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count(middle) >= left else (low, middle)
    return float(torch.tensor(low, dtype=torch.int32, device="cpu").view(torch.float32)), left - count(low + 1)


def select_above(weight: Tensor, threshold: float, ties: int) -> Tensor:
    """True for the numbers of larger magnitude than `threshold`, and the first `ties` of those that equal it. bool."""
    magnitudes = weight.detach().float().abs().flatten()
    equal = magnitudes == threshold
    return ((magnitudes > threshold) | (equal & (equal.cumsum(0) <= ties))).view(weight.shape)


def pack(is_left: Tensor) -> Tensor:
    """Pack flat bools, eight a byte, the lowest bit first: uint8 [ceil(n / 8)]."""
    missing = -len(is_left) % 8
    padded = torch.cat((is_left, is_left.new_zeros(missing))) if missing else is_left
    packed = padded.new_zeros(len(padded) // 8, dtype=torch.uint8)
    for place, bits in enumerate(padded.view(-1, 8).unbind(1)):
        packed |= bits.to(torch.uint8) << place
    return packed


def unpack(bits: Tensor, size: int) -> Tensor:
    """The reverse of `pack`: flat bools, of `size` numbers."""
    is_left = bits.new_empty(bits.numel() * 8, dtype=torch.bool)
    for place, out in enumerate(is_left.view(-1, 8).unbind(1)):
        out.copy_((bits >> place) & 1)
    return is_left[:size]


@dataclass
class EarlyBird:
    """Says when masks have settled: the last `window` of them differ from the newest in at most `tolerance` of their
    numbers (You et al. 2020, section 3.2: 5 masks, 0.1 of their distance)."""

    window: int = 5
    tolerance: float = 0.1
    _drawn: deque[Masks] = field(default_factory=deque, repr=False)

    def __post_init__(self) -> None:
        self.window = require_whole("window", self.window, 2, rest=" masks; 5 would do")
        if not 0 <= self.tolerance < 1:
            raise ValueError(f"tolerance is {self.tolerance}, but must be at least 0 and less than 1; 0.1 would do")

    def distances(self, drawn: Masks) -> list[dict[str, int]]:
        """Note newly drawn masks. Returns, of each earlier one, how many numbers of each parameter's shard differ.

        Fewer than `window` - 1 of them say that it is too early. Raises ValueError for masks of another model or
        sparsity than the earlier ones.
        """
        first = self._drawn[0] if self._drawn else drawn
        if first.sparsity != drawn.sparsity or first.masks.keys() != drawn.masks.keys():
            raise ValueError("this EarlyBird has seen masks of another model or sparsity: use a new EarlyBird()")
        counts = [
            {name: int((mask.unpacked() != earlier.masks[name].unpacked()).sum()) for name, mask in drawn.masks.items()}
            for earlier in self._drawn
        ]
        self._drawn.append(drawn)
        if len(self._drawn) > self.window - 1:
            self._drawn.popleft()
        return counts

# SPDX-License-Identifier: Apache-2.0
"""A group of ranks in which a case makes its calls, with random numbers that are the same on all its ranks."""

import zlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class Team:
    """The ranks of one process group. kept: objects shared by its cases, such as the collectives' workspace."""

    group: dist.ProcessGroup
    device: torch.device
    seed: int
    kept: dict[Hashable, Any] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self.group.rank()

    @property
    def world(self) -> int:
        return self.group.size()

    @property
    def is_cuda(self) -> bool:
        """True if kernels are compiled; else they are interpreted."""
        return self.device.type == "cuda"

    def keep(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The object that is kept under a key; made at its first use."""
        if key not in self.kept:
            self.kept[key] = make()
        return self.kept[key]

    def draw(self, *words: object) -> torch.Generator:
        """A generator on the device, seeded by the words: the same numbers on all ranks."""
        return torch.Generator(self.device).manual_seed(mix(self.seed, *words))

    def integers(
        self, shape: tuple[int, ...], *words: object, low: int = -1, high: int = 1, density: float = 1.0
    ) -> Tensor:
        """Random whole numbers from `low` to `high` in fp64; a fraction of 1 - `density` is set to 0."""
        generator = self.draw(*words)
        numbers = torch.randint(low, high + 1, shape, generator=generator, device=self.device).double()
        if density < 1:
            numbers *= torch.rand(shape, generator=generator, device=self.device) < density
        return numbers


def mix(*words: object) -> int:
    """A seed made of words and numbers, the same in every process."""
    return zlib.crc32(" ".join(map(str, words)).encode())


def is_exact(numbers: Tensor, dtype: torch.dtype) -> bool:
    """True if a dtype holds these numbers without rounding."""
    return torch.equal(numbers.to(dtype).double(), numbers.double())

# SPDX-License-Identifier: Apache-2.0
"""Settings of `stretto bench sparse`."""

from dataclasses import dataclass
from typing import Annotated

from stretto.bench.settings import Option, Repeats, Rounds, require_least
from stretto.execution import check_sparsity
from stretto.quantities import MAX_COUNT


@dataclass(frozen=True)
class SparseSetting:
    """Sparsities, numbers of a weight, and widths of layers (Singh, figure 4.1: batch 576, 128^2 to 4096^2)."""

    sparsities: Annotated[tuple[float, ...], Option("Parts that are pruned, with commas.")] = (0.5, 0.8, 0.9, 0.95)
    numbers: Annotated[int, Option("Numbers of the weight that is compressed.", least=1, most=MAX_COUNT)] = 1 << 28
    widths: Annotated[tuple[int, ...], Option("Inputs and outputs of the layers, with commas.")] = (
        128,
        256,
        512,
        1024,
        2048,
        4096,
    )
    batch: Annotated[int, Option("Rows of the layers' inputs.", least=1, most=MAX_COUNT)] = 576
    cpu: Annotated[bool, Option("Try it on the CPU, with small --numbers and --widths.", "--cpu")] = False
    repeats: Repeats = 20
    rounds: Rounds = 5

    def __post_init__(self) -> None:
        for sparsity in self.sparsities:
            check_sparsity(sparsity)
        require_least(1, repeats=self.repeats, rounds=self.rounds)

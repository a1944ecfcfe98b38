# SPDX-License-Identifier: Apache-2.0
"""Settings of `python -m lab saves`. Imports no torch.

Defaults are those of one GPU. With `--cpu`, steps run on `--ranks` processes, and `size` copies little: a try.
"""

from dataclasses import dataclass
from typing import Annotated

from stretto.bench.settings import Option, Repeats, require_known, require_least

USUAL_PARTS = ("steps", "size")
PARTS = (*USUAL_PARTS, "hash")
LLAMA_7B_NUMBERS = 6_738_415_616
"""Parameters of Llama 7B (Touvron et al., 2023), of which each has a weight and two moments in fp32."""
LARGEST_NUMBERS = 11008 * 4096
"""Numbers of its largest matrix, and of the tensors that `size` copies."""
USABLE, USABLE_ON_HOST = 0.85, 0.75
"""The parts of a GPU's free memory and of the host's that `size` uses."""


@dataclass(frozen=True)
class SavesSetting:
    """Settings of `python -m lab saves`. Raises ValueError for impossible settings."""

    parts: Annotated[tuple[str, ...], Option("steps, size, hash, with commas.")] = USUAL_PARTS
    ranks: Annotated[int, Option("Processes of the CPU, for steps and kills; a GPU has one.")] = 2
    steps: Annotated[int, Option("Timed steps of each way to save.")] = 48
    every: Annotated[int, Option("Steps between two saves.")] = 12
    layers: Annotated[int, Option("Transformer blocks of the model that is trained.")] = 4
    hidden: Annotated[int, Option("Width of a token's vector.")] = 512
    batch: Annotated[int, Option("Sequences of a step, of 256 tokens.")] = 4
    numbers: Annotated[
        int, Option("Parameters whose state is copied by `size`; fewer where memory does not suffice.")
    ] = LLAMA_7B_NUMBERS
    write_gigabytes: Annotated[float, Option("Of that state, how much `size` writes to the disk.")] = 8.0
    writers: Annotated[tuple[int, ...], Option("Writer threads to compare, with commas.")] = (1, 2, 4, 8)
    repeats: Repeats = 3
    kills: Annotated[int, Option("Kill runs so often while they save, on the CPU, and measure nothing else.")] = 0
    seed: Annotated[int, Option("Of the kills' moments.")] = 0
    cpu: Annotated[bool, Option("On processes of the CPU; `size` is then a try.")] = False

    def __post_init__(self) -> None:
        require_known("part", self.parts, PARTS)
        require_least(
            1,
            ranks=self.ranks,
            steps=self.steps,
            every=self.every,
            layers=self.layers,
            batch=self.batch,
            numbers=self.numbers,
            repeats=self.repeats,
            writers=min(self.writers, default=0),
        )
        require_least(0, kills=self.kills, seed=self.seed)
        if self.hidden < 64 or self.hidden % 64:
            raise ValueError(f"hidden is {self.hidden}, but must be a multiple of 64; 512 would do")
        if self.write_gigabytes <= 0:
            raise ValueError(f"write-gigabytes is {self.write_gigabytes:g}, but must be more than 0")
        if self.steps < 2 * self.every:
            raise ValueError(f"steps is {self.steps}, but must be at least twice every ({self.every})")

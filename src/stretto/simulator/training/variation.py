# SPDX-License-Identifier: Apache-2.0
"""Draws how much slower than a cluster's figures each GPU computes, or each GPU's links are: stragglers, slow links."""

import math
import random
from dataclasses import dataclass

WIDEST, SLOWEST = 3.0, 1e6  # so that no time and no link's bandwidth leaves what the network can count
FORMS = "lognormal:SIGMA, uniform:WIDTH, or fraction:PART:FACTOR (fraction:0.01:1.3 makes 1% of them take 1.3 times)"


@dataclass(frozen=True)
class Variation:
    """A distribution of factors by which times are multiplied, one drawn for each GPU.

    kind: "lognormal", whose logarithm has the standard deviation `width`, and which is at least 1; "uniform", from 1 to
    1 + width; or "fraction", `width` for a part of all GPUs, and 1 for the others.
    """

    kind: str
    width: float
    part: float = 1.0

    @classmethod
    def parse(cls, text: str, option: str = "a distribution") -> "Variation":
        """Parse the formats of FORMS. ValueError, which names the option, for anything else."""
        kind, *numbers = text.split(":")
        try:
            values = [float(number) for number in numbers]
        except ValueError:
            values = []
        match kind, values:
            case "lognormal", [width] if 0 <= width <= WIDEST:
                return cls(kind, width)
            case "uniform", [width] if 0 <= width <= SLOWEST:
                return cls(kind, width)
            case "fraction", [part, factor] if 0 <= part <= 1 and 1 <= factor <= SLOWEST:
                return cls(kind, factor, part)
        limits = f"; SIGMA is 0 to {WIDEST:g}, WIDTH and FACTOR at most {SLOWEST:g}"
        raise ValueError(f"{option} is {text!r}, but must be {FORMS}{limits}")

    def draw(self, count: int, seed: int) -> tuple[float, ...]:
        """Draw a factor, at least 1, for each of so many GPUs. Of a fraction, the same number of them for each seed."""
        generator = random.Random(f"{self.kind} {seed}")
        match self.kind:
            case "lognormal":
                return tuple(math.exp(abs(generator.gauss(0.0, self.width))) for _ in range(count))
            case "uniform":
                return tuple(1.0 + generator.uniform(0.0, self.width) for _ in range(count))
            case _:
                slow = set(generator.sample(range(count), round(self.part * count)))
                return tuple(self.width if each in slow else 1.0 for each in range(count))

# SPDX-License-Identifier: Apache-2.0
"""Settings of benches: frozen dataclasses whose fields are the options of a command of `stretto bench`.

Each bench has its settings in a module that does not import torch, its own or, if they are few, this one, so that
`stretto bench --help` is fast. A field that the command line sets is annotated with an `Option`;
`stretto.cli.settings_command` makes the command from these.

Two traps: when a command is used, `stretto.cli.settings_command` unpacks each annotation,
`type_, option = get_args(field.type)`.

- Write `Annotated[type, Option(...)]` with exactly two arguments. Any other number raises ValueError there.
- Do not write `from __future__ import annotations` in a module of settings: annotations would be strings, which have no
  arguments, and raise the same ValueError.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Annotated

from stretto.quantities import MAX_LAYERS, MAX_LENGTH, MAX_LOCAL_RANKS, MAX_REPEATS, MAX_VOCAB
from stretto.suggestions import name_known


class Needs(Enum):
    """Needs of a bench on the machine; the value heads its group in `stretto bench --help`."""

    NO_GPU = "Need no GPU"
    RANKS = "Need GPUs, or --ranks N for processes on the CPU"
    ONE_GPU = "Need a GPU, or --cpu for a try on the CPU"
    TWO_GPUS = "Need two GPUs or more"


@dataclass(frozen=True)
class Option:
    """Description of how a command line sets a field of a bench's settings.

    help: what `--help` says. flags: the option's name where it is not the field's ("--only", "--graph/--no-graph").
    separator: between the items of a tuple in the default that is shown; a user may write commas or spaces. A tuple
    with is_repeated is an option that may be given several times instead. least, most: between which it may be.
    """

    help: str
    flags: str | None = None
    metavar: str | None = None
    envvar: str | None = None
    separator: str = ","
    is_repeated: bool = False
    least: float | None = None
    most: int | None = None


Ranks = Annotated[int | None, Option("Processes (default: the machine's GPUs).", least=1, most=MAX_LOCAL_RANKS)]
WarmUp = Annotated[int, Option("Steps before timing.", least=0, most=MAX_REPEATS)]
Repeats = Annotated[int, Option("Timed steps of a round; their median counts.", least=1, most=MAX_REPEATS)]
Rounds = Annotated[int, Option("Rounds over all runs; a run's best median counts.", least=1, most=MAX_REPEATS)]
Layers = Annotated[int | None, Option("How many of its layers (default: all).", least=1, most=MAX_LAYERS)]
SeqLen = Annotated[int, Option("Tokens a sequence.", least=1, most=MAX_LENGTH)]
Vocab = Annotated[
    int,
    Option(
        "Vocabulary; GPT-2's 50,257 padded to a multiple of 64, since an odd GEMM is slow.", least=1, most=MAX_VOCAB
    ),
]
Modes = Annotated[tuple[str, ...], Option("graph, eager, with commas.")]
LargestBytes = Annotated[int, Option("Bytes of the whole array.")]
Step = Annotated[int, Option("A size is this many times the one before it.")]


@dataclass(frozen=True)
class Tuning:
    """A command of `stretto tune`: with `lists` it measures nothing."""

    lists: Annotated[bool, Option("Show what would be measured, and measure nothing.", "--list")] = False


def require_known(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise ValueError for an unknown name."""
    for name in given:
        if name not in known:
            raise ValueError(f"there is no {what} {name!r}{name_known(name, known)}")


def require_most(most: int, **numbers: float) -> None:
    """ValueError for a number that is larger, with its name."""
    for name, number in numbers.items():
        if number > most:
            raise ValueError(f"{name} is {number}, but must be at most {most:,}")


def list_sizes(smallest: int, largest: int, step: int) -> tuple[int, ...]:
    """Sizes in bytes, each `step` times the one before it. ValueError where these are none."""
    if step < 2 or smallest < 64 or largest < smallest:
        raise ValueError(f"sizes go from {smallest} (at least 64) to {largest} by a factor of {step} (at least 2)")
    sizes = []
    while smallest <= largest:
        sizes.append(smallest)
        smallest *= step
    return tuple(sizes)


def split_words(text: str) -> list[str]:
    """The words of a text that has commas or spaces between them."""
    return re.split(r"[,\s]+", text.strip(", \t\n")) if text.strip(", \t\n") else []


def parse_number(text: str, what: str) -> int:
    """Parse a whole number, at least 1. Raises ValueError otherwise; what: names the source in the message."""
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{what} has {text!r}, but takes whole numbers, at least 1")
    return int(text)


PROXIES = ("native", "python")


@dataclass(frozen=True)
class NetworkSetting:
    """Sizes of puts, and by which proxies. Raises ValueError for others."""

    proxies: Annotated[tuple[str, ...], Option("native, python, with commas.")] = PROXIES
    smallest: Annotated[int, Option("Bytes of a put.")] = 64 << 10
    largest: Annotated[int, Option("Bytes of a put.")] = 4 << 20
    step: Step = 4
    megabytes: Annotated[int, Option("Sent each way for each rate, in MB.", least=1, most=1 << 16)] = 256
    idle_seconds: Annotated[
        int, Option("Over which an idle proxy's share of a core is measured.", least=1, most=60)
    ] = 3

    def __post_init__(self) -> None:
        require_known("proxy", self.proxies, PROXIES)
        list_sizes(self.smallest, self.largest, self.step)

    @property
    def sizes(self) -> tuple[int, ...]:
        return list_sizes(self.smallest, self.largest, self.step)

"""What several benches ask for, and what they make of it."""

from pathlib import Path
from typing import Annotated

import typer

Out = Annotated[Path, typer.Option("--out", help="Folder for the JSON and the picture.")]
Ranks = Annotated[int | None, typer.Option(help="Default: the machine's GPUs.")]
WarmUp = Annotated[int, typer.Option(help="Steps before timing.")]
Repeats = Annotated[int, typer.Option(help="Steps timed a round; their median counts.")]
Rounds = Annotated[int, typer.Option(help="Rounds over all runs; a run's best median counts.")]
Layers = Annotated[int | None, typer.Option(help="How many of its layers (default: all).")]
SeqLen = Annotated[int, typer.Option(help="Tokens a sequence.")]
Vocab = Annotated[
    int, typer.Option(help="Vocabulary; GPT-2's 50,257 padded to 64, or an odd GEMM slows everything down.")
]


def count_ranks(ranks: int | None) -> int:
    """How many ranks to start."""
    import torch

    if ranks is not None and ranks < 1:
        raise ValueError(f"--ranks is {ranks}, but must be at least 1")
    count = ranks or torch.cuda.device_count()
    if not count:
        raise ValueError("this machine has no GPU: say how many CPU --ranks to use")
    return count


def count_gpus(ranks: int | None) -> int:
    """The ranks of a bench that takes a GPU each. ValueError for more than there are."""
    import torch

    from stretto.memory import shared_gpus

    there = torch.cuda.device_count()
    if there and shared_gpus.is_enabled():
        there = max(there, ranks or 2)
    if there < 2 or (ranks is not None and not 2 <= ranks <= there):
        raise ValueError(f"this bench takes 2 GPUs or more, one a rank: there are {there}, and {ranks or there} ranks")
    return ranks or there


def parse_numbers(text: str, option: str) -> list[int]:
    return [parse_number(part, option) for part in text.replace(",", " ").split()]


def parse_number(text: str, option: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{option} has {text!r}, but takes whole numbers, at least 1")
    return int(text)

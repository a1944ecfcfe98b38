"""Whether a run's state fits into the machine's memory: a bound from below, known before anything is allocated."""

import os

from stretto.models import GPTConfig
from stretto.planner import read_architecture
from stretto.train.config import TrainConfig

_ITEMSIZE = {"fp32": 4, "bf16": 4, "fp64": 8}  # of parameters: bf16 keeps them in fp32


def check_fits_machine(config: TrainConfig, model: GPTConfig) -> None:
    """Raise ValueError when the ranks of this machine need more memory for certain than it has, swap included.

    Counted are parameters, gradients, the optimizer's state and the tokens of a step; not activations. Only for runs on
    CPUs: a GPU says at once what it cannot hold.
    """
    if config.device != "cpu":
        return
    grid, run = config.grid, config.train
    copies = 2 + (2 if run.optimizer == "adamw" else bool(run.momentum))
    numbers = read_architecture(model, run.seq_len).parameters
    state = numbers * copies * _ITEMSIZE[run.dtype] // (grid.x * grid.y * grid.z)
    tokens = run.batch // grid.batch_parts * run.seq_len * 8
    kind, what = (
        ("model", f"a model of {numbers:,} parameters")
        if state > tokens
        else ("batch", f"a batch of train.batch={run.batch} x train.seq_len={run.seq_len} tokens")
    )
    check_room(state + tokens, config.ranks, what, kind)


def check_room(bytes_of_rank: float, ranks: int, what: str, kind: str) -> None:
    """Raise ValueError, in terms of `what` and its `kind`, when the ranks of this machine need more than it has."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    needed = round(ranks_here * bytes_of_rank)
    if (there := _memory_bytes()) is None or needed <= there:
        return
    raise ValueError(
        f"{what} needs at least {_gigabytes(needed / ranks_here)} on each rank, {_gigabytes(needed)} for the "
        f"{ranks_here} here, but this machine has {_gigabytes(there)}; a {kind} of 1/{-(-needed // there)} of that "
        "might do"
    )


def _memory_bytes() -> int | None:
    """This machine's memory and swap space; None where it does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            sizes = dict(line.split(":") for line in file)
        return sum(int(sizes[name].split()[0]) << 10 for name in ("MemTotal", "SwapTotal"))
    except (OSError, ValueError, KeyError):  # not Linux
        return None


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:,.3g} GB"

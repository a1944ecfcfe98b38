# SPDX-License-Identifier: Apache-2.0
"""Checks that a run on CPUs fits into the machine's memory, before anything is allocated."""

from stretto.cluster.local_ranks import count_local_ranks, is_rank


def check_room(bytes_of_rank: float, ranks: int, what: str, kind: str) -> None:
    """Raise ValueError if the ranks on this machine need more memory than it has, swap included.

    what, kind: words for the message: what needs the memory, and what to make smaller.
    """
    ranks_here = (count_local_ranks() or 1) if is_rank() else ranks
    needed = round(ranks_here * bytes_of_rank)
    if (there := _memory_bytes()) is None or needed <= there:
        return
    raise ValueError(
        f"{what} needs at least {_gigabytes(needed / ranks_here)} on each rank, {_gigabytes(needed)} for the "
        f"{ranks_here} here, but this machine has {_gigabytes(there)}; a {kind} of 1/{-(-needed // there)} of that "
        "might do"
    )


def _memory_bytes() -> int | None:
    """This machine's memory and swap space in bytes; None where /proc/meminfo does not exist."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            sizes = dict(line.split(":") for line in file)
        return sum(int(sizes[name].split()[0]) << 10 for name in ("MemTotal", "SwapTotal"))
    except (OSError, ValueError, KeyError):  # not Linux
        return None


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:,.3g} GB"

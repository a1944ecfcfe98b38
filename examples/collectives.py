# SPDX-License-Identifier: Apache-2.0
"""Collectives in the chunk language (docs/collectives.md). Compiles, verifies and plots each; needs no GPU.

python examples/collectives.py [FOLDER]
"""

import sys
from pathlib import Path

from stretto.collectives import AllGather, AllReduce, AllToAll, algorithm, chunk, parallelize, verify
from stretto.report.schedule import plot_schedule


@algorithm(lambda ranks: AllGather(ranks))
def ring(ranks: int) -> None:
    """Ring all-gather: every chunk is copied around the ring."""
    for rank in range(ranks):
        c = chunk(rank, "in", 0)
        for step in range(1, ranks):
            c = c.copy((rank + step) % ranks, "out", rank)


@algorithm(lambda ranks: AllReduce(ranks, chunks=ranks))
def sums(ranks: int) -> None:
    """Ring all-reduce: every chunk goes around the ring once for the sum, and once to copy the result."""
    for index in range(ranks):
        c = chunk((index + 1) % ranks, "in", index)
        for step in range(2, ranks + 1):
            c = chunk((index + step) % ranks, "in", index).reduce(c)
        for step in range(1, ranks):
            c = c.copy((index + step) % ranks, "in", index)


@algorithm(lambda nodes, gpus: AllToAll(nodes * gpus))
def two_steps(nodes: int, gpus: int) -> None:
    """Two-step all-to-all: chunks for one GPU of another node are collected first and sent as one message."""
    for node in range(nodes):
        for source in range(node * gpus, (node + 1) * gpus):
            for target in range(nodes * gpus):
                away, gpu = divmod(target, gpus)
                c = chunk(source, "in", target)
                if away == node:
                    c.copy(target, "out", source)
                else:
                    c.copy(node * gpus + gpu, "scratch", away * gpus + source % gpus)
    for node in range(nodes):
        for gpu in range(gpus):
            for away in range(nodes):
                if away != node:
                    together = chunk(node * gpus + gpu, "scratch", away * gpus, count=gpus)
                    together.copy(away * gpus + gpu, "out", node * gpus, ch=1)


@algorithm(lambda ranks: AllGather(ranks))
def wide_ring(ranks: int) -> None:
    """The ring all-gather with two parallel instances of every copy, each with half of the data."""
    with parallelize(2):
        ring(ranks)


def main(folder: Path) -> None:
    """Compile, verify and draw all four."""
    folder.mkdir(parents=True, exist_ok=True)
    for program, sizes in (
        (ring, {"ranks": 3}),
        (wide_ring, {"ranks": 3}),
        (sums, {"ranks": 3}),
        (two_steps, {"nodes": 2, "gpus": 2}),
    ):
        schedule = program.compile(protocol="Simple", **sizes)
        found = verify(schedule)
        assert found.ok, found.errors
        plot_schedule(schedule, folder / f"{program.name}.png")
        print(f"{program.name}: {found.steps} steps, {schedule.channels} channels, needs {found.min_slots} slots")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))

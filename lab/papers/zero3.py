# SPDX-License-Identifier: Apache-2.0
"""Figure 6.12 of Singh's dissertation: ZeRO-3 over flat and two-level collectives, simulated.

All ranks act identically, so one is simulated: a stream of products, and one of collectives, which run one at a time in
the order in which DeepSpeed issues them. The durations of collectives are those of `lab.papers.collectives`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, get_args

from lab.harness import ANY_CPU, Measured, column
from lab.papers import Compared, read_paper, symmetric
from lab.papers.collectives import PACKET
from lab.papers.machines import MACHINES, StudiedMachine, name_machines
from lab.pictures import describe_origin, group, points
from stretto.axes import GridSizes
from stretto.cluster.two_level import Collective
from stretto.models import GPTConfig
from stretto.planner import read_architecture
from stretto.planner.communication import bandwidths
from stretto.planner.compute import Device
from stretto.planner.cost import full_cost
from stretto.planner.workload import StepConfig, StepWorkload
from stretto.simulator import ClosedFormNetwork, Execution, GraphBuilder, execute, parse_topology

SEQ_LEN = 2048
# GPT-3's sizes (Brown et al., table 2.1).
MODELS = {"7B": GPTConfig(layers=32, hidden=4096, heads=32), "13B": GPTConfig(layers=40, hidden=5120, heads=40)}
# DeepSpeed's default bucket of gradients, in numbers (reduce_bucket_size).
REDUCE_BUCKET = 500_000_000
ELEMENT = 2  # bytes
RANKS = {"frontier": (128, 256, 512, 1024, 2048), "perlmutter": (256, 512, 1024)}  # of figure 6.12

Seconds = Callable[[Collective, float], float]
Library = Literal["vendor", "two levels"]
# The part of the batch time that two levels save: lowest and highest.
PUBLISHED = {tuple(run): (low, high) for *run, low, high in read_paper("singh")["figure-6-12"]["saved"]}


@dataclass(frozen=True)
class Row:
    """A step over the vendor's ring and over two levels: simulated and published."""

    machine: str = column("machine")
    model: str = column("model")
    ranks: int = column("ranks", "{:,}")
    compute_seconds: float = column("computation (s)", "{:.2f}")
    vendor_seconds: float = column("vendor's ring (s)", "{:.2f}")
    vendor_exposed: float = column("of it exposed (s)", "{:.2f}")
    two_level_seconds: float = column("two levels (s)", "{:.2f}")
    two_level_exposed: float = column("of it exposed (s)", "{:.2f}")
    saved: float = column("saved", "{:.0%}")
    speedup: float = column("speed-up less 1", "{:.0%}")
    published: str | None = column("published")
    event_saved: float = column("saved, event-driven", "{:.0%}")


@dataclass(frozen=True)
class Piece:
    """A unit that ZeRO-3 gathers at once: a linear or a table, in numbers, with its seconds in each pass."""

    numbers: float
    forward: float
    backward: float


def study_zero3(
    machines: Iterable[str] = tuple(RANKS), models: Iterable[str] = tuple(MODELS), batch: int = 2048
) -> Iterator[Measured | Compared]:
    """Simulate the step of each machine, model and number of ranks. batch: a multiple of all ranks, in sequences."""
    rows = [
        simulate_zero3(MACHINES[machine], model, ranks, batch)
        for machine in machines
        for model in models
        for ranks in RANKS[machine]
    ]
    about = {"machine": ANY_CPU, "setting": {"batch": batch}, "seq_len": SEQ_LEN}
    yield Measured(rows, about, name="simulated-zero3", title=f"ZeRO-3, {batch} sequences of {SEQ_LEN} tokens")
    for row in rows:
        if row.published is not None:
            run, saved = f"{row.model} on {row.ranks:,} ranks of {row.machine}", (row.saved, row.event_saved)
            yield Compared("Singh", "figure 6.12", run, "part of the batch time saved", row.published, *saved)


def simulate_zero3(machine: StudiedMachine, model: str, ranks: int, batch: int) -> Row:
    """Simulate a step over both libraries, with the times of collectives in both fidelities."""
    pieces = list_pieces(MODELS[model], machine, ranks, batch)
    (vendor, event_vendor), (two_level, event_two_level) = (
        [run_step(pieces, partial(_seconds, machine.name, of, ranks, is_event=each)) for each in (False, True)]
        for of in get_args(Library)
    )
    compute_seconds = vendor.busy(0, "compute")
    low, high = PUBLISHED.get((machine.name, ranks, model), (None, None))
    return Row(
        machine.name,
        model,
        ranks,
        compute_seconds,
        vendor.makespan,
        vendor_exposed=vendor.makespan - compute_seconds,
        two_level_seconds=two_level.makespan,
        two_level_exposed=two_level.makespan - compute_seconds,
        saved=1 - two_level.makespan / vendor.makespan,
        speedup=vendor.makespan / two_level.makespan - 1,
        published=None if low is None else f"{low:.0%}" if low == high else f"{low:.0%} to {high:.0%}",
        event_saved=1 - event_two_level.makespan / event_vendor.makespan,
    )


@cache
def _seconds(
    machine: str, library: Library, ranks: int, collective: Collective, num_bytes: float, *, is_event: bool
) -> float:
    studied = MACHINES[machine]
    if library == "vendor":
        if is_event:
            return symmetric.flat_seconds(studied, studied.choose_protocol(num_bytes, ranks), num_bytes, ranks, PACKET)
        return studied.flat_seconds(num_bytes, ranks)
    if is_event:
        return symmetric.two_level_seconds(studied, collective, "recursive", num_bytes, ranks, PACKET)
    return studied.two_level_seconds(collective, "recursive", num_bytes, ranks)


def list_pieces(config: GPTConfig, machine: StudiedMachine, ranks: int, batch: int) -> list[Piece]:
    """The model in the order of the forward pass: each linear of each block, then the head.

    Each rank computes all of its sequences at once. The time of norms, attention and element-wise work is distributed
    over the linears by their weights. The token embedding is the head's table; the time of its look-up is neglected.
    """
    architecture = read_architecture(config, SEQ_LEN)
    workload = StepWorkload(architecture, batch, SEQ_LEN)
    grid, cluster = GridSizes(z=ranks), machine.cluster
    step = StepConfig(grid, batch // ranks)
    work = full_cost(workload, step, Device(cluster, "bf16"), bandwidths(cluster, grid)).compute
    assert work is not None
    linears = architecture.linears
    weights = sum(linear.weights for linear in linears)
    of_block = [
        Piece(
            linear.weights,
            work.forward / architecture.layers * linear.weights / weights,
            work.backward / architecture.layers * linear.weights / weights,
        )
        for linear in linears
    ]
    head = Piece(architecture.vocab * architecture.hidden, work.head / 3, 2 * work.head / 3)
    return of_block * architecture.layers + [head]


def run_step(pieces: list[Piece], seconds: Seconds) -> Execution:
    """Execute one step on one rank. seconds: of a collective that gathers or reduces the given bytes.

    Forward, every piece is gathered while the one before it is computed. Backward, blocks are computed again
    (activation checkpointing) from weights that are gathered again, which then stay for their gradients: DeepSpeed
    keeps what is used again within a billion numbers. A bucket of gradients is reduce-scattered when it is full, and
    after the last.
    """
    builder = GraphBuilder()
    done: list[int] = []  # products, in the order of their pieces

    def gather(piece: Piece) -> int:
        time = seconds("all_gather", piece.numbers * ELEMENT)
        # While one piece is computed, the next is gathered, and none after that.
        return builder.compute(0, time, stream="collectives", after=done[-2:-1], category="communication")

    def add(time: float, after: list[int]) -> None:
        done.append(builder.compute(0, time, after=after))

    for piece in pieces:
        add(piece.forward, [gather(piece)])
    *blocks, head = pieces
    add(head.backward, [])  # its table is still there
    filled = head.numbers
    per_block = 4
    for last in range(len(blocks), 0, -per_block):
        block = blocks[last - per_block : last]
        for piece in block:
            add(piece.forward, [gather(piece)])
        for piece in reversed(block):
            add(piece.backward, [])
            filled += piece.numbers
            if filled >= REDUCE_BUCKET:
                _reduce(builder, seconds, filled, done)
                filled = 0
    if filled:
        _reduce(builder, seconds, filled, done)
    return execute(builder.build(), ClosedFormNetwork(parse_topology("full:2", 1e9, 0.0)))


def _reduce(builder: GraphBuilder, seconds: Seconds, numbers: float, done: list[int]) -> None:
    time = seconds("reduce_scatter", numbers * ELEMENT)
    builder.compute(0, time, stream="collectives", after=done[-1:], category="communication")


def plot_zero3(data: dict[str, Any], picture: Path) -> None:
    """Draw figure 6.12: a panel a machine, the batch time of each model and library by ranks."""
    from lab.style import drawing, plain_log
    from stretto.report.style import SERIES

    machines = group(data["rows"], "machine")
    with drawing(picture, 4.2 * len(machines), 3.2) as drawn:
        panels = drawn.panels(1, len(machines))[0]
        for panel, (machine, rows) in zip(panels, machines.items(), strict=True):
            for nth, (model, mine) in enumerate(group(rows, "model").items()):
                for place, (key, name) in enumerate((("vendor", "vendor's ring"), ("two_level", "two levels"))):
                    known = points(mine, "ranks", f"{key}_seconds")
                    panel.plot(*known, label=f"{model}, {name}", **SERIES[2 * nth + place].line)
            drawn.log_ticks(panel.xaxis, [row["ranks"] for row in rows])
            plain_log(panel.yaxis)
            panel.set(xlabel="ranks", title=machine.capitalize())
        panels[0].set_ylabel("s a batch")
        drawn.title = f"ZeRO-3 on {data['setting']['batch']} sequences of {data['seq_len']} tokens, simulated"
        drawn.subtitle = describe_origin(data, simulated=name_machines(machines))

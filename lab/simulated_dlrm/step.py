# SPDX-License-Identifier: Apache-2.0
"""A DLRM's training step as an execution graph, with look-up and all-to-all separate or fused (Punniyamurthy et al.).

Tables are distributed by whole tables, and the MLPs replicated. On each rank's stream "compute" run, in this order:

    look-up of the rank's tables for the whole batch        -> all-to-all of pooled vectors
    bottom MLP                                                 (meanwhile)
    interaction, top MLP, its backward pass                 -> all-reduces of its gradients, by buckets
    backward pass of the interaction                        -> all-to-all of the vectors' gradients
    backward pass of the bottom MLP                         -> all-reduces of its gradients (meanwhile)
    update of the tables, update of the MLPs

Separate, an all-to-all is a collective between two kernels. Fused, it goes slice by slice (section 3.2): the look-up
makes slices for other ranks first and sends each immediately; backward, the update takes slices as they arrive.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lab.simulated_dlrm.exchange import DIRECT, Exchange, FormulaExchange, MessageExchange
from lab.simulated_dlrm.kernels import KernelRates, RecommendationStep
from stretto.simulator.graph import ExecutionGraph, GraphBuilder, execute, pausing_garbage_collection
from stretto.simulator.network.closed_form import ClosedFormNetwork
from stretto.simulator.network.event_driven import EventDrivenNetwork
from stretto.simulator.network.topology import NetworkTopology

SEPARATE, FORWARD, BOTH = "none", "forward", "both"
FUSIONS = (SEPARATE, FORWARD, BOTH)
FIDELITIES = ("closed-form", "event-driven")
SLICE_VECTORS = 128
WINDOW = 64  # slices
FORMULA_SLICES = 1024
LOOKUP, UPDATE = "look-up", "update"


@dataclass(frozen=True, kw_only=True)
class SimulatedRecommendation:
    """A simulated step. Times in seconds, of rank 0."""

    seconds: float
    exposed: float
    lookup: float
    update: float
    compute: float


def simulate_recommendation(
    step: RecommendationStep,
    kernels: KernelRates,
    topology: NetworkTopology,
    *,
    fused: str = SEPARATE,
    collective: str = DIRECT,
    fidelity: str = "event-driven",
    slice_vectors: int = SLICE_VECTORS,
    window: int | None = WINDOW,
    packet_bytes: int | None = None,
) -> SimulatedRecommendation:
    """Simulate one step.

    fused: none, forward, or both passes. collective: direct or by-dimension. slice_vectors: pooled vectors of a slice
    (the last of a pair may be smaller; all are taken to be equal). window: how many slices of a rank are in flight at
    most, in the event-driven network; None: any number, behind which an all-reduce then waits in the links' queues.
    packet_bytes: of the event-driven network; None: whole messages are stored and forwarded.
    """
    exchange: Exchange
    if fidelity == "closed-form":
        exchange = FormulaExchange(topology, collective, FORMULA_SLICES)
    else:
        slices = -(-step.batch * step.tables // slice_vectors)
        exchange = MessageExchange(topology, collective, slices, window)
    network = ClosedFormNetwork(topology) if fidelity == "closed-form" else EventDrivenNetwork(topology, packet_bytes)
    with pausing_garbage_collection():
        execution = execute(recommendation_graph(step, kernels, exchange, fused), network)
    return SimulatedRecommendation(
        seconds=execution.makespan,
        exposed=execution.makespan - execution.busy(0, "compute"),
        lookup=kernels.lookup_seconds(step, topology.devices),
        update=kernels.update_seconds(step, topology.devices),
        compute=execution.busy(0, "compute"),
    )


def recommendation_graph(
    step: RecommendationStep, kernels: KernelRates, exchange: Exchange, fused: str = SEPARATE
) -> ExecutionGraph:
    """The graph of a step on the ranks that an exchange simulates."""
    builder = GraphBuilder(exchange.world)
    world, ranks = exchange.world, exchange.ranks
    lookup, update = kernels.lookup_seconds(step, world), kernels.update_seconds(step, world)
    pair_bytes = step.pair_bytes()
    top_layers = step.layers - step.bottom_layers
    layer, layer_backward = kernels.layer_seconds(step), kernels.layer_backward_seconds(step)
    interaction = kernels.interaction_seconds(step, world)

    def compute(seconds: float, name: str, after: Sequence[Sequence[int]] = ()) -> list[int]:
        """Add a kernel on every rank."""
        waits = after or [()] * len(ranks)
        return [builder.compute(rank, seconds, after=each, name=name) for rank, each in zip(ranks, waits, strict=True)]

    if fused == SEPARATE:
        arrived = [[each] for each in exchange.all_to_all(builder, pair_bytes, compute(lookup, LOOKUP))]
    else:
        arrived = _fused_lookup(builder, exchange, lookup, pair_bytes)
    compute(step.bottom_layers * layer, "bottom MLP")
    compute(interaction + top_layers * layer, "interaction, top MLP", arrived)

    reductions: list[list[int]] = [[] for _ in ranks]
    _backward(builder, step, exchange, compute, top_layers, layer_backward, reductions)
    gradients = compute(interaction, "interaction's backward pass")
    if fused == BOTH:
        slices = _send_gradients(builder, exchange, pair_bytes, gradients)
        _backward(builder, step, exchange, compute, step.bottom_layers, layer_backward, reductions)
        _fused_update(builder, exchange, update, gradients, slices)
    else:
        back = exchange.all_to_all(builder, pair_bytes, gradients)
        _backward(builder, step, exchange, compute, step.bottom_layers, layer_backward, reductions)
        compute(update, UPDATE, [[each] for each in back])
    compute(kernels.optimizer_seconds(step), "optimizer of the MLPs", [row[-1:] for row in reductions])
    return builder.build()


def _fused_lookup(builder: GraphBuilder, exchange: Exchange, seconds: float, pair_bytes: float) -> list[list[int]]:
    """Look slices up and send each immediately; a rank's own last. Returns each rank's own and arriving slices."""
    place = {rank: number for number, rank in enumerate(exchange.ranks)}
    arrived: list[list[int]] = [[] for _ in place]
    share = _remote_share(exchange) * seconds
    for rank in exchange.ranks:
        sent: deque[int] = deque()
        for slice in exchange.slices(rank):
            made = builder.compute(rank, slice.part * share, name=LOOKUP)
            waits = [made, sent.popleft()] if len(sent) == exchange.window else [made]
            sent.append(exchange.send(builder, rank, slice, pair_bytes, waits))
            arrived[place[slice.peer]].append(sent[-1])
    for rank in exchange.ranks:
        arrived[place[rank]].append(builder.compute(rank, seconds / exchange.world, name=LOOKUP))
    return arrived


def _send_gradients(
    builder: GraphBuilder, exchange: Exchange, pair_bytes: float, after: Sequence[int]
) -> list[list[tuple[float, int]]]:
    """Send the vectors' gradients by slices. Returns for each rank what arrives, in the order to expect: (part, slice).

    All ranks send in the same order, so a slice that is early in its sender's order is early for its receiver.
    """
    place = {rank: number for number, rank in enumerate(exchange.ranks)}
    arrived: list[list[tuple[int, float, int]]] = [[] for _ in place]
    for rank, made in zip(exchange.ranks, after, strict=True):
        sent: deque[int] = deque()
        for turn, slice in enumerate(exchange.slices(rank)):
            waits = [made, sent.popleft()] if len(sent) == exchange.window else [made]
            sent.append(exchange.send(builder, rank, slice, pair_bytes, waits))
            arrived[place[slice.peer]].append((turn, slice.part, sent[-1]))
    return [[(part, operation) for _, part, operation in sorted(row)] for row in arrived]


def _fused_update(
    builder: GraphBuilder,
    exchange: Exchange,
    seconds: float,
    gradients: Sequence[int],
    slices: Sequence[Sequence[tuple[float, int]]],
) -> None:
    """Update the tables by a rank's own gradients, and by each slice that arrives."""
    share = _remote_share(exchange) * seconds
    for rank, own, row in zip(exchange.ranks, gradients, slices, strict=True):
        builder.compute(rank, seconds / exchange.world, after=[own], name=UPDATE)
        for part, arrived in row:
            builder.compute(rank, part * share, after=[arrived], name=UPDATE)


def _remote_share(exchange: Exchange) -> float:
    """The part of a rank's look-ups that a slice of part 1 is: for one peer, or for all at once."""
    peers = 1 if len(exchange.ranks) == 1 else exchange.world - 1
    return (exchange.world - 1) / exchange.world / peers


def _backward(
    builder: GraphBuilder,
    step: RecommendationStep,
    exchange: Exchange,
    compute: Any,
    layers: int,
    seconds: float,
    reductions: list[list[int]],
) -> None:
    """An MLP's backward pass; the gradients of each bucket of layers are reduced from then on, one bucket at a time."""
    a_bucket = max(step.bucket_bytes // step.layer_bytes, 1)
    for first in range(0, layers, a_bucket):
        count = min(a_bucket, layers - first)
        done = compute(count * seconds, "MLP's backward pass")
        after = [[each, *row[-1:]] for each, row in zip(done, reductions, strict=True)]
        for row, reduced in zip(reductions, exchange.all_reduce(builder, count * step.layer_bytes, after), strict=True):
            row.append(reduced)

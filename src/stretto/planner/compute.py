# SPDX-License-Identifier: Apache-2.0
"""Predicts computation time: matrix products from a measured table or a roofline, the rest by FLOPs or by bytes."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from stretto.axes import SHARDS, GridSizes
from stretto.cluster import Cluster
from stretto.cluster.model import ATTENTION_TOKENS, LONG_ATTENTION_TOKENS
from stretto.execution import TwoLevel
from stretto.planner.architecture import Architecture
from stretto.planner.architecture_loader import read_architecture
from stretto.planner.communication import group_bandwidth, has_nvlink_over
from stretto.planner.experts.cost import local_expert_parameters
from stretto.planner.grids import every_grid, why_impossible
from stretto.planner.memory import gathered_by_copy_engines, local_parameters
from stretto.planner.optimizer_state import number_bytes, optimizer_seconds
from stretto.planner.step import GroupCollective
from stretto.planner.workload import ELEMENT_BYTES, StepConfig, StepWorkload
from stretto.quantities import require_least

# What real kernels reach, where the cluster does not say what was measured on it.
MATMUL_EFFICIENCY = 0.75  # of the datasheet's peak, for large products
ATTENTION_EFFICIENCY = 0.6  # of what matrix products reach, forward and backward pass together
COPY_EFFICIENCY = 0.87  # of the memory's bandwidth, for a large copy
# A grouped product's rate with many rows per expert, relative to a large product's; and the rows of its tiles.
# Assumptions, until they are measured: tiles of 128 rows are usual on Hopper.
GROUPED_EFFICIENCY = 0.9
TILE_ROWS = 128
# What element-wise kernels, norms and the optimizer reach of a copy's rate, gaps between them included: torch's own
# copy kernel reaches 2.9 TB/s on an H200, where a plain Triton one reaches 4.2.
ELEMENT_WISE_EFFICIENCY = 0.7

CollectivesOfGrid = dict[tuple[str, str, float], GroupCollective | None]


@dataclass(frozen=True)
class Compute:
    """Seconds that a rank computes in a step, without waits: all micro-batches and all blocks together."""

    forward: float
    backward: float
    head: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.head + self.optimizer


class Device:
    """Computation times on one GPU of a cluster. Raises ValueError for a figure that the cluster does not have."""

    def __init__(self, cluster: Cluster, dtype: str) -> None:
        self.cluster = cluster
        self.dtype = dtype
        measured = getattr(cluster.gpu.empirical_flops, dtype)
        if measured is None and getattr(cluster.gpu.peak_flops, dtype) is None:
            known = [name for name, rate in vars(cluster.gpu.empirical_flops).items() if rate is not None]
            if known:  # a probe measures one dtype: without GPUs fp32
                raise ValueError(
                    f"cluster {cluster.name!r} was measured in {', '.join(known)}: plan for dtype {known[0]} "
                    f"(--dtype {known[0]}), or measure {dtype} too (stretto probe --dtype {dtype})"
                )
        self.flops = measured or MATMUL_EFFICIENCY * cluster.require(f"gpu.peak_flops.{dtype}")
        self.of_others = Device(cluster, "bf16") if dtype == "fp8" else self  # attention, and the head
        copied = cluster.gpu.measured_memory_bandwidth or COPY_EFFICIENCY * cluster.require("gpu.memory_bandwidth")
        self.memory_bandwidth = ELEMENT_WISE_EFFICIENCY * copied
        self._seconds: dict[tuple[int, int, int, str], float] = {}
        self._collectives: dict[tuple[GridSizes, TwoLevel], CollectivesOfGrid] = {}

    def collectives(self, grid: GridSizes, two_level: TwoLevel = False) -> CollectivesOfGrid:
        """A grid's collectives by kind, group and bytes, as far as they were predicted; added to by its steps."""
        return self._collectives.setdefault((grid, two_level), {})

    @cached_property
    def _measured(self) -> dict[str, list[tuple[tuple[float, float, float], float]]]:
        """Log sizes and measured FLOP/s of this dtype's products, by layout."""
        measured: dict[str, list[tuple[tuple[float, float, float], float]]] = {}
        for row in self.cluster.matmuls:
            if row.dtype == self.dtype:
                place = (math.log(row.m), math.log(row.n), math.log(row.k))
                measured.setdefault(row.layout, []).append((place, 2 * row.m * row.n * row.k / row.seconds))
        return measured

    def matmul(self, m: float, n: float, k: float, layout: str) -> float:
        """Seconds of a product [m, k] x [k, n]: from the nearest measured shapes, else a roofline."""
        key = (round(m), round(n), round(k), layout)
        if key not in self._seconds:
            self._seconds[key] = self._matmul(*key)
        return self._seconds[key]

    def _matmul(self, m: int, n: int, k: int, layout: str) -> float:
        if min(m, n, k) < 1:
            return 0.0
        flops = 2.0 * m * n * k
        element = ELEMENT_BYTES[self.dtype]
        if measured := self._measured.get(layout):
            return flops / self._interpolate(measured, (math.log(m), math.log(n), math.log(k)))
        return max(flops / self.flops, element * (m * k + k * n + m * n) / self.memory_bandwidth)

    @staticmethod
    def _interpolate(
        measured: list[tuple[tuple[float, float, float], float]], place: tuple[float, float, float]
    ) -> float:
        """FLOP/s at a place among the measured ones: the four nearest, each by the inverse square of its distance."""
        distances = sorted((sum((a - b) ** 2 for a, b in zip(place, at, strict=True)), rate) for at, rate in measured)
        if distances[0][0] < 1e-12:
            return distances[0][1]
        weights = [(1 / distance, rate) for distance, rate in distances[:4]]
        return math.exp(sum(w * math.log(rate) for w, rate in weights) / sum(w for w, _ in weights))

    def grouped_matmul(self, experts: float, rows: float, n: float, k: float) -> float:
        """Seconds of as many products [rows, k] x [k, n] as there are experts, made by one kernel.

        The rate of a large product, times GROUPED_EFFICIENCY, times the part of tiles that is filled: of each expert's
        rows, the last tile is half full on the average. With few rows the weights' bytes count instead.
        """
        if min(experts, rows, n, k) <= 0:
            return 0.0
        computed = 2.0 * experts * (rows + TILE_ROWS / 2) * n * k
        num_bytes = ELEMENT_BYTES[self.dtype] * experts * (rows * k + k * n + rows * n)
        return max(computed / (self.flops * GROUPED_EFFICIENCY), num_bytes / self.memory_bandwidth)

    def attention(self, flops: float, seq_len: float) -> float:
        """Seconds of attention's own products (scores and their sum), of so many FLOPs: longer sequences run faster."""
        gpu = self.cluster.gpu
        rate = gpu.attention_flops or ATTENTION_EFFICIENCY * self.of_others.flops
        if gpu.attention_flops and gpu.long_attention_flops:
            place = math.log(seq_len / ATTENTION_TOKENS) / math.log(LONG_ATTENTION_TOKENS / ATTENTION_TOKENS)
            rate += min(max(place, 0.0), 1.0) * (gpu.long_attention_flops - gpu.attention_flops)
        return flops / rate

    def traffic(self, num_bytes: float) -> float:
        """Seconds of element-wise work that moves so many bytes."""
        return num_bytes / self.memory_bandwidth


BACKWARD_ATTENTION = 2.5  # attention's products in the backward pass, five, over those in the forward pass, two


class BlockSeconds(NamedTuple):
    """Seconds of one block for one micro-batch, without casts.

    linears: of each linear's output, its input's gradient and its weight's. kept: which outputs recomputation keeps.
    experts: of experts' grouped products in the forward pass; the gradients by inputs, and those by weights, take as
    long each. attention: of its own products in the forward pass. other_forward, other_backward: of all else, and of
    these. recomputed: of what is computed again, in the mean of the
    blocks that are recomputed together; in the last of them, leaves_out_last says, the last linear is not.
    """

    linears: tuple[tuple[float, float, float], ...]
    kept: tuple[bool, ...]
    experts: float
    attention: float
    other_forward: float
    other_backward: float
    recomputed: float
    leaves_out_last: bool

    @property
    def forward(self) -> float:
        return self.other_forward + self.experts + sum(output for output, _, _ in self.linears)

    @property
    def backward(self) -> float:
        own = sum(by_input + by_weight for _, by_input, by_weight in self.linears)
        return self.other_backward + 2 * self.experts + own + self.recomputed


def block_seconds(workload: StepWorkload, model: Architecture, config: StepConfig, device: Device) -> BlockSeconds:
    """The times of one block of a model whose blocks are alike."""
    grid = model.splitting_sizes(config.grid)
    tokens = config.tokens(workload)
    linears = []
    for linear in model.linears:
        k, n = linear.inputs / linear.input_shards(grid), linear.local_outputs(grid)
        linears.append(
            (device.matmul(tokens, n, k, "NT"), device.matmul(tokens, k, n, "NN"), device.matmul(n, k, tokens, "TN"))
        )
    flops = sum(layer.attention_flops(grid, tokens, workload.seq_len) for layer in model.block)
    length, packed = float(workload.seq_len), workload.documents
    if packed is not None and not any(layer.scores(grid) for layer in model.block):  # else masked scores are made, too
        flops *= packed.share * packed.over_context(config.grid.context).balance
        length = packed.length
    scores = device.attention(flops, length)
    forward_bytes, backward_bytes = _element_wise(workload, model, grid, config.token_parts)
    if workload.dtype == "fp8":
        # Inputs are read for their scale, and cast for each of two products; gradients are cast for both at once.
        inputs = sum(linear.inputs / linear.input_shards(grid) for linear in model.linears)
        outputs = sum(linear.local_outputs(grid) for linear in model.linears)
        forward_bytes += 5 * inputs
        backward_bytes += 5 * inputs + 6 * outputs
    forward = scores + device.traffic(forward_bytes * tokens)
    backward = BACKWARD_ATTENTION * scores + device.traffic(backward_bytes * tokens)
    experts = 0.0
    if (layer := model.moe_layer) is not None:
        router = device.matmul(*layer.router_product(grid, tokens, config.token_parts), "NT")
        forward, backward = forward + router, backward + 2 * router
        experts = sum(device.grouped_matmul(*sizes) for sizes in layer.expert_products(grid, tokens))
    recomputation, recomputed = config.options.recomputation, 0.0
    kept = tuple(recomputation.keeps_product(linear.input_shards(grid)) for linear in model.linears)
    leaves_out_last = recomputation.is_on and model.ends_with_linear
    if recomputation.is_on:
        again = (output for (output, _, _), is_kept in zip(linears, kept, strict=True) if not is_kept)
        recomputed = forward + experts + sum(again)
        if leaves_out_last and not kept[-1]:
            recomputed -= linears[-1][0] / recomputation.blocks
    return BlockSeconds(tuple(linears), kept, experts, scores, forward, backward, recomputed, leaves_out_last)


class CastSeconds(NamedTuple):
    """Seconds of each micro-batch's casts and copies: of weights in its forward pass, of those that are gathered again
    for recomputation, and of gradients, and weights that were freed, in its backward pass."""

    forward: float
    again: float
    backward: float


def cast_seconds(workload: StepWorkload, config: StepConfig, device: Device) -> CastSeconds:
    """The casts and copies of a model. What is gathered once a step is cast once: each micro-batch has a part of it."""
    casts, casts_back = _casts(workload, config, workload.model.splitting_sizes(config.grid))
    copies, again, copies_back = _copies(workload, config, device.cluster)
    parts = config.micro_batches(workload) if config.gathers_once else 1
    return CastSeconds(
        device.traffic(casts + copies) / parts, device.traffic(again), device.traffic(casts_back + copies_back)
    )


def step_seconds(workload: StepWorkload, config: StepConfig, device: Device) -> float:
    """Seconds of the optimizer's step on a rank without pipeline stages."""
    grid, state = workload.model.splitting_sizes(config.grid), config.state
    # With separate optimizer state, a rank's actual shards count; with fp32 parameters, an equal part of all.
    parameters = local_parameters(workload.model, grid) if state.is_separate else _parameters(workload, grid)
    update = optimizer_seconds(workload, state, device.cluster, parameters, device.traffic)
    return update + muon_seconds(workload, config.grid, device)


NEWTON_SCHULZ = 5  # iterations, by default


def muon_seconds(workload: StepWorkload, grid: GridSizes, device: Device) -> float:
    """Seconds of Muon's iterations and exchange of matrices in a step of one stage's blocks (`stretto.optim.Muon`).

    Owners share the iterations evenly. Nothing hides these: passes leave no multiplying to others. Matrices travel to
    owners and back meanwhile, in the dtype of the iterations; what takes longer than these is counted.
    """
    if workload.optimizer != "muon":
        return 0.0
    flops = numbers = 0.0
    for kind in workload.model.kinds:
        for count, rows, columns in (each for layer in kind.model.block for each in layer.matrices()):
            short, long = sorted((rows, columns))
            flops += kind.blocks * count * NEWTON_SCHULZ * (4 * short * short * long + 2 * short**3)
            numbers += kind.blocks * count * rows * columns
    owners = grid.stage_ranks
    iterations = flops / owners / device.of_others.flops
    if owners == 1:
        return iterations
    element = 8 if workload.dtype == "fp64" else 2
    copies = owners / workload.model.splitting_sizes(grid).weight_parts  # all of which get the result
    sent = element * numbers / owners * (1 + copies) * (1 - 1 / owners)
    return max(iterations, sent / group_bandwidth(device.cluster, 1, owners))


_PASSES_OVER_SCORES = 12  # reads and writes


def _parameters(workload: StepWorkload, grid: GridSizes) -> float:
    model = workload.model
    others = model.parameters - model.expert_parameters
    return others / grid.weight_parts + local_expert_parameters(model, grid)


def _element_wise(
    workload: StepWorkload, model: Architecture, grid: GridSizes, token_parts: int
) -> tuple[float, float]:
    """Bytes a token that a block's element-wise kernels read and write, in the forward and in the backward pass.

    token_parts: over how many ranks those of hidden activations are sharded.
    """
    of_layers = [layer.element_wise(grid, token_parts) for layer in model.block]
    forward, backward = (sum(numbers) for numbers in zip(*of_layers, strict=True))
    # Scores that are tensors are scaled, masked, joined with the sinks, shifted and normalized, each in a pass.
    scores = sum(layer.scores(grid) for layer in model.block) * workload.seq_len
    forward, backward = forward + _PASSES_OVER_SCORES * scores, backward + _PASSES_OVER_SCORES * scores
    for linear in model.linears:
        if linear.has_bias:  # summed for its gradient; and added by a separate kernel after a sum over ranks
            outputs = linear.local_outputs(grid) / (token_parts if linear.is_rowwise else 1)
            backward += outputs
            forward += 3 * outputs if linear.input_shards(grid) > 1 else 0
    return forward * workload.element, backward * workload.element


def _casts(workload: StepWorkload, config: StepConfig, grid: GridSizes) -> tuple[float, float]:
    """Bytes of turning a rank's weights into dtype before they are used, and its gradients back and adding them up.

    With separate optimizer state, weights are in dtype, and gradients are copied or added to those that are kept; of
    pruned weights they are compressed.
    """
    parameters = _parameters(workload, grid)
    if config.state.is_separate:
        of_number, adds = number_bytes(workload, config.state), 1 - 1 / config.micro_batches(workload)
        return 0.0, parameters * (workload.element + of_number.places + (1 + adds) * of_number.gradient)
    # Gradients of the micro-batches after the first are added: both are read, and the sum is written. What z sums
    # is in the dtype of the computation.
    new = workload.element if grid.shards > 1 else workload.master
    adds = (1 - 1 / config.micro_batches(workload)) * parameters * (2 * workload.master + new)
    if workload.element == workload.master:
        return 0.0, adds
    cast = parameters * (workload.master + workload.element)
    # Gradients that are not reduced are written by the products in the parameters' dtype: only the wider writes cost
    # time.
    is_summed = grid.shards * grid.replicas > 1
    return cast, adds + (cast if is_summed else parameters * (workload.master - workload.element))


def _copies(workload: StepWorkload, config: StepConfig, cluster: Cluster) -> tuple[float, float, float]:
    """Bytes of copying a block's parameters out of what was gathered, and its gradients into what is scattered: as
    `CastSeconds` has them.

    Dividing gradients by the number of ranks is another pass over them. Only whole blocks are sent so, and what is in
    none of a model that is sharded by blocks (`stretto.parallel.layers.block_shard`); weights gathered by copy engines
    need no copy.
    """
    model, options, element = workload.model, config.options, workload.element
    if not model.sends_blocks or config.grid.shards == 1:
        return 0.0, 0.0, 0.0
    in_block = model.block_parameters
    has_nvlink = has_nvlink_over(cluster, config.grid, SHARDS)
    of_block, outside = gathered_by_copy_engines(workload, config, has_nvlink=has_nvlink)
    whole = model.layers * in_block + model.outside_parameters * model.is_sharded_by_blocks
    gathered = whole - model.layers * of_block - outside
    again = 2 * model.layers * in_block * element * (not config.gathers_once)
    freed = again * (not options.keeps_weights)
    recomputed = again * options.recomputation.is_on - freed
    return 2 * gathered * element, max(0.0, recomputed), freed + 4 * whole * element


def head_seconds(workload: StepWorkload, grid: GridSizes, tokens: float, device: Device) -> float:
    """Seconds of the head and the loss of one micro-batch: three products, and bytes of the logits.

    Kernels that take 16-bit logits in slices only read them twice and write their gradient. Of pooled
    logits there are hardly any in the loss: they are made, and their gradient is.
    """
    model, device = workload.model, device.of_others
    outputs, hidden = -(-model.head_outputs // grid.x), model.hidden / grid.y
    products = device.matmul(tokens, outputs, hidden, "NT") + device.matmul(tokens, hidden, outputs, "NN")
    products += device.matmul(outputs, hidden, tokens, "TN")
    here = outputs if model.logits == "sliced" else model.head_outputs
    passes = 4 * workload.element + (0 if model.logits == "pooled" else 11 * workload.master)
    if model.logits == "sliced" and workload.element == 2:
        passes = 3 * workload.element
    return products + device.traffic(tokens * here * passes)


def matmul_shapes(models: Sequence[str], batches: Sequence[int], seq_len: int, gpus: int) -> list[tuple[int, int, int]]:
    """(m, n, k) of every product of these models at these global batches, on every grid of `gpus`, without repeats.

    Raises ValueError for an unknown model, or models without batches.
    """
    if bool(models) != bool(batches):
        raise ValueError("--model and --batch go together: the products' sizes follow from both")
    require_least(1, **{"--seq-len": seq_len})
    shapes: set[tuple[int, int, int]] = set()
    for name in models:
        model = read_architecture(name, seq_len)
        for batch in batches:
            require_least(1, **{"--batch": batch})
            shapes.update(_shapes(model, batch, seq_len, gpus))
    return sorted(shapes)


def _shapes(model: Architecture, batch: int, seq_len: int, gpus: int) -> Iterator[tuple[int, int, int]]:
    for whole_grid in every_grid(gpus):
        if why_impossible(model, whole_grid, batch) is not None:
            continue
        grid = model.splitting_sizes(whole_grid)
        tokens = batch // grid.batch_parts * seq_len
        for linear in (linear for kind in model.kinds for linear in kind.model.linears):
            k, n = linear.inputs // linear.input_shards(grid), int(linear.local_outputs(grid))
            yield from ((tokens, n, k), (tokens, k, n), (n, k, tokens))

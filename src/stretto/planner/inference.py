# SPDX-License-Identifier: Apache-2.0
"""Predicts how fast a model answers on a cluster: time to the first token, time per token, and what its cache holds.

The closed form of a step of `stretto.inference`: a prefill is bound by matrix products, a decoding step by the bytes of
weights and cache that each rank reads once, and both by two sums over x a block.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from stretto.axes import EXPERT, GridSizes
from stretto.cluster import Cluster
from stretto.planner.architecture import Architecture
from stretto.planner.architecture_loader import read_architecture
from stretto.planner.collective_times import collective_seconds
from stretto.planner.communication import bandwidths, group_bandwidth
from stretto.planner.compute import COPY_EFFICIENCY, Device
from stretto.planner.experts.layers import MoeLayer
from stretto.planner.grids import divisors, list_expert_grids, why_impossible
from stretto.planner.memory import local_parameters, max_allocated
from stretto.planner.workload import ELEMENT_BYTES
from stretto.quantities import require_least

CHUNK = 2048  # tokens of a step of the engine, by default
# Of a decoding step that is one CUDA graph: what a kernel of few rows takes beside its bytes, from the end of the one
# before until memory is busy, and at its end; and how many kernels a block has. Of Llama-3-8B's steps of 1, 8 and 64
# requests on one H200 (lab/results/inference), whose bytes take 3.6, 3.9 and 6.1 ms.
KERNEL_SECONDS = 3.2e-6
BLOCK_KERNELS = 8
# What a sum of few rows takes where GPUs write to each other's memory: 0.21 ms for 64 of them (4 H100, NVLink).
ONE_SHOT_SECONDS = 3.3e-6
_ONE_SHOT_BYTES = 512 << 10  # up to which each rank sends all it has to each other one


@dataclass(frozen=True)
class PassSeconds:
    """Seconds of a prefill, or of a decoding step: of products and attention, of sums and exchanges between ranks; and
    the limit by a GPU's data sheet alone, of its bytes and FLOPs without any communication."""

    compute: float
    communication: float
    limit: float

    @property
    def total(self) -> float:
        """All of it: nothing is hidden."""
        return self.compute + self.communication


@dataclass(frozen=True)
class InferencePlan:
    """A grid, and how it answers `batch` requests at a time.

    first_token: of a prompt alone, the mean of the given lengths. token: one decoding step with the whole batch. Both
    in seconds. tokens_per_gpu: tokens a second of decoding, of each GPU. cache_tokens: of all ranks together. weights:
    bytes of a rank. fits: the cache holds all requests. meets: `token` is at most what was asked for.
    """

    grid: dict[str, Any]
    gpus: int
    first_token: PassSeconds
    token: PassSeconds
    tokens_per_gpu: float
    cache_tokens: int
    weights: float
    fits: bool
    meets: bool

    def as_dict(self) -> dict[str, Any]:
        """The plan for JSON: seconds, bytes and numbers."""
        times = {
            f"{name}_{part}": getattr(getattr(self, name), part)
            for name in ("first_token", "token")
            for part in ("total", "compute", "communication", "limit")
        }
        names = ("grid", "gpus", "tokens_per_gpu", "cache_tokens", "weights", "fits", "meets")
        return {name: getattr(self, name) for name in names} | times


class Lengths(NamedTuple):
    """Lengths of prompts, and of what the cache holds of a request while it decodes; each equally likely."""

    prompts: tuple[int, ...]
    contexts: tuple[int, ...]

    @property
    def longest(self) -> int:
        """The most tokens of a request."""
        return max(*self.prompts, *self.contexts)


def plan_inference(
    model: Any,
    cluster: Cluster,
    *,
    prompts: Sequence[int],
    contexts: Sequence[int],
    batch: int,
    gpus: int | None = None,
    token_seconds: float | None = None,
    dtype: str = "bf16",
) -> list[InferencePlan]:
    """Rank grids of data, x and expert for so many requests at a time, the best first.

    Those come first whose cache holds them and that need at most `token_seconds` a token; of these, the one with the
    most tokens a second and GPU. gpus: None compares all numbers of a node's that divide it. Raises ValueError for
    lengths that are not positive, for a model that an engine does not run, and where no grid is possible.
    """
    require_least(1, prompt=min(prompts, default=1), context=min(contexts, default=1), batch=batch, gpus=gpus)
    if token_seconds is not None and not token_seconds > 0:
        raise ValueError(f"tpot is {token_seconds} s, but must be more than 0; 20ms would do")
    if dtype == "fp8" or dtype not in ELEMENT_BYTES:
        known = ", ".join(each for each in ELEMENT_BYTES if each != "fp8")
        raise ValueError(f"dtype is {dtype!r}, but engines decode in {known}; bf16 would do")
    lengths = Lengths(tuple(prompts), tuple(contexts))
    shape = read_architecture(model, lengths.longest)
    _refuse(shape, lengths)
    counts = divisors(cluster.gpus_per_node) if gpus is None else [gpus]
    if cluster.gpus is not None and counts[-1] > cluster.gpus:
        raise ValueError(f"cluster {cluster.name!r} has {cluster.gpus} GPUs, not {gpus}; {cluster.gpus} would do")
    device, found, reasons = Device(cluster, dtype), [], []
    for grid in _grids(shape, counts):
        if grid.data > batch:
            reasons.append(f"a batch of {batch} leaves some of data={grid.data} ranks without a request")
        elif reason := why_impossible(shape, grid, grid.batch_parts):
            reasons.append(reason)
        else:
            found.append(_predict(shape, grid, device, lengths, batch, token_seconds))
    if not found:
        raise ValueError(f"no grid of {counts[-1]} GPUs is possible for {shape.name}: {reasons[0]}")
    return sorted(found, key=lambda plan: (not plan.fits, not plan.meets, -plan.tokens_per_gpu))


def _refuse(model: Architecture, lengths: Lengths) -> None:
    if model.latent is not None:
        raise ValueError(f"{model.name} has latent attention, and an engine's cache holds keys and values of one size")
    if model.is_sharded_by_blocks or model.labels is not None:
        raise ValueError(f"{model.name} is not a model that predicts tokens and that parallelize has roles for")
    if model.positions and lengths.longest > model.positions:
        raise ValueError(
            f"{model.name} has {model.positions} positions, fewer than {lengths.longest} tokens; {model.positions} "
            "would do"
        )


def _grids(model: Architecture, counts: Iterable[int]) -> Iterator[GridSizes]:
    for count in counts:
        for x in divisors(count):
            yield from list_expert_grids(model, GridSizes(data=count // x, x=x))


def _predict(
    model: Architecture, grid: GridSizes, device: Device, lengths: Lengths, batch: int, token_seconds: float | None
) -> InferencePlan:
    rank = _Rank(model, grid, device)
    requests = -(-batch // grid.data)
    context = sum(lengths.contexts) / len(lengths.contexts)
    prefills = [rank.prefill(length) for length in lengths.prompts]
    first = PassSeconds(
        *(sum(getattr(each, part) for each in prefills) / len(prefills) for part in PassSeconds.__dataclass_fields__)
    )
    token = rank.decode(requests, context)
    gpus = grid.data * grid.x
    of_rank = rank.cache_tokens(requests)
    return InferencePlan(
        grid=grid.sizes(),
        gpus=gpus,
        first_token=first,
        token=token,
        tokens_per_gpu=batch / token.total / gpus,
        cache_tokens=of_rank * grid.data,
        weights=rank.weights,
        fits=of_rank >= requests * lengths.longest,
        meets=token_seconds is None or token.total <= token_seconds,
    )


class _Work:
    """FLOPs of matrix products, and bytes that are read, of a pass; and seconds of these by what real kernels reach."""

    def __init__(self) -> None:
        self.flops = self.bytes = self.seconds = self.communication = 0.0


class _Rank:
    """The passes of one rank of a grid."""

    def __init__(self, model: Architecture, grid: GridSizes, device: Device) -> None:
        self._model, self._grid, self._device, self._cluster = model, grid, device, device.cluster
        self._element = ELEMENT_BYTES[device.dtype]
        gpu = self._cluster.gpu
        self._peak_bytes = self._cluster.require("gpu.memory_bandwidth")
        # Reads alone reach what a copy does.
        self._read = gpu.measured_memory_bandwidth or COPY_EFFICIENCY * self._peak_bytes
        self._peak_flops = getattr(gpu.peak_flops, device.dtype) or device.flops
        self._rates = bandwidths(self._cluster, grid)
        self.weights = local_parameters(model, grid) * self._element

    def prefill(self, tokens: int) -> PassSeconds:
        """A prompt of so many tokens, by itself: chunk by chunk."""
        work = _Work()
        for start in range(0, tokens, CHUNK):
            self._blocks(work, min(CHUNK, tokens - start))
        flops = seconds = 0.0
        for kind in self._model.kinds:
            of_block = sum(layer.attention_flops(self._grid, tokens, tokens) for layer in kind.model.block)
            flops += kind.blocks * of_block
            seconds += kind.blocks * self._device.attention(of_block, tokens)
        work.flops, work.seconds = work.flops + flops, work.seconds + seconds
        self._head(work, 1)
        return self._sum(work)

    def decode(self, requests: int, context: float) -> PassSeconds:
        """One token of each of so many requests, of which the cache holds `context` tokens each on the average."""
        work = _Work()
        self._blocks(work, requests)
        cached = requests * context * self._cache_bytes
        work.bytes += cached
        work.seconds += cached / self._read + self._model.layers * BLOCK_KERNELS * KERNEL_SECONDS
        self._head(work, requests)
        return self._sum(work)

    def cache_tokens(self, requests: int) -> int:
        """Tokens whose keys and values fit beside weights and what a step needs."""
        model, grid = self._model, self._grid
        capacity = self._cluster.require("gpu.memory")
        widest = max(layer.widest(grid) for kind in model.kinds for layer in kind.model.block)
        step = CHUNK * (4 * model.hidden + 2 * widest) * self._element
        logits = 3 * 4 * requests * model.head_outputs / grid.x  # fp32, and twice more to draw from them
        return max(0, int((max_allocated(capacity) - self.weights - step - logits) / self._cache_bytes))

    @property
    def _cache_bytes(self) -> float:
        numbers = sum(
            kind.blocks * sum(layer.exchanged_keys(self._grid) for layer in kind.model.block)
            for kind in self._model.kinds
        )
        return numbers * self._element

    def _blocks(self, work: _Work, tokens: int) -> None:
        """The products, element-wise kernels and sums of all blocks, for so many tokens."""
        grid, element = self._grid, self._element
        for kind in self._model.kinds:
            of_block, sums = _Work(), 0
            for linear in kind.model.linears:
                k, n = linear.inputs / linear.input_shards(grid), linear.local_outputs(grid)
                self._product(of_block, tokens, n, k)
                sums += linear.input_shards(grid) > 1
            moves = sum(layer.element_wise(grid, 1)[0] for layer in kind.model.block) * tokens * element
            of_block.seconds += self._device.traffic(moves)
            if (layer := kind.model.moe_layer) is not None:
                self._experts(of_block, layer, tokens)
                sums += grid.expert_x > 1
            of_block.communication += sums * self._sum_over_x(tokens * self._model.hidden * element)
            for name in vars(work):
                setattr(work, name, getattr(work, name) + kind.blocks * getattr(of_block, name))

    def _product(self, work: _Work, m: float, n: float, k: float) -> None:
        num_bytes = self._element * (k * n + m * (k + n))
        work.flops += 2 * m * n * k
        work.bytes += self._element * k * n
        # A measured table has large products; with few rows the weight's bytes count.
        by_rate = 2 * m * n * k / self._device.flops if m < 256 else self._device.matmul(m, n, k, "NT")
        work.seconds += max(by_rate, num_bytes / self._read)

    def _experts(self, work: _Work, layer: MoeLayer, tokens: int) -> None:
        """Router, the products of the experts that tokens choose, and the exchange of tokens."""
        grid, shape = self._grid, layer.shape
        self._product(work, tokens, shape.experts, layer.hidden)
        for experts, rows, n, k in layer.expert_products(grid, tokens):
            chosen = experts * -math.expm1(-rows)  # those that at least one row goes to
            num_bytes = self._element * chosen * k * n
            work.flops += 2 * experts * rows * n * k
            work.bytes += num_bytes
            dense = self._device.grouped_matmul(experts, rows, n, k) if rows > 1 else 0.0
            work.seconds += max(dense if chosen > 0.99 * experts else 0.0, num_bytes / self._read)
        if grid.expert > 1:
            rows = tokens * min(shape.active, grid.expert) * (grid.expert - 1) / grid.expert
            sent = rows * layer.hidden * self._element
            work.communication += 2 * self._collective("all_to_all", EXPERT, sent)

    def _head(self, work: _Work, rows: int) -> None:
        outputs = self._model.head_outputs / self._grid.x
        self._product(work, rows, outputs, self._model.hidden)
        if self._grid.x > 1:  # the best token of each rank's part of the vocabulary, and their log-probabilities
            work.communication += 4 * self._sum_over_x(16 * rows)

    def _sum_over_x(self, num_bytes: float) -> float:
        x = self._grid.x
        if x == 1:
            return 0.0
        ring = self._collective("all_reduce", "x", 2 * (x - 1) / x * num_bytes)
        if num_bytes > _ONE_SHOT_BYTES or x > self._cluster.gpus_per_node or not self._cluster.has_nvlink:
            return ring
        return min(ring, ONE_SHOT_SECONDS + (x - 1) * num_bytes / group_bandwidth(self._cluster, 1, x))

    def _collective(self, kind: str, group: str, num_bytes: float) -> float:
        return collective_seconds(kind, group, num_bytes, self._cluster, self._grid, self._rates)

    def _sum(self, work: _Work) -> PassSeconds:
        limit = max(work.flops / self._peak_flops, work.bytes / self._peak_bytes)
        return PassSeconds(work.seconds, work.communication, limit)

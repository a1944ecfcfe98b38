# SPDX-License-Identifier: Apache-2.0
"""Predicts memory and time of optimizer state: with fp32 parameters, or stored separately on device or host.

With phi parameters on a rank, separate state (`stretto.optim.state`) takes, in bf16 with AdamW:

    the whole training   weights 2 phi, gradients 2 phi, on the device
    state, on the device 12 phi: fp32 weights and both moments
    state, on the host   12 phi there, or 10 phi with split weights; on the device a bucket's in each set of buffers
    the beginning        the fp32 parameters, 4 phi, stand beside the flat weights (and the fp32 weights of state on
                         the device) until the last of them is taken over

Of weights that are pruned to the part f (Singh, section 4.1.4), all of these but the 16-bit weights take f as much, and
an index takes 0.129 phi, or 4 f phi of int32 positions: 14 f phi + 2 phi + 0.129 phi. Where z shards them, a rank also
has its share of what is left in 16 bits, and the index of the whole rows.

Singh's section 3.3.1 has 4 phi + 16 bsize; here the kernel reads 16-bit gradients, and buffers have no room for fp32
ones. Sections 3.3.1 and 3.3.3 also model the time of its step: `optimizer_seconds` and `exposed_sums`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple, get_args

from stretto.cluster import Cluster
from stretto.execution import BUCKET_ALIGNMENT, ExecutionOptions, StateLocation, StateOptions
from stretto.planner.workload import NumberTypes, StepConfig

# What a step reaches of the host link's duplex bandwidth: on an H100, steps took 0.98 to 1.07 times their bytes over
# what two copies reached in the same run (lab/results/offload/h100); some 1% of it is the first bucket's way to the
# device and the last one's back.
HOST_LINK_EFFICIENCY = 0.95
# Bytes of a number of a pruned weight: a bit, and an int32 prefix sum for 1,024 numbers (`stretto.optim.sparse`).
BITMAP_BYTES = 1 / 8 + 4 / 1024
# Of a node's memory, what plans put into pinned memory: the rest is for the processes and the system.
USABLE_OF_HOST = 0.9
LOCATIONS: tuple[StateLocation, ...] = get_args(StateLocation)


class NumberBytes(NamedTuple):
    """Bytes that a rank keeps for each of its parameters.

    weight: of the computation. gradient: as it is kept between passes. master: of the fp32 weight of a 16-bit
    one; 2 where it is split, 0 where there is none. moments: the optimizer's own state. Of pruned weights these are
    averages over all parameters; places: of the places of what is left, for weights that z does not shard.
    """

    weight: int
    gradient: float
    master: float
    moments: float
    places: float = 0.0

    @property
    def state(self) -> float:
        """Bytes that a step reads and writes in addition to weight and gradient."""
        return self.master + self.moments


class HostTraffic(NamedTuple):
    """Bytes of a number, or of all of them, that go to the device and to the host in a step."""

    to_device: float
    to_host: float

    def times(self, numbers: float) -> "HostTraffic":
        return HostTraffic(self.to_device * numbers, self.to_host * numbers)


class PinnedMemory(NamedTuple):
    """Pinned host memory, in bytes: a rank's optimizer state and activations, and all that a node's ranks have.

    limit: how much of a node's a plan may take; None if the cluster does not specify it.
    """

    state: float
    activations: float
    ranks: int
    limit: float | None

    @property
    def of_rank(self) -> float:
        return self.state + self.activations

    @property
    def of_node(self) -> float:
        return self.of_rank * self.ranks

    @property
    def fits(self) -> bool:
        return self.limit is None or self.of_node <= self.limit


class Formula(NamedTuple):
    """One line of an explanation: what takes or sends memory, by which formula, with which numbers, and the bytes."""

    name: str
    formula: str
    terms: Mapping[str, float]
    bytes: float


def number_bytes(types: NumberTypes, options: StateOptions) -> NumberBytes:
    """Bytes that a rank keeps per parameter; for step_on="auto", those of steps on the device."""
    if options.step_on == "auto":
        options = replace(options, step_on="device")
    element, moments = types.element, types.moments * types.master
    if not options.is_separate:
        return NumberBytes(types.master, types.master, 0, moments)
    is_split = options.splits(element, is_bf16=types.dtype in ("bf16", "fp8"))
    master = 0 if element == types.master else element if is_split else types.master
    gradient = types.master if options.accumulates_fp32 else element
    if not options.sparsity:
        return NumberBytes(element, gradient, master, moments)
    of_index = BITMAP_BYTES if options.index == "bitmap" else 4 * (1 - options.sparsity)
    left = 1 - options.sparsity * types.prunable
    return NumberBytes(element, left * gradient, left * master, left * moments, of_index * types.prunable)


def check_state(types: NumberTypes, execution: ExecutionOptions, options: StateOptions) -> None:
    """Raise ValueError where training does not support separate optimizer state."""
    if not options.is_separate:
        return
    if types.dtype == "fp64":
        raise ValueError(
            f"optimizer state on the {options.location} is of fp32 weights, and dtype is fp64; bf16, fp16 or fp32 "
            "would do"
        )
    if execution.scatters_once:
        raise ValueError(
            f"optimizer state on the {options.location} takes no reshard={execution.reshard!r}, which keeps whole "
            "gradients in fp32; reshard='after_backward' would do"
        )


def bucket_numbers(options: StateOptions, parameters: float) -> float:
    """Numbers of a bucket: no more than the rank has."""
    return min(options.bucket_size, max(1, math.ceil(parameters / BUCKET_ALIGNMENT)) * BUCKET_ALIGNMENT)


def state_on_device(types: NumberTypes, options: StateOptions, parameters: float) -> float:
    """Bytes of the optimizer's state on the device, or of the buffers that it comes into."""
    of_number = number_bytes(types, options)
    if options.location != "host":
        kept = of_number.state * parameters
    elif options.step_on == "host":
        kept = 0.0
    else:
        kept = options.buffer_sets * bucket_numbers(options, parameters) * of_number.state
    return kept


def parameters_and_optimizer(
    types: NumberTypes, options: StateOptions, parameters: float, z: int = 1
) -> dict[str, float]:
    """Bytes of the two components that are there all the time, where z has so many ranks."""
    weight, *_, index = number_bytes(types, options)
    if options.sparsity and z > 1:
        left = (1 - options.sparsity) * types.prunable
        index += z * index + weight * left
    return {"parameters": parameters * (weight + index), "optimizer": state_on_device(types, options, parameters)}


def take_over(types: NumberTypes, options: StateOptions, parameters: float) -> dict[str, float] | None:
    """Bytes by component when the first fp32 parameter is taken over; None where none is."""
    if not options.is_separate:
        return None
    of_number = number_bytes(types, options)
    # Pruned parameters get dense weights one after another, in place of the fp32 ones.
    return {
        "parameters": parameters * (of_number.places if options.sparsity else of_number.weight),
        "optimizer": parameters * of_number.master if options.location == "device" else 0.0,
        "gradients": 0.0,
        "gathered_weights": 0.0,
        "activations": 0.0,
        "logits": 0.0,
        "temporary": parameters * types.master,
    }


def state_on_host(types: NumberTypes, options: StateOptions, parameters: float) -> float:
    """Bytes of pinned memory that a rank's state takes; for step_on="auto", the larger of both places'."""
    if options.location != "host":
        return 0.0
    if options.step_on == "auto":
        return max(state_on_host(types, replace(options, step_on=on), parameters) for on in ("device", "host"))
    of_number = number_bytes(types, options)
    staged = 0.0
    if options.step_on == "host":
        staged = options.buffer_sets * bucket_numbers(options, parameters) * (of_number.weight + of_number.gradient)
    return of_number.state * parameters + staged


def max_parameters(needed: Callable[[int], float], num_bytes: float) -> int:
    """Return how many parameters a rank may have if so many need `needed` bytes, and there are `num_bytes`."""
    low, high = 0, int(num_bytes) + 1  # each takes more than a byte
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if needed(middle) <= num_bytes else (low, middle)
    return low


def min_on_device(types: NumberTypes, options: StateOptions, parameters: float) -> float:
    """Bytes that a rank with so many parameters needs on the device at least, without any activations."""
    fixed = sum(parameters_and_optimizer(types, options, parameters).values())
    beginning = take_over(types, options, parameters) or {}
    return max(fixed + parameters * number_bytes(types, options).gradient, sum(beginning.values()))


def host_memory(
    types: NumberTypes, config: StepConfig, cluster: Cluster, parameters: float, activations: float
) -> PinnedMemory:
    """Host memory of a rank with so many parameters, and so many bytes of activations on the host; and of its node."""
    ranks = min(cluster.gpus_per_node, config.grid.ranks)
    limit = None if cluster.host_memory is None else USABLE_OF_HOST * cluster.host_memory
    return PinnedMemory(state_on_host(types, config.state, parameters), activations, ranks, limit)


# Time.


def host_traffic(types: NumberTypes, options: StateOptions) -> HostTraffic:
    """Bytes per parameter that are copied between device and host in a step."""
    if options.location != "host":
        return HostTraffic(0.0, 0.0)
    of_number = number_bytes(types, options)
    if options.step_on == "host":
        return HostTraffic(of_number.weight, of_number.weight + of_number.gradient)
    return HostTraffic(of_number.state, of_number.state)


def update_bytes(types: NumberTypes, options: StateOptions) -> float:
    """Bytes of each number that a step reads and writes in the device's memory, that of the gradient's norm included.

    With separate state, one kernel does all of it; with fp32 parameters, SGD has gradients scaled first. Pruned weights
    are expanded from the buffer of a bucket.
    """
    weight, gradient, master, _, index = of_number = number_bytes(types, options)
    if not options.is_separate:
        passes = gradient + (2 * gradient if types.optimizer == "sgd" else 0)
        return passes + gradient + 2 * (weight + of_number.state)
    norm, is_split = gradient, options.splits(types.element, is_bf16=types.dtype in ("bf16", "fp8"))
    if options.step_on == "host" and options.location == "host":
        return norm
    reads_weight = not master or is_split
    if options.sparsity:
        left = 1 - options.sparsity * types.prunable
        expanded = (weight + index + 2 * left * weight) * (2 if reads_weight else 1)
        return norm + gradient + expanded + 2 * of_number.state
    return norm + gradient + (2 if reads_weight else 1) * weight + 2 * of_number.state


def optimizer_seconds(
    types: NumberTypes, options: StateOptions, cluster: Cluster, parameters: float, traffic: Callable[[float], float]
) -> float:
    """Seconds of a step of the optimizer on a rank with so many parameters.

    State on the device: its bytes over the memory bandwidth. On the host: buckets are fetched, stepped and returned at
    the same time, as far as there are sets of buffers, so that the slowest of the three counts, and the other two of
    one bucket. A step that is computed on the host is predicted by its copies alone.

    traffic: seconds of so many bytes on the device. Raises ValueError for a cluster that does not say its host link.
    """
    on_device = traffic(update_bytes(types, options) * parameters)
    if options.location != "host":
        return on_device
    link, each = host_link(cluster), host_traffic(types, options)
    bucket = bucket_numbers(options, parameters)
    buckets = parameters / bucket
    fetch, give_back = (
        num_bytes * bucket / HOST_LINK_EFFICIENCY / rate for num_bytes, rate in zip(each, link[:2], strict=True)
    )
    both = sum(each) * bucket / HOST_LINK_EFFICIENCY / link[2]
    update = on_device / buckets
    alone = fetch + update + give_back
    period = max(fetch, give_back, both, update, alone / options.buffer_sets)
    return buckets * period + max(0.0, alone - period)


def host_link(cluster: Cluster) -> tuple[float, float, float]:
    """Bytes/s to the device, to the host, and in both directions, of each rank while all ranks of its node copy.

    Raises ValueError for a cluster that does not say the last of them; without the others, each way has half of it.
    """
    link = cluster.host_link_or_default
    duplex = link.duplex_bandwidth or cluster.require("host_link.duplex_bandwidth")
    return link.to_device_bandwidth or duplex / 2, link.to_host_bandwidth or duplex / 2, duplex


def gradient_chunks(options: StateOptions, parameters: float) -> int:
    """All-reduces of a step's gradients: one for `coarsening` buckets."""
    return max(1, math.ceil(parameters / (options.coarsening * bucket_numbers(options, parameters))))


def steps_in_chunks(types: NumberTypes, config: StepConfig) -> bool:
    """True if buckets are stepped as soon as their own chunk is summed: nothing needs the norm of all gradients."""
    return config.state.is_separate and not config.clips and types.dtype != "fp16"


def exposed_sums(left: float, whole: float, chunks: int, optimizer: float) -> float:
    """Seconds by which all-reduces of gradients delay a step that is taken chunk by chunk (Singh, section 3.3.3).

    left: seconds of the all-reduces that the backward pass does not hide, of `whole` in `chunks` messages. optimizer:
    seconds of all steps. Two stages of a pipeline: a chunk's all-reduce, then the steps of its buckets. The last
    chunk's steps come after its all-reduce, and the first ones wait for one if none is done yet.
    """
    if not left:
        return 0.0
    each = whole / chunks
    first = each if left > whole - each / 2 else 0.0
    return max(first, left + optimizer / chunks - optimizer)

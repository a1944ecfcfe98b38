# SPDX-License-Identifier: Apache-2.0
"""The parts of a cluster: GPU, links, measurements. Values only; `cluster.py` combines them.

Bandwidths are bytes/s in one direction, never bits and never both directions added, but for a host link's
`duplex_bandwidth`. `None` means that the figure is unknown.
"""

from dataclasses import dataclass, field

from stretto.cluster.schema import Checked, Kind, figure, quantity

MATMUL_DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8")
MATMUL_LAYOUTS = ("NN", "NT", "TN")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
ATTENTION_TOKENS, LONG_ATTENTION_TOKENS = 2048, 8192


@dataclass(frozen=True)
class FlopRates(Checked):
    """Floating-point operations a second of one GPU by dtype, dense (without structured sparsity).

    For matrix products, on tensor or matrix cores where the dtype has them; `None` if the GPU does not have the dtype,
    or its rate is unknown.
    """

    fp64: float | None = quantity("FLOP/s")
    fp32: float | None = quantity("FLOP/s")
    tf32: float | None = quantity("FLOP/s")
    bf16: float | None = quantity("FLOP/s")
    fp16: float | None = quantity("FLOP/s")
    fp8: float | None = quantity("FLOP/s")


@dataclass(frozen=True)
class GPU(Checked):
    """Device on which one rank computes: a GPU, a die of one where each die is a device, or a core of a CPU."""

    name: str = field(metadata=figure(Kind.TEXT))  # as torch.cuda.get_device_name gives it
    memory: float | None = quantity("bytes")
    memory_bandwidth: float | None = quantity("bytes/s, reads and writes together")
    # Of a large copy; and the seconds that computation loses for each second of a concurrent collective.
    measured_memory_bandwidth: float | None = quantity("bytes/s, reads and writes together")
    overlap_slowdown: float | None = quantity("seconds a second")
    # Causal attention forward and backward with a fused kernel, counting only the products that the mask leaves; of
    # sequences of ATTENTION_TOKENS and of LONG_ATTENTION_TOKENS.
    attention_flops: float | None = quantity("FLOP/s")
    long_attention_flops: float | None = quantity("FLOP/s")
    # The vendor's figures, and the best measured of a matrix product.
    peak_flops: FlopRates = field(default=FlopRates(), metadata=figure(Kind.TABLE, of=FlopRates))
    empirical_flops: FlopRates = field(default=FlopRates(), metadata=figure(Kind.TABLE, of=FlopRates))


@dataclass(frozen=True)
class NodeLink(Checked):
    """The links between the GPUs of one node.

    `bandwidth` is what one GPU sends to all others of its node at once, with all its links; `pair_bandwidth`, what it
    sends to a peer over a direct connection (the slowest one). Behind a switch the two are equal.
    `domains`: of GPUs that PCI Express connects, so many NUMA domains have equal parts of the node's GPUs, in order.
    """

    bandwidth: float | None = quantity("bytes/s, one direction, one GPU to all")
    pair_bandwidth: float | None = quantity("bytes/s, one direction, to one peer")
    latency: float | None = quantity("seconds")
    domains: int | None = field(default=None, metadata=figure(Kind.COUNT))
    domain_bandwidth: float | None = quantity("bytes/s, one direction, from one NUMA domain to another")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.domains or 1) > 1 and self.domain_bandwidth is None:
            raise ValueError(f"domains = {self.domains}: needs domain_bandwidth, of the link between two of them")
        if self.bandwidth and self.pair_bandwidth and self.pair_bandwidth > self.bandwidth:
            rule = f"must be at most bandwidth; {self.bandwidth:g} would do"
            raise ValueError(f"pair_bandwidth = {self.pair_bandwidth:g}: {rule}")


@dataclass(frozen=True)
class HostLink(Checked):
    """The link between one GPU and its node's memory, as large copies of pinned memory use it.

    Of one direction while the other is idle, and of both at once, added (`duplex_bandwidth`): PCI Express has lanes for
    each direction, but the host's memory and requests for reading it take a part when both are busy.
    """

    to_device_bandwidth: float | None = quantity("bytes/s, host to GPU, the other direction idle")
    to_host_bandwidth: float | None = quantity("bytes/s, GPU to host, the other direction idle")
    duplex_bandwidth: float | None = quantity("bytes/s, both directions at once, added")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.to_device_bandwidth and self.to_host_bandwidth and self.duplex_bandwidth:
            both = self.to_device_bandwidth + self.to_host_bandwidth
            if self.duplex_bandwidth > both:
                rule = f"must be at most both directions' bandwidths together; {both:g} would do"
                raise ValueError(f"duplex_bandwidth = {self.duplex_bandwidth:g}: {rule}")


@dataclass(frozen=True)
class HostTimes(Checked):
    """The host's time to launch kernels and collectives one by one, as an eager step does.

    block_forward, block_backward: the passes of one dense transformer block, without collectives. collective: one.
    operator: one that runs within a product, beside the product itself; without it, as long as two collectives.
    """

    block_forward: float | None = quantity("seconds")
    block_backward: float | None = quantity("seconds")
    collective: float | None = quantity("seconds")
    operator: float | None = quantity("seconds")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.block_forward is None) != (self.block_backward is None):
            missing = "block_forward" if self.block_forward is None else "block_backward"
            raise ValueError(f"{missing} is missing: the passes of a block come together")


@dataclass(frozen=True)
class NetworkLink(Checked):
    """The link between nodes, of one network interface (NIC)."""

    bandwidth: float | None = quantity("bytes/s, one direction, one NIC")
    latency: float | None = quantity("seconds")


@dataclass(frozen=True)
class InNodeBandwidth(Checked):
    """A measured bandwidth of groups of `size` GPUs of one node, with all such groups of the node busy concurrently.

    `preceding` is the product of the sizes of the grid's inner axes: the group's GPUs are that many device numbers
    apart. `bandwidth` is per GPU: the bytes that a ring algorithm sends from one GPU, divided by the time of the
    collective (what nccl-tests calls bus bandwidth). It is case 1 of section 5.1.2 in Singh, "Optimizing communication
    in parallel deep learning on exascale-class machines".
    """

    preceding: int = field(metadata=figure(Kind.COUNT))
    size: int = field(metadata=figure(Kind.COUNT))
    bandwidth: float = field(metadata=figure(Kind.QUANTITY, "bytes/s"))


@dataclass(frozen=True)
class Matmul(Checked):
    """A measured matrix product [m, k] x [k, n] of one GPU.

    `layout` is the layout of the operands: "NN", "NT" (the second transposed, as a linear's weight) or "TN" (the first,
    as in a weight's gradient).
    """

    m: int = field(metadata=figure(Kind.COUNT))
    n: int = field(metadata=figure(Kind.COUNT))
    k: int = field(metadata=figure(Kind.COUNT))
    dtype: str = field(metadata=figure(Kind.TEXT))
    layout: str = field(metadata=figure(Kind.TEXT))
    seconds: float = field(metadata=figure(Kind.QUANTITY, "seconds"))

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in (("dtype", MATMUL_DTYPES), ("layout", MATMUL_LAYOUTS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} = {getattr(self, name)!r}: must be one of {', '.join(known)}")


@dataclass(frozen=True)
class MeasuredCollective(Checked):
    """A measured collective inside a node, of all groups of `size` GPUs that are `preceding` apart, concurrently.

    A row of the key `transfers` of a cluster file. `bytes` is what a ring algorithm sends from one GPU, `seconds` the
    time of the collective.
    """

    collective: str = field(metadata=figure(Kind.TEXT))
    preceding: int = field(metadata=figure(Kind.COUNT))
    size: int = field(metadata=figure(Kind.COUNT))
    bytes: float = field(metadata=figure(Kind.QUANTITY, "bytes"))
    seconds: float = field(metadata=figure(Kind.QUANTITY, "seconds"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.collective not in COLLECTIVES:
            raise ValueError(f"collective = {self.collective!r}: must be one of {', '.join(COLLECTIVES)}")

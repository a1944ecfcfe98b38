# SPDX-License-Identifier: Apache-2.0
"""`TwoLevelGroup`: hierarchical collectives on a torch.distributed group (Singh, chapter 6: PCCL)."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Literal, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.cluster.two_level import ALGORITHMS, TYPICAL, Algorithm, Collective, Links, choose, choose_parts
from stretto.collectives.two_level.buffers import (
    DEFAULT_PART_BYTES,
    Reduction,
    check_reduction,
    library_reduces,
    split_range,
)
from stretto.collectives.two_level.inter_node import (
    GroupTransport,
    InterNodeAlgorithm,
    InterNodeGroup,
    NodeTransport,
    all_gather_steps,
    inter_node_all_gather,
    inter_node_reduce_scatter,
    reduce_scatter_steps,
)
from stretto.collectives.two_level.intra_node import (
    IntraNodeGroup,
    flat_all_reduce,
    flat_reduce_scatter,
    intra_node_all_gather,
    intra_node_reduce_scatter,
)
from stretto.collectives.two_level.nodes import Nodes, exchange_hosts, find_nodes
from stretto.collectives.two_level.work import Deadline, InlineRunner, SerialRunner, Work
from stretto.memory import PeerError, find_own_rank, group_timeout, shared_gpus
from stretto.memory.groups import make_local_group, next_group_number, set_timeout
from stretto.quantities import require_least
from stretto.suggestions import name_known

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT = 300.0
_MIN_PART_BYTES = 16  # one element of any dtype
_MAX_PARTS = 64

_Key = tuple[tuple[int, ...], str]  # the ranks, by their numbers in the job, and the backend
_idle: "WeakKeyDictionary[dist.ProcessGroup, dict[_Key, list[dist.ProcessGroup]]]" = WeakKeyDictionary()
"""Sub-groups of closed two-level groups, by the job's group, for the next ones of the same ranks.

torch would give a new one the name of the destroyed one, under which the store has that one's addresses; and a peer
may still read the last bytes from a connection that this rank would close.
"""

RequestedAlgorithm = Literal["auto", "ring", "recursive", "flat"]


class TwoLevelCall(NamedTuple):
    """The implementation and shape of a call: the key of `TwoLevelGroup.calls`."""

    collective: Collective
    algorithm: Algorithm


class Levels(NamedTuple):
    """The nodes of a group, and this rank's group inside its node and between nodes; None for one of one rank."""

    nodes: Nodes
    inside: dist.ProcessGroup | None
    between: dist.ProcessGroup | None


def check_library(level: str, name: str | None) -> None:
    """Raise ValueError unless torch.distributed has this backend, or these by device ("cpu:gloo,cuda:nccl"), here.

    level: the argument's name.
    """
    known = [each for each in dist.Backend.backend_list if each != "undefined"]
    is_there = {"nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available, "ucc": dist.is_ucc_available}
    for part in () if name is None else name.split(","):
        backend = part.rpartition(":")[2]
        if backend not in known:
            near = name_known(backend, known)
            raise ValueError(f"{level} is {name!r}, but must be a backend of torch.distributed{near}")
        if backend in is_there and not is_there[backend]():
            raise ValueError(f"{level} is {name!r}, which this build of torch does not have; 'gloo' would do on CPUs")


class TwoLevelGroup:
    """All-gather, reduce-scatter and all-reduce of a group in two phases: between nodes, and inside them.

    group: the ranks (None: all). Every one of them makes its TwoLevelGroup, at the same time and with the same
    arguments. ranks_per_node: this many consecutive ranks are a node; None: the ranks of one host are a node (see
    `find_nodes`), at any position in the group. links: the cost of messages, for `algorithm="auto"`; algorithms: those
    that "auto" chooses from. parts: how many parts of a buffer are pipelined through both levels (None: by the model).
    intra, inter: the backend of each level, such as "nccl" inside nodes and "mpi" between them (None: the group's).
    timeout: seconds for a collective. part_bytes: the most bytes of a message or of a call of the library.
    make_transport: makes what carries messages between nodes, given the inter-node group of this rank's place. levels:
    the nodes and this rank's groups inside its node and between nodes (None: of one rank), if the caller has made them.

    Collectives run one at a time, in the order in which they were started; all ranks must start them in one order.
    Results are the same on all ranks and in all runs, bit for bit; another algorithm, or another number of ranks, may
    round differently. `nodes` has the ranks of each node; `calls` counts calls by collective and algorithm.

    Raises ValueError for nodes of unequal size, and where ranks give different arguments; PeerError for ranks that do
    not arrive in time.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        ranks_per_node: int | None = None,
        links: Links = TYPICAL,
        algorithms: Sequence[Algorithm] = ALGORITHMS,
        parts: int | None = None,
        intra: str | None = None,
        inter: str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        part_bytes: int = DEFAULT_PART_BYTES,
        make_transport: Callable[[dist.ProcessGroup], NodeTransport] = GroupTransport,
        levels: "Levels | None" = None,
    ) -> None:
        if not 0 < timeout < math.inf:
            raise ValueError(f"timeout is {timeout}, but must be a finite number of seconds, greater than 0")
        require_least(_MIN_PART_BYTES, part_bytes=part_bytes)
        if parts is not None and not 1 <= parts <= _MAX_PARTS:
            near = min(max(parts, 1), _MAX_PARTS)
            raise ValueError(f"parts is {parts}, but must be 1 to {_MAX_PARTS}; {near} would do")
        check_library("intra", intra)
        check_library("inter", inter)
        self.rank, self.world = find_own_rank(group)
        self.links = links
        self.calls: Counter[TwoLevelCall] = Counter()
        self._group = cast(dist.ProcessGroup, dist.group.WORLD if group is None else group)
        self._timeout = timeout
        self._algorithms = tuple(algorithms)
        self._num_parts = parts
        self._libraries = {"intra": intra, "inter": inter}
        same = (links, part_bytes, self._algorithms, parts, intra, inter)
        self.nodes = self._agree(ranks_per_node, same) if levels is None else levels.nodes
        self._node, self._place = self.nodes.place_of(self.rank)
        self._runners: dict[torch.device, SerialRunner] = {}
        self._inside_runners: dict[torch.device, SerialRunner] = {}
        self._failure: Exception | None = None
        self._sub_groups: list[tuple[_Key, dist.ProcessGroup]] = []
        everyone = Nodes.of_consecutive(self.world, self.world)
        self._flat = IntraNodeGroup(everyone, 0, self.rank, self._group, part_bytes)
        mine = self.nodes.ranks[self._node]
        column = tuple(node[self._place] for node in self.nodes.ranks)
        # On a single node a collective is the library's, on the group itself.
        has_levels = self.nodes.count > 1
        if levels is None:
            inside = self._make_group(mine, intra) if has_levels and len(mine) > 1 else None
            between = self._make_group(column, inter) if has_levels else None
        else:
            inside, between = levels.inside, levels.between
        self._intra_node = IntraNodeGroup(self.nodes, self._node, self._place, inside, part_bytes)
        self._inter_node: InterNodeGroup | None = None
        if has_levels:
            assert between is not None
            self._inter_node = InterNodeGroup(column, self._node, make_transport(between), part_bytes)

    def all_gather(
        self, output: Tensor, input: Tensor, *, algorithm: RequestedAlgorithm = "auto", async_op: bool = False
    ) -> Work | None:
        """Fill `output` with all ranks' `input`, in rank order.

        input: contiguous, of the same size on every rank; output: contiguous, of the same dtype and device, with
        `world` times as many elements. Takes every dtype. Runs the phase between nodes, then the phase inside nodes,
        then the shuffle.

        algorithm: of the phase between nodes, or "flat" for the library's own collective; "auto" takes the one that the
        model predicts to be fastest. async_op: return at once, with a `Work` to wait for. ValueError for tensors that
        do not fit; PeerError, now or from `wait`, for a peer that does not arrive in time: the group cannot be used
        after it.
        """
        _check_pair("output", output, "input", input, self.world)
        chosen = self.choose("all_gather", input, algorithm)
        shard, whole = input.detach().view(-1), output.detach().view(self.world, -1)

        def run(deadline: Deadline) -> None:
            self._all_gather(whole, shard, chosen, deadline)

        return self._start("all_gather", chosen, run, (output, input), async_op)

    def reduce_scatter(
        self,
        output: Tensor,
        input: Tensor,
        op: str | dist.ReduceOp | dist.ReduceOp.RedOpType = "sum",
        *,
        algorithm: RequestedAlgorithm = "auto",
        async_op: bool = False,
    ) -> Work | None:
        """Fill `output` with this rank's part of the reduction of all ranks' `input`, which is not modified.

        input: contiguous, `world` times as many elements as `output`, the part of rank 0 first. op: "sum", "avg", "max"
        or "min", or torch.distributed's op of that name. Partial sums are sent in the tensors' dtype; dtypes of fewer
        than 32 bits are added in fp32 and rounded once a hop. Runs the phase inside nodes, then the phase between them.

        algorithm, async_op and errors as in `all_gather`; also ValueError for an op that the dtype does not support.
        """
        reduction = check_reduction(op, input.dtype)
        _check_pair("input", input, "output", output, self.world)
        chosen = self.choose("reduce_scatter", output, algorithm)
        shard, whole = output.detach().view(-1), input.detach().view(self.world, -1)

        def run(deadline: Deadline) -> None:
            self._reduce_scatter(shard, whole, reduction, chosen, deadline)

        return self._start("reduce_scatter", chosen, run, (output, input), async_op)

    def all_reduce(
        self,
        tensor: Tensor,
        op: str | dist.ReduceOp | dist.ReduceOp.RedOpType = "sum",
        *,
        algorithm: RequestedAlgorithm = "auto",
        async_op: bool = False,
    ) -> Work | None:
        """Replace `tensor`, contiguous and of any size, by the reduction of all ranks' tensors.

        Runs a reduce-scatter and an all-gather; pads a size that `world` does not divide with zeros in a copy.
        Arguments and errors as in `reduce_scatter`.
        """
        reduction = check_reduction(op, tensor.dtype)
        _check_contiguous("tensor", tensor)
        elements = -(-tensor.numel() // self.world)
        chosen = self.choose("all_reduce", tensor, algorithm)
        flat = tensor.detach().view(-1)

        def run(deadline: Deadline) -> None:
            if chosen == "flat" and library_reduces(flat.dtype):
                divisor = self.world if reduction == "avg" else None
                flat_all_reduce(flat, self._flat, reduction, divisor, deadline)
                return
            padded = flat
            if elements * self.world != flat.numel():
                padded = flat.new_zeros(elements * self.world)
                padded[: flat.numel()].copy_(flat)
            whole = padded.view(self.world, elements)
            if chosen == "flat" or self._inter_node is None:
                shard = torch.empty_like(whole[0])
                self._reduce_scatter(shard, whole, reduction, chosen, deadline)
                self._all_gather(whole, shard, chosen, deadline)
            else:
                self._all_reduce(whole, reduction, chosen, deadline)
            if padded is not flat:
                flat.copy_(padded[: flat.numel()])

        return self._start("all_reduce", chosen, run, (tensor,), async_op)

    def choose(self, collective: Collective, tensor: Tensor, algorithm: RequestedAlgorithm = "auto") -> Algorithm:
        """The algorithm of a call. tensor: an all-gather's input, a reduce-scatter's output, or what is all-reduced."""
        if algorithm not in ("auto", *ALGORITHMS):
            raise ValueError(f"algorithm is {algorithm!r}: must be auto, {', '.join(ALGORITHMS)}")
        if self.nodes.count == 1:
            return "flat"
        if algorithm != "auto":
            return cast(InterNodeAlgorithm, algorithm)
        # An all-reduce is given the whole tensor, the other collectives one rank's part.
        shard_bytes = tensor.numel() * tensor.element_size() / (self.world if collective == "all_reduce" else 1)
        is_gloo = not tensor.is_cuda or shared_gpus.is_enabled()
        links = replace(self.links, library_scatters=False) if is_gloo else self.links
        return choose(collective, shard_bytes, self.nodes.count, self.nodes.size, links, self._algorithms)

    def close(self) -> None:
        """Wait for all collectives that were started, and give back the sub-groups; all ranks call it."""
        for runner in (*self._runners.values(), *self._inside_runners.values()):
            runner.close()
        world = dist.group.WORLD
        if self._failure is None and world is not None:  # after a failure messages may be on their way
            for key, sub_group in self._sub_groups:
                _idle.setdefault(world, {}).setdefault(key, []).append(sub_group)
        self._failure = self._failure or RuntimeError("it was closed")
        self._sub_groups.clear()
        self._inter_node = None
        self._intra_node = replace(self._intra_node, group=None)

    def _all_gather(self, whole: Tensor, shard: Tensor, chosen: Algorithm, deadline: Deadline) -> None:
        """All-gather every rank's `shard` [elements] into `whole` [world, elements]."""
        if chosen == "flat" or self._inter_node is None:
            intra_node_all_gather(whole, shard.unsqueeze(0), self._flat, deadline)
            return
        parts = self._parts("all_gather", whole, chosen)
        inside, gathers = self._inside(whole.device, parts), []
        for begin, end in parts:
            slots = shard.new_empty(self.nodes.count, end - begin)
            slots[0].copy_(shard[begin:end])
            inter_node_all_gather(slots, all_gather_steps(chosen, self.nodes.count), self._inter_node, deadline)
            gathers.append(self._start_gather(inside, whole[:, begin:end], slots, deadline))
        for gather in gathers:
            gather.wait()

    def _reduce_scatter(
        self, shard: Tensor, whole: Tensor, name: Reduction, chosen: Algorithm, deadline: Deadline
    ) -> None:
        """Reduce all ranks' `whole` [world, elements] and leave this rank's row in `shard` [elements]."""
        divisor = self.world if name == "avg" else None
        if chosen == "flat" or self._inter_node is None:
            flat_reduce_scatter(shard, whole, self._flat, name, divisor, deadline)
            return
        parts = self._parts("reduce_scatter", whole, chosen)
        inside = self._inside(whole.device, parts)
        sums = [self._start_sum(inside, whole[:, begin:end], name, deadline) for begin, end in parts]
        steps = reduce_scatter_steps(chosen, self.nodes.count)
        for (begin, end), (slots, work) in zip(parts, sums, strict=True):
            work.wait()
            inter_node_reduce_scatter(slots, steps, self._inter_node, name, divisor, deadline)
            shard[begin:end].copy_(slots[0])

    def _all_reduce(self, whole: Tensor, reduction: Reduction, chosen: InterNodeAlgorithm, deadline: Deadline) -> None:
        """Reduce all ranks' `whole` [world, elements] in place.

        Inside the node, sums of the next two parts come before the gather of one, so that neither level awaits the
        other once the first part is on its way.
        """
        assert self._inter_node is not None
        divisor = self.world if reduction == "avg" else None
        scatter_steps = reduce_scatter_steps(chosen, self.nodes.count)
        gather_steps = all_gather_steps(chosen, self.nodes.count)
        parts = self._parts("all_reduce", whole, chosen)
        inside = self._inside(whole.device, parts)

        def start_sum(number: int) -> tuple[Tensor, Work]:
            begin, end = parts[number]
            return self._start_sum(inside, whole[:, begin:end], reduction, deadline)

        sums = [start_sum(number) for number in range(min(2, len(parts)))]
        gathers = []
        for number, (begin, end) in enumerate(parts):
            slots, work = sums[number]
            work.wait()
            inter_node_reduce_scatter(slots, scatter_steps, self._inter_node, reduction, divisor, deadline)
            inter_node_all_gather(slots, gather_steps, self._inter_node, deadline)
            gathers.append(self._start_gather(inside, whole[:, begin:end], slots, deadline))
            if number + 2 < len(parts):
                sums.append(start_sum(number + 2))
        for gather in gathers:
            gather.wait()

    def _start_gather(
        self, inside: SerialRunner | InlineRunner, whole: Tensor, slots: Tensor, deadline: Deadline
    ) -> Work:
        run = partial(intra_node_all_gather, whole, slots, self._intra_node, deadline)
        return inside.start(run, (whole, slots))

    def _start_sum(
        self, inside: SerialRunner | InlineRunner, whole: Tensor, reduction: Reduction, deadline: Deadline
    ) -> tuple[Tensor, Work]:
        slots = whole.new_empty(self.nodes.count, whole.shape[1])
        run = partial(intra_node_reduce_scatter, slots, whole, self._intra_node, reduction, None, deadline)
        return slots, inside.start(run, (whole, slots))

    def _inside(self, device: torch.device, parts: Sequence[tuple[int, int]]) -> SerialRunner | InlineRunner:
        """Runner of the phases inside the node: a thread of its own if there are several parts."""
        if len(parts) < 2:
            return InlineRunner()
        if device not in self._inside_runners:
            self._inside_runners[device] = SerialRunner(device)
        return self._inside_runners[device]

    def _parts(self, collective: Collective, whole: Tensor, chosen: Algorithm) -> list[tuple[int, int]]:
        """The ranges of each rank's elements, of `whole` [world, elements], that are pipelined through both levels."""
        elements = whole.shape[1]
        parts = self._num_parts
        if parts is None:
            num_bytes = elements * whole.element_size()
            parts = choose_parts(collective, chosen, num_bytes, self.nodes.count, self.nodes.size, self.links)
        return list(split_range(elements, -(-elements // parts)))

    def _start(
        self,
        collective: Collective,
        algorithm: Algorithm,
        run: Callable[[Deadline], None],
        tensors: tuple[Tensor, ...],
        async_op: bool,
    ) -> Work | None:
        self._require_usable()
        first = tensors[0]
        on_stream = first.is_cuda
        for level, name in self._libraries.items() if on_stream and algorithm != "flat" else ():
            if name == "gloo" and not shared_gpus.is_enabled():
                raise ValueError(f"{level}='gloo' sends no tensors of GPUs: None, the group's backend, would do")
        self.calls[TwoLevelCall(collective, algorithm)] += 1
        logger.debug("rank %d: %s of %s %s runs as %s", self.rank, collective, first.numel(), first.dtype, algorithm)

        def guarded() -> None:
            if not first.numel() or (self.world == 1 and collective == "all_reduce"):
                return
            self._require_usable()  # a collective that was started before may have failed meanwhile
            place = f"node {self._node}, place {self._place}"
            what = f"{collective} ({algorithm})"
            try:
                run(Deadline.start(self._timeout, self.rank, self.world, place, what, on_stream=on_stream))
            except Exception as failure:  # whatever it is, the ranks may now be at different points
                self._failure = failure
                raise

        if first.device not in self._runners:
            self._runners[first.device] = SerialRunner(first.device)
        work = self._runners[first.device].start(guarded, tensors)
        if async_op:
            return work
        work.wait()
        return None

    def _require_usable(self) -> None:
        if self._failure is not None:
            raise PeerError(f"this two-level group is of no more use: {self._failure}")

    def _agree(self, ranks_per_node: int | None, same: tuple[object, ...]) -> Nodes:
        """Exchange hosts and arguments between all ranks; return the nodes. ValueError where arguments differ."""
        what = f"(ranks_per_node, (links, part_bytes, algorithms, parts, intra, inter)) = {(ranks_per_node, same)}"
        given, hosts = zip(*exchange_hosts(self._group, self._timeout, f"{what} {next_group_number()}"), strict=True)
        same_of, counts = zip(*(each.rsplit(" ", 1) for each in given), strict=True)
        self._next_number = max(map(int, counts))
        for rank, other in enumerate(same_of):
            if other != same_of[0]:
                raise ValueError(
                    f"rank {rank} was given {other}, and rank 0 {same_of[0]}: all ranks must be given the same"
                )
        if ranks_per_node is not None:
            return Nodes.of_consecutive(self.world, ranks_per_node)
        return find_nodes(list(hosts))

    def _make_group(self, ranks: tuple[int, ...], library: str | None) -> dist.ProcessGroup:
        """Make a sub-group of these ranks. Only its members call this: other ranks of the job may not be here."""
        world, limit = dist.group.WORLD, timedelta(seconds=self._timeout)
        assert world is not None
        members = [dist.get_global_rank(self._group, rank) for rank in ranks]
        key = tuple(members), library or dist.get_backend_config(self._group)
        if idle := _idle.get(world, {}).get(key):
            made = idle.pop()
            if group_timeout(made) != self._timeout:
                set_timeout(made, limit)
        else:
            made = make_local_group(members, key[1], limit, self._next_number + len(self._sub_groups))
        self._sub_groups.append((key, made))
        return made


def _check_contiguous(name: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        raise ValueError(f"{name} {tuple(tensor.shape)} is not contiguous; {name}.contiguous() would do")


def _check_pair(large_name: str, large: Tensor, small_name: str, small: Tensor, world: int) -> None:
    """ValueError unless both tensors have one dtype and device, and the large one `world` times as many elements."""
    _check_contiguous(large_name, large)
    _check_contiguous(small_name, small)
    if (large.dtype, large.device) != (small.dtype, small.device):
        raise ValueError(
            f"{large_name} is {large.dtype} on {large.device} and {small_name} {small.dtype} on {small.device}: "
            "both must be of one dtype and device"
        )
    if large.numel() != world * small.numel():
        raise ValueError(
            f"{large_name} has {large.numel()} elements and {small_name} {small.numel()}, on {world} ranks: "
            f"{large_name} must have {world * small.numel()}"
        )

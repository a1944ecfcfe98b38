# SPDX-License-Identifier: Apache-2.0
"""Compares the weights that several ranks hold, to find silent corruption of a rank's memory or arithmetic.

Ranks that hold the same shard of a parameter have computed it from the same numbers, summed by collectives that give
all of them the same bits, so their shards are equal bit by bit (docs/when-ranks-fail.md). A check costs one pass over
the weights on their device, and one all-gather of 8 bytes for each kind of shard that a rank holds.
"""

import hashlib
import logging
import socket
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stretto.axes import AXES
from stretto.memory.plain_data import all_gather_data
from stretto.parallel.comm.collectives import gather_rows
from stretto.parallel.grid import Grid
from stretto.parallel.layout import layout_of, place_on
from stretto.train.bit_hash import hash_bits, multipliers
from stretto.train.observe.metrics import CorruptionError
from stretto.train.optimizer import local_shard

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Shards:
    """Parameters of which the same ranks hold the same shards. key: equal on those ranks, and on no others."""

    key: str
    names: tuple[str, ...]


class HoldsWeights(Protocol):
    """The interface by which a check reads a training: see `stretto.train.task.TrainTask`."""

    grid: Grid

    def replicated(self) -> Mapping[str, Tensor]: ...

    def masters(self) -> Mapping[str, Tensor]: ...


@dataclass(frozen=True)
class ModelWeights:
    """The weights of a parallelized model, for a check in a loop of one's own: `ReplicaCheck(ModelWeights(...))`."""

    model: nn.Module
    grid: Grid

    def replicated(self) -> Mapping[str, Tensor]:
        """All parameters, by name."""
        return dict(self.model.named_parameters())

    def masters(self) -> Mapping[str, Tensor]:
        """None."""
        return {}


class ReplicaCheck:
    """Compares hashes of the weights that more than one rank holds. Collective, also when it is made.

    Each parameter is compared over all ranks that hold the same shard: along every axis that does not cut it. Warns,
    on rank 0, if no parameter is held twice.
    """

    def __init__(self, task: HoldsWeights) -> None:
        self._task = task
        self._device = task.grid.device
        self._shards = _group(task.replicated())
        keys = all_gather_data([shards.key for shards in self._shards], kind=list[str])
        self._width = max(map(len, keys))
        # The ranks that hold the same shards, and the position of their hash in each one's message.
        holders: dict[str, dict[int, int]] = defaultdict(dict)
        for rank, own in enumerate(keys):
            for number, key in enumerate(own):
                holders[key][rank] = number
        self._holders = {key: ranks for key, ranks in holders.items() if len(ranks) > 1}
        self._verified: int | None = None
        if not self._holders and dist.get_rank() == 0:
            logger.warning("train.verify_steps has nothing to compare: on this grid no two ranks hold the same weights")

    def check(self, step: int) -> None:
        """Raise CorruptionError, on all ranks, if weights that must be equal differ after `step`.

        It names the ranks that differ from the majority; all of them where there is none, as with two replicas.
        """
        if not self._holders:
            return
        hashes = self._hash()
        totals = torch.zeros(self._width, dtype=torch.int64, device=self._device)
        for number, own in enumerate(hashes):
            factors = multipliers(0, len(own)).to(own.device)
            totals[number] = (own * factors).sum()
        world = self._task.grid.group("world")
        found = gather_rows(totals, self._width * world.size(), world).view(-1, self._width).tolist()
        differing = [
            key
            for key, ranks in self._holders.items()
            if len({found[rank][number] for rank, number in ranks.items()}) > 1
        ]
        if differing:
            raise self._describe(step, differing, hashes)
        self._verified = step

    def _hash(self) -> list[Tensor]:
        """The hashes of the parameters of each of `_shards`, int64 [parameters], on the device."""
        weights, masters = self._task.replicated(), self._task.masters()
        hashes = []
        for shards in self._shards:
            own = hash_bits([local_shard(weights[name]) for name in shards.names])
            if masters:  # a flipped bit of either changes the sum, as one of the two is multiplied by 3
                own = own + 3 * hash_bits([masters.get(name, own[:0]) for name in shards.names])
            hashes.append(own)
        return hashes

    def _describe(self, step: int, differing: Sequence[str], hashes: Sequence[Tensor]) -> CorruptionError:
        """Find the parameters and the ranks. Collective."""
        own = {
            shards.key: list(zip(shards.names, values.tolist(), strict=True))
            for shards, values in zip(self._shards, hashes, strict=True)
            if shards.key in differing
        }
        shard = tuple(self._task.grid.coordinate(axis.name) for axis in AXES if not axis.sums_gradients)
        mine = socket.gethostname(), shard, own
        gathered = all_gather_data(mine, kind=tuple[str, tuple[int, ...], dict[str, list[tuple[str, int]]]])
        votes = [
            Vote(name, {rank: gathered[rank][2][key][number][1] for rank in self._holders[key]})
            for key in differing
            for number, name in enumerate(_names(gathered[next(iter(self._holders[key]))][2][key]))
        ]
        culprits, names = judge([vote for vote in votes if vote.differs], [shard for _, shard, _ in gathered])
        others = sorted({rank for vote in votes if vote.name == names[0] for rank in vote.hashes} - set(culprits))
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        who = _ranks(culprits, [gathered[rank][0] for rank in culprits])
        than = f"other weights than {_ranks(others)}" if others else "different weights, and either may be right"
        since = "when training began" if self._verified is None else f"at step {self._verified}"
        return CorruptionError(
            f"{who} {'holds' if len(culprits) == 1 else 'hold'} {than}: {names[0]}{more} "
            f"after step {step}, which were equal {since}",
            culprits,
        )


@dataclass(frozen=True)
class Vote:
    """A parameter's hashes by rank, of the ranks that hold the same shard."""

    name: str
    hashes: Mapping[int, int]

    @property
    def differs(self) -> bool:
        return len(set(self.hashes.values())) > 1

    @property
    def minority(self) -> list[int]:
        """The ranks that differ from a majority of more than half; none if there is no such majority."""
        (most, count), *_ = Counter(self.hashes.values()).most_common(1)
        return [rank for rank, value in self.hashes.items() if value != most] if 2 * count > len(self.hashes) else []

    def split(self, shards: Sequence[tuple[int, ...]]) -> list["Vote"]:
        """The votes of the ranks that are equal in `shards`, which has an entry for each rank of the job."""
        parts: dict[tuple[int, ...], dict[int, int]] = defaultdict(dict)
        for rank, value in self.hashes.items():
            parts[shards[rank]][rank] = value
        return [Vote(self.name, hashes) for hashes in parts.values()]


def judge(votes: Sequence[Vote], tensor_shards: Sequence[tuple[int, ...]]) -> tuple[list[int], list[str]]:
    """Find the ranks that hold wrong weights, and the parameters, the surest first.

    Along data and z gradients are summed, so that a fault of one rank makes no other rank differ from its replicas
    there. Along x and y each rank computes the gradients of replicated weights separately, and those of a faulty rank's
    neighbours change a step later. So ranks that agree in `tensor_shards`, by rank, are compared first.
    """
    narrow = [(vote, part) for vote in votes for part in vote.split(tensor_shards) if part.differs]
    judged = narrow or [(vote, vote) for vote in votes]
    named = [part.minority or [rank for rank in part.hashes if rank in vote.minority] for vote, part in judged]
    culprits = {rank for ranks in named for rank in ranks}
    # Two replicas have no majority. If one of them is a culprit already, the other one is not suspected.
    culprits |= {rank for _, part in judged if not culprits & part.hashes.keys() for rank in part.hashes}
    surest = sorted(zip(judged, named, strict=True), key=lambda each: not each[1])
    return sorted(culprits), list(dict.fromkeys([vote.name for (vote, _), _ in surest] + [v.name for v in votes]))


def _group(weights: Mapping[str, Tensor]) -> list[_Shards]:
    """Group parameters by which shard of them this rank holds, in the parameters' order."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name, weight in weights.items():
        groups[place_of(weight)].append(name)
    return [
        _Shards(hashlib.blake2b(repr((place, names)).encode(), digest_size=16).hexdigest(), tuple(names))
        for place, names in groups.items()
    ]


def place_of(weight: Tensor) -> str:
    """Find the shard that this rank holds: its coordinates on the axes that cut the parameter."""
    if not isinstance(weight, DTensor):
        return "whole"
    layout = layout_of(weight)
    sizes, coordinates = place_on(weight.device_mesh)
    cut = {split.axis: split.part_of(coordinates) for split in layout.splits if split.part_of(sizes) > 1}
    return " ".join(f"{axis}={part}" for axis, part in sorted(cut.items()))


def _names(rows: Sequence[tuple[str, int]]) -> list[str]:
    return [name for name, _ in rows]


def _ranks(ranks: Sequence[int], hosts: Sequence[str] = ()) -> str:
    """Name ranks, each with its host if there are `hosts`."""
    shown = [f"{rank} (host {hosts[at]})" if hosts else str(rank) for at, rank in enumerate(ranks)]
    if len(shown) == 1:
        return f"rank {shown[0]}"
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"

# SPDX-License-Identifier: Apache-2.0
"""Takes tokens from their ranks to their experts' ranks and back, as many as there are, by the library's all-to-alls.

A token is sent once to each rank that has experts of it, however many of them: a *pair* of a token and a rank. What a
rank receives are its *places*; `PlaceIndex` has the row of each of their choices. A rank sums a place's rows, and
sends one row back.

Collectives that follow each other nest: what `make` of the last one computes includes the ones before it. A caller that
keeps its result (`wrap_collective`) then skips them all.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.ops import operator
from stretto.ops.moe.pairs import Pairs, find_pairs, unpack_words
from stretto.ops.moe.permutation import spread_tokens, sum_copies
from stretto.ops.moe.sorting import sort_copies
from stretto.ops.operator import find_name

T = TypeVar("T")


def call(kind: str, make: Callable[[], T]) -> T:
    """The default of `wrap_collective`: it only issues the collective."""
    return make()


CollectiveWrapper = Callable[[str, Callable[[], Any]], Any]
"""wrap_collective(kind, make) returns what make() returns; kind is "all_to_all", "all_gather" or "reduce_scatter"."""


@dataclass(frozen=True)
class PlaceIndex:
    """The rows of this rank's experts, sorted by expert, then by place.

    slots: int64 [n], the copy (place * k + slot) of each row; places: int32 [n], its place. positions: int64 [places,
    k], the row of each copy. is_here: bool [places, k], whether this rank has the copy's expert. offsets: int32 [local
    experts + 1].
    """

    slots: Tensor
    places: Tensor
    positions: Tensor
    is_here: Tensor
    offsets: Tensor

    def order_rows(self) -> Tensor:
        """The rows by place, then by slot: int64 [n]; 0 behind those of the copies that are here."""
        rows, is_here = len(self.slots), self.is_here.reshape(-1)
        numbers = (is_here.cumsum(0) - 1).masked_fill(~is_here, rows).clamp(max=rows)
        return self.positions.new_zeros(rows + 1).scatter_(0, numbers, self.positions.reshape(-1))[:rows]


class Route(ABC):
    """The way of a call's tokens to their experts' ranks, and back.

    index: of this rank's rows. needed: of a fixed number of rows, how many this rank needs, one integer on the device;
    else None. weights: those of the places' choices, [places, k], if they were sent with the route.
    """

    index: PlaceIndex
    needed: Tensor | None
    weights: Tensor | None

    @abstractmethod
    def send(self, make: Callable[[], Tensor], wrap_collective: CollectiveWrapper, *, lends: bool = False) -> Tensor:
        """Send what `make` returns for this rank's tokens, [t, .], to their experts' ranks: [places, .] of all.

        After too many rows each may be NaN. lends: it may be overwritten by the group's next call.
        """

    def spread(self, tokens: Tensor, weights: Tensor | None = None) -> Tensor:
        """A row for each copy of places' tokens [places, h], times weights [places, k]; padding after them."""
        index = self.index
        return spread_tokens(tokens, index.positions, weights, index.is_here, len(index.slots), self.needed)

    @abstractmethod
    def give_back(self, make: Callable[[], Tensor], wrap_collective: CollectiveWrapper) -> Tensor:
        """Sum what `make` returns for places, [places, .], over the ranks: [t, .], added in fp32 and rounded once."""

    def sum_back(
        self, make: Callable[[], Tensor], weights: Tensor | None, wrap_collective: CollectiveWrapper
    ) -> Tensor:
        """Sum the rows that `make` returns, [n, .], times weights [places, k], by place, and give the sums back."""
        index = self.index
        return self.give_back(lambda: sum_copies(make(), index.positions, weights, index.is_here), wrap_collective)

    @abstractmethod
    def give_choices_back(self, make: Callable[[], Tensor], wrap_collective: CollectiveWrapper) -> Tensor:
        """Return the rows that `make` returns, [n, .], one a choice: [t * k, .], in the order of `choices`."""

    @property
    @abstractmethod
    def choices(self) -> Tensor:
        """The position of each of this rank's choices in what `give_choices_back` returns: int64 [t, k]."""

    def mark_excess(self, tokens: Tensor) -> Tensor:
        """The tokens of places [places, h] as `send` returned them, with NaN in each after too many rows."""
        return tokens


@dataclass(frozen=True)
class RowExchange:
    """An all-to-all over `group`, then an all-gather over `gather_group`; each None where it has one rank.

    sends, receives: rows to and from each rank of the group. longest: the most rows that a rank of gather_group
    receives, as many as each has in the gathered buffer.
    """

    group: dist.ProcessGroup | None
    gather_group: dist.ProcessGroup | None
    sends: list[int]
    receives: list[int]
    longest: int

    def send(
        self, make: Callable[[], Tensor], wrap_collective: CollectiveWrapper, padding: int | None = None
    ) -> Tensor:
        """Send the rows that `make` returns, [sum(sends), .], to their ranks. padding: None if it is never read."""

        def exchange() -> Tensor:
            if self.group is None:
                return self._exchange(make(), None, None, self.longest, padding)
            return wrap_collective(
                "all_to_all", lambda: self._exchange(make(), self.sends, self.receives, self.longest, padding)
            )

        gather_group = self.gather_group
        if gather_group is None:
            return exchange()
        return wrap_collective("all_gather", lambda: gather_rows(exchange(), gather_group))

    def give_back(self, make: Callable[[], Tensor], wrap_collective: CollectiveWrapper) -> Tensor:
        """Take rows that `make` returns for those of `send`, back: [sum(sends), .], summed over gather_group."""
        gather_group = self.gather_group

        def scatter() -> Tensor:
            if gather_group is None:
                return make()
            own: Tensor = wrap_collective("reduce_scatter", lambda: scatter_sum(make(), gather_group))
            return own[: sum(self.receives)]

        if self.group is None:
            return scatter()
        return wrap_collective(
            "all_to_all", lambda: self._exchange(scatter(), self.receives, self.sends, sum(self.sends), None)
        )

    def _exchange(
        self, rows: Tensor, sends: list[int] | None, receives: list[int] | None, length: int, padding: int | None
    ) -> Tensor:
        """All-to-all of rows, or a copy without a group, into the first of `length` rows."""
        shape = length, rows.shape[1]
        received = rows.new_empty(shape) if padding is None else rows.new_full(shape, padding)
        if sends is None or receives is None:
            received[: len(rows)] = rows
        else:
            dist.all_to_all_single(received[: sum(receives)], rows.contiguous(), receives, sends, group=self.group)
        return received


@dataclass(frozen=True)
class ExactRoute(Route):
    """The route of a call without a limit: it has as many rows as there are.

    of_pairs, of_choices: the exchanges of a row for each of them. choice_totals: choices of the tokens that each rank
    of gather_group receives.
    """

    pairs: Pairs
    index: PlaceIndex
    of_pairs: RowExchange
    of_choices: RowExchange
    choice_totals: list[int]
    weights: Tensor | None
    needed: None = None

    def send(self, make: Callable[[], Tensor], wrap_collective: CollectiveWrapper, *, lends: bool = False) -> Tensor:
        """Send a row of each pair: see `Route`."""
        tokens = self.pairs.tokens[: sum(self.of_pairs.sends)]
        return self.of_pairs.send(lambda: make().index_select(0, tokens), wrap_collective)

    def give_back(self, make: Callable[[], Tensor], wrap_collective: CollectiveWrapper) -> Tensor:
        """Return a row of each pair, and sum each token's in the order of ranks."""
        returned = self.of_pairs.give_back(make, wrap_collective)
        return sum_copies(returned, self.pairs.numbers, is_valid=self.pairs.is_pair)

    def give_choices_back(self, make: Callable[[], Tensor], wrap_collective: CollectiveWrapper) -> Tensor:
        index, longest = self.index, self.of_choices.longest

        def sort() -> Tensor:
            if self.of_choices.gather_group is None:
                return make().index_select(0, index.order_rows())
            numbers = index.is_here.reshape(-1).cumsum(0).index_select(0, index.slots) - 1
            gaps = [rank * longest - sum(self.choice_totals[:rank]) for rank in range(len(self.choice_totals))]
            ranks = index.places // max(self.of_pairs.longest, 1)
            numbers = numbers + torch.tensor(gaps, device=numbers.device).index_select(0, ranks)
            rows = make()
            return rows.new_zeros(len(gaps) * longest, rows.shape[1]).index_copy_(0, numbers, rows)

        return self.of_choices.give_back(sort, wrap_collective)

    @property
    def choices(self) -> Tensor:
        """The choices' order by rank."""
        return self.pairs.order_choices()


def find_route(
    topk_ids: Tensor,
    num_experts: int,
    group: dist.ProcessGroup | None,
    gather_group: dist.ProcessGroup | None,
    wrap_collective: CollectiveWrapper,
    topk_weights: Tensor | None = None,
) -> ExactRoute:
    """The route of this call. All ranks' counts are exchanged, and the host reads them once; then pairs' experts are.

    topk_weights: sent with the experts. ValueError for ids that are no experts.
    """
    world = 1 if group is None else group.size()
    pairs = find_pairs(topk_ids, topk_weights, num_experts, world)

    def exchange() -> Tensor:
        """Counts [source rank, 2]: of pairs and of choices."""
        received = torch.empty_like(pairs.counts)
        dist.all_to_all_single(received, pairs.counts, group=group)
        return received

    def gather(gather_group: dist.ProcessGroup) -> Tensor:
        """Counts [rank of gather_group, source rank * 2]."""
        received = pairs.counts if group is None else wrap_collective("all_to_all", exchange)
        return gather_rows(received.reshape(1, -1), gather_group)

    def read(received: Tensor) -> tuple[Tensor]:
        """The counts on the host: of what is sent, then of what each rank of gather_group receives."""
        return (torch.cat((pairs.counts.reshape(-1), received.reshape(-1))).cpu(),)

    if gather_group is None:
        (on_host,) = wrap_collective("all_to_all", lambda: read(exchange()))
    else:
        (on_host,) = wrap_collective("all_gather", lambda: read(gather(gather_group)))
    (sends, choice_sends), *known = (one.t().tolist() for one in on_host.view(-1, world, 2))
    require_experts(topk_ids, sum(choice_sends), num_experts)
    receives, choice_receives = known[0 if gather_group is None else gather_group.rank()]
    totals, choice_totals = ([sum(one[which]) for one in known] for which in (0, 1))
    of_pairs = RowExchange(group, gather_group, sends, receives, max(totals))
    of_choices = RowExchange(group, gather_group, choice_sends, choice_receives, max(choice_totals))
    local = num_experts // world
    words = of_pairs.send(lambda: pairs.words[: sum(sends)], wrap_collective, padding=local)
    experts, weights = unpack_words(words, topk_weights)
    index = PlaceIndex(*sort_copies(experts, local, sum(choice_totals)))
    return ExactRoute(pairs, index, of_pairs, of_choices, choice_totals, weights)


def require_experts(topk_ids: Tensor, number: int, num_experts: int) -> None:
    """ValueError unless so many ids are all of topk_ids; on CPUs it was checked before."""
    if number != topk_ids.numel():
        raise ValueError(
            f"dispatch: {topk_ids.numel() - number} of topk_ids are no experts: they are numbered 0 to "
            f"{num_experts - 1}"
        )


def gather_rows(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather rows [n, h], of one shape on all ranks: [ranks * n, h]."""
    return operator.gather_rows(rows.contiguous(), find_name(group))


def scatter_sum(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Reduce-scatter rows [ranks * n, h] to [n, h]: on CPUs added in fp32 in rank order, on GPUs by NCCL."""
    return operator.reduce_scatter(rows.contiguous(), find_name(group))

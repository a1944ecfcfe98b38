# SPDX-License-Identifier: Apache-2.0
"""Takes rows from their tokens' ranks to their experts' ranks and back, as many as there are.

Collectives that follow each other nest: what `make` of the last one computes includes the ones before it. A caller that
keeps its result (`wrap_collective`) then skips them all.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.ops import operator
from stretto.ops.operator import find_name

T = TypeVar("T")


def call(kind: str, make: Callable[[], T]) -> T:
    """The default of `wrap_collective`: it only issues the collective."""
    return make()


CollectiveWrapper = Callable[[str, Callable[[], Any]], Any]
"""wrap_collective(kind, make) returns what make() returns; kind is "all_to_all", "all_gather" or "reduce_scatter"."""


@dataclass(frozen=True)
class Route:
    """An all-to-all over `group`, then an all-gather over `gather_group`; each None where it has one rank.

    sends, receives: rows to and from each rank of the group. longest: the most rows that a rank of gather_group
    receives, as many as each has in the gathered buffer. places: int64 [n], where rows sorted by expert lie in that
    buffer, and rows: int64, the row of each place; both None where the orders are one.
    """

    group: dist.ProcessGroup | None
    gather_group: dist.ProcessGroup | None
    sends: list[int]
    receives: list[int]
    longest: int
    places: Tensor | None
    rows: Tensor | None

    def forward(self, make: Callable[[], Tensor], wrap_collective: CollectiveWrapper) -> Tensor:
        """Take the rows that `make` returns, [sum(sends), h], to experts' ranks: [n, h], sorted by expert."""

        def exchange() -> Tensor:
            if self.group is None:
                return _pad(make(), self.longest)
            received: Tensor = wrap_collective(
                "all_to_all", lambda: self._exchange(make(), self.sends, self.receives, self.longest)
            )
            return received

        gather_group = self.gather_group
        if gather_group is None:
            received = exchange()
        else:
            received = wrap_collective("all_gather", lambda: gather_rows(exchange(), gather_group))
        return received if self.places is None else received.index_select(0, self.places)

    def backward(self, make: Callable[[], Tensor], wrap_collective: CollectiveWrapper) -> Tensor:
        """Take the rows that `make` returns, [n, h], back: [sum(sends), h], after a sum over gather_group."""

        def sort() -> Tensor:
            return make() if self.rows is None else make().index_select(0, self.rows)

        gather_group = self.gather_group

        def scatter() -> Tensor:
            if gather_group is None:
                return sort()
            own: Tensor = wrap_collective("reduce_scatter", lambda: scatter_sum(sort(), gather_group))
            return own[: sum(self.receives)]

        if self.group is None:
            return scatter()
        returned: Tensor = wrap_collective(
            "all_to_all", lambda: self._exchange(scatter(), self.receives, self.sends, sum(self.sends))
        )
        return returned

    def _exchange(self, rows: Tensor, sends: list[int], receives: list[int], length: int) -> Tensor:
        """All-to-all of rows into the first of `length` rows."""
        received = rows.new_empty(length, rows.shape[1])
        dist.all_to_all_single(received[: sum(receives)], rows.contiguous(), receives, sends, group=self.group)
        return received


def find_route(
    counts: Tensor,
    group: dist.ProcessGroup | None,
    gather_group: dist.ProcessGroup | None,
    wrap_collective: CollectiveWrapper,
) -> tuple[Route, Tensor]:
    """(the route of this call, offsets of its rows), from the copies of this rank's tokens for each expert [experts].

    All ranks' counts are exchanged, and the host reads them once.
    """
    shared = counts.view(1 if group is None else group.size(), -1)  # [expert's rank, its experts]

    def exchange() -> Tensor:
        """Counts [source rank, this rank's experts]."""
        received = torch.empty_like(shared)
        dist.all_to_all_single(received, shared, group=group)
        return received

    def gather(gather_group: dist.ProcessGroup) -> Tensor:
        """Counts [rank of gather_group, source rank, expert]."""
        received = shared if group is None else wrap_collective("all_to_all", exchange)
        return gather_rows(received.reshape(1, -1), gather_group).view(-1, *received.shape)

    def read(received: Tensor) -> tuple[Tensor, Tensor]:
        """Received counts on the device; and on the host, after rows to send by rank."""
        return received, torch.cat((shared.sum(1), received.reshape(-1))).cpu()

    if gather_group is None:
        received, on_host = wrap_collective("all_to_all", lambda: read(exchange()[None]))
    else:
        received, on_host = wrap_collective("all_gather", lambda: read(gather(gather_group)))
    sends, known = on_host[: shared.shape[0]].tolist(), on_host[shared.shape[0] :].view(received.shape)
    own = known[0 if gather_group is None else gather_group.rank()]
    longest = int(known.sum((1, 2)).max())
    places = rows = None
    if known.shape[0] > 1 or min(known.shape[1:]) > 1:
        places, rows = _sort_by_expert(received, longest, int(known.sum()))
    offsets = torch.zeros(received.shape[2] + 1, dtype=torch.int32, device=received.device)
    torch.cumsum(received.sum((0, 1)), 0, dtype=torch.int32, out=offsets[1:])
    return Route(group, gather_group, sends, own.sum(1).tolist(), longest, places, rows), offsets


def _sort_by_expert(counts: Tensor, longest: int, total: int) -> tuple[Tensor, Tensor]:
    """(places, rows) of `Route`, from counts [rank of gather_group, source rank, expert] of `total` rows."""
    flat = counts.flatten(1)
    first = torch.arange(len(flat), device=counts.device)[:, None] * longest
    starts = (flat.cumsum(1) - flat + first).view_as(counts)  # of each run of rows in the buffer
    lengths, starts = (one.permute(2, 0, 1).reshape(-1) for one in (counts, starts))
    before = lengths.cumsum(0) - lengths
    numbers = torch.arange(total, device=counts.device)
    places = numbers + torch.repeat_interleave(starts - before, lengths, output_size=total)
    # Slots without a row get the first row's index; these slots are never read.
    return places, numbers.new_zeros(len(flat) * longest).scatter_(0, places, numbers)


def gather_rows(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather rows [n, h], of one shape on all ranks: [ranks * n, h]."""
    return operator.gather_rows(rows.contiguous(), find_name(group))


def scatter_sum(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Reduce-scatter rows [ranks * n, h] to [n, h]: on CPUs added in fp32 in rank order, on GPUs by NCCL."""
    scatter = operator.scatter_sum if rows.device.type == "cpu" else operator.reduce_scatter
    return scatter(rows.contiguous(), find_name(group))


def _pad(rows: Tensor, length: int) -> Tensor:
    missing = length - rows.shape[0]
    return rows if missing == 0 else torch.cat((rows, rows.new_zeros(missing, rows.shape[1])))

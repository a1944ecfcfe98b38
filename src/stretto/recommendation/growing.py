# SPDX-License-Identifier: Apache-2.0
"""Tables that grow: any id, such as a hash of 63 bits, gets a row of its own once it was looked up often enough."""

from collections.abc import Sequence

import torch
from torch import Tensor

from stretto.optim.row_update import draw_bits
from stretto.recommendation.placement import Growth

_SEEN = 4  # counters of ids without a row, for each row


class GrowingRows:
    """The rows that ids have in a table [rows, dim] on the device.

    Row 0 is for all ids that have no row of their own. An id gets a row in the batch by which it was looked up
    `min_count` times: a free one, or that of the id that goes first (`Growth.evicts`). Rows of this batch and of the
    one before, which may not have been updated yet, stay. A new row starts from random numbers that depend on its id
    alone, and its optimizer's states from zeros. All depends on the ids of global batches, not on ranks. Ids without a
    row are counted in hashed counters, so one that shares a counter may be early.
    """

    def __init__(self, weight: Tensor, growth: Growth, table: int) -> None:
        """weight: [rows, dim]. table: its number, from which, with an id, the random numbers of a row are hashed."""
        self.weight, self._growth, self._table = weight, growth, table
        self._states: list[Tensor] = []
        rows, device = len(weight), weight.device
        self.ids = torch.full((rows,), -1, dtype=torch.int64, device=device)
        self._last_used, self._uses = torch.zeros_like(self.ids), torch.zeros_like(self.ids)
        self._seen = torch.zeros(_SEEN * rows, dtype=torch.int64, device=device)
        self._batches = torch.zeros(1, dtype=torch.int64, device=device)
        self._seed = torch.tensor([0, 0], device=device)
        self._known, self._order, self._version = self.ids, self.ids, -1

    def add_states(self, states: Sequence[Tensor]) -> None:
        """Take the optimizer's states of the rows, which begin anew with a row."""
        self._states = list(states)

    def state(self) -> dict[str, Tensor]:
        """All that a checkpoint has besides rows and the optimizer's states."""
        return {
            "ids": self.ids, "last_used": self._last_used, "uses": self._uses, "seen": self._seen,
            "batches": self._batches,
        }  # fmt: skip

    @torch.no_grad()
    def fetch(self, ids: Tensor, *, grows: bool) -> Tensor:
        """The rows of a global batch's ids. grows: count them, and give rows to new ones.

        Ids that no table has stay outside of this one, so that the look-up refuses them.
        """
        different, inverse, counts = ids.long().unique(return_inverse=True, return_counts=True)
        rows = self._find(different)
        if grows:
            self._batches += 1
            self._last_used[rows] = self._batches.expand(len(rows))
            self._uses.index_add_(0, rows, counts)
            is_new = (rows == 0) & (different >= 0) & (different < self._growth.ids)
            rows[is_new] = self._admit(different[is_new], counts[is_new])
        rows = torch.where(different < 0, different, rows)
        rows = torch.where(different < self._growth.ids, rows, different.clamp(min=len(self.ids)))
        return rows[inverse].to(ids.dtype)

    def _find(self, ids: Tensor) -> Tensor:
        if self._version != self.ids._version:  # also once a checkpoint was loaded
            (self._known, self._order), self._version = self.ids.sort(), self.ids._version
        at = torch.searchsorted(self._known, ids).clamp(max=len(self._known) - 1)
        return torch.where((self._known[at] == ids) & (ids >= 0), self._order[at], 0)

    def _admit(self, ids: Tensor, counts: Tensor) -> Tensor:
        """Give rows to new ids, those that were looked up most in this batch first; returns their rows, or 0."""
        bits = draw_bits(self._seed, self._table, ids, 0, 1)[:, 0]
        counters = bits % len(self._seen)
        self._seen.index_add_(0, counters, counts)
        rows = torch.zeros_like(ids)
        places = counts.argsort(descending=True, stable=True)
        places = places[self._seen[counters[places]] >= self._growth.min_count]
        leave = self._find_leaving()[: len(places)]
        places = places[: len(leave)]
        new = ids[places]
        rows[places] = leave
        self._seen[counters[places]] = 0
        self.ids[leave], self._uses[leave] = new, counts[places]
        self._last_used[leave] = self._batches.expand(len(leave))
        bound = len(self.weight) ** -0.5
        bits = draw_bits(self._seed, self._table, new, 0, self.weight.shape[1])
        self.weight[leave] = ((bits.double() / 2**31 - 1) * bound).to(self.weight.dtype)
        for state in self._states:
            state[leave] = 0
        return rows

    def _find_leaving(self) -> Tensor:
        """Rows that new ids may have, in this order: free ones, then those whose ids go."""
        rows = torch.arange(1, len(self.ids), device=self.ids.device)
        rows = rows[(self.ids[1:] < 0) | (self._last_used[1:] < self._batches - 1)]
        # By several stable sorts, of which the last counts most.
        keys = [self._last_used, *([self._uses] if self._growth.evicts == "least-frequent" else []), self.ids >= 0]
        for key in keys:
            rows = rows[key[rows].long().argsort(stable=True)]
        return rows

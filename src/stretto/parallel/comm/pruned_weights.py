# SPDX-License-Identifier: Apache-2.0
"""Pruned weights that z shards: their gathers and the reduce-scatters of their gradients carry what is left.

Of the n numbers that are left of a weight's whole rows, in order, rank r of z's `size` ranks owns those from r n / size
on, rounded up to whole shares, however the mask distributes them over rows:

    what is left    | rank 0's share | rank 1's share | rank 2's share | (padding) |
    rows            | rank 0's rows         | rank 1's rows | rank 2's rows |

So messages and optimizer state are equally long on all ranks. The parameter itself remains this rank's rows, dense;
after a step, `PrunedRowExchange` sends what lies between the two kinds of boundaries, which is little unless the mask
differs much between rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.parallel.comm.collectives import Pending, all_to_all, start_gather_rows, start_scatter_rows
from stretto.parallel.comm.two_level import TwoLevels


class Index(Protocol):
    """The places of what is left of a flat tensor (`stretto.optim.sparse.SparseIndex`)."""

    size: int
    count: int
    num_bytes: int

    def compress(self, dense: Tensor, out: Tensor) -> Tensor:
        """Write what is left of `dense` to `out`, and return `out`."""

    def fill(self, left: Tensor, dense: Tensor) -> Tensor:
        """Write `left` to its places in `dense`, and zeros elsewhere; returns `dense`."""


@dataclass(frozen=True)
class _ExpandedPending(Pending):
    """A started all-gather of what is left, which `wait` expands to whole rows."""

    index: Index | None = None
    shape: tuple[int, ...] = ()

    def wait(self) -> Tensor:
        left = super().wait()
        assert self.index is not None
        return self.index.fill(left[: self.index.count], left.new_empty(self.index.size)).view(self.shape)


class PrunedWeight:
    """This rank's share of a pruned weight that z shards: `values` [share], of which `count` are not padding.

    whole: index of the whole rows [rows, ...], which come first: of a weight whose `dim` 1 z cuts, of the transposed
    one. own: index of this rank's rows. group: over which they are sharded. values: any tensor of the dtype and device.
    """

    def __init__(
        self, whole: Index, own: Index, shape: Sequence[int], group: dist.ProcessGroup, dim: int, values: Tensor
    ) -> None:
        self.whole, self.own, self.group, self.dim = whole, own, group, dim
        self.shape = tuple(shape)
        ranks, rank = group.size(), group.rank()
        self.share = -(-whole.count // ranks)
        bounds = [min(number * self.share, whole.count) for number in range(ranks + 1)]
        self.count = bounds[rank + 1] - bounds[rank]
        self.values = values.new_zeros(self.share)
        counts = torch.tensor([own.count], device=values.device)
        ends = start_gather_rows(counts, ranks, group).wait().cumsum(0).tolist()
        rows = [0, *ends]
        # What this rank's share has of each rank's rows, and its rows of each rank's share.
        self._sends = [_overlap(bounds[rank], bounds[rank + 1], *rows[peer : peer + 2]) for peer in range(ranks)]
        self._receives = [_overlap(rows[rank], rows[rank + 1], *bounds[peer : peer + 2]) for peer in range(ranks)]

    @property
    def num_bytes(self) -> int:
        """Bytes of both indices."""
        return self.whole.num_bytes + self.own.num_bytes

    def start_gather(self, dtype: torch.dtype | None, levels: TwoLevels | None) -> Pending:
        """Begin to all-gather the whole rows, in `dtype` (None: the weight's own)."""
        sent = self.values if dtype is None else self.values.to(dtype)
        pending = start_gather_rows(sent, self.share * self.group.size(), self.group, levels)
        return _ExpandedPending(pending.result, pending.work, pending.source, index=self.whole, shape=self.shape)

    def start_scatter(
        self, gradient: Tensor, dtype: torch.dtype | None, factor: float, levels: TwoLevels | None
    ) -> Pending:
        """Begin to reduce-scatter a gradient of whole rows, times a factor, in `dtype`; the result is [count]."""
        dense = gradient.transpose(0, self.dim).reshape(-1)
        left = dense.new_empty(self.share * self.group.size())  # sums of the padding are not read
        self.whole.compress(dense, left[: self.whole.count])
        sent = left if dtype is None else left.to(dtype)
        return start_scatter_rows(sent, self.count, self.group, factor, levels)

    def to_rows(self, values: Tensor) -> Tensor:
        """Gather what is left of this rank's rows, of the ranks' shares `values` [count]. Collective."""
        return all_to_all(
            values.new_empty(self.own.count), values.contiguous(), self._receives, self._sends, self.group
        )

    def compress(self, dense: Tensor) -> Tensor:
        """This rank's share, [count], of what is left of tensors shaped as the ranks' shards. Collective."""
        rows = self.own.compress(dense.transpose(0, self.dim).reshape(-1), dense.new_empty(self.own.count))
        return all_to_all(dense.new_empty(self.count), rows, self._sends, self._receives, self.group)

    def expand_rows(self, rows: Tensor, shape: torch.Size) -> Tensor:
        """A dense tensor in the shape of this rank's shard, of what is left of its rows."""
        sizes = list(shape)
        sizes[0], sizes[self.dim] = sizes[self.dim], sizes[0]
        dense = self.own.fill(rows, rows.new_empty(self.own.size)).view(sizes)
        return dense.transpose(0, self.dim)


class PrunedRowExchange:
    """Sends the shares of several weights, which z shards over one group, to the ranks that have the rows."""

    def __init__(self, weights: Sequence[PrunedWeight]) -> None:
        self._group = weights[0].group
        ranks, numbers = range(self._group.size()), range(len(weights))
        shares = [weight.values[: weight.count].split(weight._sends) for weight in weights]
        self._sent = [share[peer] for peer in ranks for share in shares]
        self._sends = [sum(weight._sends[peer] for weight in weights) for peer in ranks]
        self._receives = [sum(weight._receives[peer] for weight in weights) for peer in ranks]
        self._sizes = [weight._receives[peer] for peer in ranks for weight in weights]
        self._order = [peer * len(weights) + number for number in numbers for peer in ranks]

    def run(self) -> Tensor:
        """Return what is left of this rank's rows of each weight, one after another. Collective."""
        sent = torch.cat(self._sent)
        received = sent.new_empty(sum(self._receives))
        parts = all_to_all(received, sent, self._receives, self._sends, self._group).split(self._sizes)
        return torch.cat([parts[place] for place in self._order])


def _overlap(first: int, last: int, other_first: int, other_last: int) -> int:
    return max(0, min(last, other_last) - max(first, other_first))

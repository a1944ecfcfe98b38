# SPDX-License-Identifier: Apache-2.0
"""Sends rows of keys and values, or of their gradients, and heads, between ranks of a group, while kernels run.

By the functional collectives of torch.distributed, which NCCL runs on a stream of its own. One rank in so many
(`degree`) takes part in an exchange of rows; ranks between have other heads of the same sequence, and exchange beside.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stretto.ops.attention.plan import Range, Step
from stretto.ops.moe.routes import CollectiveWrapper
from stretto.ops.operator import find_group


class Peers(NamedTuple):
    """Every `degree`-th rank of the group, from this rank's remainder on.

    wrap: called in place of each collective, as in `stretto.ops.moe.dispatch`.
    """

    group: str
    degree: int
    wrap: CollectiveWrapper

    @property
    def rank(self) -> int:
        return int(find_group(self.group).rank()) // self.degree

    @property
    def ranks(self) -> int:
        return int(find_group(self.group).size()) // self.degree

    def start(self, step: Step, rows: Tensor) -> Tensor:
        """Start to send rows [length, ...] as the step says; returns what comes, once `wait` has waited for it."""
        parts = [rows[part.start : part.stop] for parts in step.sends for part in parts]
        return self._start(_join(parts, rows), _count(step.sends), _count(step.receives))

    def start_back(self, step: Step, rows: Tensor) -> Tensor:
        """Start to send a row for each that came in the step, to where it came from."""
        return self._start(rows.contiguous(), _count(step.receives), _count(step.sends))

    def wait(self, arriving: Tensor) -> Tensor:
        """Have the current stream wait for rows."""
        return torch.ops._c10d_functional.wait_tensor(arriving)

    def _start(self, rows: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        functional, rest = torch.ops._c10d_functional, int(find_group(self.group).rank()) % self.degree

        def spread(counts: Sequence[int]) -> list[int]:
            """Counts of all ranks of the group."""
            return [count if other == rest else 0 for count in counts for other in range(self.degree)]

        def make() -> Tensor:
            return functional.all_to_all_single(rows, spread(receives), spread(sends), self.group)

        return self.wrap("all_to_all", make)


def add_returned(rows: Tensor, step: Step, returned: Tensor) -> None:
    """Add to fp32 or fp64 rows [length, ...] what came back for those that were sent, in the order of ranks."""
    start = 0
    for parts in step.sends:
        for part in parts:
            count = part.stop - part.start
            rows[part.start : part.stop] += returned[start : start + count]
            start += count


def _join(parts: Sequence[Tensor], rows: Tensor) -> Tensor:
    if not parts:
        return rows[:0]
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _count(parts: Sequence[Sequence[Range]]) -> list[int]:
    return [sum(part.stop - part.start for part in each) for each in parts]


def gather_sequence(x: Tensor, group: str, degree: int, layout: str, wrap: CollectiveWrapper) -> Tensor:
    """Exchange heads for positions: x [b, h, l, d] -> [b, h / degree, l * degree, d], in the order of the sequence.

    `degree` ranks that follow each other have their parts of the sequence together, each with other heads, so that they
    are as one rank of 1 / degree as many. DeepSpeed-Ulysses, section 3.
    """
    batch, heads, length, size = x.shape
    parts = x.unflatten(1, (degree, heads // degree)).permute(1, 3, 0, 2, 4)  # to the rank of these heads
    rows = _exchange(parts, group, degree, wrap)  # [degree, length, batch, heads of each, size]
    if layout == "zigzag":  # second halves are in the sequence's other half, the last rank's first
        first, second = rows.unflatten(1, (2, length // 2)).unbind(1)
        rows = torch.stack((first, second.flip(0)))
    return rows.reshape(degree * length, batch, heads // degree, size).permute(1, 2, 0, 3)


def scatter_sequence(x: Tensor, group: str, degree: int, layout: str, wrap: CollectiveWrapper) -> Tensor:
    """The inverse of `gather_sequence`."""
    rows = x.permute(2, 0, 1, 3)
    if layout == "contiguous":
        rows = rows.unflatten(0, (degree, -1))
    else:
        first, second = rows.unflatten(0, (2, degree, -1)).unbind(0)
        rows = torch.stack((first, second.flip(0)), 1).flatten(1, 2)
    parts = _exchange(rows, group, degree, wrap)  # [degree: heads of each, length / degree, batch, heads, size]
    return parts.permute(2, 0, 3, 1, 4).flatten(1, 2)


def _exchange(parts: Tensor, group: str, degree: int, wrap: CollectiveWrapper) -> Tensor:
    """Send part i of [degree, ...] to the i-th of the `degree` ranks around this one."""
    members = find_group(group)
    first = members.rank() // degree * degree
    counts = [int(first <= peer < first + degree) for peer in range(members.size())]
    functional, rows = torch.ops._c10d_functional, parts.contiguous()
    found: Tensor = wrap("all_to_all", lambda: functional.all_to_all_single(rows, counts, counts, group))
    return functional.wait_tensor(found)

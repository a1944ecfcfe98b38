# SPDX-License-Identifier: Apache-2.0
"""Checks that ranks begin with the same weights and random seeds, and that all refuse what one refuses."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from stretto.memory import store_all_gather
from stretto.parallel.comm.collectives import find_spread
from stretto.parallel.grid import Grid
from stretto.parallel.precision import DTYPES


class JointRefusal:
    """Has all ranks of pipe refuse what one of them refuses: each sees its own stages alone.

    what: is refused, for errors. Every rank calls `exchange`, with its error if it has one; later calls do nothing.
    """

    def __init__(self, grid: Grid, what: str) -> None:
        self._grid = grid
        self._what = what
        self._has_exchanged = False

    def exchange(self, error: Exception | None = None) -> None:
        """Exchange errors with the other ranks of pipe. Raises ValueError if another has one, and this rank none."""
        if self._has_exchanged or self._grid.size("pipe") == 1:
            return
        self._has_exchanged = True
        group = self._grid.group("pipe")
        reason = "" if error is None else f": {type(error).__name__}: {str(error).partition(chr(10))[0][:1000]}"
        limit = self._grid.timeout.total_seconds()
        said = store_all_gather(f"{self._what}{reason}", group, "stretto refusals", limit)
        for rank, text in enumerate(said):
            if error is None and text != self._what:
                raise ValueError(f"pipe rank {rank} (global rank {dist.get_global_rank(group, rank)}) refuses {text}")


def check_ranks_agree(
    parameters: Mapping[str, nn.Parameter], grid: Grid, group: dist.ProcessGroup, *, drops: bool
) -> None:
    """Raise ValueError unless a group's ranks have the same weights, and, with dropout (`drops`), the same seed.

    ValueError for complex parameters, too.
    """
    named = [(name, p) for name, p in parameters.items() if not p.is_meta]
    for name, parameter in parameters.items():
        if parameter.is_complex():
            raise ValueError(
                f"{name} is {parameter.dtype}, but parameters must be real: make it of real numbers, "
                f"nn.Parameter(torch.view_as_real(...)), which forward reads by torch.view_as_complex"
            )
    # Quantized weights are integers, or of dtypes that have no norm.
    real = [p.detach() if p.dtype in DTYPES else p.detach().double() for _, p in named]
    sums = [(p.sum(dtype=torch.float64), torch.linalg.vector_norm(p, dtype=torch.float64)) for p in real]
    flat = [float(value) for pair in sums for value in pair]
    flat.append(float(torch.initial_seed() % 2**52) if drops else 0.0)
    # NaN and infinity become numbers, which differ from others: a rank that has one alone is found, and by all ranks.
    numbers = torch.tensor(flat, dtype=torch.float64, device="cpu").nan_to_num_(1e300)
    spread = find_spread(numbers.to(grid.device), group).tolist()
    for index, (name, _) in enumerate(named):
        scale = 1.0 + float(numbers[2 * index + 1])
        if max(spread[2 * index : 2 * index + 2]) > 1e-6 * scale:
            raise ValueError(
                f"ranks hold different values of {name}: seed them alike before building the model, "
                "or load one checkpoint"
            )
    if spread[-1]:
        raise ValueError(
            "ranks have different random seeds, so their dropout masks would differ: torch.manual_seed(the same number)"
        )

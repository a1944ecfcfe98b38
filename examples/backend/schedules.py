# SPDX-License-Identifier: Apache-2.0
"""Installs schedules for a group of any size: the only addition of the other scripts here to plain PyTorch."""

import torch.distributed as dist

from stretto.collectives import install
from stretto.collectives.algorithms import find


def install_schedules(group: dist.ProcessGroup | None = None) -> None:
    """Install a schedule for each collective that training calls. All ranks of the group call it."""
    ranks = dist.get_world_size(group)
    for name in (
        "ring-all-reduce",
        "ring-all-gather",
        "ring-reduce-scatter",
        "binomial-broadcast",
        "direct-all-to-all",
    ):
        install(find(name).compile(ranks=ranks), group)

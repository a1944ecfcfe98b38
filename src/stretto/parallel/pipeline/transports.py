# SPDX-License-Identifier: Apache-2.0
"""Selects and creates the transport of messages between the stages of a group.

    ranks on                                                      transport
    CPUs of one machine                                           shared memory
    CPUs of several machines                                      gloo
    GPUs of one machine that reach each other's memory, or one    symmetric memory
    other GPUs                                                    NCCL; gloo where ranks share GPUs

For CPUs the table is what was measured (lab/results/messages); for GPUs it is what we expect: copy engines need no
multiprocessors, and no handshake while slots are free.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from stretto.cluster.local_ranks import name_node, require_declared
from stretto.memory import exchange, find_own_rank, group_timeout, shared_gpus
from stretto.memory.gpus import find_obstacle
from stretto.parallel.pipeline.gloo_transport import GlooTransport
from stretto.parallel.pipeline.messages import MessageTransport
from stretto.parallel.pipeline.nccl_transport import NCCLTransport
from stretto.parallel.pipeline.shared_memory_transport import SharedMemoryTransport
from stretto.parallel.pipeline.symmetric_memory_transport import SymmetricMemoryTransport
from stretto.suggestions import name_known

TRANSPORTS: Mapping[str, type[MessageTransport]] = {
    transport.name: transport
    for transport in (GlooTransport, SharedMemoryTransport, SymmetricMemoryTransport, NCCLTransport)
}
"""All transports, by name."""

_NAMESPACE = Path("/proc/self/ns/pid")


def make_transport(
    group: dist.ProcessGroup | None, device: torch.device | str, name: str | None = None
) -> MessageTransport:
    """Make the transport of a group's messages. All ranks call it, with the same name.

    device: this rank's. name: one of `TRANSPORTS`; None: what `choose_transport` says. ValueError for an unknown name,
    and for a transport that does not reach these ranks' tensors.
    """
    if name is not None and name not in TRANSPORTS:
        raise ValueError(f"there is no transport of messages {name!r}{name_known(name, TRANSPORTS)}")
    return TRANSPORTS[name or choose_transport(group, device)](group, device)


def choose_transport(group: dist.ProcessGroup | None, device: torch.device | str) -> str:
    """The name of the transport that should be the fastest between a group's ranks at 1 to 50 MB.

    Collective, with one result on all ranks. device: this rank's.
    """
    _, size = find_own_rank(group)
    device = torch.device(device)
    if size == 1:
        return GlooTransport.name  # passes messages on, and connects to no rank
    if device.type == "cpu":
        return SharedMemoryTransport.name if _share_memory(group) else GlooTransport.name
    whole = dist.group.WORLD if group is None else group
    assert isinstance(whole, dist.ProcessGroup)
    if find_obstacle(whole, device, needs_atomics=False) is None:
        return SymmetricMemoryTransport.name
    return GlooTransport.name if shared_gpus.is_enabled() else NCCLTransport.name


def _share_memory(group: dist.ProcessGroup | None) -> bool:
    """True if all ranks are processes of one user on one node that see each other in /proc."""
    if not _NAMESPACE.exists():
        return False
    here = (name_node(dist.get_rank(), dist.get_world_size()), _NAMESPACE.stat().st_ino, os.getuid())
    everyone = exchange(here, group, group_timeout(group), tuple[str, int, int])
    require_declared([node for node, *_ in everyone])
    return len(set(everyone)) == 1

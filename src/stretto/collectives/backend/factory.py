# SPDX-License-Identifier: Apache-2.0
"""Makes the backend of one group: the inner backends gloo and NCCL, the dispatcher, and the c10d object over them."""

import os
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from stretto.collectives.backend.api import install_folder
from stretto.collectives.backend.dispatcher import Dispatcher, register_dispatcher
from stretto.collectives.backend.host_fallback import HostFallback
from stretto.collectives.backend.native import find_extension, make_backend
from stretto.collectives.backend.nccl_warmup import NcclWarmup
from stretto.collectives.backend.runner import Member
from stretto.memory import shared_gpus
from stretto.memory.groups import prepare_together

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend, Store

SCHEDULES_VARIABLE = "STRETTO_SCHEDULES"


def create_backend(request: Any, options: object = None) -> "Backend":
    """Make the backend of a new group, as torch.distributed asks for it; request: its _DistributedBackendOptions.

    options: `pg_options` of the caller, for NCCL. CompilerError where the C++ part cannot be compiled. The group's time
    limit runs only once it is compiled on all ranks.
    """
    prepare_together(find_extension, dist.PrefixStore("compiled", request.store), request.group_size, request.timeout)
    return _create(
        request.store,
        request.group_rank,
        request.group_size,
        request.timeout,
        request.group_id,
        list(request.global_ranks_in_group),
        options,
    )


def _create(
    store: "Store", rank: int, size: int, timeout: timedelta, name: str, ranks: list[int], options: object
) -> "Backend":
    cpu: Any = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout=timeout)
    cpu.options.global_ranks_in_group = ranks
    cpu.options.group_name = name
    cpu._set_sequence_number_for_group()
    member = Member(rank, size, name)
    cuda, dispatch = None, None
    fast = find_extension().FastCalls()
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        dispatcher = Dispatcher(member, {"cpu": "gloo"})
    elif shared_gpus.is_enabled():
        shared_gpus.install()
        dispatcher = Dispatcher(member, {"cpu": "gloo", "cuda": "gloo"}, fast=fast)
        dispatch = HostFallback(dispatcher, cpu, dist.PrefixStore("by host", store), member)
    else:
        cuda = _create_nccl(store, rank, size, timeout, name, ranks, options)
        dispatcher = Dispatcher(member, {"cpu": "gloo", "cuda": "nccl"}, NcclWarmup(cuda, member), fast)
    register_dispatcher(dispatcher)
    if size > 1 and (folder := os.environ.get(SCHEDULES_VARIABLE)):
        dispatcher.load_schedules = partial(_load_schedules, name, folder)
    milliseconds = round(timeout.total_seconds() * 1000)
    backend: Any = make_backend(rank, size, cpu, cuda, dispatch or dispatcher, _split, milliseconds, fast)
    backend.options.group_name = name
    backend.options.global_ranks_in_group = ranks
    return backend


def _load_schedules(group_name: str, folder: str) -> None:
    install_folder(folder, c10d._resolve_process_group(group_name))  # type: ignore[arg-type]  # a GroupName is a str


def _create_nccl(
    store: "Store", rank: int, size: int, timeout: timedelta, name: str, ranks: list[int], options: object
) -> Any:
    """Make NCCL's backend, which connects at its first call."""
    if not isinstance(options, dist.ProcessGroupNCCL.Options):
        options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.global_ranks_in_group = ranks
    options.group_name = name  # type: ignore[assignment]  # a GroupName, which is a str
    nccl = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, options)
    nccl._set_sequence_number_for_group()
    return nccl


def _split(store: "Store", rank: int, ranks: Sequence[int], name: str, milliseconds: int) -> "Backend | None":
    """Make the backend of a part of a group; ranks: of the group that is split. None on a rank outside of it."""
    if rank not in ranks:
        return None
    members = list(ranks)
    prefixed = dist.PrefixStore(f"stretto/{name}", store)
    timeout = timedelta(milliseconds=milliseconds)
    return _create(prefixed, members.index(rank), len(members), timeout, name, members, None)

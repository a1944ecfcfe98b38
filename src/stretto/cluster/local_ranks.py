# SPDX-License-Identifier: Apache-2.0
"""Finds out which of a job's ranks run on this machine, however they were launched, and which share a node.

A node is a machine, unless STRETTO_NODES declares ranks of one machine to be several nodes, so that what runs between
nodes can be tried on one. GPUs, memory and processes are counted by machine all the same. Needs no torch.

torchrun sets LOCAL_RANK and LOCAL_WORLD_SIZE. Under Slurm's srun a script may set RANK and WORLD_SIZE itself; the
rest is then in Slurm's variables, which count only if each task of the step is a rank. Other launchers set nothing:
ranks find each other by the names of their machines, through the job's store.
"""

import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # distinguishes machines that have the same name


class Store(Protocol):
    """The methods that this module needs of `torch.distributed.Store`."""

    def add(self, key: str, amount: int, /) -> int: ...
    def append(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def set(self, key: str, value: str, /) -> None: ...


def is_rank(environment: Mapping[str, str] = os.environ) -> bool:
    """True if torchrun, or something similar, has started this process as a rank of a job.

    Raises ValueError for variables that no rank has.
    """
    rank, world_size = (_integer(environment, name) for name in ("RANK", "WORLD_SIZE"))
    if rank is None or world_size is None:
        return False
    if rank >= world_size:
        raise ValueError(f"the environment variable RANK is {rank}, but must be less than WORLD_SIZE, {world_size}")
    return True


def require_rendezvous(environment: Mapping[str, str] = os.environ) -> None:
    """Raise ValueError if a rank's launcher has not set where the ranks meet, as torch's `env://` needs it."""
    if not is_rank(environment):
        return
    address, port = (environment.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    if not (address and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ValueError(
            f"RANK and WORLD_SIZE are those of a rank that a launcher has started, but MASTER_ADDR is {address!r} and "
            f"MASTER_PORT {port!r}, not a host and a port from 1 to 65535: start the ranks by torchrun, or unset RANK"
        )


def count_local_ranks(environment: Mapping[str, str] = os.environ) -> int | None:
    """The ranks on this machine, as the launcher has set it; None if it has not.

    Raises ValueError for a variable that is no number.
    """
    if (count := _integer(environment, "LOCAL_WORLD_SIZE")) is not None:
        return count
    if not _is_slurm_task(environment):
        return None
    node = _integer(environment, "SLURM_NODEID")
    tasks = _expand_tasks(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return tasks[node] if node is not None and node < len(tasks) else None


def count_ranks_here(ranks: int) -> int:
    """The ranks on this machine of a job of so many: all, unless a launcher has started this process as one of them.

    1 where a launcher does not say it. Raises ValueError as `count_local_ranks`.
    """
    return (count_local_ranks() or 1) if is_rank() else ranks


def find_local_rank(environment: Mapping[str, str] = os.environ) -> int | None:
    """This rank's number among those on its machine, as the launcher has set it; None if it has not.

    Raises ValueError for a variable that is no number.
    """
    if (rank := _integer(environment, "LOCAL_RANK")) is not None:
        return rank
    return _integer(environment, "SLURM_LOCALID") if _is_slurm_task(environment) else None


def agree_on_local_rank(store: Store, rank: int, world_size: int) -> int:
    """This rank's number among those on its machine, by the machines' names and boot ids. Collective.

    store: of the job. Returns once all ranks have called; the store's time limit raises.
    """
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.is_file() else ""
    key = f"stretto/ranks on {platform.node()} {boot}"
    store.append(key, f"{rank},")
    if store.add("stretto/ranks with a machine", 1) == world_size:
        store.set("stretto/all ranks have a machine", "")
    store.get("stretto/all ranks have a machine")  # waits for it
    here = set(map(int, store.get(key).decode().rstrip(",").split(",")))  # a rank is there twice if it has asked twice
    return sorted(here).index(rank)


# Parts of a node's name: before the node that STRETTO_NODES declares, and before why it declares none.
_NODE, _WRONG = " node ", "of no job: "


def name_node(rank: int, world_size: int, environment: Mapping[str, str] = os.environ) -> str:
    """A name of this process's node, the same on ranks of one node and different on others.

    rank, world_size: of the job. It has the machine's name and boot id, and a number if STRETTO_NODES declares that the
    machine's ranks are on several nodes: "2x4" for two nodes of four ranks each, "3,1" for a node of three ranks and
    one of one rank, in the order of ranks. Where these are not all of the job's ranks, the name says so, and
    `require_declared` raises: on all ranks that have exchanged their names, or others would wait for this one.
    """
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.is_file() else ""
    machine = f"{platform.node()} {boot}"
    if not (declared := environment.get("STRETTO_NODES", "")):
        return machine
    try:
        return f"{machine}{_NODE}{_declared_nodes(declared, world_size)[rank]} of {declared}"
    except ValueError as error:
        return f"{machine}{_NODE}{_WRONG}{error}"


def require_declared(names: Sequence[str]) -> None:
    """Raise ValueError if a rank's STRETTO_NODES does not fit the job, or differs between ranks of one machine.

    names: `name_node` of each rank, in the order of ranks.
    """
    found: dict[str, tuple[int, str]] = {}
    for rank, name in enumerate(names):
        machine, _, node = name.partition(_NODE)
        if node.startswith(_WRONG):
            raise ValueError(f"{node.removeprefix(_WRONG)} (rank {rank})")
        declared = node.partition(" of ")[2]
        first, text = found.setdefault(machine, (rank, declared))
        if text != declared:
            raise ValueError(
                f"the environment variable STRETTO_NODES is {text!r} on rank {first} and {declared!r} on rank {rank} "
                "of the same machine, but must be the same: have the launcher pass it to all ranks"
            )


def _declared_nodes(text: str, world_size: int) -> list[int]:
    """The number of each rank's node, from "2x4" or "3,1"."""
    if found := re.fullmatch(r"([1-9]\d{0,6})x([1-9]\d{0,6})", text):
        declared = int(found[1]) * int(found[2])
        sizes = [int(found[2])] * min(int(found[1]), world_size)
    elif re.fullmatch(r"[1-9]\d{0,6}(,[1-9]\d{0,6})*", text):
        sizes = [int(size) for size in text.split(",")]
        declared = sum(sizes)
    else:
        raise ValueError(
            f"the environment variable STRETTO_NODES is {text!r}, but must be the number of nodes and of ranks on "
            f"each, such as 2x4, or the ranks of each node, such as 3,1; 1x{world_size} would do for this job"
        )
    if declared != world_size:
        raise ValueError(
            f"the environment variable STRETTO_NODES is {text!r}, which declares nodes for {declared} ranks, but the "
            f"job has {world_size}; 1x{world_size} would do"
        )
    return [node for node, size in enumerate(sizes) for _ in range(size)]


def _is_slurm_task(environment: Mapping[str, str]) -> bool:
    """True if the job's ranks are the tasks of a Slurm step, and this one is the task with its number.

    A script that srun starts once and that starts several ranks itself has the variables of one task in all of them.
    """
    pairs = (("SLURM_PROCID", "RANK"), ("SLURM_STEP_NUM_TASKS", "WORLD_SIZE"))
    return is_rank(environment) and all(environment.get(slurm) == environment[name] for slurm, name in pairs)


def _expand_tasks(text: str) -> list[int]:
    """The tasks of each node, from Slurm's short form: "8(x2),4" is 8, 8, 4. Empty for any other text."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            return []
        found += [int(match[1])] * int(match[2] or 1)
    return found


def _integer(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name)
    if text is None:
        return None
    if not text.isdecimal():
        raise ValueError(f"the environment variable {name} is {text!r}, but must be a whole number, at least 0")
    return int(text)

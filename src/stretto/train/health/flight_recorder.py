# SPDX-License-Identifier: Apache-2.0
"""Reads torch's flight recorder: which collectives this rank has entered, and which of them are not finished.

The recorder is a ring buffer of the last collectives of all groups. It records those of gloo and of NCCL from the
groups' creation on if the environment enables it: see `environment`. Point-to-point messages of gloo are not in it.
A dump of the whole buffer takes 30 ms, the counters of all groups take 10 us.
"""

import json
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from stretto.train.health import progress

TIMING = "TORCH_NCCL_ENABLE_TIMING"
SETTINGS = {
    "TORCH_FR_BUFFER_SIZE": "2000",  # entries: the collectives of several steps
    # An event more on the device for each collective of NCCL, and a query of it when it has finished: see device_waits.
    TIMING: "1",
}
OLD_NAMES = {TIMING: "NCCL_ENABLE_TIMING"}  # torch knows them, too


@dataclass(frozen=True)
class OpenCollective:
    """A collective that this rank has entered and that is not finished.

    number: how many collectives the group has had with it. ranks: the members of the group. is_background: a thread
    other than the main one has entered it, such as one that writes checkpoints.
    """

    name: str
    group: str
    group_name: str
    number: int
    ranks: tuple[int, ...]
    is_background: bool = False


def environment(*, times_nccl: bool) -> dict[str, str]:
    """The environment variables that switch the recorder on, without those that the user has set.

    times_nccl: also record how long NCCL's kernels run. Not for steps that a CUDA graph holds: it would capture the
    events, which are not read.
    """
    return {
        name: value
        for name, value in SETTINGS.items()
        if not {name, OLD_NAMES.get(name, name)} & os.environ.keys() and (times_nccl or name != TIMING)
    }


def dump() -> dict[str, Any]:
    """The recorder's contents, {"gloo": ..., "nccl": ...}, as torch gives them: groups, their counters, and entries."""
    return {name: _parse(function(True, False)) for name, function in _functions()}


def nccl_entries() -> list[dict[str, Any]]:
    """The entries of NCCL's collectives, oldest first; none where torch is built without NCCL, or has no recorder."""
    with suppress(RuntimeError, ValueError):
        for name, function in _functions():
            if name == "nccl":
                return list(_parse(function(True, False)).get("entries", ()))
    return []


def counters() -> dict[str, int]:
    """How many collectives each group has had, by a name of the group that holds in this process only."""
    found = {}
    for name, function in _functions():
        for group, status in _parse(function(False, False)).get("pg_status", {}).items():
            found[f"{name} {group}"] = int(status["last_enqueued_collective"])
            # Finished collectives are counted too: they are progress of their group.
            found[f"{name} {group} finished"] = int(status["last_completed_collective"])
    return found


def find_collectives() -> tuple[list[OpenCollective], dict[str, int]]:
    """The unfinished collectives, the last one of each group, and how many each group has had, by the groups' names."""
    entered: dict[str, int] = {}
    open_: dict[str, OpenCollective] = {}
    # Threads of the autograd engine are unknown to Python's module, or dummies there.
    others = {
        thread.ident
        for thread in threading.enumerate()
        if thread is not threading.main_thread() and not isinstance(thread, threading._DummyThread)
    }
    ended = progress.writers - {thread.ident for thread in threading.enumerate()}
    axes = {name: group for group, name in _groups().items()}
    for recorded in dump().values():
        for entry in recorded.get("entries", ()):
            if entry["is_p2p"]:
                continue
            group_name, description = entry["process_group"]
            number = entry["collective_seq_id"]
            entered[group_name] = max(number, entered.get(group_name, 0))
            thread = int(entry.get("thread_id", 0))
            if entry["retired"] or entry["state"] == "completed" or thread in ended:  # its wait has failed
                continue
            group = axes.get(group_name)
            open_[group_name] = OpenCollective(
                entry["profiling_name"].partition(":")[2] or entry["profiling_name"],
                _describe_group(group_name, description),
                group_name,
                number,
                () if group is None else tuple(dist.get_process_group_ranks(group)),
                is_background=thread in others,
            )
    return sorted(open_.values(), key=lambda each: each.number), entered


_names: dict[str, str] = {}


def name_groups(names: Mapping[str, str]) -> None:
    """Say what groups are called in messages: `names` maps torch's names of groups to a grid's axes, for example."""
    _names.update(names)


def _describe_group(group_name: str, description: str) -> str:
    if group_name in _names:
        return _names[group_name]
    return "world" if description == "default_pg" else description.removeprefix("mesh_") or group_name


def _groups() -> dict[dist.ProcessGroup, str]:
    """This process's groups and their names."""
    with suppress(AttributeError):  # a private list, which another version of torch may keep elsewhere
        return dict(dist.distributed_c10d._world.pg_names)
    return {}


def _functions() -> list[tuple[str, Any]]:
    bindings = getattr(getattr(__import__("torch")._C, "_distributed_c10d", None), "__dict__", {})
    known = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}
    return [(name, bindings[function]) for name, function in known.items() if function in bindings]


def _parse(text: str | bytes) -> dict[str, Any]:
    found = json.loads(text)
    return found if isinstance(found, dict) else {}

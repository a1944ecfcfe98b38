"""Ranks say what they call before anything is launched: kernels that wait for each other cannot find out themselves.

Each new kind of call of a group is said once, through the group's store; with STRETTO_DEBUG=1 every call is.
"""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from stretto.memory import is_debugging, tell
from stretto.ops.workspace import find_group, find_known

_MOST_KNOWN = 4096
_PATIENCE = 300.0  # seconds: first calls may be minutes apart, while a rank loads or compiles


@dataclass
class _Said:
    count: int = 0
    known: set[str] = field(default_factory=set)


def require_agreement(said: str, group: str, device: torch.device) -> None:
    """Compare what this rank calls with what the others do; at a kind of call that is new to the group, on all ranks.

    ValueError where another rank calls something else, PeerError where one does not come within five minutes.
    """
    kept = find_known(group, device, "calls", _Said)
    if said in kept.known and not is_debugging():
        return
    kept.count += 1
    members = find_group(group)
    heard = tell(said, members, f"stretto ops {device.type}", kept.count, _PATIENCE)
    rank = dist.get_rank(members)
    for peer, other in enumerate(heard):
        if other != said:
            raise ValueError(
                f"ranks of a group make the same calls, with the same shapes and in the same order: rank {rank} calls "
                f"{said}; rank {peer} calls {other}"
            )
    if len(kept.known) >= _MOST_KNOWN:
        kept.known.clear()
    kept.known.add(said)

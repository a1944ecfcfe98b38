"""Ranks say what they call before anything is launched: kernels that wait for each other cannot find out themselves.

Each new kind of call of a group is said once, through the group's store; with STRETTO_DEBUG=1 every call is.
"""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from stretto.memory import failures, group_timeout, is_debugging, tell
from stretto.ops.workspace import find_group, find_known

_MOST_KNOWN = 4096
_BY_TMA = ", by TMA"


@dataclass
class _Said:
    count: int = 0
    known: dict[str, bool] = field(default_factory=dict)


def require_agreement(said: str, by_tma: bool, group: str, device: torch.device) -> bool:
    """Compare what this rank calls with what the others do; at a kind of call that is new to the group, on all ranks.

    by_tma: whether TMA takes this rank's operands, whose addresses may differ from other ranks'; returns whether it
    took all ranks', at the first call of this kind. ValueError where another rank calls something else, PeerError where
    one does not come within the group's time limit.
    """
    kept = find_known(group, device, "calls", _Said)
    if said in kept.known and not is_debugging():
        return kept.known[said]
    failures.check()  # before ranks are waited for that may never come
    members = find_group(group)
    told = said + _BY_TMA if by_tma else said
    heard = tell(told, members, f"stretto ops {device.type}", kept.count + 1, group_timeout(members))
    kept.count += 1
    rank = dist.get_rank(members)
    for peer, other in enumerate(heard):
        if other.removesuffix(_BY_TMA) != said:
            raise ValueError(
                f"ranks of a group make the same calls, with the same shapes and in the same order: rank {rank} calls "
                f"{told}; rank {peer} calls {other}"
            )
    if len(kept.known) >= _MOST_KNOWN:
        kept.known.clear()
    kept.known[said] = all(other.endswith(_BY_TMA) for other in heard)
    return kept.known[said]

"""With STRETTO_DEBUG=1 all ranks of a group say what they call, before any of it has begun.

They say it through the group's store, so calls that gloo or NCCL is to run are compared too, and so are calls by
schedules with calls by none. `agreement` compares what ranks run by one schedule, always.
"""

import re

from torch.distributed.distributed_c10d import _resolve_process_group

from stretto.collectives.backend.agreement import DisagreementError
from stretto.collectives.backend.calls import BackendCall
from stretto.collectives.backend.runner import Member
from stretto.memory import store_all_gather

# What not all ranks call, and a barrier with a time limit of its own, which names ranks itself.
_OF_SOME_RANKS = {"send", "recv", "recv_anysource", "monitored_barrier"}
_WITH_ROOT = {"broadcast", "reduce"}  # c10d does not say it of others
_MOST_SHAPES = 4


class DebugCheck:
    """The calls that a group's ranks have compared so far. All ranks have one, or none has."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._calls = 0

    def require_same(self, call: BackendCall) -> None:
        """Wait for what all ranks call. Nothing is done on a device.

        DisagreementError, on all ranks, where some call something else, and the next call may go on; PeerError for a
        rank that calls nothing within the call's time limit.
        """
        if call.operation in _OF_SOME_RANKS:
            return
        self._calls += 1
        group = _resolve_process_group(self._member.name)  # type: ignore[arg-type]  # a GroupName, which is a str
        heard = store_all_gather(describe(call), group, "stretto calls", self._calls, call.timeout)
        if len(set(_ignore_given_sizes(heard))) == 1:
            return
        callers: dict[str, list[str]] = {}
        for rank, said in enumerate(heard):
            callers.setdefault(said, []).append(str(rank))
        raise DisagreementError(
            "ranks of a group make the same calls, with the same shapes and in the same order, and this one (the "
            f"group's call {self._calls}) differs: "
            + "; ".join(f"{said} on rank {', '.join(ranks)}" for said, ranks in callers.items())
        )


def describe(call: BackendCall) -> str:
    """What must be the same on all ranks, for people, on one line."""
    root = f" with root {call.root}" if call.operation in _WITH_ROOT else ""
    reduction = f" {call.reduction}" if call.reduction else ""
    dtype = "" if call.dtype is None else f" {str(call.dtype)[6:]}"
    return f"{call.operation}{reduction}{root}{_describe_shapes(call)}{dtype} on {call.device_type}"


def _describe_shapes(call: BackendCall) -> str:
    if call.operation == "alltoall":
        return ""  # each pair of ranks has its own
    # Parts of a list may have several sizes: then the list is what all ranks have alike.
    tensors = (call.outputs if call.operation == "allgather" else call.inputs) or call.outputs
    shapes = [str(list(tensor.shape)) for tensor in tensors[:_MOST_SHAPES]]
    if call.note.endswith("sizes"):
        shapes = [re.sub(r"^\[\d+", "[*", shape) for shape in shapes]
    if rest := tensors[_MOST_SHAPES:]:
        shapes.append(f"{len(rest)} more of {sum(tensor.numel() for tensor in rest)} elements")
    return f" of {', '.join(shapes)}" if shapes else ""


def _ignore_given_sizes(heard: list[str]) -> list[str]:
    """Without first dims, if any rank gives the sizes of an all-to-all's parts: another may leave its own out."""
    return [re.sub(r" \[\d+", " [*", said) for said in heard] if any(" [*" in said for said in heard) else heard

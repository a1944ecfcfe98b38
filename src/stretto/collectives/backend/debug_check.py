# SPDX-License-Identifier: Apache-2.0
"""STRETTO_DEBUG=1: compares each call on all ranks of a group before any part of it starts.

Ranks exchange descriptions through the group's store, so this covers calls that gloo or NCCL run, and calls that a
schedule runs on some ranks only. `agreement` always compares what ranks run by one schedule.
"""

import re

from torch.distributed.distributed_c10d import _resolve_process_group

from stretto.collectives.backend.agreement import DisagreementError
from stretto.collectives.backend.calls import NON_COLLECTIVE, BackendCall
from stretto.collectives.backend.runner import Member
from stretto.memory import store_all_gather

_WITH_ROOT = {"broadcast", "reduce"}  # c10d passes a root only for these
_MAX_SHAPES = 4


class DebugCheck:
    """Compares the calls of one group. Either all ranks have one, or none has."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._calls = 0

    def require_same(self, call: BackendCall) -> None:
        """Wait for the descriptions of all ranks' calls, and compare them. Uses no device.

        DisagreementError, on all ranks, if they differ; later calls remain possible. PeerError for a rank that calls
        nothing within the call's time limit.
        """
        if call.operation in NON_COLLECTIVE:
            return
        self._calls += 1
        group = _resolve_process_group(self._member.name)  # type: ignore[arg-type]  # a GroupName, which is a str
        descriptions = store_all_gather(describe(call), group, "stretto calls", call.timeout)
        if len(set(_ignore_given_sizes(descriptions))) == 1:
            return
        callers: dict[str, list[str]] = {}
        for rank, description in enumerate(descriptions):
            callers.setdefault(description, []).append(str(rank))
        raise DisagreementError(
            "ranks of a group make the same calls, with the same shapes and in the same order, and this one (the "
            f"group's call {self._calls}) differs: "
            + "; ".join(f"{description} on rank {', '.join(ranks)}" for description, ranks in callers.items())
        )


def describe(call: BackendCall) -> str:
    """One line for people with everything that must be the same on all ranks."""
    root = f" with root {call.root}" if call.operation in _WITH_ROOT else ""
    reduction = f" {call.reduction}" if call.reduction else ""
    dtype = "" if call.dtype is None else f" {str(call.dtype)[6:]}"
    return f"{call.operation}{reduction}{root}{_describe_shapes(call)}{dtype} on {call.device_type}"


def _describe_shapes(call: BackendCall) -> str:
    if call.operation == "alltoall":
        return ""  # each pair of ranks has its own sizes
    # An all-gather's list may have parts of several sizes; all ranks have the same list.
    tensors = (call.outputs if call.operation == "allgather" else call.inputs) or call.outputs
    shapes = [str(list(tensor.shape)) for tensor in tensors[:_MAX_SHAPES]]
    if call.note.endswith("sizes"):
        shapes = [re.sub(r"^\[\d+", "[*", shape) for shape in shapes]
    if rest := tensors[_MAX_SHAPES:]:
        shapes.append(f"{len(rest)} more of {sum(tensor.numel() for tensor in rest)} elements")
    return f" of {', '.join(shapes)}" if shapes else ""


def _ignore_given_sizes(descriptions: list[str]) -> list[str]:
    """Drop first dims if any rank gives explicit sizes of an all-to-all's parts: another rank may omit its own."""
    if not any(" [*" in description for description in descriptions):
        return descriptions
    return [re.sub(r" \[\d+", " [*", description) for description in descriptions]

# SPDX-License-Identifier: Apache-2.0
"""Checks, before a schedule runs a call on CPU tensors, that all ranks make the same call.

Who writes: a rank writes its call's description into its own buffer, then increments signal BEGUN at all peers. Who
waits: every rank waits for every peer's BEGUN to reach this call's number, then reads all descriptions. Why the buffer
may be reused: descriptions alternate between two halves, and a rank writes the half of call n again for call n + 2,
when all peers have begun call n + 1 and so have read those of call n. Since a rank begins a call only when it has
finished the previous one, the slots of a schedule's FIFOs are free once all ranks have arrived here.
"""

import json

import torch
import torch.distributed as dist

from stretto.memory import Backoff, HostMemory, PeerError, allocate

_BYTES = 4096
_REASON = 2 * _BYTES  # offset of the reason why a rank gave up
_SECONDS_BETWEEN_LOOKS = 0.1
_BEGUN, _GAVE_UP = 0, 1
_MAX_TEXT = 1000
_GIVING_UP = " gave up: "


class DisagreementError(ValueError):
    """Ranks make different calls, or one of them cannot run its part. All ranks raise it, and none has started."""


class Agreement:
    """A barrier of a group's ranks at which they compare their calls, used by one thread. All construct it together."""

    def __init__(self, group: dist.ProcessGroup | None, timeout: float) -> None:
        memory = allocate(3 * _BYTES, group, signals=2, timeout=timeout)
        assert isinstance(memory, HostMemory)
        self._memory = memory
        self._calls = 0

    def wait_and_compare(self, call: str, description: dict[str, object], timeout: float) -> None:
        """Wait until all ranks have arrived with the same description; `call`: one line for error messages.

        DisagreementError if descriptions differ, or one has the key "refused"; later calls remain possible. PeerError
        for a rank that does not arrive within `timeout` seconds, has died, or gave up before.
        """
        memory = self._memory
        self._calls += 1
        start = self._calls % 2 * _BYTES
        _write(memory.buffer()[start : start + _BYTES], description)
        for peer in range(memory.world_size):
            memory.signal(peer, _BEGUN)
        self._await_all(call, timeout)
        descriptions = [_read(memory.buffer(peer)[start : start + _BYTES]) for peer in range(memory.world_size)]
        _compare(call, memory.rank, descriptions)

    def give_up(self, why: str) -> None:
        """Notify all ranks that this one no longer runs schedules, and of the reason."""
        memory = self._memory
        _write(memory.buffer()[_REASON:], {"why": why})
        for peer in range(memory.world_size):
            memory.signal(peer, _GAVE_UP)

    def find_losses(self) -> list[str]:
        """Lines for people: which ranks have died, and which gave up and why."""
        memory, peers = self._memory, range(self._memory.world_size)
        others = [peer for peer in peers if peer != memory.rank]
        found = [f"the process of rank {peer} has ended" for peer in others if memory.has_ended(peer)]
        reasons = {peer: str(_read(memory.buffer(peer)[_REASON:])["why"]) for peer in others if self._gave_up(peer)}
        # Most ranks give up because another one did, and only repeat its reason.
        first = {peer: why for peer, why in reasons.items() if _GIVING_UP not in why}
        return found + [f"rank {peer}{_GIVING_UP}{why}" for peer, why in (first or reasons).items()]

    def close(self) -> None:
        self._memory.close()

    def _gave_up(self, peer: int) -> bool:
        return self._memory.has_reached(peer, _GAVE_UP, 1)

    def _await_all(self, call: str, timeout: float) -> None:
        memory = self._memory
        backoff = Backoff()
        looked = 0.0
        missing = list(range(memory.world_size))
        while True:
            missing = [peer for peer in missing if not memory.has_reached(peer, _BEGUN, self._calls)]
            if not missing:
                break
            waited = backoff.pause()
            if waited - looked < _SECONDS_BETWEEN_LOOKS:
                continue
            looked = waited
            losses = self.find_losses()
            # A rank that has died or given up may have begun the call before.
            missing = [peer for peer in missing if not memory.has_reached(peer, _BEGUN, self._calls)]
            if missing and (losses or waited > timeout):
                names = ", ".join(map(str, missing))
                why = "; ".join(losses) or f"it did not come within {timeout:g} s"
                raise PeerError(f"rank {memory.rank} of {memory.world_size} waits for rank {names} in {call}: {why}")
        if any(map(self._gave_up, range(memory.world_size))):
            raise PeerError(f"rank {memory.rank} of {memory.world_size} in {call}: {'; '.join(self.find_losses())}")


def _compare(call: str, rank: int, descriptions: list[dict[str, object]]) -> None:
    for peer, description in enumerate(descriptions):
        if "refused" in description:
            raise DisagreementError(f"rank {peer} cannot run its part of {call}: {description['refused']}")
    own = descriptions[rank]
    # All ranks name the same pair: rank 0, and the first rank that differs from it.
    for peer, description in enumerate(descriptions):
        # Compare the operation first: calls of different operations also differ otherwise, which is less informative.
        for key in sorted(descriptions[0].keys() | description.keys(), key=lambda key: (key != "operation", key)):
            first, second = descriptions[0].get(key), description.get(key)
            if first != second:
                raise DisagreementError(
                    f"all ranks must call the same: {key} is {first} on rank 0 and {second} on rank {peer} "
                    f"(rank {rank} called {own.get('operation')}, the group's call {own.get('call')} of a schedule)"
                )


def _write(place: torch.Tensor, description: dict[str, object]) -> None:
    short = {key: value[:_MAX_TEXT] if isinstance(value, str) else value for key, value in description.items()}
    text = json.dumps(short).encode()
    if len(text) > _BYTES - 4:
        text = json.dumps({"refused": "what it calls is too long to tell"}).encode()
    framed = len(text).to_bytes(4, "little") + text
    place[: len(framed)] = torch.frombuffer(bytearray(framed), dtype=torch.uint8)


def _read(place: torch.Tensor) -> dict[str, object]:
    framed = place.numpy().tobytes()
    size = int.from_bytes(framed[:4], "little")
    return json.loads(framed[4 : 4 + size])

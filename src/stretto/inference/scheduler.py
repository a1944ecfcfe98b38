# SPDX-License-Identifier: Apache-2.0
"""Decides which tokens of which requests a step computes, and in which pages of the cache they are kept."""

from collections import deque
from dataclasses import dataclass

from stretto.inference.requests import Request

SCRATCH_PAGE = 0
"""The page of rows that only fill a batch."""


@dataclass(eq=False)
class Place:
    """A running request's slot in the batch and its pages.

    computed: tokens of its prompt that were launched. drawn: tokens that were launched, of which the host may not know
    the last ones yet.
    """

    request: Request
    slot: int
    pages: list[int]
    computed: int = 0
    drawn: int = 0


@dataclass(frozen=True)
class StepPart:
    """The tokens [start, start + count) of a request that a step computes. ends_prompt, or a token that was drawn
    before: the step draws the next token of the request (`draws`)."""

    place: Place
    start: int
    count: int
    draws: bool

    @property
    def is_prompt(self) -> bool:
        """True for tokens of the prompt, which the host knows."""
        return self.start < len(self.place.request.prompt)


class Scheduler:
    """Runs requests first come, first served: each reserves the pages of all its tokens when it joins, so that none
    ever has to leave again before it is done.

    slots: requests at a time. pages: of the cache, of `page` tokens. chunk: tokens of a step: one for each running
    request, the others for prompts.
    """

    def __init__(self, slots: int, pages: int, page: int, chunk: int) -> None:
        self._page, self._chunk = page, chunk
        self._counts = slots, pages
        self.clear()

    def submit(self, request: Request) -> None:
        """Queue a request."""
        self._queue.append(request)

    def admit(self) -> list[Place]:
        """Free the slots and pages of requests that are done, and let waiting ones join while there is room; returns
        their places."""
        for place in self._running:
            if place.request.is_done:
                self._slots.append(place.slot)
                self._pages += reversed(place.pages)
        self._running[:] = [place for place in self._running if not place.request.is_done]
        joined = []
        while self._queue and self._slots:
            if self._queue[0].is_done:
                self._queue.popleft()
                continue
            needed = -(-self._queue[0].positions // self._page)
            if needed > len(self._pages):
                break
            pages = [self._pages.pop() for _ in range(needed)]
            joined.append(Place(self._queue.popleft(), self._slots.pop(), pages))
        self._running += joined
        return joined

    def next_parts(self) -> list[StepPart]:
        """The parts of the next step, which count as launched from now on."""
        parts = []
        for place in self._running:
            if place.computed == len(place.request.prompt) and _has_work(place):
                parts.append(StepPart(place, place.computed + place.drawn - 1, 1, draws=True))
        left = max(1, self._chunk - len(parts))
        for place in self._running:
            length = len(place.request.prompt)
            count = min(left, length - place.computed)
            if count > 0:
                parts.append(StepPart(place, place.computed, count, draws=place.computed + count == length))
                left -= count
        for part in parts:
            part.place.computed += part.count if part.is_prompt else 0
            part.place.drawn += part.draws
        return parts

    def clear(self) -> None:
        """Drop all requests: ranks whose requests differed agree again on the next slots and pages."""
        slots, pages = self._counts
        self._slots = list(reversed(range(slots)))
        self._pages = list(reversed(range(SCRATCH_PAGE + 1, SCRATCH_PAGE + 1 + pages)))
        self._queue: deque[Request] = deque()
        self._running: list[Place] = []


def _has_work(place: Place) -> bool:
    return not place.request.is_done and place.drawn < place.request.max_new_tokens

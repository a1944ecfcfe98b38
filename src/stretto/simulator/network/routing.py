# SPDX-License-Identifier: Apache-2.0
"""Finds shortest paths in a network: breadth-first searches, then paths that differ as early as they can.

Where no vertex has many links, as in a torus, one search from a target serves all sources. Around large switches each
pair is searched from both ends, which meet at a switch and never look through its links.
"""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial

MAX_ROUTES = 8  # of one pair of devices
_MANY_LINKS = 32  # of a vertex
_KEPT_SEARCHES = 4096


class ShortestPaths:
    """Shortest paths, by number of links, in a directed graph of `vertices` and links (source, target)."""

    def __init__(self, vertices: int, links: Sequence[tuple[int, int]]) -> None:
        self._vertices = vertices
        self._links = links
        self._leaving: list[list[int]] = [[] for _ in range(vertices)]
        self._entering: list[list[int]] = [[] for _ in range(vertices)]
        self._direct: dict[tuple[int, int], list[int]] = {}
        for number, (source, target) in enumerate(links):
            self._leaving[source].append(number)
            self._entering[target].append(number)
            self._direct.setdefault((source, target), []).append(number)
        self._has_large_switches = max(map(len, self._leaving)) > _MANY_LINKS
        self._distances_to = lru_cache(maxsize=_KEPT_SEARCHES)(partial(self._search, is_reverse=True))

    def find(self, source: int, target: int, most: int) -> tuple[tuple[int, ...], ...]:
        """At most this many different paths, as indices of links; () if there is none.

        Path k takes, at the first vertex with several next links, the (k mod their number)-th, and so on with the
        quotient: the paths of a small `most` leave the source by different links.
        """
        if direct := self._direct.get((source, target)):
            return tuple((number,) for number in direct[:most])
        if self._has_large_switches:
            following = self._search_pair(source, target)
            if not following:
                return ()
            options = following.__getitem__
        else:
            distances = self._distances_to(target)
            if distances[source] < 0:
                return ()

            @cache
            def options(vertex: int) -> list[int]:
                closer = distances[vertex] - 1
                return [number for number in self._leaving[vertex] if distances[self._links[number][1]] == closer]

        found: dict[tuple[int, ...], None] = {}
        index, limit = 0, 1
        while index < limit and len(found) < most:
            path, choices = self._walk(source, target, index, options)
            found[path] = None
            limit = max(limit, min(choices, 16 * most))  # a path with fewer branches than others comes twice
            index += 1
        return tuple(found)

    def reachable(self, source: int, *, is_reverse: bool = False) -> list[bool]:
        """Return which vertices a vertex reaches, or, in reverse, which reach it."""
        return [distance >= 0 for distance in self._search(source, is_reverse=is_reverse)]

    def _walk(
        self, source: int, target: int, index: int, options: Callable[[int], list[int]]
    ) -> tuple[tuple[int, ...], int]:
        """Path number `index`, and the product of the numbers of choices along it."""
        path, vertex, choices = [], source, 1
        while vertex != target:
            numbers = options(vertex)
            index, choice = divmod(index, len(numbers))
            choices *= len(numbers)
            path.append(numbers[choice])
            vertex = self._links[numbers[choice]][1]
        return tuple(path), choices

    def _search(self, start: int, *, is_reverse: bool) -> list[int]:
        """The distance of every vertex from the start in links, or to it in reverse; -1 where there is no path."""
        links, end = (self._entering, 0) if is_reverse else (self._leaving, 1)
        distances = [-1] * self._vertices
        distances[start] = 0
        level, distance = [start], 0
        while level:
            distance += 1
            following = []
            for vertex in level:
                for number in links[vertex]:
                    other = self._links[number][end]
                    if distances[other] < 0:
                        distances[other] = distance
                        following.append(other)
            level = following
        return distances

    def _search_pair(self, source: int, target: int) -> dict[int, list[int]]:
        """List for vertices on shortest paths the next links, in order of their numbers; empty where there is no path.

        The end whose next level has fewer links is searched on, until the two meet.
        """
        ahead: list[dict[int, None]] = [{source: None}]  # levels of vertices, from the source
        seen_ahead = {source}
        following: dict[int, list[int]] = {target: []}  # what was searched back from the target
        behind = [target]
        while not (meeting := [vertex for vertex in ahead[-1] if vertex in following]):
            forward = sum(len(self._leaving[vertex]) for vertex in ahead[-1])
            backward = sum(len(self._entering[vertex]) for vertex in behind)
            if not forward or not backward:
                return {}
            if forward <= backward:
                level: dict[int, None] = {}
                for vertex in ahead[-1]:
                    for number in self._leaving[vertex]:
                        other = self._links[number][1]
                        if other not in seen_ahead:
                            level[other] = None
                seen_ahead.update(level)
                ahead.append(level)
            else:
                found: dict[int, list[int]] = {}
                for vertex in behind:
                    for number in self._entering[vertex]:
                        other = self._links[number][0]
                        if other not in following:
                            found.setdefault(other, []).append(number)
                for numbers in found.values():
                    numbers.sort()
                following |= found
                behind = list(found)
        leads = set(meeting)
        for level in reversed(ahead[:-1]):
            for vertex in level:
                numbers = [number for number in self._leaving[vertex] if self._links[number][1] in leads]
                if numbers:
                    following[vertex] = numbers
            leads = {vertex for vertex in level if vertex in following}
        return following

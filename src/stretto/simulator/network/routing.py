# SPDX-License-Identifier: Apache-2.0
"""Finds shortest paths in a network: searches from both ends, then takes paths that differ as early as they can."""

from collections.abc import Sequence

MOST_ROUTES = 8  # of one pair of devices


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

    def find(self, source: int, target: int, most: int) -> tuple[tuple[int, ...], ...]:
        """At most so many different paths, as numbers of links; () where there is none.

        Path k takes, at the first vertex with several next links, the (k mod their number)-th, and so on with the
        quotient: the paths of a small `most` leave the source by different links.
        """
        if direct := self._direct.get((source, target)):
            return tuple((number,) for number in direct[:most])
        following = self._search(source, target)
        if not following:
            return ()
        found: dict[tuple[int, ...], None] = {}
        index, limit = 0, most
        while index < limit and len(found) < most:
            path, choices = self._walk(source, target, index, following)
            found[path] = None
            if index == 0:
                limit = min(choices, 16 * most)  # a path with fewer branches than the first one comes twice
            index += 1
        return tuple(found)

    def reachable(self, source: int, *, is_reverse: bool = False) -> list[bool]:
        """Which vertices a vertex reaches, or, in reverse, which reach it."""
        links = self._entering if is_reverse else self._leaving
        end = 0 if is_reverse else 1
        reached = [False] * self._vertices
        reached[source] = True
        level = [source]
        while level:
            following = []
            for vertex in level:
                for number in links[vertex]:
                    other = self._links[number][end]
                    if not reached[other]:
                        reached[other] = True
                        following.append(other)
            level = following
        return reached

    def _walk(
        self, source: int, target: int, index: int, following: dict[int, list[int]]
    ) -> tuple[tuple[int, ...], int]:
        """Path number `index`, and the product of the numbers of choices along it."""
        path, vertex, choices = [], source, 1
        while vertex != target:
            options = following[vertex]
            index, choice = divmod(index, len(options))
            choices *= len(options)
            path.append(options[choice])
            vertex = self._links[options[choice]][1]
        return tuple(path), choices

    def _search(self, source: int, target: int) -> dict[int, list[int]]:
        """For vertices on shortest paths the next links, in order of their numbers; empty where there is no path.

        The end whose next level has fewer links is searched on, until the two meet: a switch that joins all nodes of a
        cluster is reached from both sides, and its links are never looked through.
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

# SPDX-License-Identifier: Apache-2.0
"""Finds shortest paths in a network: one breadth-first search a target, then paths that differ as early as they can."""

from collections.abc import Sequence
from functools import lru_cache

MOST_ROUTES = 8  # of one pair of devices
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
        self._distances_to = lru_cache(maxsize=_KEPT_SEARCHES)(self._search_back)

    def find(self, source: int, target: int, most: int) -> tuple[tuple[int, ...], ...]:
        """At most so many different paths, as numbers of links; () where there is none.

        Path k takes, at the first vertex with several next links, the (k mod their number)-th, and so on with the
        quotient: the paths of a small `most` leave the source by different links.
        """
        if direct := self._direct.get((source, target)):
            return tuple((number,) for number in direct[:most])
        distances = self._distances_to(target)
        if distances[source] < 0:
            return ()
        found: dict[tuple[int, ...], None] = {}
        index, limit = 0, most
        while index < limit:
            path, choices = self._walk(source, target, index, distances)
            found[path] = None
            if index == 0:
                limit = min(choices, 16 * most)  # a path with fewer branches than the first one comes twice
            index += 1
            if len(found) == most:
                break
        return tuple(found)

    def reachable(self, source: int, *, is_reverse: bool = False) -> list[bool]:
        """Which vertices a vertex reaches, or, in reverse, which reach it."""
        if is_reverse:
            return [distance >= 0 for distance in self._search_back(source)]
        reached = [False] * self._vertices
        reached[source] = True
        level = [source]
        while level:
            following = []
            for vertex in level:
                for number in self._leaving[vertex]:
                    target = self._links[number][1]
                    if not reached[target]:
                        reached[target] = True
                        following.append(target)
            level = following
        return reached

    def _walk(self, source: int, target: int, index: int, distances: list[int]) -> tuple[tuple[int, ...], int]:
        """Path number `index`, and the product of the numbers of choices along it."""
        path, vertex, choices = [], source, 1
        while vertex != target:
            closer = distances[vertex] - 1
            options = [number for number in self._leaving[vertex] if distances[self._links[number][1]] == closer]
            index, choice = divmod(index, len(options))
            choices *= len(options)
            path.append(options[choice])
            vertex = self._links[options[choice]][1]
        return tuple(path), choices

    def _search_back(self, target: int) -> list[int]:
        """The distance of every vertex to the target in links; -1 where there is no path."""
        distances = [-1] * self._vertices
        distances[target] = 0
        level, distance = [target], 0
        while level:
            distance += 1
            following = []
            for vertex in level:
                for number in self._entering[vertex]:
                    source = self._links[number][0]
                    if distances[source] < 0:
                        distances[source] = distance
                        following.append(source)
            level = following
        return distances

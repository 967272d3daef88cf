"""The best choice of draft nodes by expert cost, found offline: what `path_greedy` is held against.

For a fixed rate m the prefix-closed S that maximises 1 + sum P(v) - m T(S) is a closure of largest
weight (project selection, Picard 1976): nodes need their parents and their experts, and a minimum
cut of that graph is the best S. Dinkelbach's method takes m to the rate of the S that was found,
until it is the best rate. There is no bound on the nodes: with one the problem is NP-hard.
"""

import math
from collections import deque

from dejax.spec.ecospec import Candidates


def best_rate(candidates: Candidates) -> tuple[list[int], float]:
    """Rows, ascending, of a choice with the largest rate of all, and that rate."""
    rows: list[int] = []
    rate = candidates.rate(rows)
    while True:
        found = _closure(candidates, rate)
        better = candidates.rate(found)
        if better <= rate * (1 + 1e-12):
            return rows, rate
        rows, rate = found, better


def _closure(candidates: Candidates, rate: float) -> list[int]:
    """Rows of the prefix-closed choice that maximises sum P(v) - rate T."""
    count = len(candidates.parents)
    # Experts that the same nodes use are one vertex: they are paid for together.
    groups: dict[tuple[int, ...], int] = {}
    users: dict[int, list[int]] = {}
    for row, experts in enumerate(candidates.experts.tolist(), start=1):
        for expert in set(experts) - {-1}:
            users.setdefault(expert, []).append(row)
    for who in map(tuple, users.values()):
        groups[who] = groups.get(who, 0) + 1
    source, sink = 0, count + len(groups) + 1
    flow = _Flow(sink + 1)
    for row, (parent, gain) in enumerate(
        zip(candidates.parents, candidates.gains.tolist(), strict=True), start=1
    ):
        weight = gain - rate * candidates.row
        if weight > 0:
            flow.edge(source, row, weight)
        else:
            flow.edge(row, sink, -weight)
        if parent:
            flow.edge(row, parent, math.inf)
    for group, (who, size) in enumerate(groups.items(), start=count + 1):
        flow.edge(group, sink, rate * candidates.expert * size)
        for row in who:
            flow.edge(row, group, math.inf)
    return sorted(row for row in flow.source_side(source, sink) if 1 <= row <= count)


class _Flow:
    """Maximum flow along shortest paths (Edmonds and Karp), for a few hundred vertices."""

    def __init__(self, vertices: int) -> None:
        self._edges: list[list[int]] = [[] for _ in range(vertices)]  # even: forth, odd: back
        self._to: list[int] = []
        self._left: list[float] = []

    def edge(self, start: int, end: int, capacity: float) -> None:
        for vertex, other, room in ((start, end, capacity), (end, start, 0.0)):
            self._edges[vertex].append(len(self._to))
            self._to.append(other)
            self._left.append(room)

    def source_side(self, source: int, sink: int) -> list[int]:
        """The vertices on the source's side of a minimum cut."""
        while True:
            came = {source: -1}  # vertex -> the edge that it was reached by
            queue = deque([source])
            while queue and sink not in came:
                for edge in self._edges[queue.popleft()]:
                    if self._left[edge] > 1e-15 and self._to[edge] not in came:
                        came[self._to[edge]] = edge
                        queue.append(self._to[edge])
            if sink not in came:
                return list(came)
            path, vertex = [], sink
            while vertex != source:
                path.append(came[vertex])
                vertex = self._to[path[-1] ^ 1]
            room = min(self._left[edge] for edge in path)
            for edge in path:
                self._left[edge] -= room
                self._left[edge ^ 1] += room

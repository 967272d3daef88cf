"""The routes that a verification will have, known before it: what no real system has.

A trained predictor of experts can at best say what the target's own routers will choose. That is
measured by asking them: a target of its own, every expert resident, passes over all nodes of a
tree before some of them are chosen. What that takes is left out of the decode's times, and a node
that was seen once is not passed over again; so a decode is best timed when it is made again.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

from dejax.shapes import Pair
from dejax.spec.tree import Node
from dejax.target import Target
from infer.buckets import ROW_BUCKETS
from infer.resident import ResidentEngine, ResidentExperts


class TrueRoutes:
    """Foresees the routes of a target: `infer.tree_drafter.Foresee`.

    Attributes:
      passes: trees that it had to pass over.
    """

    def __init__(self, target: Target, experts: ResidentExperts, capacity: int) -> None:
        self._engine = ResidentEngine(target, experts, None, capacity)
        self._known: dict[tuple[int, ...], frozenset[Pair]] = {}  # by all tokens up to the row's
        self._cached: list[int] = []  # tokens whose KV the engine holds
        self.passes = 0

    def __call__(
        self, tokens: Sequence[int], nodes: Sequence[Node]
    ) -> tuple[frozenset[Pair], list[Node]]:
        """Routes of the pending token's row, and the nodes with those of theirs."""
        paths = [tuple(tokens)]
        for node in nodes:
            paths.append((*paths[node.parent], node.token))
        if not all(path in self._known for path in paths):
            found = self._pass(list(tokens), nodes)
            self._known |= zip(paths, found, strict=True)
        root, *routes = (self._known[path] for path in paths)
        return root, [replace(n, routes=own) for n, own in zip(nodes, routes, strict=True)]

    def _pass(self, tokens: list[int], nodes: Sequence[Node]) -> Sequence[frozenset[Pair]]:
        """Routes of the pending token's row and of every node's.

        Tokens that were committed since the last pass are rows of this one, before the tree.
        """
        both = zip(self._cached, tokens[:-1], strict=False)
        start = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))
        if not start:
            self._engine.begin()
        new = tokens[start:]
        if len(new) + len(nodes) > ROW_BUCKETS[-1]:
            self._engine.prefill(new[:-1], start=start)
            start, new = len(tokens) - 1, new[-1:]
        pending = len(new) - 1
        parents = [*range(-1, pending), *(pending + node.parent for node in nodes)]
        rows = [*new, *(node.token for node in nodes)]
        routes = self._engine.target_rows(rows, start=start, parents=parents).routes
        self._cached, self.passes = tokens, self.passes + 1
        return routes[pending:]

"""The static tree that emits tokens fastest, by dynamic programming (Sequoia, arXiv 2402.12374).

With p_j the probability that the j-th child of an accepted row is the one accepted, a tree emits
1 + the sum over its nodes of the product of p along the path. A row of rank j under its parent is
worth p_j times what it would be worth as a root, so the best tree of m rows is made of best trees
of fewer.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class StaticTree:
    """A tree, as parents breadth first; what it emits a round, and the seconds a token costs."""

    parents: tuple[int, ...]
    tokens_per_round: float
    seconds_per_token: float


def best_static_tree(
    acceptance: Sequence[float],
    *,
    draft_seconds: float,
    verify_seconds: Callable[[int], float],
    most_nodes: int,
    most_levels: int,
) -> StaticTree:
    """The tree with the least seconds a token.

    Args:
      acceptance: p_1, p_2, ...: by rank, the share of accepted rows with children of which the
        child of that rank was accepted.
      draft_seconds: of one level of the draft.
      verify_seconds: of a target pass over so many rows, the pending token's included.

    Returns:
      The best of all trees of up to `most_nodes` nodes and `most_levels` levels, with as many
      children of a node as `acceptance` is long. Without nodes if drafting does not pay.
    """
    table = _Table(acceptance, most_nodes + 1, most_levels)
    best = StaticTree((), 1.0, verify_seconds(1))
    for levels in range(1, most_levels + 1):
        for rows in range(2, most_nodes + 2):
            tokens = table.value(rows, levels)
            if not math.isfinite(tokens):
                continue
            seconds = (levels * draft_seconds + verify_seconds(rows)) / tokens
            if seconds < best.seconds_per_token:
                best = StaticTree(table.tree(rows, levels), tokens, seconds)
    return best


class _Table:
    """T[levels, children, rows]: tokens of the best tree with exactly so many rows and children."""

    def __init__(self, acceptance: Sequence[float], rows: int, levels: int):
        self.acceptance = acceptance
        self._best = np.full((levels + 1, len(acceptance) + 1, rows + 1), -np.inf)
        self._first = np.zeros(self._best.shape, int)  # rows of the tree without its last child
        self._best[:, 0, 1] = 1.0
        for level in range(1, levels + 1):
            below = self._best[level - 1].max(axis=0)
            for count, chance in enumerate(acceptance, start=1):
                for size in range(2, rows + 1):
                    split = np.arange(1, size)
                    sums = self._best[level, count - 1, split] + chance * below[size - split]
                    self._best[level, count, size] = sums.max()
                    self._first[level, count, size] = split[sums.argmax()]

    def value(self, rows: int, levels: int) -> float:
        """Tokens of the best tree of so many rows."""
        return float(self._best[levels, :, rows].max())

    def tree(self, rows: int, levels: int) -> tuple[int, ...]:
        """Its parents, breadth first."""
        root = self._nested(rows, levels)
        parents, level = [], [(0, root)]
        while level:
            below = []
            for row, children in level:
                for child in children:
                    parents.append(row)
                    below.append((len(parents), child))
            level = below
        return tuple(parents)

    def _nested(self, rows: int, levels: int) -> list:
        """A row's children, each as the list of its own."""
        count = int(self._best[levels, :, rows].argmax())
        children = []
        while count:
            first = int(self._first[levels, count, rows])
            children.insert(0, self._nested(rows - first, levels - 1))
            rows, count = first, count - 1
        return children

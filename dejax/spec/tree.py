"""Draft trees as arrays: their masks and depths, how they grow, and which of their nodes to verify.

A tree hangs below the pending token, which is row 0 of the verification. Node i is row i + 1, and
`parents[i]` is the row of its parent; nodes stand breadth first. A chain is a tree of width one,
with parents 0, 1, ..., N - 1.

Sources: verification of a tree in one pass, SpecInfer (arXiv 2305.09781); choosing nodes by
cumulative confidence, EAGLE-2 (arXiv 2406.16858); the static optimum, Sequoia (arXiv 2402.12374).
"""

import math
from collections.abc import Callable, Collection, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Int

from dejax.errors import UsageError
from dejax.shapes import Pair


def is_chain(parents: Sequence[int]) -> bool:
    """Whether every node follows the one before it."""
    return all(parent == row for row, parent in enumerate(parents))


def check_parents(parents: Int[np.ndarray, " N"] | Sequence[int]) -> None:
    """Refuses a node that does not come after its parent.

    Raises:
      ValueError: there is one.
    """
    for row, parent in enumerate(parents, start=1):
        if not 0 <= parent < row:
            raise ValueError(f"parent of row {row} must be a row from 0 to {row - 1}, got {parent}")


def depths(parents: Sequence[int]) -> Int[np.ndarray, " R"]:
    """Depth of each of the R = N + 1 rows; that of row 0 is 0.

    A row's position in the sequence is that of the pending token plus its depth.
    """
    found = np.zeros(len(parents) + 1, np.int32)
    for row, parent in enumerate(parents, start=1):
        found[row] = found[parent] + 1
    return found


def ancestor_mask(parents: Sequence[int]) -> Bool[np.ndarray, "R R"]:
    """True at [i, j] where row j is row i or one of its ancestors."""
    mask = np.eye(len(parents) + 1, dtype=bool)
    for row, parent in enumerate(parents, start=1):
        mask[row] |= mask[parent]
    return mask


def accepted_path(
    tokens: Sequence[int], parents: Sequence[int], emitted: Sequence[int]
) -> tuple[int, ...]:
    """Rows, from the pending token down, whose tokens are the `emitted` ones."""
    children: dict[tuple[int, int], int] = {}
    for row, (token, parent) in enumerate(zip(tokens, parents, strict=True), start=1):
        children.setdefault((parent, token), row)
    rows: list[int] = []
    row: int | None = 0
    for token in emitted:
        row = children.get((row, token))
        if row is None:
            break
        rows.append(row)
    return tuple(rows)


@dataclass(frozen=True)
class Node:
    """A drafted token.

    Attributes:
      parent: row of its parent among the grown nodes; 0 is the pending token.
      depth: 1 below the pending token.
      own: the drafter's confidence in it, given its parent, from 0 to 1.
      confidence: the product of `own` over its path: never above its parent's.
      routes: experts that the draft pass over it predicts for its row of the verification; None if
        no pass was run over it.
      predicted: experts that a trained predictor expects of it, as numbers (`ExpertGrid.flat`);
        None without one.
    """

    token: int
    parent: int
    depth: int
    own: float
    confidence: float
    routes: frozenset[Pair] | None = None
    predicted: Int[np.ndarray, " _"] | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Paid:
    """The experts that a round has paid for, or will in any case, when its nodes are chosen.

    Attributes:
      root: what the draft pass over the pending token predicts for its row of the verification.
      used: pairs whose weights the draft passes read.
      before, available: resident or on their way when the round began, and now.
    """

    root: frozenset[Pair] = frozenset()
    used: frozenset[Pair] = frozenset()
    before: AbstractSet[Pair] = frozenset()
    available: AbstractSet[Pair] = frozenset()


@runtime_checkable
class ChooseNodes(Protocol):
    """Which grown nodes are verified. Looks at drafted values: for the match rules only."""

    def __call__(self, nodes: Sequence[Node], most: int, paid: Paid) -> Collection[int]:
        """Rows of at most `most` nodes, with every node its parent."""
        ...


def most_confident(nodes: Sequence[Node], most: int, paid: Paid | None = None) -> Collection[int]:
    """The nodes of largest cumulative confidence; among equals the earlier one, so its parent."""
    rows = sorted(range(1, len(nodes) + 1), key=lambda row: -nodes[row - 1].confidence)
    return rows[:most]


@dataclass(frozen=True)
class TreeConfig:
    """How drafts branch. The default is a chain, whose length is not said here.

    Either `shape` is given, and every tree has it (where tokens end, or a law has too few of them,
    less), or nodes are chosen by confidence while the tree grows and after it.

    Attributes:
      shape: parents of a static tree; the j-th child of a row is the drafter's j-th choice there.
      branching: children of every expanded node, where there is no shape.
      depth: levels below the pending token.
      expand: nodes that are expanded at each depth, the most confident ones; None: all.
      keep: nodes that are verified of all grown ones.
    """

    shape: tuple[int, ...] | None = None
    branching: int = 1
    depth: int = 0
    expand: int | None = None
    keep: int = 0

    def __post_init__(self) -> None:
        if self.shape is not None:
            check_static(self.shape)

    @property
    def is_chain(self) -> bool:
        """Whether drafts are chains: the draft length and the controller are those of a chain."""
        return self.shape is None and not self.depth

    @property
    def is_static(self) -> bool:
        """Whether what is drafted and verified does not depend on the drafted values."""
        return self.shape is not None

    @property
    def levels(self) -> int:
        """Draft passes, and the most tokens that can be accepted."""
        return int(depths(self.shape).max()) if self.shape is not None else self.depth

    @property
    def nodes(self) -> int:
        """Most nodes that are verified."""
        return len(self.shape) if self.shape is not None else min(self.keep, sum(self.widths()))

    def widths(self) -> list[int]:
        """Most nodes grown at each depth from 1 on."""
        if self.shape is not None:
            return np.bincount(depths(self.shape))[1:].tolist()
        widths, expanded = [], 1
        for _ in range(self.depth):
            widths.append(expanded * self.branching)
            expanded = widths[-1] if self.expand is None else min(widths[-1], self.expand)
        return widths

    def pass_rows(self) -> list[int]:
        """Most rows of each draft pass after that over the pending token."""
        if self.shape is not None:
            inner = sorted({parent for parent in self.shape} - {0})
            at = depths(self.shape)[inner]
            return np.bincount(at, minlength=1)[1:].tolist() if inner else []
        most = math.inf if self.expand is None else self.expand
        return [int(min(width, most)) for width in self.widths()[:-1]]


CHAIN = TreeConfig()


def full_tree(branching: int, depth: int) -> tuple[int, ...]:
    """Parents of the tree in which every node above the last level has `branching` children."""
    parents: list[int] = []
    level = [0]
    for _ in range(depth):
        first = len(parents) + 1
        parents += [row for row in level for _ in range(branching)]
        level = list(range(first, len(parents) + 1))
    return tuple(parents)


def check_static(parents: Sequence[int]) -> None:
    """Refuses parents of a static tree that are not breadth first.

    Raises:
      UsageError: they are not, or there are none.
    """
    if not parents:
        raise UsageError("a static tree needs the parent of at least one node")
    for row, parent in enumerate(parents, start=1):
        if not 0 <= parent < row:
            raise UsageError(
                f"parent of node {row} is {parent}; expected an earlier node, 0 (the pending "
                f"token) to {row - 1}"
            )
    if list(parents) != sorted(parents):
        raise UsageError("the nodes of a static tree stand breadth first: parents never decrease")


Children = Sequence[tuple[int, float]]
"""Tokens in the order of choice, and the confidence in each; a token drawn twice stands twice."""


@dataclass(frozen=True)
class Grown:
    """A tree before nodes are chosen from it; `tries` are rows in the order they were drawn."""

    nodes: list[Node]
    tries: list[int]


def grow(
    config: TreeConfig,
    limit: int,
    draft: Callable[[Sequence[Node], Sequence[int], Sequence[int]], Sequence[Children]],
    *,
    ends: Collection[int] = (),
) -> Grown:
    """Grows a tree level by level.

    Args:
      limit: most levels, whatever the configuration says.
      draft: (nodes so far, rows to expand, number of children of each) -> their children. Called
        once a level, first for row 0.
      ends: tokens below which nothing is drafted.
    """
    nodes: list[Node] = []
    tries: list[int] = []
    shape_rows = {0: 0}  # of a static tree: row -> its place in the shape
    frontier = [0]
    for depth in range(1, min(config.levels, limit) + 1):
        places = [_children_of(config, shape_rows[row]) for row in frontier]
        counts = [len(place) for place in places]
        found = draft(nodes, frontier, counts) if frontier else []
        level: list[int] = []
        for row, place, children in zip(frontier, places, found, strict=True):
            above = nodes[row - 1].confidence if row else 1.0
            drawn: dict[int, int] = {}
            for rank, (token, own) in enumerate(children[: len(place)]):
                if token not in drawn:
                    nodes.append(Node(token, row, depth, own, above * min(own, 1.0)))
                    drawn[token] = len(nodes)
                    shape_rows[len(nodes)] = place[rank]
                    level.append(len(nodes))
                tries.append(drawn[token])
        frontier = [
            row
            for row in level
            if nodes[row - 1].token not in ends and _children_of(config, shape_rows[row])
        ]
        if config.expand is not None and len(frontier) > config.expand:
            ranked = sorted(frontier, key=lambda row: -nodes[row - 1].confidence)
            frontier = sorted(ranked[: config.expand])
    return Grown(nodes, tries)


def _children_of(config: TreeConfig, shape_row: int) -> list[int]:
    """Places in the shape of a row's children; without a shape all are alike."""
    if config.shape is None:
        return [0] * config.branching
    return [row for row, parent in enumerate(config.shape, start=1) if parent == shape_row]


def subtree(parents: Sequence[int], rows: Collection[int]) -> tuple[list[int], list[int]]:
    """The rows of a prefix-closed choice, ascending, and their parents among one another.

    Raises:
      ValueError: a chosen row's parent is not chosen, or there is no such row.
    """
    kept = sorted(set(rows))
    index = {0: 0} | {row: place for place, row in enumerate(kept, start=1)}
    for row in kept:
        if not 1 <= row <= len(parents) or parents[row - 1] not in index:
            raise ValueError(f"row {row} is chosen without its parent, or is no node")
    return kept, [index[parents[row - 1]] for row in kept]

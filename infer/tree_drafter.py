"""The draft phase of trees: the target's own draft path, level by level.

All nodes of a level go through one draft pass, each of which sees the committed sequence and its
own ancestors. Their KV lies in scratch slots behind the committed ones, which the verification
overwrites: the target's KV of committed tokens and the draft's of a path are all a node attends to.
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dejax.errors import UsageError
from dejax.spec.rules import DraftChooser
from dejax.spec.tree import Children, ChooseNodes, Node, Paid, TreeConfig, grow, most_confident
from infer.blocks import SCRATCH
from infer.buckets import ROW_BUCKETS
from infer.drafters import Proposal
from infer.engines import EngineLike
from infer.timing import Timings


def check_tree(tree: TreeConfig, *, context: int) -> None:
    """Refuses a tree that passes or context cannot hold.

    Raises:
      UsageError: it has too many nodes or levels.
    """
    if tree.is_chain:
        return
    rows = ROW_BUCKETS[-1]
    if tree.nodes >= rows:
        raise UsageError(f"the tree has {tree.nodes} nodes; a pass verifies at most {rows - 1}")
    passes = tree.pass_rows()
    # The last pass is padded, into slots of its own.
    if max(passes, default=0) > rows or sum(passes) > SCRATCH - rows:
        raise UsageError(
            f"the tree is drafted in passes of {', '.join(map(str, passes))} nodes; expected at "
            f"most {rows} in one and {SCRATCH - rows} in all"
        )
    if tree.levels >= context:
        raise UsageError(
            f"the tree is {tree.levels} deep; the target's context is {context} tokens"
        )


def check_strict(tree: TreeConfig, *, strict: bool) -> None:
    """Refuses trees in strict decoding.

    Raises:
      UsageError: there are both. A tree's rows add over slots in another order than a chain's.
    """
    if strict and not tree.is_chain:
        raise UsageError(
            "--strict is for chains: logits of a tree's rows differ in their last bits"
        )


@dataclass(frozen=True)
class TreePhase:
    """A proposer of trees: `infer.drafters.Proposer`.

    Attributes:
      r: routed experts that the draft path keeps.
      prefetch: whether the experts that the passes predict are prefetched.
      eos_ids: nothing after an end token can be emitted, so none is drafted.
      choose: which of the grown nodes are verified; None: the most confident ones, if the tree
        grows more than it keeps.
    """

    engine: EngineLike
    tree: TreeConfig
    r: int
    chooser: DraftChooser
    timings: Timings
    prefetch: bool
    eos_ids: Collection[int]
    choose: ChooseNodes | None = None

    @property
    def verifies_all(self) -> bool:
        """Whether whatever is passed is verified too."""
        return self.tree.is_static and self.choose is None

    def propose(self, tokens: Sequence[int], limit: int) -> Proposal:
        """A tree below the last of `tokens`."""
        levels, residency = _Levels(self, tokens), self.engine.residency
        before = residency.available()
        grown = grow(self.tree, limit, levels.draft, ends=self.eos_ids)
        results = levels.results
        nodes = [
            replace(node, routes=results[row].routes if row in results else None)
            for row, node in enumerate(grown.nodes, start=1)
        ]
        whole = Proposal(
            tokens=[node.token for node in nodes],
            confidences=[node.own for node in nodes],
            routes=[result.routes for result in results.values()],
            used=levels.used,
            parents=[node.parent for node in nodes],
            tries=grown.tries,
            logits={row: result.logits for row, result in results.items()},
            passes=levels.passes,
        )
        if self.verifies_all:
            return whole
        paid = Paid(results[0].routes, levels.used, before, residency.available())
        kept = (self.choose or most_confident)(nodes, self.tree.nodes, paid)
        if self.prefetch:
            routes = [nodes[row - 1].routes or () for row in sorted(kept)]
            residency.prefetch(pair for pairs in routes for pair in pairs)
        return whole.choose(kept)


@dataclass(frozen=True)
class _Row:
    logits: Any
    routes: frozenset


class _Levels:
    """The passes of one tree; rows of the block are those that were passed, not all nodes."""

    def __init__(self, phase: TreePhase, tokens: Sequence[int]):
        self.phase, self.tokens = phase, tokens
        self.results: dict[int, _Row] = {}  # by row of the tree
        self.used: frozenset = frozenset()
        self.passes = 0
        self._block: dict[int, int] = {}  # row of the tree -> row of the block
        self._parents: list[int] = []

    def draft(
        self, nodes: Sequence[Node], rows: Sequence[int], counts: Sequence[int]
    ) -> list[Children]:
        """One level: passes over these rows, and the children they lead to."""
        self._run(nodes, rows)
        committed, chooser = len(self.tokens), self.phase.chooser
        found = []
        for row, count in zip(rows, counts, strict=True):
            position = committed + (nodes[row - 1].depth if row else 0)
            logits = self.results[row].logits
            found.append(chooser.children(logits, position=position, count=count))
        return found

    def _run(self, nodes: Sequence[Node], rows: Sequence[int]) -> None:
        phase, engine = self.phase, self.phase.engine
        start, clock = len(self.tokens) - 1, self.phase.engine.clock
        began, waited = time.perf_counter(), clock.loads
        sure = phase.prefetch and (phase.verifies_all or rows[0] == 0)
        for row in rows:
            self._parents.append(self._block[nodes[row - 1].parent] if row else -1)
            self._block[row] = len(self._block)
        if rows[0] == 0:
            result = engine.draft_row(self.tokens[-1], start=start, r=phase.r, prefetch=sure)
        else:
            level = [nodes[row - 1].token for row in rows]
            result = engine.draft_level(
                level, start=start, parents=self._parents, r=phase.r, prefetch=sure
            )
        seconds = time.perf_counter() - began
        phase.timings.draft_pass(seconds, waited=clock.loads - waited)
        self.passes += 1
        self.used |= result.used
        for row, logits, routes in zip(rows, result.logits, result.routes, strict=True):
            self.results[row] = _Row(logits, routes)
        if sure:
            engine.residency.prefetch(pair for pairs in result.routes for pair in pairs)

"""The draft phase of trees: the target's own draft path, level by level.

All nodes of a level go through one draft pass, each of which sees the committed sequence and its
own ancestors. Their KV lies in scratch slots behind the committed ones, which the verification
overwrites: the target's KV of committed tokens and the draft's of a path are all a node attends to.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from dejax.errors import UsageError
from dejax.shapes import Pair
from dejax.spec.confidence import Sureness
from dejax.spec.expert_use import Flat
from dejax.spec.tree import Children, ChooseNodes, Node, Paid, TreeConfig, grow, most_confident
from infer.blocks import SCRATCH
from infer.buckets import ROW_BUCKETS
from infer.drafters import Proposal
from infer.engines import EngineLike
from infer.node_predictor import NodePredictor
from infer.passes import Drafting
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


@runtime_checkable
class Foresee(Protocol):
    """Tells what rows of a verification will use before it is run: for measurements alone."""

    def __call__(
        self, tokens: Sequence[int], nodes: Sequence[Node]
    ) -> tuple[frozenset[Pair], list[Node]]:
        """Routes of the pending token (the last of `tokens`), and the nodes with theirs."""
        ...


@dataclass(frozen=True)
class TreePhase:
    """A proposer of trees: `infer.drafters.Proposer`.

    Attributes:
      r, resident: of the draft path's passes, as in `infer.passes.Drafting`.
      sureness: what chooses the tokens below a row, and how sure it is of each.
      prefetch: whether the experts that the passes predict are prefetched.
      eos_ids: nothing after an end token can be emitted, so none is drafted.
      choose: which of the grown nodes are verified; None: the most confident ones, if the tree
        grows more than it keeps.
      foresee: given, `choose` is told of these routes in place of the drafter's; what that takes is
        no part of the decode.
      predictor: given, tells `choose` what experts each node will need.
    """

    engine: EngineLike
    tree: TreeConfig
    r: int
    sureness: Sureness
    timings: Timings
    prefetch: bool
    eos_ids: Collection[int]
    choose: ChooseNodes | None = None
    foresee: Foresee | None = None
    resident: float | None = None
    predictor: NodePredictor | None = None

    @property
    def verifies_all(self) -> bool:
        """Whether whatever is passed is verified too."""
        return self.tree.is_static and self.choose is None

    def propose(self, tokens: Sequence[int], limit: int) -> Proposal:
        """A tree below the last of `tokens`."""
        levels, residency, clock = _Levels(self, tokens), self.engine.residency, self.engine.clock
        with clock.controlling():
            before = residency.available()
            grown = grow(self.tree, limit, levels.draft, ends=self.eos_ids)
        clock.control -= levels.seconds
        results = levels.results
        guesses = self._predicted(grown.nodes, results)
        nodes = [
            replace(node, routes=results[row].routes if row in results else None, predicted=guess)
            for row, (node, guess) in enumerate(zip(grown.nodes, guesses, strict=True), start=1)
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
        root, known = self._foreseen(tokens, nodes, results[0].routes)
        with clock.controlling():
            paid = Paid(root, levels.used, before, residency.available())
            kept = (self.choose or most_confident)(known, self.tree.nodes, paid)
        if self.prefetch:
            routes = [nodes[row - 1].routes or () for row in sorted(kept)]
            residency.prefetch(pair for pairs in routes for pair in pairs)
        chosen = whole.choose(kept)
        if self.predictor is None:
            return chosen
        flat = (nodes[row - 1].predicted for row in sorted(kept))
        told = [self.predictor.grid.pairs(each) for each in flat if each is not None]
        return replace(chosen, predicted=told)

    def _predicted(
        self, nodes: Sequence[Node], results: Mapping[int, "_Row"]
    ) -> Sequence[Flat | None]:
        """What the predictor expects of each node."""
        if self.predictor is None or not nodes:
            return [None] * len(nodes)
        parents = [results[node.parent] for node in nodes]
        return self.predictor(
            [parent.hidden for parent in parents],
            [node.token for node in nodes],
            [parent.routes for parent in parents],
            size=sum(self.tree.widths()),
        )

    def _foreseen(
        self, tokens: Sequence[int], nodes: list[Node], root: frozenset[Pair]
    ) -> tuple[frozenset[Pair], list[Node]]:
        """What `choose` is told: the drafter's routes, or those that are foreseen."""
        if self.foresee is None:
            return root, nodes
        began = time.perf_counter()
        found = self.foresee(tokens, nodes)
        self.engine.clock.aside += time.perf_counter() - began
        return found


@dataclass(frozen=True)
class _Row:
    logits: Any
    routes: frozenset
    hidden: Any
    scores: Any


class _Levels:
    """The passes of one tree; rows of the block are those that were passed, not all nodes."""

    def __init__(self, phase: TreePhase, tokens: Sequence[int]):
        self.phase, self.tokens = phase, tokens
        self.results: dict[int, _Row] = {}  # by row of the tree
        self.used: frozenset = frozenset()
        self.passes, self.seconds = 0, 0.0
        self._block: dict[int, int] = {}  # row of the tree -> row of the block
        self._parents: list[int] = []

    def draft(
        self, nodes: Sequence[Node], rows: Sequence[int], counts: Sequence[int]
    ) -> list[Children]:
        """One level: passes over these rows, and the children they lead to."""
        began = time.perf_counter()
        self._run(nodes, rows)
        committed, sureness = len(self.tokens), self.phase.sureness
        found = []
        for row, count in zip(rows, counts, strict=True):
            depth = nodes[row - 1].depth if row else 0
            place: Any = dict(position=committed + depth, depth=depth + 1, count=count)
            result = self.results[row]
            found.append(sureness.of_children(result.logits, result.scores, **place))
        self.seconds += time.perf_counter() - began
        return found

    def _run(self, nodes: Sequence[Node], rows: Sequence[int]) -> None:
        phase, engine = self.phase, self.phase.engine
        start, clock = len(self.tokens) - 1, self.phase.engine.clock
        began, waited = time.perf_counter(), clock.loads
        sure = phase.prefetch and (phase.verifies_all or rows[0] == 0)
        for row in rows:
            self._parents.append(self._block[nodes[row - 1].parent] if row else -1)
            self._block[row] = len(self._block)
        drafting = Drafting(phase.r, sure, phase.resident)
        if rows[0] == 0:
            result = engine.draft_row(self.tokens[-1], start=start, drafting=drafting)
        else:
            level = [nodes[row - 1].token for row in rows]
            result = engine.draft_level(
                level, start=start, parents=self._parents, drafting=drafting
            )
        seconds = time.perf_counter() - began
        phase.timings.draft_pass(seconds, waited=clock.loads - waited)
        self.passes += 1
        self.used |= result.used
        nothing = [None] * len(rows)
        hidden = nothing if result.hidden is None else result.hidden
        scores = nothing if result.scores is None else result.scores
        found = map(_Row, result.logits, result.routes, hidden, scores)
        self.results |= zip(rows, found, strict=True)
        if sure:
            engine.residency.prefetch(pair for pairs in result.routes for pair in pairs)

"""Draft trees chosen by what their experts cost (EcoSpec).

Source: the abstract of EcoSpec, which is all of it that was at hand: the predicted marginal expert
cost enters the selection of drafts, experts are predicted by a lightweight predictor, a dynamic
buffer tells which experts cost nothing, and the target's verification is unchanged. The objective,
the algorithm and every number below are ours.

A round emits 1 + sum of P(v) tokens on average, P(v) being the cumulative confidence of a node v
that is verified, and takes

    T(S) = 1 + row |S| + expert (spent + |(E(root) u E(S)) - buffer|),

in units of what a round takes whatever it verifies. E(v) are the layer-experts that v's row of the
verification is predicted to use, `spent` those that the round's draft passes have loaded. Wanted is
the prefix-closed S of at most N nodes with the largest rate F(S) = (1 + sum P(v)) / T(S). The sum
is modular and the cost a coverage function; with the bound N the problem is NP-hard in general, so
`path_greedy` it is at run time. Without it, `dejax.spec.ecospec_oracle` finds the best S.

The choice looks at the drafted tokens, so it is for the match rules only (R0, R4, R5).
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Literal, get_args

import numpy as np
from jaxtyping import Float64, Int, UInt64

from dejax.errors import UsageError
from dejax.spec.expert_use import ExpertUse, Flat
from dejax.spec.tree import Node, Paid, ancestor_mask

Untrained = Literal["persistence", "table", "router"]
Predictor = Untrained | Literal["trained"]
PREDICTORS: tuple[Untrained, ...] = get_args(Untrained)
"""Those that need no training of their own."""
_TIE = 1e-12
"""Mean gains of a path are sums that were rounded; below this they are no better."""


@dataclass(frozen=True)
class EcoConfig:
    """How experts count in the choice of nodes.

    Attributes:
      expert_cost: what the experts of one token cost beside all that a round takes anyway. 0: the
        nodes of largest confidence; the larger, the fewer experts a token.
      predictor: where E(v) comes from. "router": the routes of the draft pass over v; of a node
        without a pass, what its token used last, or its parent's. "trained": the same, but of a
        node without a pass what a trained predictor says (`dejax.draft.predictor`). "table": what
        its token used last. "persistence": what the last committed token used, for every v the
        same.
    """

    expert_cost: float = 0.3
    predictor: Predictor = "router"

    def __post_init__(self) -> None:
        cost = self.expert_cost
        if not (isinstance(cost, Real) and 0 <= cost < float("inf")):
            raise UsageError(f"expert_cost must be a finite number >= 0, got {cost!r}")
        if self.predictor not in (known := (*PREDICTORS, "trained")):
            names = ", ".join(map(repr, known))
            raise UsageError(f"predictor must be one of {names}, got {self.predictor!r}")


@dataclass(frozen=True)
class Candidates:
    """N grown nodes, in rows 1 to N: what each may add, and what it costs.

    Attributes:
      parents: row of each node's parent; 0 is the pending token.
      gains: P(v), the probability that v is emitted.
      experts: layer-experts that v's row uses and nobody has paid for, as numbers >= 0; -1 where
        there are fewer.
      base: T of no node; above 0.
      expert, row: what one more layer-expert, and one more row, add to T.
    """

    parents: Sequence[int]
    gains: Float64[np.ndarray, " N"]
    experts: Int[np.ndarray, "N A"]
    base: float
    expert: float
    row: float = 0.0

    def rate(self, rows: Collection[int]) -> float:
        """F of these nodes."""
        places = np.array(sorted(rows), int) - 1
        used = np.unique(self.experts[places])
        time = self.base + self.row * len(places) + self.expert * int((used >= 0).sum())
        return (1.0 + float(self.gains[places].sum())) / time


def path_greedy(candidates: Candidates, most: int) -> list[int]:
    """Rows of at most `most` nodes of nearly the largest rate, prefix-closed, in the order taken.

    Adds the path (from the chosen nodes down to a candidate) that gains most a node at the rate so
    far, dP - F(S) dT over its length, while that is above 0; each addition raises F. The length
    stands for the bound: without it a path that costs nothing would take the place of a likely one.
    A path that adds no time is taken whatever it gains: of free nodes the likeliest are.

    Marginal costs only fall as S grows, so a queue of old keys would be wrong. An inverted index
    keeps them: row i of it tells, of 64 layer-experts, which of them each candidate's path uses.
    What a path newly covers names the rows in which the costs of candidates fall.
    """
    count = len(candidates.parents)
    if not count:
        return []
    index = _path_index(candidates)
    above = ancestor_mask(candidates.parents)[1:, 1:].astype(np.float64)
    costs = np.bitwise_count(index).sum(axis=0, dtype=np.int64)
    covered = np.zeros(len(index), np.uint64)
    left = np.stack([np.ones(count), candidates.gains], axis=1)  # of the nodes not chosen
    out = np.zeros(count)  # -inf where chosen
    chosen: list[int] = []
    tokens, time = 1.0, candidates.base
    while len(chosen) < min(most, count):
        length, gain = (above @ left).T
        extra = candidates.expert * costs
        if candidates.row:
            extra += candidates.row * length
        score = (gain - tokens / time * extra) / (length - out) + out
        best = _best(score, length, most - len(chosen))
        if best is None or (score[best] <= 0 and extra[best] > 0):
            break
        tokens, time = tokens + gain[best], time + extra[best]
        path = np.flatnonzero(above[best] * left[:, 0])
        chosen += (path + 1).tolist()
        left[path], out[path] = 0.0, -np.inf
        new = index[:, best] & ~covered
        touched = np.flatnonzero(new)
        fallen = np.bitwise_count(index[touched] & new[touched, None])
        costs -= fallen.sum(axis=0, dtype=np.int64)
        covered |= new
    return chosen


def _best(
    score: Float64[np.ndarray, " N"], length: Float64[np.ndarray, " N"], most: int
) -> int | None:
    """The first of the largest scores; of a longer path only if it is larger beyond rounding."""
    best = int(score.argmax())
    if length[best] > 1:
        score = np.where(length <= most, score, -np.inf)
        best, alone = int(score.argmax()), np.where(length == 1, score, -np.inf)
        one = int(alone.argmax())
        if alone[one] > -np.inf and score[best] <= alone[one] + _TIE * abs(alone[one]):
            best = one
    return best if score[best] > -np.inf else None


def _path_index(candidates: Candidates) -> UInt64[np.ndarray, "W N"]:
    """Bit b of [i, v]: the path to candidate v uses layer-expert 64 i + b."""
    experts = candidates.experts
    words = int(experts.max(initial=0)) // 64 + 1
    width = 64 * words + 64
    uses = np.zeros(len(experts) * width, bool)
    # An expert of -1 falls into the last columns of the row before, which are not looked at.
    uses[(experts + np.arange(len(experts))[:, None] * width).ravel()] = True
    rows = uses.reshape(-1, width)[:, : 64 * words]
    bits = np.packbits(rows, axis=1, bitorder="little").view(np.uint64)
    for node, parent in enumerate(candidates.parents):
        if parent:
            bits[node] |= bits[parent - 1]
    return np.ascontiguousarray(bits.T)


class ExpertCost:
    """Chooses a tree's nodes by `path_greedy`: `dejax.spec.tree.ChooseNodes`.

    The dynamic buffer is what is resident or on its way: that costs nothing. Where every expert is
    resident, nothing is ever loaded, and what counts is what a pass reads from the device's memory;
    the buffer is then what was used most, lately: as many layer-experts as one token uses.
    """

    def __init__(self, config: EcoConfig, use: ExpertUse) -> None:
        """`use`, kept by the caller, is told what every verification used."""
        self.config, self.use = config, use

    def __call__(self, nodes: Sequence[Node], most: int, paid: Paid) -> Collection[int]:
        return path_greedy(self.candidates(nodes, paid), most)

    def candidates(self, nodes: Sequence[Node], paid: Paid) -> Candidates:
        """The nodes with what they are predicted to use and nobody has paid for.

        Raises:
          UsageError: routes are those of another target.
        """
        grid = self.use.grid
        root = grid.flat(paid.root)
        free = np.zeros(grid.size, bool)
        if len(paid.available) < grid.size:
            free[grid.flat(paid.available)] = True
            spent = len(paid.available - paid.before)
        else:
            free[self.use.hot(grid.routes)] = True
            spent = len(paid.used)
        price = self.config.expert_cost / grid.routes
        base = 1.0 + price * (spent + int((~free[root]).sum()))
        free[root] = True
        experts = np.full((len(nodes), grid.routes), -1, np.int32)
        for place, used in enumerate(self._predict(nodes, root)):
            costly = used[~free[used]]
            experts[place, : len(costly)] = costly
        gains = np.array([node.confidence for node in nodes])
        return Candidates([node.parent for node in nodes], gains, experts, base, price)

    def _predict(self, nodes: Sequence[Node], root: Flat) -> list[Flat]:
        """E(v) of every node."""
        use, found = self.use, [root]
        last = use.last()
        other: Callable[[int], Flat] = lambda parent: root if last is None else last  # noqa: E731
        for node in nodes:
            known = None
            if self.config.predictor in ("router", "trained"):
                other = found.__getitem__
                known = None if node.routes is None else use.grid.flat(node.routes)
            if known is None and self.config.predictor == "trained":
                known = node.predicted
            if known is None and self.config.predictor != "persistence":
                known = use.of_token(node.token)
            found.append(other(node.parent) if known is None else known)
        return found[1:]

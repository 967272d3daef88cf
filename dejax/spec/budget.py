"""Budgets for verification: a target pass over a draft that may use few experts. NOT lossless.

Source: MoE-Spec (arXiv 2602.16052, of which the abstract and summaries were at hand): per layer and
per verification, experts are ranked by the router probability that all rows give them together; the
best B may be used; a row whose own experts are not among them goes without ("truncation") or takes
the best of those that are ("substitution").

Ours, where that leaves things open:

- If the rows need no more than B experts in all, nothing is changed: the pass is exact.
- No row is left to the shared experts alone: each keeps its top-1, whether that is among the best B
  or not. Rows for which it was not are counted ("rescued"); a pass uses at most B experts and one
  for each of them.
- A row's own experts go before others. (With a selection bias or groups of experts these need not
  be the likeliest ones.)
- Gates of substitutes are what the family's rule would give them: gate / probability is the same
  for all experts of a row. Afterwards the gates are as they are ("raw"), or are scaled to the sum
  that the row's own experts had ("compensate"), as families that renormalise gates do anyway.
- Ranking by residency, what is on the device before all else, is there for comparison. It loads
  least, and is known to ruin the text.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

from dejax.errors import UsageError

Select = Literal["substitution", "truncation"]
Weights = Literal["compensate", "raw"]
Rank = Literal["weight", "residency"]


@dataclass(frozen=True)
class VerifyBudget:
    """How a verification is limited.

    Attributes:
      experts: B, experts a layer.
      select, weights, rank: see the module.
      exact_every: rounds after which the KV of what was committed is computed again, exactly; 0:
        never, so that errors add up.
    """

    experts: int
    select: Select = "substitution"
    weights: Weights = "compensate"
    rank: Rank = "weight"
    exact_every: int = 0

    def __post_init__(self) -> None:
        if self.experts < 1:
            raise UsageError(f"the verification budget is {self.experts}; expected 1 or more")
        if self.exact_every < 0:
            raise UsageError(f"exact_every is {self.exact_every}; expected 0 or more rounds")


@dataclass(frozen=True)
class Restricted:
    """The routing of a layer's rows under a budget.

    Attributes:
      ids, gates: as the router gives them, gates of places that nobody takes being 0; such a place
        repeats the row's first id.
      rescued: rows whose top-1 was not among the best B.
    """

    ids: Int[np.ndarray, "R K"]
    gates: Float[np.ndarray, "R K"]
    rescued: int


def restrict(
    ids: Int[np.ndarray, "R K"],
    gates: Float[np.ndarray, "R K"],
    scores: Float[np.ndarray, "R E"],
    budget: VerifyBudget,
    *,
    resident: Collection[int] = (),
) -> Restricted:
    """The routing of one layer with at most `budget.experts` experts, and one for each rescue.

    Args:
      ids, gates: of the router, by descending gate; scores: its probabilities.
      resident: experts of the layer that are on the device, for ranking by residency.
    """
    if len(np.unique(ids)) <= budget.experts:
        return Restricted(ids, gates, 0)
    total = scores.sum(axis=0)
    missing = np.ones(len(total), bool)
    missing[list(resident)] = False
    keys = (-total, missing) if budget.rank == "residency" else (-total,)
    allowed = np.zeros(len(total), bool)
    allowed[np.lexsort(keys)[: budget.experts]] = True
    rescued = int((~allowed[ids[:, 0]]).sum())
    allowed[ids[:, 0]] = True

    rows = np.arange(len(ids))[:, None]
    own = allowed[ids]
    chosen, new_gates = np.where(own, ids, ids[:, :1]), np.where(own, gates, 0)
    if budget.select == "substitution":
        # What is allowed, by probability; never what a row has already.
        others = np.where(allowed, scores, -np.inf)
        others[rows, ids] = -np.inf
        # One stable order: the k-th gap takes the k-th best of the others.
        best = np.argsort(-others, axis=1, kind="stable")
        place = np.cumsum(~own, axis=1) - 1
        substitute = np.take_along_axis(best, np.maximum(place, 0), axis=1)
        probability = others[rows, substitute]
        fits = ~own & np.isfinite(probability)
        scale = gates[:, :1] / scores[rows, ids[:, :1]]
        chosen = np.where(fits, substitute, chosen)
        new_gates = np.where(fits, scale * np.where(fits, probability, 0), new_gates)
    if budget.weights == "compensate":
        new_gates = new_gates * (gates.sum(1, keepdims=True) / new_gates.sum(1, keepdims=True))
    return Restricted(chosen.astype(ids.dtype), new_gates.astype(gates.dtype), rescued)

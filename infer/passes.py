"""What an engine is told about a pass, and what a pass gives."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from dejax.shapes import Pair


@dataclass(frozen=True)
class Drafting:
    """How a draft pass runs.

    Attributes:
      r: routed experts that a layer keeps.
      prefetch: whether what a layer's router chooses is asked for at once, so that it comes while
        the layers after it are computed, and so is what the pass itself will probably need next.
      resident: given, an expert that is not on the device gives way to one that is and whose gate
        is at least so many times its own (`dejax.spec.substitute`).
    """

    r: int
    prefetch: bool = False
    resident: float | None = None

    @property
    def asks_ahead(self) -> bool:
        """Whether a layer asks for what the next one will read, if that is the router's choice."""
        return self.prefetch and self.resident is None


@dataclass(frozen=True)
class PassResult:
    """What one pass gives.

    Attributes:
      logits: [R, V] on the host, in the compute dtype.
      routes: for each row, its top-k experts in every MoE layer, as pairs.
      gates: for each row, the top-1 gate in every MoE layer.
      used: the pairs whose weights the pass read.
      rescued: rows, summed over layers, that were left their top-1 in spite of the budget.
      hidden: of a draft pass with a predictor, the residual stream after the last layer.
      scores: of a draft pass with a confidence head, [R, M] of `head_scores`.
    """

    logits: Float[np.ndarray, "R V"]
    routes: tuple[frozenset[Pair], ...]
    gates: Float[np.ndarray, "R L"]
    used: frozenset[Pair]
    rescued: int = 0
    hidden: Float[np.ndarray, "P D"] | None = None
    scores: Float[np.ndarray, "P M"] | None = None


def pass_result(
    logits: Float[np.ndarray, "R V"],
    rows: Sequence[int],
    *,
    ids: Mapping[int, Int[np.ndarray, "_P K"]],
    read: Mapping[int, Int[np.ndarray, "*_N"]],
    gates: Sequence[Float[np.ndarray, " _P"]],
    rescued: int = 0,
    hidden: Float[np.ndarray, "P D"] | None = None,
    scores: Float[np.ndarray, "P M"] | None = None,
) -> PassResult:
    """The result of a pass for some of its P rows, those that `logits` are of.

    Args:
      ids: of each MoE layer, the experts that the router chose for every row.
      read: of each, the experts whose weights were read, in any shape.
      gates: of each, every row's top-1 gate.
      hidden, scores: as in `PassResult`, of all rows.
    """
    routes = tuple(
        frozenset((layer, e) for layer, chosen in ids.items() for e in chosen[row].tolist())
        for row in rows
    )
    used = frozenset(
        (layer, e) for layer, experts in read.items() for e in np.unique(experts).tolist()
    )
    first = [layer[list(rows)] for layer in gates]
    top = np.stack(first, axis=1) if first else np.zeros((len(rows), 0))
    return PassResult(logits, routes, top, used, rescued, hidden, scores)

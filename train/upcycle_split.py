"""Which neurons of a dense feed-forward are shared, and which expert each of the others goes to.

The neurons that add most to the output, in the mean over tokens, are shared: they are what a token
can least do without. The others are put together with those that are active on the same tokens, so
that a token needs few experts.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

ROUNDS = 10
"""Of the clustering; it has settled by then, or goes around in circles."""


@dataclass(frozen=True)
class Activity:
    """How strongly neurons act: sums over tokens of m_j = |a_j| * norm(down_j).

    Attributes:
      total: [N], sum of m; gram: [N, N], sum of m m^T; tokens: how many.
    """

    total: Float[np.ndarray, " N"]
    gram: Float[np.ndarray, "N N"]
    tokens: int

    @property
    def importance(self) -> Float[np.ndarray, " N"]:
        """Mean of m."""
        return self.total / self.tokens

    def correlation(self, chosen: Int[np.ndarray, " M"]) -> Float[np.ndarray, "M M"]:
        """Correlation of m over tokens among `chosen` neurons; 0 for a neuron that never varies."""
        mean = self.importance[chosen]
        covariance = self.gram[np.ix_(chosen, chosen)] / self.tokens - np.outer(mean, mean)
        deviation = np.sqrt(np.maximum(np.diag(covariance), 0))
        scale = np.divide(1, deviation, out=np.zeros_like(deviation), where=deviation > 0)
        return covariance * np.outer(scale, scale)


def order_neurons(
    activity: Activity, *, shared: int, experts: int, rng: np.random.Generator
) -> Int[np.ndarray, " N"]:
    """Neurons in their new order: `shared` ones by importance, then expert after expert."""
    ranked = np.argsort(-activity.importance, kind="stable")
    rest = np.sort(ranked[shared:])
    groups = balanced_clusters(activity.correlation(rest), experts, rng)
    routed = [rest[groups == expert] for expert in range(experts)]
    return np.concatenate([ranked[:shared], *routed])


def balanced_clusters(
    correlation: Float[np.ndarray, "M M"], groups: int, rng: np.random.Generator
) -> Int[np.ndarray, " M"]:
    """Groups of equal size whose members correlate with the same others: k-means, M / groups each.

    `groups` divides M.
    """
    count = len(correlation)
    rows = correlation / np.maximum(np.linalg.norm(correlation, axis=1, keepdims=True), 1e-12)
    centres = rows[rng.choice(count, groups, replace=False)]
    assigned = np.full(count, -1)
    for _ in range(ROUNDS):
        before, assigned = assigned, _fill(rows @ centres.T, count // groups)
        if (before == assigned).all():
            break
        sums = np.stack([rows[assigned == group].sum(axis=0) for group in range(groups)])
        centres = sums / np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), 1e-12)
    return assigned


def _fill(similarity: Float[np.ndarray, "M G"], room: int) -> Int[np.ndarray, " M"]:
    """The group of each row: the most similar pairs first, while the group has room."""
    assigned = np.full(len(similarity), -1)
    left = np.full(similarity.shape[1], room)
    for pair in np.argsort(-similarity, axis=None, kind="stable"):
        row, group = divmod(int(pair), similarity.shape[1])
        if assigned[row] < 0 and left[group]:
            assigned[row] = group
            left[group] -= 1
    return assigned

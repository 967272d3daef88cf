"""How good estimated probabilities are, against what came of them.

An outcome is 0 or 1, or the probability of 1 where that is known: every measure is then the mean
over what may come.
"""

import numpy as np
from jaxtyping import Float

BINS = 15

Values = Float[np.ndarray, " n"]


def expected_calibration_error(estimates: Values, outcomes: Values, *, bins: int = BINS) -> float:
    """Mean over bins of equal mass of |mean estimate - mean outcome|, in their shares of all.

    The bins are n sorted estimates cut as evenly as can be; equal estimates may be cut apart. 0
    where there are none.
    """
    if not len(estimates):
        return 0.0
    order = np.argsort(estimates, kind="stable")
    parts = np.array_split(order, min(bins, len(order)))
    gaps = [len(p) * abs(float(np.mean(estimates[p]) - np.mean(outcomes[p]))) for p in parts]
    return sum(gaps) / len(order)


def brier_score(estimates: Values, outcomes: Values) -> float:
    """Mean of (estimate - outcome)^2, over outcomes of 0 and 1 that have these probabilities."""
    return float(np.mean(estimates**2 - 2 * estimates * outcomes + outcomes))


def area_under_curve(estimates: Values, outcomes: Values) -> float:
    """Probability that an accepted one has the larger estimate of two, ties counting half.

    NaN where all outcomes are the same.
    """
    _, group = np.unique(estimates, return_inverse=True)
    ones = np.bincount(group, weights=outcomes)
    zeros = np.bincount(group, weights=1 - outcomes)
    pairs = ones.sum() * zeros.sum()
    if pairs == 0:
        return float("nan")
    below = np.cumsum(zeros) - zeros
    return float(np.sum(ones * (below + zeros / 2)) / pairs)


def cross_entropy(logits: Values, outcomes: Values) -> Values:
    """-log of the probability of each outcome, the estimate being sigmoid(logit)."""
    return np.logaddexp(0, logits) - outcomes * logits


def survival(steps: Float[np.ndarray, "S K"]) -> Float[np.ndarray, "S K"]:
    """That all tokens up to each are accepted: the product of the steps so far."""
    return np.cumprod(steps, axis=1)

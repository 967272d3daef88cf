"""Fits a confidence head to how drafts went: logistic regression, then a temperature by position.

The draft of K tokens that begins at s counts at position i with the probability that it gets there:
what is estimated is acceptance where all before it was accepted, so that the product of the
estimates is the probability of surviving (DSpark, arXiv 2607.05147; weighting by survival is ours).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.optimize import minimize, minimize_scalar
from scipy.special import expit

from dejax.draft.confidence import ConfidenceHead
from dejax.spec.calibration import cross_entropy, survival
from dejax.spec.confidence import FEATURES
from train.draft_outcomes import Outcomes

PENALTIES = (1.0, 3e-1, 1e-1, 3e-2, 1e-2)
"""Weights of |w|^2 / 2 beside the mean cross entropy that are tried, for features of spread 1."""
LIGHT = 1e-4
"""The penalty of the few weights that are no hidden state's or embedding's."""
FOLDS = 5
"""One prompt in so many chooses the penalty, and is what temperatures are fitted to."""
NEGLIGIBLE = 1e-4
"""Survival below which a drafted token is left out of the fit."""


@dataclass(frozen=True)
class Rows:
    """N drafted tokens for a regression.

    Attributes:
      features: hidden state, embedding and law, each column of mean 0 and spread 1.
      positions: in the draft, from 0; weights: survival so far; accepted: outcomes.
    """

    features: Float[np.ndarray, "N C"]
    positions: Int[np.ndarray, " N"]
    weights: Float[np.ndarray, " N"]
    accepted: Float[np.ndarray, " N"]


@dataclass(frozen=True)
class Columns:
    """What was done to the columns of the features."""

    means: Float[np.ndarray, " C"]
    spreads: Float[np.ndarray, " C"]


def raw_features(outcomes: Outcomes, embedding: Float[np.ndarray, "V D"]) -> np.ndarray:
    """[S, K, 2 D + 3]: hidden state, embedding of the consumed token, features of the law."""
    return np.concatenate([outcomes.hidden, embedding[outcomes.tokens], outcomes.law], axis=-1)


def survival_before(outcomes: Outcomes) -> Float[np.ndarray, "S K"]:
    """That a draft gets to each of its tokens; 0 behind the text's end."""
    alive = np.cumprod(outcomes.accepted.astype(np.float64), axis=1)
    before = np.concatenate([np.ones_like(alive[:, :1]), alive[:, :-1]], axis=1)
    return before * outcomes.inside


def columns_of(features: np.ndarray, weights: np.ndarray) -> Columns:
    """Weighted means and spreads; a column that does not vary has spread 1."""
    kept = weights > NEGLIGIBLE
    x, w = features[kept], weights[kept][:, None] / weights[kept].sum()
    means = (w * x).sum(axis=0)
    spreads = np.sqrt((w * (x - means) ** 2).sum(axis=0))
    return Columns(means, np.where(spreads > 1e-9, spreads, 1.0))


def rows_of(outcomes: Outcomes, features: np.ndarray, columns: Columns) -> Rows:
    """The tokens that drafts get to."""
    before = survival_before(outcomes)
    kept = before > NEGLIGIBLE
    scaled = (features[kept] - columns.means) / columns.spreads
    positions = np.broadcast_to(np.arange(before.shape[1]), before.shape)[kept]
    accepted = outcomes.accepted[kept].astype(np.float64)
    return Rows(scaled.astype(features.dtype), positions, before[kept], accepted)


def loss_and_gradient(
    weights: Float[np.ndarray, " P"], rows: Rows, penalty: float, positions: int
) -> tuple[float, Float[np.ndarray, " P"]]:
    """Weighted mean cross entropy + penalties' |w|^2 / 2 of (w, biases), and its gradient.

    `penalty` is that of hidden states and embeddings, which are many columns for a weak signal.
    Weights of the law, and the biases' differences from the first, have `LIGHT`.
    """
    w, biases = weights[:-positions], weights[-positions:]
    logits = rows.features @ w.astype(rows.features.dtype) + biases[rows.positions]
    total = rows.weights.sum()
    later = biases - biases[0]
    penalties = np.where(np.arange(len(w)) < len(w) - FEATURES, penalty, LIGHT)
    loss = float(rows.weights @ cross_entropy(logits, rows.accepted)) / total
    loss += (float(penalties @ w**2) + LIGHT * float(later @ later)) / 2
    slope = rows.weights * (expit(logits) - rows.accepted) / total
    by_bias = np.bincount(rows.positions, weights=slope, minlength=positions) + LIGHT * later
    by_bias[0] -= LIGHT * later.sum()
    by_weight = rows.features.T @ slope.astype(rows.features.dtype) + penalties * w
    return loss, np.concatenate([by_weight, by_bias]).astype(np.float64)


def fit_rows(
    rows: Rows, penalty: float, positions: int, start: Float[np.ndarray, " P"] | None = None
) -> Float[np.ndarray, " P"]:
    """The minimum of `loss_and_gradient`, by L-BFGS."""
    if start is None:
        start = np.zeros(rows.features.shape[1] + positions)
    options = dict(maxiter=500, gtol=1e-6, ftol=1e-10)
    given = (rows, penalty, positions)
    return minimize(loss_and_gradient, start, given, "L-BFGS-B", jac=True, options=options).x


def logits_at(
    features: np.ndarray, columns: Columns, weights: Float[np.ndarray, " P"]
) -> Float[np.ndarray, "S K"]:
    """What fitted weights say of every token of drafts."""
    positions = features.shape[1]
    w = weights[:-positions] / columns.spreads
    offset = -float(columns.means @ w)
    return features.astype(np.float64) @ w + weights[-positions:] + offset


def position_temperatures(
    logits: Float[np.ndarray, "S K"],
    accepted: Float[np.ndarray, "S K"],
    inside: Bool[np.ndarray, "S K"],
) -> Float[np.ndarray, " K"]:
    """Temperatures t_1, t_2, ..., fitted from left to right to the survival so far.

    t_j minimises the cross entropy of prod_{i <= j} sigmoid(z_i / t_i) against survival to j, those
    before it being fixed (DSpark, arXiv 2607.05147). 1 where there is nothing to fit.
    """
    count = logits.shape[1]
    found, before = np.ones(count), np.zeros(len(logits))  # log of the survival so far
    outcomes = survival(accepted)
    for place in range(count):
        at = inside[:, place]
        loss = _survival_loss(logits[at, place], before[at], outcomes[at, place])
        if at.any():
            best = minimize_scalar(loss, bounds=(-3.0, 3.0), method="bounded")
            found[place] = np.exp(best.x)
        before = before - np.logaddexp(0, -logits[:, place] / found[place])
    return found


def _survival_loss(
    logits: Float[np.ndarray, " n"],
    before: Float[np.ndarray, " n"],
    outcomes: Float[np.ndarray, " n"],
) -> Callable[[float], float]:
    def loss(log_temperature: float) -> float:
        log_alive = before - np.logaddexp(0, -logits * np.exp(-log_temperature))
        log_alive = np.minimum(log_alive, -1e-12)
        log_ended = np.log(-np.expm1(log_alive))
        return -float(np.mean(outcomes * log_alive + (1 - outcomes) * log_ended))

    return loss


@dataclass(frozen=True)
class Fit:
    """A regime's weights as a head has them: `ConfidenceHead`, without the leading M."""

    hidden: Float[np.ndarray, " D"]
    embedding: Float[np.ndarray, " D"]
    law: Float[np.ndarray, " 3"]
    biases: Float[np.ndarray, " K"]
    temperatures: Float[np.ndarray, " K"]
    penalty: float


def fit_regime(
    outcomes: Outcomes,
    embedding: Float[np.ndarray, "V D"],
    *,
    penalties: Sequence[float] = PENALTIES,
) -> Fit:
    """Fits one regime's weights; the same outcomes give the same weights."""
    features = raw_features(outcomes, embedding)
    positions, width = features.shape[1], outcomes.hidden.shape[-1]
    columns = columns_of(
        features.reshape(-1, features.shape[-1]), survival_before(outcomes).ravel()
    )
    aside = outcomes.prompts % FOLDS == FOLDS - 1
    if aside.all() or not aside.any():  # one prompt, or none of those set aside
        aside = np.arange(len(aside)) % FOLDS == FOLDS - 1
    others = outcomes.take(~aside)
    train = rows_of(others, features[~aside], columns)
    judge = rows_of(outcomes.take(aside), features[aside], columns)
    found, start = [], None
    for penalty in penalties:
        start = fit_rows(train, penalty, positions, start)
        found.append((loss_and_gradient(start, judge, 0.0, positions)[0], penalty, start))
    _, penalty, tried = min(found, key=lambda each: each[0])
    held = outcomes.take(aside)
    temperatures = position_temperatures(
        logits_at(features[aside], columns, tried), held.accepted, held.inside
    )
    weights = fit_rows(rows_of(outcomes, features, columns), penalty, positions, tried)
    w = weights[:-positions] / columns.spreads
    return Fit(
        hidden=w[:width],
        embedding=w[width : 2 * width],
        law=w[-FEATURES:],
        biases=weights[-positions:] - float(columns.means @ w),
        temperatures=temperatures,
        penalty=penalty,
    )


def head_of_fits(fits: Sequence[Fit]) -> ConfidenceHead:
    """A head of one fit a regime."""
    names = ("hidden", "embedding", "law", "biases", "temperatures")
    arrays = {name: np.stack([getattr(fit, name) for fit in fits]) for name in names}
    return ConfidenceHead(**{name: a.astype(np.float32) for name, a in arrays.items()})


def estimates(
    head: ConfidenceHead, regime: int, outcomes: Outcomes, embedding: Float[np.ndarray, "V D"]
) -> Float[np.ndarray, "S K"]:
    """c_i of every drafted token, as the decode loop has it."""
    wide = {name: array[regime].astype(np.float64) for name, array in head.arrays().items()}
    logits = outcomes.hidden @ wide["hidden"] + (embedding @ wide["embedding"])[outcomes.tokens]
    logits = logits + outcomes.law @ wide["law"] + wide["biases"]
    return expit(logits / wide["temperatures"])

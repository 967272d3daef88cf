"""Closed forms of `dejax upcycle`: a linear router, and down projections that make up for routing.

Both are ridge regressions on second moments, which are summed over windows. The correction is
fitted across folds of windows: what it does to a window is judged, and passed on to the next
layer, by a fit that has not seen that window. A fit judged on its own windows takes the drift of
later layers for smaller than it will be on new text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from train.closed_form import solve_ridge

RIDGES = (0.1, 0.3, 1.0)
"""Regularisations of the correction to choose from, relative to a neuron's mean square.

They are large: a layer of SmolLM2 has 1,536 neurons. What is left of its output's error, 0.149
without a correction, was with 0.03, 0.1, 0.3, 1 and 3: 0.131, 0.126, 0.122, 0.122 and 0.127 fitted
on 12k tokens, 0.119, 0.117, 0.116, 0.119 and 0.125 on 24k.
"""
ROUTER_RIDGE = 1e-3
"""Regularisation of the router, relative to the mean square of its input's deviation."""


# --- router ----------------------------------------------------------------------------------


@dataclass
class RouterMoments:
    """Sums over tokens of the router's input h and of what it shall predict, y.

    Attributes:
      tokens: how many; h: [D]; y: [E]; hh: [D, D]; hy: [D, E].
    """

    tokens: int
    h: Float[np.ndarray, " D"]
    y: Float[np.ndarray, " E"]
    hh: Float[np.ndarray, "D D"]
    hy: Float[np.ndarray, "D E"]

    @classmethod
    def zero(cls, width: int, experts: int) -> "RouterMoments":
        """Of no token."""
        shapes = ((width,), (experts,), (width, width), (width, experts))
        return cls(0, *map(np.zeros, shapes))

    def add(self, h: Float[np.ndarray, "R D"], y: Float[np.ndarray, "R E"]) -> None:
        """Counts more tokens."""
        self.tokens += len(h)
        self.h += h.sum(axis=0, dtype=np.float64)
        self.y += y.sum(axis=0, dtype=np.float64)
        self.hh += h.T @ h
        self.hy += h.T @ y


def fit_router(
    moments: RouterMoments, *, sharpness: float
) -> tuple[Float[np.ndarray, "E D"], Float[np.ndarray, " E"]]:
    """Weight [E, D] and selection bias [E] of a sigmoid router that ranks experts by y.

    The weight is the regression's, times `sharpness`. A sigmoid router has no bias on its logits;
    the intercept goes into the selection, with the slope 1/4 that the sigmoid has at 0.
    """
    mean_h, mean_y = moments.h / moments.tokens, moments.y / moments.tokens
    hh = moments.hh / moments.tokens - np.outer(mean_h, mean_h)
    hy = moments.hy / moments.tokens - np.outer(mean_h, mean_y)
    weight = solve_ridge(hh, hy.T, ridge=ROUTER_RIDGE).T
    bias = mean_y - weight @ mean_h
    return sharpness * weight, sharpness * (bias - bias.mean()) / 4


# --- correction ------------------------------------------------------------------------------


@dataclass
class Moments:
    """Sums over the tokens of one fold, each weighted by one over its dense state's mean square.

    With phi the gated activations, *own* is what routing leaves out of the layer's own output, and
    *gap* what separates the MoE's state from the dense model's where nothing were left out.

    Attributes:
      gram: [N, N], phi phi^T; own, gap: [D, N], those with phi; energy: the squared length of
      own + gap; tokens: how many.
    """

    gram: Float[np.ndarray, "N N"]
    own: Float[np.ndarray, "D N"]
    gap: Float[np.ndarray, "D N"]
    energy: float = 0.0
    tokens: int = 0

    @classmethod
    def zero(cls, width: int, neurons: int) -> "Moments":
        """Of no token."""
        gram, own, gap = (np.zeros((rows, neurons)) for rows in (neurons, width, width))
        return cls(gram, own, gap)

    def add(
        self,
        phi: Float[np.ndarray, "R N"],
        own: Float[np.ndarray, "R D"],
        gap: Float[np.ndarray, "R D"],
    ) -> None:
        """Counts more tokens, whose rows are weighted already."""
        self.gram += phi.T @ phi
        self.own += own.T @ phi
        self.gap += gap.T @ phi
        self.energy += float(np.sum(np.square(own + gap), dtype=np.float64))
        self.tokens += len(phi)

    def without(self, fold: "Moments") -> "Moments":
        """Of the tokens that are not in `fold`, a part of these (for fitting: no energy)."""
        return Moments(self.gram - fold.gram, self.own - fold.own, self.gap - fold.gap)


@dataclass(frozen=True)
class Correction:
    """Changes of a layer's down projection.

    Attributes:
      change: [D, N], fitted on all folds; by_fold: those fitted without each fold.
      beta: the share of the gap that is made up for; ridge: one of `RIDGES`.
      before, after: the squared distance of the MoE's state from the dense one relative to the
        dense state's square, without a change and (on the fold left out) with it.
    """

    change: Float[np.ndarray, "D N"]
    by_fold: list[Float[np.ndarray, "D N"]]
    beta: float
    ridge: float
    before: float
    after: float


def fit_correction(folds: Sequence[Moments]) -> Correction:
    """The ridge regression towards own + beta * gap, beta and ridge by cross-validation.

    The solution is linear in beta, and the error on the folds left out quadratic: the line search
    is exact. The ridge is chosen on half of the folds, since a solution for each takes most of the
    time of a fit; beta, and what is told of the error, on all of them. At least two folds.
    """
    width, neurons = folds[0].own.shape
    whole = Moments.zero(width, neurons)
    for fold in folds:
        for name in ("gram", "own", "gap"):
            getattr(whole, name)[...] += getattr(fold, name)
    energy = sum(fold.energy for fold in folds)
    half = len(folds) // 2
    judged = {ridge: _left_out(whole, folds[:half], ridge) for ridge in RIDGES}
    ridge = min(RIDGES, key=lambda ridge: _best_beta(judged[ridge])[1])
    parts = judged[ridge] + _left_out(whole, folds[half:], ridge)
    beta, change_of_error = _best_beta(parts)
    by_fold = [part.own + beta * part.gap for part in parts]
    own, gap = _solve(whole, ridge)
    scale = sum(fold.tokens for fold in folds) * width
    before, after = energy / scale, (energy + change_of_error) / scale
    return Correction(own + beta * gap, by_fold, beta, ridge, before, after)


class _LeftOut(NamedTuple):
    """Changes fitted without a fold, [D, N] each, and their error curve on it."""

    own: Float[np.ndarray, "D N"]
    gap: Float[np.ndarray, "D N"]
    curve: Float[np.ndarray, " 3"]


def _left_out(whole: Moments, folds: Sequence[Moments], ridge: float) -> list[_LeftOut]:
    """For each fold, what is fitted without it."""
    solved = [_solve(whole.without(fold), ridge) for fold in folds]
    return [
        _LeftOut(*changes, _error_curve(fold, *changes))
        for fold, changes in zip(folds, solved, strict=True)
    ]


def _best_beta(parts: Sequence[_LeftOut]) -> tuple[float, float]:
    """The beta in 0 to 1 with the smallest error on the folds left out, and that error's change."""
    curve = np.sum([part.curve for part in parts], axis=0)
    beta = float(np.clip(-curve[1] / (2 * curve[2]), 0, 1)) if curve[2] > 0 else 0.0
    return beta, float(np.polynomial.polynomial.polyval(beta, curve))


def _solve(
    moments: Moments, ridge: float
) -> tuple[Float[np.ndarray, "D N"], Float[np.ndarray, "D N"]]:
    """The changes towards own, and towards gap."""
    cross = np.concatenate([moments.own, moments.gap])
    own, gap = np.split(solve_ridge(moments.gram, cross, ridge=ridge).T, 2)
    return own, gap


def _error_curve(
    fold: Moments, own: Float[np.ndarray, "D N"], gap: Float[np.ndarray, "D N"]
) -> Float[np.ndarray, " 3"]:
    """Coefficients in beta of the squared error on a fold, less its energy."""
    wanted = fold.own + fold.gap
    seen_own, seen_gap = own @ fold.gram, gap @ fold.gram
    return np.array(
        [
            np.vdot(own, seen_own) - 2 * np.vdot(own, wanted),
            2 * np.vdot(own, seen_gap) - 2 * np.vdot(gap, wanted),
            np.vdot(gap, seen_gap),
        ]
    )

"""Measures of calibration."""

import numpy as np
import pytest

from dejax.spec.calibration import (
    area_under_curve,
    brier_score,
    expected_calibration_error,
)


def test_the_calibration_error_by_hand():
    estimates = np.array([0.9, 0.1, 0.7, 0.3])  # two bins: (0.1, 0.3) and (0.7, 0.9)
    outcomes = np.array([1.0, 0.0, 0.0, 1.0])
    # |0.2 - 0.5| and |0.8 - 0.5|, half of all each.
    assert expected_calibration_error(estimates, outcomes, bins=2) == pytest.approx(0.3)
    # Each alone: 0.1, 0.1, 0.7, 0.7.
    assert expected_calibration_error(estimates, outcomes, bins=9) == pytest.approx(0.4)
    assert expected_calibration_error(estimates, outcomes, bins=1) == pytest.approx(0.0)
    # Five in two bins are three and two: 3/5 |0.2 - 0| + 2/5 |0.8 - 1|.
    uneven = np.array([0.1, 0.2, 0.3, 0.75, 0.85]), np.array([0.0, 0, 0, 1, 1])
    assert expected_calibration_error(*uneven, bins=2) == pytest.approx(0.2)
    assert expected_calibration_error(np.zeros(0), np.zeros(0)) == 0


def test_the_others_by_hand():
    estimates, outcomes = np.array([0.8, 0.6, 0.4]), np.array([1.0, 0.0, 1.0])
    assert brier_score(estimates, outcomes) == pytest.approx((0.04 + 0.36 + 0.36) / 3)
    assert area_under_curve(estimates, outcomes) == pytest.approx(0.5)  # over 0.6: one of two
    assert area_under_curve(np.array([0.8, 0.8]), np.array([1.0, 0.0])) == 0.5
    assert area_under_curve(np.array([0.2, 0.9, 0.5]), np.array([0.0, 1.0, 1.0])) == 1
    assert np.isnan(area_under_curve(np.ones(2), np.ones(2)))


def test_an_outcome_that_is_a_probability_is_the_mean_over_what_may_come():
    rng = np.random.default_rng(0)
    estimates, chances = rng.random(6), rng.random(6)
    every = [np.array([i >> bit & 1 for bit in range(6)], float) for i in range(64)]
    weights = [np.prod(np.where(drawn == 1, chances, 1 - chances)) for drawn in every]
    mean = sum(w * brier_score(estimates, drawn) for w, drawn in zip(weights, every, strict=True))
    assert brier_score(estimates, chances) == pytest.approx(mean)

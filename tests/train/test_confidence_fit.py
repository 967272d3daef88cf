"""The fit: its gradient, its optimum, what it recovers, and that nothing of it is by chance."""

import numpy as np
import pytest

from dejax.spec.calibration import cross_entropy, survival
from train.confidence_fit import (
    columns_of,
    estimates,
    fit_regime,
    fit_rows,
    head_of_fits,
    logits_at,
    loss_and_gradient,
    position_temperatures,
    raw_features,
    rows_of,
    survival_before,
)
from train.draft_outcomes import Outcomes

VOCAB, WIDTH, PLACES = 7, 5, 3


def made_up(drafts=200, *, seed=0, scale=1.0):
    """Drafts whose tokens are accepted by a law that a head can have."""
    rng = np.random.default_rng(seed)
    embedding = rng.normal(size=(VOCAB, WIDTH))
    tokens = rng.integers(0, VOCAB, (drafts, PLACES))
    hidden = 3 * rng.normal(size=(drafts, PLACES, WIDTH)) + 1
    law = rng.normal(size=(drafts, PLACES, 3)) - 1
    true = {"hidden": [0.2, 0, -0.1, 0, 0.3], "embedding": [0.5, -0.5, 0, 0, 0]}
    logits = hidden @ true["hidden"] + (embedding @ true["embedding"])[tokens]
    logits = scale * (logits + law @ [0.4, 0.2, -0.3] + [0.5, 0.2, -0.1])
    accepted = 1 / (1 + np.exp(-logits))
    inside = rng.random((drafts, PLACES)) < 0.9
    inside = np.logical_and.accumulate(inside, axis=1)
    return Outcomes(tokens, hidden, law, accepted, inside, np.arange(drafts) // 4), embedding


@pytest.fixture(scope="module")
def rows():
    outcomes, embedding = made_up()
    features = raw_features(outcomes, embedding)
    flat = features.reshape(-1, features.shape[-1])
    columns = columns_of(flat, survival_before(outcomes).ravel())
    return rows_of(outcomes, features, columns)


def test_columns_have_mean_zero_and_spread_one(rows):
    weights = rows.weights[:, None] / rows.weights.sum()
    np.testing.assert_allclose((weights * rows.features).sum(0), 0, atol=1e-9)
    np.testing.assert_allclose((weights * rows.features**2).sum(0), 1, atol=1e-9)


@pytest.mark.parametrize("penalty", [0.0, 0.3])
def test_the_gradient_is_that_of_the_loss(rows, penalty):
    rng = np.random.default_rng(2)
    point = rng.normal(size=rows.features.shape[1] + PLACES)
    _, gradient = loss_and_gradient(point, rows, penalty, PLACES)
    step = 1e-6
    for place in range(len(point)):
        ends = []
        for sign in (1, -1):
            moved = point.copy()
            moved[place] += sign * step
            ends.append(loss_and_gradient(moved, rows, penalty, PLACES)[0])
        assert gradient[place] == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=1e-8)


def test_at_the_fit_the_gradient_vanishes(rows):
    found = fit_rows(rows, 0.01, PLACES)
    least, gradient = loss_and_gradient(found, rows, 0.01, PLACES)
    assert np.abs(gradient).max() < 1e-5
    rng = np.random.default_rng(3)
    for _ in range(20):
        other = found + 0.01 * rng.normal(size=len(found))
        assert loss_and_gradient(other, rows, 0.01, PLACES)[0] > least


def test_a_head_has_what_was_fitted_and_finds_the_law_that_decided():
    outcomes, embedding = made_up(2000)
    fit = fit_regime(outcomes, embedding, penalties=(1e-3, 1e-6))
    head = head_of_fits([fit, fit])
    found = estimates(head, 1, outcomes, embedding)
    seen = survival_before(outcomes) > 0.05
    np.testing.assert_allclose(found[seen], outcomes.accepted[seen], atol=0.03)
    assert fit.penalty == 1e-6
    np.testing.assert_allclose(fit.temperatures, 1, atol=0.1)


def test_the_head_computes_what_the_fit_does():
    outcomes, embedding = made_up(60)
    features = raw_features(outcomes, embedding)
    columns = columns_of(features.reshape(-1, features.shape[-1]), np.ones(60 * PLACES))
    weights = np.random.default_rng(4).normal(size=features.shape[-1] + PLACES)
    w = weights[:-PLACES] / columns.spreads
    logits = logits_at(features, columns, weights)
    scaled = (features - columns.means) / columns.spreads
    np.testing.assert_allclose(logits, scaled @ weights[:-PLACES] + weights[-PLACES:], atol=1e-9)
    assert w.shape == (2 * WIDTH + 3,)


def test_a_token_counts_as_often_as_drafts_get_to_it():
    outcomes, _ = made_up(8)
    before = survival_before(outcomes)
    a, inside = outcomes.accepted, outcomes.inside
    np.testing.assert_allclose(before[:, 0], inside[:, 0])
    np.testing.assert_allclose(before[:, 2], a[:, 0] * a[:, 1] * inside[:, 2])
    assert not inside.all() and (before[~inside] == 0).all()


def test_the_same_drafts_give_the_same_head():
    first, second = (fit_regime(*made_up(80, seed=5)) for _ in range(2))
    for name, value in vars(first).items():
        np.testing.assert_array_equal(value, getattr(second, name))
    one_prompt = Outcomes(**(vars(made_up(40)[0]) | {"prompts": np.zeros(40, int)}))
    assert np.isfinite(fit_regime(one_prompt, made_up(40)[1]).hidden).all()


def test_temperatures_are_those_that_the_outcomes_were_drawn_with():
    rng = np.random.default_rng(1)
    true = np.array([0.5, 2.0, 1.0])
    logits = rng.normal(1.0, 2.0, (4000, 3))
    chances = 1 / (1 + np.exp(-logits / true))
    found = position_temperatures(logits, chances, np.ones_like(logits, bool))
    np.testing.assert_allclose(found, true, rtol=1e-3)
    # Each is the least of the loss at its place, those before it being fixed.
    alive = survival(1 / (1 + np.exp(-logits / found)))
    for place in range(3):
        for factor in (0.97, 1.03):
            other = found.copy()
            other[place] *= factor
            moved = survival(1 / (1 + np.exp(-logits / other)))[:, place]
            at, wanted = alive[:, place], survival(chances)[:, place]
            losses = [cross_entropy(np.log(p / (1 - p)), wanted).mean() for p in (at, moved)]
            assert losses[0] < losses[1]


def test_behind_the_end_of_all_texts_nothing_is_scaled():
    logits, inside = np.full((3, 2), 0.5), np.array([[1, 0]] * 3, bool)
    found = position_temperatures(logits, np.full((3, 2), 0.9), inside)
    assert found[0] != 1 and found[1] == 1

"""Draft experts in closed form: the regression, the choice of neurons, layer upon layer."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from dejax.errors import UsageError
from dejax.model import attend_full, causal_mask, route
from dejax.nn.experts import expert_output
from tests.infer.random_target import random_target
from tests.train.rows import random_batch
from train.closed_form import (
    InitConfig,
    fit_draft,
    mean_missing,
    pick_features,
    solve_ridge,
    take_moments,
)
from train.evaluate import teacher_forced
from train.teacher import as_teacher


@pytest.fixture(scope="module")
def teacher():
    return as_teacher(random_target("shared", dtype=jnp.float32))


@pytest.fixture(scope="module")
def batches(teacher):
    return [random_batch(teacher.config, rows=4, length=32, seed=seed) for seed in range(4)]


def fit(teacher, batches, *, width=24, **fields):
    return fit_draft(teacher, batches, width=width, r=1, config=InitConfig(**fields))


def test_ridge_recovers_a_linear_map():
    rng = np.random.default_rng(0)
    features, down = rng.normal(size=(200, 6)), rng.normal(size=(6, 3))
    targets = features @ down
    solved = solve_ridge(features.T @ features, targets.T @ features, ridge=1e-12)
    np.testing.assert_allclose(solved, down, rtol=1e-9)


def test_ridge_is_relative_to_the_size_of_the_features():
    rng = np.random.default_rng(1)
    features, targets = rng.normal(size=(50, 4)), rng.normal(size=(50, 2))

    def solution(scale):
        phi = scale * features
        return scale * solve_ridge(phi.T @ phi, targets.T @ phi, ridge=0.1)

    np.testing.assert_allclose(solution(1.0), solution(1e4), rtol=1e-9)
    phi = features
    system = phi.T @ phi + 0.1 * np.trace(phi.T @ phi) / 4 * np.eye(4)
    np.testing.assert_allclose(system @ solution(1.0), phi.T @ targets, rtol=1e-9, atol=1e-9)


def test_dead_features_are_no_obstacle():
    solved = solve_ridge(np.zeros((3, 3)), np.zeros((2, 3)), ridge=1e-3)
    np.testing.assert_array_equal(solved, np.zeros((3, 2)))


def test_features_are_picked_by_what_they_explain():
    rng = np.random.default_rng(3)
    useful, noise = rng.normal(size=(300, 3)), rng.normal(size=(300, 5))
    # Loud noise, a copy of a useful feature, and useful features of small size.
    features = np.concatenate([10 * noise, useful[:, :1] * 2, 0.01 * useful], axis=1)
    targets = useful @ rng.normal(size=(3, 4))
    gram, cross = features.T @ features, targets.T @ features
    picked = pick_features(gram, cross, 3, ridge=1e-9)
    assert set(picked) & {5, 6} and {7, 8} <= set(picked)
    assert len(set(pick_features(gram, cross, 9, ridge=1e-9))) == 9


def explained(gram, cross, picked):
    down = solve_ridge(gram[np.ix_(picked, picked)], cross[:, picked], ridge=1e-9)
    return np.sum(cross[:, picked].T * down)


def test_greedy_picking_beats_taking_the_first():
    rng = np.random.default_rng(4)
    features = rng.normal(size=(400, 20)) @ rng.normal(size=(20, 20))
    targets = features @ rng.normal(size=(20, 5)) + rng.normal(size=(400, 5))
    gram, cross = features.T @ features, targets.T @ features
    picked = pick_features(gram, cross, 6, ridge=1e-9)
    assert explained(gram, cross, picked) > explained(gram, cross, np.arange(6))


@pytest.mark.slow
def test_zero_fit_copies_neurons_and_changes_nothing(teacher, batches):
    params, left = fit(teacher, batches[:1], fit="zero")
    assert params["weights"].shape == (2, 3, 24, 32) and (params["gamma"] == 1).all()
    assert (params["weights"][:, 2] == 0).all() and left == [1.0, 1.0]
    for index, stack in enumerate(teacher.params.routed):
        known = {row.tobytes() for row in np.asarray(stack[:, 0]).reshape(-1, 32)}
        assert all(row.tobytes() in known for row in np.asarray(params["weights"][index, 0]))


def targets_of(teacher, batches):
    """Counted inputs and left-out outputs of each MoE layer, from the routing itself: numpy."""
    target = random_target("shared", dtype=jnp.float32)
    inputs = {layer: [] for layer in target.config.moe_layers}
    outputs = {layer: [] for layer in target.config.moe_layers}
    for batch in batches:
        kept = np.asarray(batch["mask"]) > 0
        x = target.model.embedding[...][batch["tokens"]]
        rows = dict(positions=batch["positions"], mask=causal_mask(batch["segment_ids"]))
        for index, layer in enumerate(target.model.layers):
            x = attend_full(layer, x, **rows)
            h, routing, always = route(layer, x)
            if routing is None:
                x = x + always
                continue
            every = jnp.stack([expert_output(h, expert) for expert in target.routed[index]], 2)
            ranked = jnp.take_along_axis(every, routing.ids[..., None], 2)
            ranked = ranked * routing.gates[..., None]
            inputs[index].append(np.asarray(h, np.float64)[kept])
            outputs[index].append(np.asarray(ranked[:, :, 1:].sum(2), np.float64)[kept])
            x = x + always + ranked.sum(2)
    return [[np.concatenate(part[layer]) for part in (inputs, outputs)] for layer in inputs]


@pytest.mark.slow
def test_the_fit_is_the_least_squares_solution(teacher, batches):
    params, left = fit(teacher, batches, pool=1, ridge=1e-3)
    for layer, (h, missing) in enumerate(targets_of(teacher, batches)):
        gate_rows, up_rows, down = np.asarray(params["weights"][layer], np.float64)
        gate, up = h @ gate_rows.T, h @ up_rows.T
        phi = gate / (1 + np.exp(-gate)) * up
        ridge = 1e-3 * np.trace(phi.T @ phi) / 24 * np.eye(24)
        expected = np.linalg.solve(phi.T @ phi + ridge, phi.T @ missing)
        np.testing.assert_allclose(down, expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())
        error = np.square(missing - phi @ down).sum() / np.square(missing).sum()
        np.testing.assert_allclose(left[layer], error, rtol=1e-3)
        assert 0 < error < 1


def test_moments_add_up_over_batches(teacher, batches):
    weights = fit(teacher, batches[:1], fit="zero")[0]["weights"]
    take = partial(take_moments, teacher, weights, r=1)
    whole, parts = take(batches), [take([batch]) for batch in batches]
    assert whole.gram.dtype == np.float64 and whole.gram.shape == (2, 24, 24)
    assert whole.cross.shape == (2, 32, 24) and whole.energy.shape == (2,)
    for name in ("gram", "cross", "energy"):
        total = sum(getattr(part, name) for part in parts)
        np.testing.assert_allclose(getattr(whole, name), total, rtol=1e-12)


@pytest.mark.slow
def test_the_fit_brings_the_draft_nearer(teacher, batches):
    params, left = fit(teacher, batches)
    assert all(0 < share < 1 for share in left)
    fitted, alone = (teacher_forced(teacher, p, batches, r=1) for p in (params, None))
    assert fitted["kl"] < alone["kl"] and fitted["residual"] < alone["residual"] == 1
    # With all candidates seen, the chosen ones explain more than the most important ones.
    assert sum(left) < sum(fit(teacher, batches, pool=1)[1])


@pytest.mark.slow
def test_mean_of_the_left_out_output(teacher, batches):
    constant = mean_missing(teacher, batches, r=1)["constant"]
    assert constant.shape == (2, 32)
    with_mean, alone = (
        teacher_forced(teacher, p, batches, r=1)["residual"] for p in ({"constant": constant}, None)
    )
    assert with_mean < alone
    # Where every chosen expert is kept, nothing is left out.
    nothing_left = mean_missing(teacher, batches, r=3)["constant"]
    assert (nothing_left == 0).all()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(tokens=0), "^init.tokens is 0; expected at least 1$"),
        (dict(pool=0), "^init.pool is 0; expected at least 1$"),
        (dict(ridge=0.0), "^init.ridge is 0.0; expected > 0$"),
    ],
)
def test_bad_settings_are_refused_by_name(fields, message):
    with pytest.raises(UsageError, match=message):
        InitConfig(**fields)


def test_too_wide_a_draft_is_refused(teacher, batches):
    with pytest.raises(UsageError, match="width of 1000 is more than the 128 neurons"):
        fit(teacher, batches[:1], width=1000)

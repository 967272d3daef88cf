"""Draft experts in closed form: the regression, the choice of neurons, layer upon layer."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax.errors import UsageError
from dejax.nn.experts import expert_output
from tests.infer.random_target import random_target
from tests.train.rows import random_batch
from train.closed_form import (
    InitConfig,
    Moments,
    fit_draft,
    mean_missing,
    pick_features,
    solve_ridge,
)
from train.distill_step import paired_forward
from train.evaluate import teacher_forced
from train.teacher import as_teacher


@pytest.fixture(scope="module")
def teacher():
    return as_teacher(random_target("shared", dtype=jnp.float32))


@pytest.fixture(scope="module")
def batches(teacher):
    return [random_batch(teacher.config, rows=4, length=32, seed=seed) for seed in range(4)]


def fit(teacher, batches, *, width=24, **fields):
    return fit_draft(
        teacher.definition,
        teacher.params,
        batches,
        width=width,
        r=1,
        config=InitConfig(**fields),
    )


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


def test_moments_are_those_of_the_counted_rows():
    rng = np.random.default_rng(2)
    features = jnp.asarray(rng.normal(size=(2, 2, 5, 4)), jnp.float32)
    targets = jnp.asarray(rng.normal(size=(2, 2, 5, 3)), jnp.float32)
    mask = jnp.asarray(rng.integers(0, 2, (2, 2, 5)), jnp.float32)
    moments = Moments(4, 3)
    for part in zip(features, targets, mask, strict=True):
        moments.add(*part)
    kept = np.asarray(mask).reshape(-1) > 0
    phi, y = (np.asarray(a, np.float64).reshape(20, -1)[kept] for a in (features, targets))
    np.testing.assert_allclose(moments.gram, phi.T @ phi, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(moments.cross, y.T @ phi, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(moments.energy, np.square(y).sum(), rtol=1e-5)
    assert moments.rows == kept.sum() and moments.gram.dtype == np.float64


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


def test_zero_fit_copies_neurons_and_changes_nothing(teacher, batches):
    params, left = fit(teacher, batches[:1], fit="zero")
    assert params["weights"].shape == (2, 3, 24, 32) and (params["gamma"] == 1).all()
    assert (params["weights"][:, 2] == 0).all() and left == [1.0, 1.0]
    for index, stack in enumerate(teacher.params.routed):
        known = {row.tobytes() for row in np.asarray(stack[:, 0]).reshape(-1, 32)}
        assert all(row.tobytes() in known for row in np.asarray(params["weights"][index, 0]))


def test_the_fit_is_the_least_squares_solution_of_its_layer(teacher, batches):
    """Against numpy on the hidden states and left-out outputs of the first MoE layer."""
    params, left = fit(teacher, batches, fit="local", pool=1, ridge=1e-6)
    from train.closed_form import _climb, _embedded

    layer = jax.tree.map(lambda a: a[0], params)
    phi, y, outputs = [], [], []
    for batch in batches:
        x = _embedded(teacher.definition, teacher.params, batch, jnp.float32)
        first = jax.tree.map(lambda a: a[0], teacher.params.layers)
        _, side = _climb(
            teacher.definition, first, teacher.params.routed[0], x, x, batch, r=1, fit="local"
        )
        kept = np.asarray(batch["mask"]).reshape(-1) > 0
        h = side.hidden.reshape(-1, 32)
        gate, up = (np.asarray(h @ layer["weights"][i].T, np.float64) for i in (0, 1))
        phi.append((gate / (1 + np.exp(-gate)) * up)[kept])
        y.append(np.asarray(side.wanted, np.float64).reshape(-1, 32)[kept])
        outputs.append(np.asarray(expert_output(h, layer["weights"]))[kept])
    phi, y, outputs = (np.concatenate(a) for a in (phi, y, outputs))
    ridge = 1e-6 * np.trace(phi.T @ phi) / 24 * np.eye(24)
    np.testing.assert_allclose(
        layer["weights"][2], np.linalg.solve(phi.T @ phi + ridge, phi.T @ y), rtol=2e-2, atol=2e-3
    )
    remaining = np.square(y - outputs).sum() / np.square(y).sum()
    np.testing.assert_allclose(left[0], remaining, rtol=1e-3)
    assert 0 < remaining < 1


@pytest.mark.parametrize("fit_to", ["local", "drift", "stream"])
def test_every_fit_brings_the_draft_nearer(teacher, batches, fit_to):
    params, left = fit(teacher, batches, fit=fit_to, pool=4)
    assert all(0 < share < 1 for share in left)
    fitted, alone = (teacher_forced(teacher, p, batches, r=1) for p in (params, None))
    assert fitted["kl"] < alone["kl"] and fitted["residual"] < alone["residual"] == 1


def test_the_stream_fit_follows_the_draft_networks_own_stream(teacher, batches):
    """What a layer is fitted on is what the draft network really gives it."""
    params, left = fit(teacher, batches, fit="stream", pool=1)
    run = jax.jit(partial(paired_forward, teacher.definition, r=1))
    error = energy = 0.0
    layers = teacher.params.routed.shape[0]
    for batch in batches:
        _, full, drafted, _ = run(teacher.params, params, batch)
        last = params | {"weights": params["weights"].at[layers - 1, 2].set(0)}
        _, _, base, _ = run(teacher.params, last, batch)
        mask = batch["mask"][..., None]
        error += float((jnp.square(full - drafted) * mask).sum())
        energy += float((jnp.square(full - base) * mask).sum())
    np.testing.assert_allclose(left[-1], error / energy, rtol=1e-3)


def test_mean_of_the_left_out_output(teacher, batches):
    constant = mean_missing(teacher.definition, teacher.params, batches, r=1)["constant"]
    assert constant.shape == (2, 32)
    with_mean, alone = (
        teacher_forced(teacher, p, batches, r=1)["residual"] for p in ({"constant": constant}, None)
    )
    assert with_mean < alone
    # Where every chosen expert is kept, nothing is left out.
    nothing_left = mean_missing(teacher.definition, teacher.params, batches, r=3)["constant"]
    assert (nothing_left == 0).all()


@pytest.mark.parametrize("fields", [dict(tokens=0), dict(pool=0), dict(ridge=0.0)])
def test_bad_settings_are_refused(fields):
    with pytest.raises(UsageError, match="init: tokens is"):
        InitConfig(**fields)


def test_too_wide_a_draft_is_refused(teacher, batches):
    with pytest.raises(UsageError, match="width of 1000 is more than the 128 neurons"):
        fit(teacher, batches[:1], width=1000)

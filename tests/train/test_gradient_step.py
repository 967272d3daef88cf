"""Gradients of a batch in smaller ones, and of each loss by itself."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.infer.random_target import draft_of, random_target
from tests.train.rows import random_batch
from train.distill_step import loss_fn
from train.gradient_step import DistillState, make_step, make_term_norms
from train.losses import TERMS
from train.teacher import as_teacher

pytestmark = pytest.mark.slow  # what it compiles

ROWS, LENGTH = 4, 16


@pytest.fixture(scope="module")
def target():
    return random_target("shared", dtype=jnp.float32)


@pytest.fixture(scope="module")
def teacher(target):
    return as_teacher(target)


@pytest.fixture(scope="module")
def params(target):
    return draft_of(target).stacked_params()


@pytest.fixture(scope="module")
def batch(target):
    """Rows that count differently many tokens: the smaller batches weigh 4 to 1."""
    found = dict(random_batch(target.config, rows=ROWS, length=LENGTH, documents=1))
    counted = np.zeros((ROWS, LENGTH), np.float32)
    for row, tokens in enumerate((16, 5, 12, 2)):
        counted[row, :tokens] = 1
    return found | {"mask": jnp.asarray(counted)}


@pytest.fixture(scope="module")
def options(teacher):
    return dict(definition=teacher.definition, r=1, dtype=teacher.dtype)


@pytest.fixture(scope="module")
def norms(teacher, params, batch, options):
    """By number of smaller batches."""
    return {
        count: make_term_norms(accumulate=count, **options)(teacher.params, params, batch)
        for count in (1, 2)
    }


def test_norms_of_smaller_batches_are_those_of_the_whole(norms):
    for name in ("logit", "token", "router"):  # means over tokens
        whole, parts = (norms[count][f"grad_norm_{name}"] for count in (1, 2))
        assert whole > 0
        np.testing.assert_allclose(parts, whole, rtol=1e-4)


def test_the_residuals_norm_is_that_of_the_parts_by_their_tokens(
    norms, teacher, params, batch, options
):
    """The residual's error is relative to what is missing in its own part."""

    @jax.jit
    def gradient(params, part):
        loss = partial(loss_fn, **options)
        return jax.grad(lambda p: loss(p, teacher.params, part, jnp.eye(4)[2])[0])(params)

    parts = [{key: a[first::2] for key, a in batch.items()} for first in (0, 1)]
    shares = [part["mask"].sum() / batch["mask"].sum() for part in parts]
    found = [gradient(params, part) for part in parts]
    mean = jax.tree.map(lambda a, b: shares[0] * a + shares[1] * b, *found)
    norm = norms[2]["grad_norm_residual"]
    np.testing.assert_allclose(norm, optax.tree.norm(mean), rtol=1e-4)


@pytest.mark.parametrize("count", [1, 2])
def test_a_loss_alone_has_the_norm_that_a_step_of_it_reports(
    norms, teacher, params, batch, options, count
):
    optimizer = optax.sgd(0.1)
    step = make_step(optimizer, accumulate=count, **options)
    for name, weights in zip(TERMS, jnp.eye(4), strict=True):
        draft = jax.tree.map(jnp.copy, params)
        state = DistillState(draft=draft, opt_state=optimizer.init(draft))
        _, metrics = step(teacher.params, state, batch, weights)
        expected = norms[count][f"grad_norm_{name}"]
        np.testing.assert_allclose(metrics["grad_norm"], expected, rtol=1e-4)


def test_norms_take_no_more_memory_than_the_step(teacher, params, target, options):
    """Where an accumulated step fits, so do they."""
    batch, optimizer = random_batch(target.config, rows=8, length=128), optax.sgd(0.1)
    state = DistillState(draft=params, opt_state=optimizer.init(params))

    def bytes_beside(function, *args):
        analysis = function.lower(teacher.params, *args).compile().memory_analysis()
        return analysis.temp_size_in_bytes

    taken = bytes_beside(make_step(optimizer, accumulate=8, **options), state, batch, jnp.ones(4))
    norms = make_term_norms(accumulate=8, **options)
    assert bytes_beside(norms, params, batch) < 1.5 * taken
    assert bytes_beside(make_term_norms(**options), params, batch) > 2 * taken

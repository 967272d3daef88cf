"""The distillation losses: against plain formulas, in chunks, added over shards."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax.errors import UsageError
from train.losses import (
    LossWeights,
    Total,
    cross_entropy,
    residual_loss,
    router_loss,
    vocabulary_losses,
)

N, D, V = 23, 8, 37
B = 1  # the rows are of one sequence


@pytest.fixture
def rows():
    rng = np.random.default_rng(0)
    head = jnp.asarray(rng.normal(size=(V, D)), jnp.float32)
    teacher = jnp.asarray(rng.normal(size=(B, N, D)), jnp.float32)
    student = teacher + jnp.asarray(0.5 * rng.normal(size=(B, N, D)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, V, (B, N)), jnp.int32)
    mask = jnp.asarray(rng.integers(0, 2, (B, N)), jnp.float32)
    return head, teacher, student, targets, mask


def naive(head, teacher, student, targets, mask, temperature):
    """The same five numbers from whole arrays of logits."""
    full, draft, targets, mask = teacher[0] @ head.T, student[0] @ head.T, targets[0], mask[0]
    p = jax.nn.softmax(full / temperature)
    soft = jax.nn.log_softmax(draft / temperature)
    kl = temperature**2 * (p * (jnp.log(p) - soft)).sum(-1)
    every = jnp.arange(N)
    best = full.argmax(-1)
    columns = [
        kl,
        -jax.nn.log_softmax(draft)[every, best],
        (draft.argmax(-1) == best).astype(jnp.float32),
        -jax.nn.log_softmax(full)[every, targets],
        -jax.nn.log_softmax(draft)[every, targets],
    ]
    return [(column * mask).sum() for column in columns]


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("chunk", [1, 5, 23, 64])
def test_chunks_give_the_sums_and_gradients_of_whole_arrays(rows, temperature, chunk):
    head, teacher, student, targets, mask = rows
    options = dict(temperature=temperature, chunk=chunk)

    def chunked(student, head):
        return vocabulary_losses(
            head, teacher, student, targets, mask, weights=(2.0, 0.3), **options
        )

    def plain(student):
        sums = naive(head, teacher, student, targets, mask, temperature)
        return 2.0 * sums[0] + 0.3 * sums[1], sums

    (loss, totals), grad = jax.jit(jax.value_and_grad(chunked, has_aux=True))(student, head)
    (whole, sums), expected = jax.value_and_grad(plain, has_aux=True)(student)
    np.testing.assert_allclose([loss, chunked(student, head)[0]], whole, rtol=2e-6)
    for total, value in zip(totals, sums, strict=True):
        np.testing.assert_allclose(total.sum, value, rtol=2e-6)
        assert total.count == mask.sum()
    np.testing.assert_allclose(grad, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())


def test_chunks_are_exact_in_float64(rows):
    with jax.enable_x64(True):
        wide = [jnp.asarray(a, jnp.float64) for a in rows[:3]]
        found = vocabulary_losses(*wide, *rows[3:], chunk=4)[1]
        expected = naive(*wide, *rows[3:], 1.0)
        for total, value in zip(found, expected, strict=True):
            np.testing.assert_allclose(total.sum, value, rtol=1e-12)


def test_equal_streams_agree_everywhere(rows):
    head, teacher, _, targets, _ = rows
    _, totals = vocabulary_losses(head, teacher, teacher, targets, jnp.ones((B, N)), chunk=8)
    assert totals.agreement.mean == 1
    assert abs(totals.logit.mean) < 1e-6
    np.testing.assert_allclose(totals.full.mean, totals.draft.mean)


def test_no_gradient_reaches_the_target(rows):
    head, teacher, student, targets, mask = rows

    def loss(teacher):
        loss, totals = vocabulary_losses(head, teacher, student, targets, mask, chunk=8)
        residual = residual_loss(student, teacher, mask)
        router = router_loss(jax.nn.softmax(teacher), jax.nn.softmax(student), mask)
        return loss + totals.logit.mean + totals.token.mean + residual.mean + router.mean

    assert (jax.grad(loss)(teacher) == 0).all()


def test_no_array_of_all_logits_is_made(rows):
    head, teacher, student, targets, mask = rows

    def loss(student):
        return vocabulary_losses(head, teacher, student, targets, mask, chunk=4)[0]

    jaxpr = str(jax.make_jaxpr(jax.grad(loss))(student))
    assert f"f32[4,{V}]" in jaxpr
    for rows_held in (N, 24):
        assert f"f32[{rows_held},{V}]" not in jaxpr and f"f32[6,4,{V}]" not in jaxpr


@pytest.mark.slow
def test_sums_over_shards_are_the_sums_over_the_whole(rows):
    head, teacher, student, targets, mask = rows

    def totals(part):
        rows = (a[:, part] for a in (teacher, student, targets, mask))
        vocabulary = vocabulary_losses(head, *rows, chunk=4)
        residual = residual_loss(student[:, part], teacher[:, part], mask[:, part])
        router = router_loss(
            jax.nn.softmax(teacher[:, part]), jax.nn.softmax(student[:, part]), mask[:, part]
        )
        return vocabulary, residual, router

    whole, first, second = totals(slice(None)), totals(slice(9)), totals(slice(9, None))
    added = jax.tree.map(lambda a, b: a + b, first, second)
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(added), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_residual_is_relative_to_what_is_missing(rows):
    _, teacher, student, _, mask = rows
    total = residual_loss(student, teacher, mask)
    error = np.square(np.asarray(student - teacher)) * np.asarray(mask)[..., None]
    energy = np.square(np.asarray(teacher)) * np.asarray(mask)[..., None]
    np.testing.assert_allclose(total.mean, error.sum() / energy.sum(), rtol=1e-5)
    for scale in (1e-3, 100.0):
        scaled = residual_loss(scale * student, scale * teacher, mask)
        np.testing.assert_allclose(scaled.mean, total.mean, rtol=1e-4)
    assert residual_loss(jnp.zeros_like(teacher), teacher, mask).mean == 1


def test_router_loss_is_a_divergence_and_survives_zero_probabilities():
    teacher = jnp.asarray([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])
    student = jnp.asarray([[0.25, 0.75, 0.0], [0.0, 1.0, 0.0]])
    total = router_loss(teacher[:1], student[:1], jnp.ones(1))
    expected = 0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75)
    np.testing.assert_allclose(total.mean, expected, rtol=1e-6)
    grad = jax.grad(lambda s: router_loss(teacher, s, jnp.ones(2)).mean)(student)
    assert np.isfinite(router_loss(teacher, student, jnp.ones(2)).mean)
    assert np.isfinite(grad).all()
    assert router_loss(teacher, student, jnp.asarray([1.0, 0.0])).mean == total.mean


def test_weights_stand_in_the_order_of_the_terms():
    weights = LossWeights(logit=1.0, token=10.0, residual=100.0, router=1000.0)
    assert weights.vector().tolist() == [1, 10, 100, 1000]


def test_a_mean_over_nothing_is_zero_and_small_counts_are_counts():
    assert Total(jnp.zeros(()), jnp.zeros(())).mean == 0
    assert Total(jnp.asarray(1.0), jnp.asarray(0.25)).mean == 4
    rows = jnp.ones((3, D))
    total = cross_entropy(lambda h: h[:, :2], rows, jnp.zeros(3, jnp.int32), jnp.zeros(3), chunk=2)
    assert total.mean == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(logit=-1.0, token=2.0), "^losses: logit is -1.0; expected 0 or more$"),
        (
            dict(logit=0.0, token=0.0, residual=0.0, router=0.0),
            "router are all 0; expected one a",
        ),
        (dict(temperature=0.0), "temperature is 0.0; expected > 0"),
    ],
)
def test_bad_weights_are_refused(fields, message):
    with pytest.raises(UsageError, match=message):
        LossWeights(**fields)

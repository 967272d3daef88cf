"""Routed experts: both functions give the weighted sum, whatever else the pass computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax.nn.experts import expert_output, experts_of_rows, experts_of_tokens, unique_weights

E, F, D = 6, 5, 8


@pytest.fixture(scope="module")
def stack():
    return jnp.asarray(np.random.default_rng(0).standard_normal((E, 3, F, D), np.float32))


def silu(x):
    return x / (1 + np.exp(-x))


def by_hand(h, ids, gates, stack):
    """sum_k gate_k * down(silu(gate h) * up h) in float64, row by row."""
    h, gates, stack = (np.asarray(a, np.float64) for a in (h, gates, stack))
    rows = np.zeros(h.shape)
    for row, (x, experts, weights) in enumerate(zip(h, ids, gates, strict=True)):
        for expert, weight in zip(np.asarray(experts), weights, strict=True):
            gate, up, down = stack[expert]
            rows[row] += weight * (silu(gate @ x) * (up @ x)) @ down
    return rows


# Eager operations compile one by one.
sum_of_rows, weights_of = jax.jit(experts_of_rows), jax.jit(unique_weights)


def routed(rows, k, seed):
    rng = np.random.default_rng(seed)
    h = rng.standard_normal((rows, D), np.float32)
    ids = np.stack([rng.permutation(E)[:k] for _ in range(rows)]).astype(np.int32)
    return jnp.asarray(h), jnp.asarray(ids), jnp.asarray(rng.random((rows, k), np.float32))


def test_one_expert(stack):
    h, _, _ = routed(4, 1, 0)
    expected = by_hand(h, np.full((4, 1), 2), np.ones((4, 1)), stack)
    np.testing.assert_allclose(jax.jit(expert_output)(h, stack[2]), expected, atol=1e-5)


def test_weights_of_unique_experts():
    ids, gates = jnp.array([[3, 1], [1, 5]]), jnp.array([[0.5, 0.25], [2.0, 4.0]])
    weights = weights_of(ids, gates, jnp.array([1, 3, 5, -1]))
    np.testing.assert_array_equal(weights, [[0.25, 0.5, 0, 0], [2, 0, 4, 0]])


@pytest.mark.parametrize("rows, k, block", [(1, 3, 1), (7, 1, 16), (20, E, 16), (20, 2, 4)])
def test_both_functions_are_the_sum(stack, rows, k, block):
    h, ids, gates = routed(rows, k, seed=rows)
    expected = by_hand(h, ids, gates, stack)
    tokens = experts_of_tokens(h, ids, gates, stack, block=block)
    np.testing.assert_allclose(tokens, expected, atol=2e-5)
    weights = weights_of(ids, gates, np.arange(E))
    np.testing.assert_allclose(sum_of_rows(h, weights, tuple(stack)), expected, atol=2e-5)


@pytest.mark.parametrize("favourite", [0, 3, E - 1])
def test_no_token_is_dropped_when_all_want_the_same_expert(stack, favourite):
    h, ids, gates = routed(40, 1, 0)
    ids = jnp.full_like(ids, favourite)
    expected = by_hand(h, ids, gates, stack)
    np.testing.assert_allclose(
        experts_of_tokens(h, ids, gates, stack, block=4), expected, atol=2e-5
    )


def test_a_row_knows_nothing_of_the_other_experts_of_the_pass(stack):
    """Bit for bit: the union, its padding, and how it is cut into groups change no row."""
    h, ids, gates = routed(3, 2, 1)
    ids = jnp.broadcast_to(jnp.array([1, 4]), ids.shape)

    def output(unique, before=None):
        experts = tuple(stack[max(expert, 0)] for expert in unique)
        weights = weights_of(ids, gates, np.array(unique))
        return sum_of_rows(h, weights, experts, before=before)

    alone = output((1, 4))
    np.testing.assert_array_equal(alone, output((0, 1, 2, 3, 4, 5)))
    np.testing.assert_array_equal(alone, output((1, 4, -1, -1)))
    np.testing.assert_array_equal(alone, output((3, 4), before=output((0, 1))))


def test_order_of_the_choice_does_not_matter(stack):
    h, ids, gates = routed(9, 3, 2)
    one = experts_of_tokens(h, ids, gates, stack, block=4)
    other = experts_of_tokens(h, ids[:, ::-1], gates[:, ::-1], stack, block=4)
    np.testing.assert_array_equal(one, other)


def test_gradients_of_the_grouped_product(stack):
    """Its own backward pass is the derivative of the plain sum."""
    h, ids, gates = routed(20, 3, 3)

    def grouped(h, gates, stack):
        return jnp.sin(experts_of_tokens(h, ids, gates, stack, block=8)).sum()

    def plain(h, gates, stack):
        weights = unique_weights(ids, gates, jnp.arange(E))
        return jnp.sin(experts_of_rows(h, weights, tuple(stack))).sum()

    ours = jax.jit(jax.grad(grouped, (0, 1, 2)))(h, gates, stack)
    expected = jax.jit(jax.grad(plain, (0, 1, 2)))(h, gates, stack)
    for one, other in zip(ours, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_short_weights_are_widened(stack):
    h, ids, gates = routed(3, 2, 4)
    short = stack.astype(jnp.bfloat16)
    y = experts_of_tokens(h, ids, gates, short, block=4)
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, by_hand(h, ids, gates, short.astype(jnp.float32)), atol=2e-5)

"""Draft experts start from the neurons that carry most of what they stand in for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax.draft.init import copy_neurons, most_important, neuron_importance
from dejax.draft.path import below_r
from dejax.errors import UsageError
from dejax.nn.experts import expert_output
from dejax.nn.router import Routing

E, K, F, D, N = 5, 3, 4, 6, 20


@pytest.fixture
def layer():
    rng = np.random.default_rng(1)
    h = jnp.asarray(rng.normal(size=(N, D)), jnp.float32)
    stack = jnp.asarray(rng.normal(size=(E, 3, F, D)), jnp.float32)
    scores = jax.nn.softmax(jnp.asarray(rng.normal(size=(N, E)), jnp.float32))
    gates, ids = jax.lax.top_k(scores, K)
    mask = jnp.asarray(rng.integers(0, 2, N), jnp.float32)
    return h, stack, Routing(ids=ids, gates=2 * gates, scores=scores), mask


def test_importance_counts_what_is_left_out(layer):
    h, stack, routing, mask = layer
    expected = np.zeros((E, F))
    for t in range(N):
        for rank in range(1, K):  # the top-1 expert is kept, so its neurons do not count
            expert = int(routing.ids[t, rank])
            gate, up, down = np.asarray(stack[expert])
            x = np.asarray(h[t])
            activation = (gate @ x) / (1 + np.exp(-gate @ x)) * (up @ x)
            share = float(mask[t] * routing.gates[t, rank])
            expected[expert] += share * np.abs(activation) * np.linalg.norm(down, axis=1)
    found = neuron_importance(h, below_r(routing, 1), stack, mask)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_the_most_important_neurons_are_copied_with_zero_output(layer):
    h, stack, routing, mask = layer
    importance = np.asarray(neuron_importance(h, below_r(routing, 1), stack, mask))
    neurons = most_important(importance, 7)
    assert importance.reshape(-1)[neurons].min() >= np.sort(importance.reshape(-1))[-7]
    weights = copy_neurons(stack, jnp.asarray(neurons), D)
    for place, flat in enumerate(neurons):
        np.testing.assert_array_equal(weights[:2, place], stack[flat // F, :2, flat % F])
    assert (weights[2] == 0).all() and (weights[:2] != 0).all()
    np.testing.assert_array_equal(expert_output(h, weights), 0)


def test_ties_go_to_the_lower_neuron():
    assert most_important(np.ones((2, 3)), 4).tolist() == [0, 1, 2, 3]


def test_copies_are_wide_enough_to_be_trained(layer):
    _, stack, _, _ = layer
    neurons = np.arange(3)
    assert copy_neurons(stack.astype(jnp.bfloat16), jnp.asarray(neurons), D).dtype == jnp.float32
    with jax.enable_x64(True):
        assert (
            copy_neurons(jnp.asarray(stack, jnp.float64), jnp.asarray(neurons), D).dtype
            == jnp.float64
        )


def test_more_neurons_than_there_are_is_refused():
    with pytest.raises(UsageError, match="width of 7 is more than the 6 neurons"):
        most_important(np.ones((2, 3)), 7)

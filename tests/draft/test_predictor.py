"""The predictor of experts: what it computes, and what it starts from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax.draft.predictor import expert_logits, initial_predictor, predictor_shapes
from tests.infer.random_target import SHAPES


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def test_logits_are_those_of_the_formula():
    config, rng = SHAPES["groups"], np.random.default_rng(0)
    params = {k: rng.standard_normal(s) for k, s in predictor_shapes(config, 5).items()}
    state, token = rng.standard_normal((2, 3, config.width))
    layers, experts, top_k = len(config.moe_layers), config.moe.num_experts, config.moe.top_k
    parent = np.array([[rng.permutation(experts)[:top_k] for _ in range(layers)] for _ in range(3)])
    parent[2] = -1  # nothing is known of its parent
    found = expert_logits(
        jax.tree.map(jnp.asarray, params), *map(jnp.asarray, (state, token, parent))
    )
    unit = lambda x: x / np.sqrt((x**2).mean())  # noqa: E731
    for row in range(3):
        z = params["state"] @ unit(state[row]) + params["token"] @ unit(token[row])
        z = z + params["offset"]
        z = z / (1 + np.exp(-z))
        for layer in range(layers):
            expected = params["heads"][layer] @ z + params["bias"][layer]
            kept = [e for e in parent[row, layer] if e >= 0]
            expected[kept] += params["parent"][layer]
            np.testing.assert_allclose(found[row, layer], expected, rtol=1e-9)


def test_training_starts_from_the_shapes_told_and_from_the_seed():
    config = SHAPES["shared"]
    one, again, other = (initial_predictor(config, rank=6, seed=seed) for seed in (0, 0, 1))
    assert {k: a.shape for k, a in one.items()} == predictor_shapes(config, 6)
    assert all(np.array_equal(one[k], again[k]) for k in one)
    assert not np.array_equal(one["state"], other["state"])
    # Every expert as likely as it is on average: 3 of 8.
    np.testing.assert_allclose(1 / (1 + np.exp(-one["bias"])), 3 / 8, rtol=1e-6)

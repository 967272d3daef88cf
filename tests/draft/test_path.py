"""The draft path: what it keeps, what it leaves out, what stands in for that."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax.draft.expert import draft_of_params, draft_output
from dejax.draft.path import below_r, draft_experts, routed_output, top_r
from dejax.nn.experts import expert_output
from dejax.nn.router import Routing
from tests.infer.random_target import draft_of, random_target

E, K, F, D = 5, 3, 4, 6


@pytest.fixture
def layer():
    rng = np.random.default_rng(0)
    h = jnp.asarray(rng.normal(size=(2, 7, D)), jnp.float32)
    stack = jnp.asarray(rng.normal(size=(E, 3, F, D)), jnp.float32)
    scores = jax.nn.softmax(jnp.asarray(rng.normal(size=(2, 7, E)), jnp.float32))
    gates, ids = jax.lax.top_k(scores, K)
    return h, stack, Routing(ids=ids, gates=gates, scores=scores)


def naive(h, stack, routing, ranks):
    """Sum over the experts at these ranks, token by token."""
    out = np.zeros(h.shape, np.float64)
    for b, t in np.ndindex(*h.shape[:2]):
        for rank in ranks:
            expert = stack[routing.ids[b, t, rank]]
            out[b, t] += routing.gates[b, t, rank] * expert_output(h[b, t][None], expert)[0]
    return out


@pytest.mark.parametrize("r", range(K + 1))
def test_kept_and_left_out_make_up_the_full_output(layer, r):
    h, stack, routing = layer
    kept = routed_output(h, top_r(routing, r), stack, block=4)
    missing = routed_output(h, below_r(routing, r), stack, block=4)
    np.testing.assert_allclose(kept, naive(h, stack, routing, range(r)), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(missing, naive(h, stack, routing, range(r, K)), rtol=1e-5, atol=1e-6)


def test_gates_are_not_renormalised(layer):
    _, _, routing = layer
    assert (top_r(routing, 1).gates == routing.gates[..., :1]).all()
    assert (top_r(routing, 1).scores == routing.scores).all()


def test_draft_path_adds_the_draft_expert_and_nothing_without_one(layer):
    h, stack, routing = layer
    params = {"weights": jnp.ones((3, 2, D)), "gamma": jnp.asarray(0.5)}
    alone = draft_experts(stack, None, r=1, block=4)(h, routing)
    np.testing.assert_array_equal(alone, routed_output(h, top_r(routing, 1), stack, block=4))
    both = draft_experts(stack, params, r=1, block=4)(h, routing)
    np.testing.assert_array_equal(both, alone + draft_output(params, h))
    np.testing.assert_allclose(both - alone, 0.5 * expert_output(h, params["weights"]), atol=1e-5)


def test_a_constant_can_stand_in_for_the_expert(layer):
    h, stack, routing = layer
    constant = jnp.arange(D, dtype=jnp.float32)
    both = draft_experts(stack, {"constant": constant}, r=1, block=4)(h, routing)
    alone = draft_experts(stack, None, r=1, block=4)(h, routing)
    np.testing.assert_array_equal(both, alone + constant)


def test_stacked_parameters_round_trip():
    draft = draft_of(random_target("groups", dtype=jnp.float32))
    params = draft.stacked_params()
    assert params["weights"].shape == (2, 3, 8, 32) and params["gamma"].shape == (2,)
    again = draft_of_params(
        params, layers=(2, 3), top_r=1, identity=draft.identity, training=draft.training
    )
    assert again.config == draft.config and again.identity == draft.identity
    for index in (2, 3):
        for name, value in draft.layer_params(index).items():
            np.testing.assert_array_equal(again.layer_params(index)[name], value)

"""The router: softmax over all experts, selection, groups, ties, scaling."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax.config import MoEConfig
from dejax.nn.router import Router
from tests.nn.filled import apply, filled

GREEDY = MoEConfig(num_experts=8, top_k=3, expert_width=4, shared_width=0)
GROUPED = dataclasses.replace(GREEDY, groups=4, groups_kept=2)


def route(config, logits, dtype=jnp.float32, **options):
    """Routing of rows whose logits are given: the router's weight is the identity."""
    router = filled(lambda rngs: Router(config, config.num_experts, dtype=dtype, rngs=rngs))
    router.weight[...] = jnp.asarray(np.eye(config.num_experts), dtype)
    if options:
        return router(jnp.asarray(np.array(logits), dtype), **options)
    return apply(router, jnp.asarray(np.array(logits), dtype))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def test_gates_are_probabilities_over_all_experts():
    """NVIDIA/Megatron-LM 955, sglang 35160: softmax first, then top-k, not renormalised."""
    logits = np.random.default_rng(0).standard_normal((50, 8)) * 2
    routing = route(dataclasses.replace(GREEDY, scaling=16.0), logits)
    scores = softmax(logits)
    order = np.argsort(-scores, axis=-1)[:, :3]
    np.testing.assert_array_equal(routing.ids, order)
    expected = 16 * np.take_along_axis(scores, order, -1)
    np.testing.assert_allclose(routing.gates, expected, rtol=1e-5)
    np.testing.assert_allclose(routing.scores, scores, rtol=1e-5)
    assert (np.diff(routing.gates, axis=-1) <= 0).all()  # column 0 is the top-1 expert


def test_the_lower_of_equal_experts_is_chosen():
    """vllm-project/vllm 55514."""
    routing = route(GREEDY, [[0, 1, 0, 1, 1, 1, 0, 0], [0] * 8])
    np.testing.assert_array_equal(routing.ids, [[1, 3, 4], [0, 1, 2]])


def test_a_group_is_as_good_as_its_best_expert():
    """EricLBuehler/mistral.rs 1278: not as the sum of its best two, which is another family's."""
    logits = [[3.0, -9.0, 2.0, 2.0, 2.5, -9.0, 0.0, 0.0]]  # maxima: groups 0, 2; sums: 1, 0
    routing = route(GROUPED, logits)
    np.testing.assert_array_equal(routing.ids[0, :2], [0, 4])
    assert set(np.asarray(routing.ids[0]).tolist()) <= {0, 1, 4, 5}
    # The law over all experts is left whole: what draft experts are trained on.
    np.testing.assert_allclose(routing.scores, softmax(np.array(logits)), rtol=1e-5)


def test_equal_groups_fall_to_the_lower_ones():
    np.testing.assert_array_equal(route(GROUPED, [[0] * 8]).ids, [[0, 1, 2]])


@pytest.mark.parametrize("groups, kept, top_k", [(1, 1, 5), (2, 1, 6), (4, 3, 4), (6, 2, 1)])
def test_selection_by_hand(groups, kept, top_k):
    config = dataclasses.replace(
        GREEDY, num_experts=12, top_k=top_k, groups=groups, groups_kept=kept
    )
    # Few values and so many ties; different ones stay different in the softmax.
    logits = np.random.default_rng(groups).integers(-9, 9, (100, 12)) / 4
    routing = route(config, logits)
    members = np.arange(12).reshape(groups, -1).tolist()
    for row, ids in zip(logits, np.asarray(routing.ids), strict=True):
        ranked = sorted(range(groups), key=lambda g: (-max(row[members[g]]), g))  # noqa: B023
        open_experts = [expert for g in ranked[:kept] for expert in members[g]]
        chosen = sorted(open_experts, key=lambda e: (-row[e], e))[:top_k]  # noqa: B023
        assert ids.tolist() == chosen


def test_scores_are_at_least_float32():
    """vllm-project/vllm 14027: a router in bfloat16 picks other experts."""
    routing = route(GREEDY, np.random.default_rng(0).standard_normal((4, 8)), jnp.bfloat16)
    assert routing.scores.dtype == routing.gates.dtype == jnp.float32
    near = [[1.0, 1.0 + 2**-12, 0, 0, 0, 0, 0, 0]]  # equal in bfloat16
    assert route(GREEDY, near).ids[0, 0] == 1
    with jax.enable_x64(True):
        assert route(GREEDY, near, jnp.float64).scores.dtype == jnp.float64


def test_the_product_is_exact_on_accelerators_too():
    router = filled(lambda rngs: Router(GREEDY, 8, rngs=rngs))
    jaxpr = str(jax.make_jaxpr(lambda h: router(h).scores)(jnp.ones((2, 8))))
    assert "HIGHEST" in jaxpr


@pytest.mark.parametrize("shape", [(8,), (2, 8), (2, 3, 8)])
def test_any_leading_shape(shape):
    routing = route(GREEDY, np.ones(shape))
    assert routing.ids.shape == (*shape[:-1], 3) and routing.scores.shape == shape


def test_plain_gates_are_those_of_the_same_router_with_fewer_experts():
    """As chosen, not divided by their sum: the first r are a model with r experts a token."""
    sigmoid = dict(scoring="sigmoid", selection_bias=True, scaling=2.5, group_score="top2")
    config = dataclasses.replace(GROUPED, **sigmoid, normalised=True, num_experts=8)
    logits = np.random.default_rng(3).standard_normal((40, 8))
    full, plain = route(config, logits), route(config, logits, plain=True)
    np.testing.assert_array_equal(np.sort(full.ids), np.sort(plain.ids))
    np.testing.assert_array_equal(full.scores, plain.scores)
    assert (np.asarray(full.ids[:, 0]) != np.asarray(plain.ids[:, 0])).any()
    expected = 2.5 / (1 + np.exp(-np.take_along_axis(logits, np.asarray(plain.ids), -1)))
    np.testing.assert_allclose(plain.gates, expected, rtol=1e-5)
    for r in (1, 2):
        fewer = route(dataclasses.replace(config, top_k=r, normalised=False), logits)
        np.testing.assert_array_equal(np.sort(plain.ids[:, :r]), np.sort(fewer.ids))
        np.testing.assert_allclose(np.sort(plain.gates[:, :r]), np.sort(fewer.gates), rtol=1e-6)

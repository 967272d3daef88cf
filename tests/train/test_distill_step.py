"""The two streams of a distillation step, against plain networks and finite differences."""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax.draft.expert import draft_output
from dejax.draft.path import draft_experts
from dejax.model import attend_full, causal_mask, layer_full, logits_of, route
from dejax.nn.experts import expert_output
from tests.infer.random_target import draft_of, random_target
from tests.train.rows import random_batch
from train.distill_step import (
    LayerPair,
    compare_vocabulary,
    loss_fn,
    paired_forward,
    route_overlap,
)
from train.evaluate import prefetch_overlap
from train.losses import TERMS, LossWeights, Total
from train.stacked import stack_target
from train.teacher import as_teacher

WEIGHTS = LossWeights(logit=1.0, token=0.5, residual=0.25, router=2.0, temperature=1.5)
METRICS = ("kl", "token", "residual", "router")


def ranked_outputs(h, routing, stack):
    """Gate times output of each token's experts by rank: [B, T, K, D]."""
    every = jax.vmap(partial(expert_output, h), out_axes=2)(stack)
    chosen = jnp.take_along_axis(every, routing.ids[..., None], axis=2)
    return chosen * routing.gates[..., None]


def plain_networks(target, experts, batch, r):
    """Streams, residual ratios and router divergences, layer by layer, without scan or blocks."""
    model, rows = target.model, dict(positions=batch["positions"])
    rows["mask"] = causal_mask(batch["segment_ids"])
    x = y = model.embedding[...][batch["tokens"]]
    ratios, divergences = [], []
    counted = batch["mask"][..., None]
    for index, layer in enumerate(model.layers):
        x, y = (attend_full(layer, a, **rows) for a in (x, y))
        (h, routing, always), (g, drafted, kept) = route(layer, x), route(layer, y)
        if routing is None:
            x, y = x + always, y + kept
            continue
        stack = target.routed[index]
        outputs = ranked_outputs(h, routing, stack)
        missing = outputs[:, :, r:].sum(2)
        output = draft_output(experts[index], g)
        x = x + always + outputs.sum(2)
        y = y + kept + ranked_outputs(g, drafted, stack)[:, :, :r].sum(2) + output
        ratios.append(
            (jnp.square(output - missing) * counted).sum() / (jnp.square(missing) * counted).sum()
        )
        p, q = routing.scores, drafted.scores
        kl = (p * (jnp.log(p) - jnp.log(q))).sum(-1)
        divergences.append((kl * batch["mask"]).sum() / batch["mask"].sum())
    return x, y, ratios, divergences


def plain_losses(target, experts, batch, r, temperature):
    x, y, ratios, divergences = plain_networks(target, experts, batch, r)
    full, draft = logits_of(target.model, x), logits_of(target.model, y)
    mean = lambda a: (a * batch["mask"]).sum() / batch["mask"].sum()  # noqa: E731
    soft = [jax.nn.log_softmax(z / temperature) for z in (full, draft)]
    kl = temperature**2 * (jnp.exp(soft[0]) * (soft[0] - soft[1])).sum(-1)
    best = full.argmax(-1)[..., None]
    token = -jnp.take_along_axis(jax.nn.log_softmax(draft), best, -1)[..., 0]
    agreement = mean((best[..., 0] == draft.argmax(-1)).astype(full.dtype))
    losses = (mean(kl), mean(token), sum(ratios) / len(ratios), sum(divergences) / len(divergences))
    return dict(zip(TERMS, losses, strict=True)) | {"agreement": agreement}


@functools.cache
def case():
    """A float64 target, its draft's parameters, and rows of several documents; ask under x64."""
    target = random_target("groups")
    params = draft_of(target).stacked_params()
    params = jax.tree.map(lambda a: a.astype(jnp.float64), params)
    params["gamma"] = jnp.asarray([0.7, 1.3])
    return target, params, random_batch(target.config, rows=2, length=12)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def loss_of(target, params, batch, *, weights=WEIGHTS, r=1, **options):
    definition, stacked = stack_target(target.model, target.routed)
    vector = jnp.asarray([getattr(weights, term) for term in TERMS])  # in float64
    options |= dict(definition=definition, temperature=weights.temperature)
    return loss_fn(params, stacked, batch, vector, r=r, dtype=target.compute_dtype, **options)


@functools.cache
def terms_and_jacobian():
    """The four losses of the case as a function of its parameters, and their gradients.

    Each gradient is that of an objective with one loss alone: metrics themselves carry none.
    """
    target, params, batch = case()
    teacher = as_teacher(target)
    options = dict(definition=teacher.definition, r=1, dtype=teacher.dtype)
    options |= dict(temperature=WEIGHTS.temperature)

    def terms(params):
        metrics = loss_of(target, params, batch)[1]
        return jnp.stack([metrics[name] for name in METRICS])

    @jax.jit
    def gradient(params, weights):
        loss = partial(loss_fn, **options)
        return jax.grad(lambda p: loss(p, teacher.params, batch, weights)[0])(params)

    each = [gradient(params, weights) for weights in jnp.eye(4)]
    return jax.jit(terms), jax.tree.map(lambda *rows: jnp.stack(rows), *each)


@pytest.mark.slow
@pytest.mark.parametrize("r", [1, 2])
def test_losses_are_those_of_plain_networks(x64, r):
    target, params, batch = case()
    layers = target.config.moe_layers
    experts = {layer: jax.tree.map(lambda a, i=i: a[i], params) for i, layer in enumerate(layers)}
    loss, metrics = jax.jit(partial(loss_of, target, r=r))(params, batch)
    expected = jax.jit(lambda: plain_losses(target, experts, batch, r, WEIGHTS.temperature))()
    total = sum(getattr(WEIGHTS, term) * expected[term] for term in TERMS)
    np.testing.assert_allclose(loss, total, rtol=1e-11)
    for term, name in zip(TERMS, METRICS, strict=True):
        np.testing.assert_allclose(metrics[name], expected[term], rtol=1e-11)
    np.testing.assert_allclose(metrics["agreement"], expected["agreement"], rtol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["weights", "gamma"])
def test_gradients_by_finite_differences(x64, name):
    _, params, _ = case()
    terms, jacobian = terms_and_jacobian()
    rng = np.random.default_rng(0)
    for _ in range(3):
        direction = jnp.asarray(rng.normal(size=params[name].shape))
        ahead, behind = (
            terms(params | {name: params[name] + step * direction}) for step in (1e-6, -1e-6)
        )
        along = [jnp.vdot(gradient, direction) for gradient in jacobian[name]]
        np.testing.assert_allclose(along, (ahead - behind) / 2e-6, rtol=2e-6, atol=1e-9)


def test_gradients_pass_through_the_frozen_layers(x64):
    _, jacobian = terms_and_jacobian()
    for of_terms in jacobian.values():
        for term, gradient in zip(TERMS, of_terms, strict=True):
            reached = [bool(jnp.any(layer != 0)) for layer in gradient]
            # No router lies above the last layer's draft expert.
            assert reached == [True, term != "router"], term


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["products", "layer"])
def test_recomputed_layers_give_the_same_gradients(x64, remat):
    target, params, batch = case()
    loss = jax.jit(jax.grad(lambda p: loss_of(target, p, batch, remat=remat)[0]))
    weights = jnp.asarray([getattr(WEIGHTS, term) for term in TERMS])
    for name, gradient in loss(params).items():
        expected = jnp.tensordot(weights, terms_and_jacobian()[1][name], axes=1)
        np.testing.assert_allclose(gradient, expected, rtol=1e-10, atol=1e-13)


@pytest.mark.slow
def test_the_local_objective_feeds_the_targets_own_states(x64):
    target, params, batch = case()

    @jax.jit
    def plain(params):
        x = target.model.embedding[...][batch["tokens"]]
        rows = dict(positions=batch["positions"], mask=causal_mask(batch["segment_ids"]))
        ratios = []
        for index, layer in enumerate(target.model.layers):
            x = attend_full(layer, x, **rows)
            h, routing, always = route(layer, x)
            if routing is None:
                x = x + always
                continue
            outputs = ranked_outputs(h, routing, target.routed[index])
            place = target.config.moe_layers.index(index)
            output = draft_output(jax.tree.map(lambda a, i=place: a[i], params), h)
            missing, counted = outputs[:, :, 1:].sum(2), batch["mask"][..., None]
            error = jnp.square(output - missing) * counted
            ratios.append(error.sum() / (jnp.square(missing) * counted).sum())
            x = x + always + outputs.sum(2)
        return sum(ratios) / len(ratios)

    local = jax.jit(partial(loss_of, target, objective="residual-local"))
    loss, metrics = local(params, batch)
    np.testing.assert_allclose(loss, plain(params), rtol=1e-11)
    assert set(metrics) == {"loss", "residual"}


@pytest.mark.slow
def test_zero_down_rows_are_the_top_1_path_bit_for_bit():
    target = random_target("shared", dtype=jnp.float32)
    batch = random_batch(target.config, rows=2, length=16)
    rows = dict(positions=batch["positions"], mask=causal_mask(batch["segment_ids"]))

    def logits(draft):  # operation by operation: a compiler may round a fused sum otherwise
        x = target.model.embedding[...][batch["tokens"]]
        for index, layer in enumerate(target.model.layers):
            params = None if draft is None or index not in draft.experts else draft
            params = None if params is None else params.layer_params(index)
            stack = target.routed.get(index)
            experts = draft_experts(stack, params, r=1, block=8) if stack is not None else None
            x, _ = layer_full(layer, x, experts=experts or no_experts, **rows)
        return logits_of(target.model, x)

    def no_experts(h, routing):
        raise AssertionError

    draft = draft_of(target)
    for expert in draft.experts.values():
        expert.weights[...] = expert.weights[...].at[2].set(0)
    np.testing.assert_array_equal(logits(draft), logits(None))
    draft.experts[1].weights[...] = draft.experts[1].weights[...].at[2].set(0.01)
    assert not np.array_equal(logits(draft), logits(None))


@pytest.mark.slow
def test_the_targets_stream_is_the_targets():
    target = random_target("bare", dtype=jnp.float32)
    teacher = as_teacher(target)
    batch = random_batch(target.config, rows=2, length=16, documents=1)

    @jax.jit
    def run(params):
        outer, full, drafted, _ = paired_forward(teacher.definition, params, None, batch, r=1)
        return logits_of(outer, full), compare_vocabulary(outer, full, drafted, batch)[1]

    logits, totals = run(teacher.params)
    np.testing.assert_allclose(logits, target(batch["tokens"]), rtol=1e-4, atol=1e-4)
    assert 0 < totals.agreement.mean < 1 and totals.logit.mean > 0


@pytest.mark.slow
def test_all_experts_kept_is_the_target_itself():
    target = random_target("shared", dtype=jnp.float32)
    teacher = as_teacher(target)
    batch = random_batch(target.config, rows=2, length=16)

    @jax.jit
    def run(params):
        options = dict(r=target.config.moe.top_k)
        return paired_forward(teacher.definition, params, None, batch, **options)[1:]

    full, drafted, pairs = run(teacher.params)
    np.testing.assert_array_equal(full, drafted)
    overlap, first = route_overlap(pairs, batch["mask"])
    assert overlap.mean == first.mean == 1
    assert (pairs.residual.mean == 0).all() and (pairs.residual.count == 0).all()


def test_route_overlap_and_prefetch_count_pairs():
    nothing = Total(jnp.zeros(1), jnp.zeros(1))
    pairs = LayerPair(
        residual=nothing,
        router=nothing,
        routes=jnp.asarray([[[[0, 1], [2, 3], [4, 5], [0, 1]]]]),
        draft_routes=jnp.asarray([[[[1, 0], [2, 4], [6, 7], [0, 1]]]]),
    )
    overlap, first = route_overlap(pairs, jnp.asarray([[1.0, 1.0, 1.0, 0.0]]))
    assert (float(overlap.sum), float(overlap.count)) == (1 + 0.5 + 0, 3)
    assert (float(first.sum), float(first.count)) == (1, 3)
    segments = jnp.asarray([[1, 1, 2, 2]])
    options = dict(experts=8, rows=2)
    # First round: wanted {0,1,2,3}, predicted {0,1,2,4}, loaded by the drafts {1,2}.
    recall, precision = prefetch_overlap(pairs, segments, r=1, **options)
    # Second round: wanted {0,1,4,5}, predicted {0,1,6,7}, loaded {0,6}.
    assert (float(recall.sum), float(recall.count)) == (1 + 1, 2 + 3)
    assert (float(precision.sum), float(precision.count)) == (1 + 1, 2 + 2)
    recall, precision = prefetch_overlap(pairs, segments, r=0, **options)
    assert (float(recall.sum), float(recall.count)) == (3 + 2, 4 + 4)
    # A round that crosses into another document, or lies in padding, is left out.
    for crossing in ([[1, 2, 2, 2]], [[0, 0, 2, 2]]):
        recall, _ = prefetch_overlap(pairs, jnp.asarray(crossing), r=1, **options)
        assert (float(recall.sum), float(recall.count)) == (1, 3)

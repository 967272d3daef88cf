"""The two streams of a distillation step, against plain networks; gradients by finite differences."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax.draft.expert import draft_output
from dejax.model import attend_full, causal_mask, logits_of, route
from dejax.nn.experts import expert_output
from tests.infer.random_target import draft_of, random_target
from tests.train.rows import random_batch
from train.distill_step import compare_vocabulary, loss_fn, paired_forward, route_overlap
from train.evaluate import prefetch_overlap
from train.losses import LossWeights
from train.teacher import as_teacher

ZERO = dict(logit=0.0, token=0.0, residual=0.0, router=0.0)
TERMS = ("logit", "token", "residual", "router")


def only(term: str) -> LossWeights:
    return LossWeights(**{**ZERO, term: 1.0}, temperature=1.5 if term == "logit" else 1.0)


def ranked_outputs(h, routing, stack):
    """Gate times output of each token's experts by rank, [B, T, K, D], every expert on every token."""
    every = jnp.stack([expert_output(h, expert) for expert in stack], axis=2)
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


@pytest.fixture
def case():
    """A float64 target with all it needs, its draft's parameters, and rows of several documents."""
    with jax.enable_x64(True):
        target = random_target("groups")
        params = draft_of(target).stacked_params()
        params = jax.tree.map(lambda a: a.astype(jnp.float64), params)
        params["gamma"] = jnp.asarray([0.7, 1.3])
        yield target, params, random_batch(target.config, rows=2, length=12)


def loss_of(target, params, batch, *, weights, r=1, **options):
    teacher = as_teacher(target)
    return loss_fn(
        params,
        teacher.params,
        batch,
        definition=teacher.definition,
        r=r,
        weights=weights,
        dtype=teacher.dtype,
        **options,
    )


@pytest.mark.parametrize("r", [0, 1, 2])
def test_losses_are_those_of_plain_networks(case, r):
    target, params, batch = case
    layers = target.config.moe_layers
    experts = {layer: jax.tree.map(lambda a, i=i: a[i], params) for i, layer in enumerate(layers)}
    weights = LossWeights(logit=1.0, token=0.5, residual=0.25, router=2.0, temperature=1.5)
    loss, metrics = jax.jit(partial(loss_of, target, weights=weights, r=r))(params, batch)
    expected = jax.jit(lambda: plain_losses(target, experts, batch, r, 1.5))()
    total = sum(getattr(weights, term) * expected[term] for term in TERMS)
    np.testing.assert_allclose(loss, total, rtol=1e-11)
    names = {"logit": "kl", "token": "token", "residual": "residual", "router": "router"}
    for term, name in names.items():
        np.testing.assert_allclose(metrics[name], expected[term], rtol=1e-11)
    assert metrics["agreement"] == expected["agreement"]


@pytest.mark.parametrize("term", TERMS)
def test_gradients_by_finite_differences(case, term):
    target, params, batch = case
    loss = jax.jit(lambda p: loss_of(target, p, batch, weights=only(term))[0])
    grads = jax.jit(jax.grad(loss))(params)
    rng = np.random.default_rng(0)
    for name in ("weights", "gamma"):
        for _ in range(2):
            direction = {k: jnp.zeros_like(v) for k, v in params.items()}
            direction[name] = jnp.asarray(rng.normal(size=params[name].shape))
            step = 1e-6

            def at(sign, direction=direction, step=step):
                moved = jax.tree.map(lambda p, d: p + sign * step * d, params, direction)
                return float(loss(moved))

            slope = (at(1) - at(-1)) / (2 * step)
            inner = sum(jnp.vdot(grads[k], direction[k]) for k in params)
            np.testing.assert_allclose(inner, slope, rtol=2e-6, atol=1e-9)


def test_gradients_pass_through_the_frozen_layers(case):
    target, params, batch = case

    def gradient(term):
        return jax.jit(jax.grad(lambda p: loss_of(target, p, batch, weights=only(term))[0]))(params)

    through_logits, through_router = gradient("logit"), gradient("router")
    for name in params:
        assert all(jnp.any(layer != 0) for layer in through_logits[name])
        # No router lies above the last layer's draft expert.
        assert jnp.any(through_router[name][0] != 0) and jnp.all(through_router[name][-1] == 0)


def test_recomputed_layers_give_the_same_gradients(case):
    target, params, batch = case

    def gradient(remat):
        loss = partial(loss_of, target, weights=LossWeights(), remat=remat)
        return jax.jit(jax.grad(lambda p: loss(p, batch)[0]))(params)

    for one, other in zip(*(jax.tree.leaves(gradient(flag)) for flag in (False, True)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-14)


def test_the_local_objective_feeds_the_targets_own_states(case):
    target, params, batch = case
    options = dict(weights=LossWeights(), objective="residual-local")
    loss, metrics = loss_of(target, params, batch, **options)
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
    np.testing.assert_allclose(loss, sum(ratios) / len(ratios), rtol=1e-11)
    assert set(metrics) == {"loss", "residual"}


def test_zero_down_rows_are_the_top_1_path_bit_for_bit():
    target = random_target("shared", dtype=jnp.float32)
    teacher = as_teacher(target)
    params = draft_of(target).stacked_params()
    params["weights"] = params["weights"].at[:, 2].set(0)
    batch = random_batch(target.config, rows=2, length=16)

    @jax.jit
    def logits(draft):
        outer, _, drafted, _ = paired_forward(
            teacher.definition, teacher.params, draft, batch, r=1
        )
        return logits_of(outer, drafted)

    np.testing.assert_array_equal(logits(params), logits(None))
    params["weights"] = params["weights"].at[:, 2].set(0.01)
    assert not np.array_equal(logits(params), logits(None))


def test_the_targets_stream_is_the_targets():
    target = random_target("bare", dtype=jnp.float32)
    teacher = as_teacher(target)
    batch = random_batch(target.config, rows=2, length=16, documents=1)
    outer, full, drafted, _ = paired_forward(
        teacher.definition, teacher.params, None, batch, r=1
    )
    expected = target(batch["tokens"])
    np.testing.assert_allclose(logits_of(outer, full), expected, rtol=1e-4, atol=1e-4)
    totals = compare_vocabulary(outer, full, drafted, batch)
    assert 0 < totals.agreement.mean < 1 and totals.logit.mean > 0


def test_all_experts_kept_is_the_target_itself():
    target = random_target("shared", dtype=jnp.float32)
    teacher = as_teacher(target)
    batch = random_batch(target.config, rows=2, length=16)
    run = partial(paired_forward, teacher.definition, teacher.params, None, batch)
    _, full, drafted, pairs = run(r=target.config.moe.top_k)
    np.testing.assert_array_equal(full, drafted)
    overlap, first = route_overlap(pairs, batch["mask"])
    assert overlap.mean == first.mean == 1
    assert (pairs.residual.mean == 0).all() and (pairs.residual.count == 0).all()


def test_route_overlap_and_prefetch_count_pairs():
    class Pairs:
        routes = jnp.asarray([[[[0, 1], [2, 3], [4, 5], [0, 1]]]])
        draft_routes = jnp.asarray([[[[1, 0], [2, 4], [6, 7], [0, 1]]]])

    overlap, first = route_overlap(Pairs, jnp.asarray([[1.0, 1.0, 1.0, 0.0]]))
    assert (float(overlap.sum), float(overlap.count)) == (1 + 0.5 + 0, 3)
    assert (float(first.sum), float(first.count)) == (1, 3)
    segments = jnp.asarray([[1, 1, 2, 2]])
    options = dict(experts=8, rows=2)
    # First round: wanted {0,1,2,3}, predicted {0,1,2,4}, loaded by the drafts {1,2}.
    recall, precision = prefetch_overlap(Pairs, segments, r=1, **options)
    # Second round: wanted {0,1,4,5}, predicted {0,1,6,7}, loaded {0,6}.
    assert (float(recall.sum), float(recall.count)) == (1 + 1, 2 + 3)
    assert (float(precision.sum), float(precision.count)) == (1 + 1, 2 + 2)
    recall, precision = prefetch_overlap(Pairs, segments, r=0, **options)
    assert (float(recall.sum), float(recall.count)) == (3 + 2, 4 + 4)
    # A round that crosses into another document, or lies in padding, is left out.
    for crossing in ([[1, 2, 2, 2]], [[0, 0, 2, 2]]):
        recall, _ = prefetch_overlap(Pairs, jnp.asarray(crossing), r=1, **options)
        assert (float(recall.sum), float(recall.count)) == (1, 3)


def test_no_weights_of_the_target_are_held_for_the_backward_pass():
    """The target is an argument of the step, and nothing but draft parameters gets a gradient."""
    target = random_target("shared", dtype=jnp.float32)
    params = draft_of(target).stacked_params()
    batch = random_batch(target.config, rows=1, length=8)
    grads = jax.grad(lambda p: loss_of(target, p, batch, weights=LossWeights())[0])(params)
    assert jax.tree.map(jnp.shape, grads) == jax.tree.map(jnp.shape, params)
    assert dataclasses.is_dataclass(as_teacher(target).params)

"""What draft experts are trained on: target and draft network over the same tokens, in one pass.

One scan over the MoE layers carries both residual streams. The target's is constant; the draft's
takes the draft path (shared + top-r + draft expert), so that the drift of lower layers is part of
what an upper layer learns from. Gradients pass through the frozen layers and end in the draft
experts (DraftExpert, arXiv 2607.24434, section 4).
"""

from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dejax.config import ModelConfig
from dejax.draft.expert import draft_output
from dejax.draft.path import routed_output, routed_parts, top_r
from dejax.model import (
    DecoderLayer,
    Params,
    Transformer,
    combine,
    head_of,
    route,
)
from dejax.nn.router import Routing
from train.losses import (
    Total,
    VocabularyTotals,
    residual_loss,
    router_loss,
    vocabulary_losses,
)
from train.stacked import (
    Sight,
    StackedDef,
    StackedParams,
    all_but_gathered,
    block_size,
    embed_outer,
    layer_of,
    scan_layers,
)
from train.update import Batch

Objective = Literal["all", "residual-local"]
Remat = Literal["none", "products", "layer"]
"""What a backward pass finds kept: everything, products with weights, or a layer's input alone."""


_KEPT = {
    "none": all_but_gathered,
    "products": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "layer": None,
}
"""Policies of `jax.checkpoint`: whether the backward pass finds kept what a primitive gives."""


class LayerPair(NamedTuple):
    """What the two streams did in a MoE layer (with a leading L after the scan).

    Attributes:
      residual, router: totals of the two per-layer losses; routes, draft_routes: [B, T, K] experts
      chosen in the target's and in the draft's stream, best first.
    """

    residual: Total
    router: Total
    routes: Int[Array, "*L B T K"]
    draft_routes: Int[Array, "*L B T K"]


class TargetHalf(NamedTuple):
    """A MoE layer's target side.

    Attributes:
      x: residual stream after the layer; hidden: normed input of router and experts; routing;
      missing: output of the chosen experts below the top r.
    """

    x: Float[Array, "B T D"]
    hidden: Float[Array, "B T D"]
    routing: Routing
    missing: Float[Array, "B T D"]


def _grouped(h: Float[Array, "B T D"], per_token: int, config: ModelConfig) -> dict[str, Any]:
    """Block size and activation for a grouped product of `per_token` experts a token."""
    block = block_size(h.shape[0] * h.shape[1], config, per_token=max(per_token, 1))
    return dict(block=block, activation=config.moe.activation)


def target_half(
    layer: DecoderLayer,
    x: Float[Array, "B T D"],
    stack: Array,
    sight: Sight,
    windowed: Any,
    *,
    r: int,
    config: ModelConfig,
    plain: bool = False,
) -> TargetHalf:
    """One full MoE layer, its routed output split into what a draft path keeps and the rest."""
    x = sight.attend(layer, x, windowed)
    h, routing, always = route(layer, x)
    assert routing is not None and layer.router is not None
    options = _grouped(h, config.moe.top_k, config)
    if plain:  # an expert that is kept has another gate, and the rest makes up for that
        kept = top_r(layer.router(h, plain=True), r)
        kept = routed_output(h, kept, stack, **_grouped(h, r, config))
        missing = routed_output(h, routing, stack, **options) - kept
    else:
        kept, missing = routed_parts(h, routing, stack, r=r, **options)
    return TargetHalf(combine(x, always, kept + missing), h, routing, missing)


class DraftHalf(NamedTuple):
    """A MoE layer's draft side, up to its draft expert.

    Attributes:
      x: residual stream after attention; hidden: normed input of router and experts; routing;
      always: output of the shared experts; kept: output of the top-r experts.
    """

    x: Float[Array, "B T D"]
    hidden: Float[Array, "B T D"]
    routing: Routing
    always: Float[Array, "B T D"]
    kept: Float[Array, "B T D"]

    def finish(self, output: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Residual stream after the layer, given the draft expert's output."""
        return combine(self.x, self.always, self.kept + output)


def draft_half(
    layer: DecoderLayer,
    x: Float[Array, "B T D"],
    full: Float[Array, "B T D"],
    stack: Array,
    sight: Sight,
    windowed: Any,
    *,
    r: int,
    config: ModelConfig,
    plain: bool = False,
) -> DraftHalf:
    """One MoE layer of the draft network, its draft expert left to the caller.

    `full` is the target's stream before the layer, which the draft sees where `sight` mixes.
    """
    x = sight.attend_draft(layer, x, full, windowed)
    h, routing, always = route(layer, x, plain=plain)
    assert routing is not None
    kept = routed_output(h, top_r(routing, r), stack, **_grouped(h, r, config))
    return DraftHalf(x, h, routing, always, kept)


def paired_forward(
    definition: StackedDef,
    params: StackedParams,
    draft: Params | None,
    batch: Batch,
    *,
    r: int,
    dtype: Any = jnp.float32,
    remat: Remat = "none",
) -> tuple[Transformer, Float[Array, "B T D"], Float[Array, "B T D"], LayerPair]:
    """Outer model, the final residual streams of target and draft, and the layers' pairs.

    Args:
      draft: stacked draft parameters; None is the draft path without draft experts.
      r: routed experts that the draft path keeps.
      remat: what of the draft's half of a layer the backward pass computes again, for less memory.
    """
    config = definition.config
    path: Any = dict(r=r, config=config, plain=definition.plain)
    sight, counted = Sight.of(config, batch), batch["mask"]
    outer, x = embed_outer(definition, params, batch["tokens"], sight, dtype=dtype)
    x = jax.lax.stop_gradient(x)

    def drafting(layer_params, stack, expert, drafted, full, windowed, missing, scores):
        layer = layer_of(definition, layer_params)
        half = draft_half(layer, drafted, full, stack, sight, windowed, **path)
        output = jnp.zeros_like(half.hidden)
        if expert is not None:
            output = draft_output(expert, half.hidden)
        residual = residual_loss(output, missing, counted)
        router = router_loss(scores, half.routing.scores, counted)
        return half.finish(output), residual, router, half.routing.ids

    drafting = jax.checkpoint(drafting, policy=_KEPT[remat], prevent_cse=False)

    def body(carry, pieces, windowed):
        full, drafted = carry
        layer_params, stack, expert = pieces
        layer = layer_of(definition, layer_params)
        target = target_half(layer, full, stack, sight, windowed, **path)
        drafted, residual, router, ids = drafting(
            layer_params,
            stack,
            expert,
            drafted,
            full,
            windowed,
            target.missing,
            target.routing.scores,
        )
        pair = LayerPair(residual, router, routes=target.routing.ids, draft_routes=ids)
        return (target.x, drafted), pair

    def dense(index, layer, carry):
        full, drafted = carry
        drafted = sight.dense_draft(config, index, layer, drafted, full)
        return sight.dense(config, index, layer, full), drafted

    pieces = (params.layers, params.routed, draft)
    (full, drafted), pairs = scan_layers(definition, outer, body, dense, (x, x), pieces)
    return outer, full, drafted, pairs


def local_residual(
    definition: StackedDef,
    params: StackedParams,
    draft: Params,
    batch: Batch,
    *,
    r: int,
    dtype: Any = jnp.float32,
) -> Total:
    """Residual totals by layer with the target's own hidden states as input: no draft network.

    The cheap first stage: layers are independent and no gradient passes through depth.
    """
    sight, config = Sight.of(definition.config, batch), definition.config
    outer, x = embed_outer(definition, params, batch["tokens"], sight, dtype=dtype)

    def body(full, pieces, windowed):
        layer_params, stack, expert = pieces
        layer = layer_of(definition, layer_params)
        path: Any = dict(r=r, config=config, plain=definition.plain)
        half = target_half(layer, full, stack, sight, windowed, **path)
        output = draft_output(expert, jax.lax.stop_gradient(half.hidden))
        return jax.lax.stop_gradient(half.x), residual_loss(output, half.missing, batch["mask"])

    dense, pieces = partial(sight.dense, config), (params.layers, params.routed, draft)
    return scan_layers(definition, outer, body, dense, x, pieces)[1]


def compare_vocabulary(
    outer: Transformer,
    full: Float[Array, "B T D"],
    drafted: Float[Array, "B T D"],
    batch: Batch,
    *,
    weights: Any = (1.0, 0.0),
    temperature: float = 1.0,
    chunk: int = 512,
) -> tuple[Float[Array, ""], VocabularyTotals]:
    """`vocabulary_losses` of two final residual streams."""
    return vocabulary_losses(
        jax.lax.stop_gradient(head_of(outer)),
        outer.norm(full),
        outer.norm(drafted),
        batch["targets"],
        batch["mask"],
        weights=weights,
        temperature=temperature,
        chunk=chunk,
    )


def route_overlap(pairs: LayerPair, mask: Float[Array, "B T"]) -> tuple[Total, Total]:
    """Share of the target's experts that the draft's router chose too, and of equal first ones.

    Both are over all counted (layer, token).
    """
    common = (pairs.routes[..., :, None] == pairs.draft_routes[..., None, :]).any(-1).mean(-1)
    first = pairs.routes[..., 0] == pairs.draft_routes[..., 0]
    count = mask.sum() * pairs.routes.shape[0]
    return Total(jnp.sum(common * mask), count), Total(jnp.sum(first * mask), count)


def loss_fn(
    draft: Params,
    params: StackedParams,
    batch: Batch,
    weights: Float[Array, "4"],
    *,
    definition: StackedDef,
    r: int,
    temperature: float = 1.0,
    objective: Objective = "all",
    dtype: Any = jnp.float32,
    remat: Remat = "none",
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """The objective of a batch, and what a step reports.

    `weights` are those of logit, token, residual and router loss (`LossWeights.vector`).
    """
    if objective == "residual-local":
        residual = local_residual(definition, params, draft, batch, r=r, dtype=dtype)
        loss = residual.mean.mean()
        return loss, {"loss": loss, "residual": loss}
    outer, full, drafted, pairs = paired_forward(
        definition, params, draft, batch, r=r, dtype=dtype, remat=remat
    )
    summed, vocabulary = compare_vocabulary(
        outer, full, drafted, batch, weights=weights[:2], temperature=temperature
    )
    residual, router = pairs.residual.mean.mean(), pairs.router.mean.mean()
    loss = Total(summed, vocabulary.logit.count).mean
    loss = loss + weights[2] * residual + weights[3] * router
    metrics = {
        "loss": loss,
        "kl": vocabulary.logit.mean,
        "token": vocabulary.token.mean,
        "residual": residual,
        "router": router,
        "agreement": vocabulary.agreement.mean,
        "router_agreement": route_overlap(pairs, batch["mask"])[0].mean,
    }
    return loss, metrics

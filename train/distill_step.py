"""One training step of draft experts: target and draft network over the same tokens, in one jit.

One scan over the MoE layers carries both residual streams. The target's is constant; the draft's
takes the draft path (shared + top-r + draft expert), so that the drift of lower layers is part of
what an upper layer learns from. Gradients pass through the frozen layers and end in the draft
experts (DraftExpert, arXiv 2607.24434, section 4).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from dejax.config import ModelConfig
from dejax.draft.expert import draft_output
from dejax.draft.path import below_r, routed_output, top_r
from dejax.model import (
    DecoderLayer,
    Params,
    Transformer,
    attend_full,
    combine,
    logits_of,
    route,
)
from dejax.nn.router import Routing
from dejax.pytree import pytree
from dejax.sharding import add_shards, per_shard
from train.losses import (
    LossWeights,
    Total,
    VocabularyTotals,
    distillation_loss,
    residual_loss,
    router_loss,
    vocabulary_losses,
)
from train.stacked import (
    Sight,
    StackedDef,
    StackedParams,
    block_size,
    embed_outer,
    scan_layers,
)

Objective = Literal["all", "residual-local"]
Batch = dict[str, Any]
"""Packed rows, on the host or the device: the keys and shapes of `train.data.Batch`."""


@pytree(frozen=True)
class DistillState:
    """What a checkpoint holds: draft parameters and optimizer state, nothing of the target.

    Attributes:
      draft: {"weights": [L, 3, F, D], "gamma": [L]}; opt_state: optax's, for these two alone.
    """

    draft: Params
    opt_state: Any


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


def _routed(
    h: Float[Array, "B T D"], chosen: Routing, stack: Array, config: ModelConfig
) -> Float[Array, "B T D"]:
    """`routed_output` with the block size that suits so many assignments."""
    tokens, per_token = h.shape[0] * h.shape[1], max(chosen.ids.shape[-1], 1)
    block = block_size(tokens, config, per_token=per_token)
    return routed_output(h, chosen, stack, block=block, activation=config.moe.activation)


def target_half(
    layer: DecoderLayer,
    x: Float[Array, "B T D"],
    stack: Array,
    positions: Int[Array, "B T"],
    mask: Bool[Array, "B T T"],
    *,
    r: int,
    config: ModelConfig,
) -> TargetHalf:
    """One full MoE layer, its routed output split into the top r and the rest."""
    x = attend_full(layer, x, positions=positions, mask=mask)
    h, routing, always = route(layer, x)
    assert routing is not None
    kept = _routed(h, top_r(routing, r), stack, config)
    missing = _routed(h, below_r(routing, r), stack, config)
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
    stack: Array,
    positions: Int[Array, "B T"],
    mask: Bool[Array, "B T T"],
    *,
    r: int,
    config: ModelConfig,
) -> DraftHalf:
    """One MoE layer of the draft network, its draft expert left to the caller."""
    x = attend_full(layer, x, positions=positions, mask=mask)
    h, routing, always = route(layer, x)
    assert routing is not None
    return DraftHalf(x, h, routing, always, _routed(h, top_r(routing, r), stack, config))


def paired_forward(
    definition: StackedDef,
    params: StackedParams,
    draft: Params | None,
    batch: Batch,
    *,
    r: int,
    dtype: Any = jnp.float32,
    remat: bool = False,
) -> tuple[Transformer, Float[Array, "B T D"], Float[Array, "B T D"], LayerPair]:
    """Outer model, the final residual streams of target and draft, and the layers' pairs.

    Args:
      draft: stacked draft parameters; None is the draft path without draft experts.
      r: routed experts that the draft path keeps.
      remat: recompute each layer in the backward pass, for less memory.
    """
    sight, counted = Sight.of(definition.config, batch), batch["mask"]
    outer, x = embed_outer(definition, params, batch["tokens"], sight, dtype=dtype)
    x = jax.lax.stop_gradient(x)
    options: Any = dict(r=r, config=definition.config)

    def body(carry, pieces, mask):
        full, drafted = carry
        layer_params, stack, expert = pieces
        layer: DecoderLayer = nnx.merge(definition.layer, layer_params)
        target = target_half(layer, full, stack, sight.positions, mask, **options)
        draft_side = draft_half(layer, drafted, stack, sight.positions, mask, **options)
        h = draft_side.hidden
        output = jnp.zeros_like(h) if expert is None else draft_output(expert, h)
        pair = LayerPair(
            residual=residual_loss(output, target.missing, counted),
            router=router_loss(target.routing.scores, draft_side.routing.scores, counted),
            routes=target.routing.ids,
            draft_routes=draft_side.routing.ids,
        )
        return (target.x, draft_side.finish(output)), pair

    body = jax.checkpoint(body) if remat else body
    pieces = (params.layers, params.routed, draft)
    (full, drafted), pairs = scan_layers(definition, outer, sight, body, (x, x), pieces)
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
    sight = Sight.of(definition.config, batch)
    outer, x = embed_outer(definition, params, batch["tokens"], sight, dtype=dtype)

    def body(full, pieces, mask):
        layer_params, stack, expert = pieces
        layer: DecoderLayer = nnx.merge(definition.layer, layer_params)
        options: Any = dict(r=r, config=definition.config)
        half = target_half(layer, full, stack, sight.positions, mask, **options)
        output = draft_output(expert, jax.lax.stop_gradient(half.hidden))
        return jax.lax.stop_gradient(half.x), residual_loss(output, half.missing, batch["mask"])

    pieces = (params.layers, params.routed, draft)
    return scan_layers(definition, outer, sight, body, x, pieces)[1]


def compare_vocabulary(
    outer: Transformer,
    full: Float[Array, "B T D"],
    drafted: Float[Array, "B T D"],
    batch: Batch,
    *,
    temperature: float = 1.0,
    chunk: int = 512,
) -> VocabularyTotals:
    """`vocabulary_losses` of two final residual streams."""
    width = full.shape[-1]
    return vocabulary_losses(
        partial(logits_of, outer),
        full.reshape(-1, width),
        drafted.reshape(-1, width),
        batch["targets"].reshape(-1),
        batch["mask"].reshape(-1),
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
    *,
    definition: StackedDef,
    r: int,
    weights: LossWeights,
    objective: Objective = "all",
    dtype: Any = jnp.float32,
    remat: bool = False,
    add: Callable[[Any], Any] = lambda tree: tree,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """A batch's part of the objective, and what a step reports of the whole.

    `add` sums over the shards of a batch (default: there is one). Sums are the shard's own and
    counts the whole's, so that the parts of all shards add up to the objective.
    """
    of_whole = partial(_of_whole, add=add)
    if objective == "residual-local":
        residual = local_residual(definition, params, draft, batch, r=r, dtype=dtype)
        loss = of_whole(residual).mean.mean()
        return loss, add({"loss": loss, "residual": loss})
    outer, full, drafted, pairs = paired_forward(
        definition, params, draft, batch, r=r, dtype=dtype, remat=remat
    )
    vocabulary = compare_vocabulary(outer, full, drafted, batch, temperature=weights.temperature)
    overlap = route_overlap(pairs, batch["mask"])[0]
    vocabulary, residual, router, overlap = of_whole(
        (vocabulary, pairs.residual, pairs.router, overlap)
    )
    loss = distillation_loss(vocabulary, residual, router, weights)
    metrics = {
        "loss": loss,
        "kl": vocabulary.logit.mean,
        "token": vocabulary.token.mean,
        "residual": residual.mean.mean(),
        "router": router.mean.mean(),
        "agreement": vocabulary.agreement.mean,
        "router_agreement": overlap.mean,
    }
    return loss, add(metrics)


def _of_whole(totals: Any, *, add: Callable[[Any], Any]) -> Any:
    """Totals of a shard over the counts of the whole batch."""
    is_total = lambda node: isinstance(node, Total)  # noqa: E731
    return jax.tree.map(lambda total: Total(total.sum, add(total.count)), totals, is_leaf=is_total)


def make_step(
    optimizer: optax.GradientTransformation, mesh: Mesh, **loss_options: Any
) -> Callable[[StackedParams, DistillState, Batch], tuple[DistillState, dict[str, Array]]]:
    """The jitted step (target, state, batch) -> (state, metrics); the state is donated.

    Data-parallel over `mesh`. The target is an argument, not a constant of the compiled program.
    `loss_options` are those of `loss_fn`.
    """
    loss = partial(loss_fn, add=add_shards, **loss_options)

    def gradients(whole: tuple[Params, StackedParams], batch: Batch):
        (_, metrics), grads = jax.value_and_grad(loss, has_aux=True)(*whole, batch)
        return add_shards(grads), metrics

    sharded = per_shard(gradients, mesh)

    @partial(jax.jit, donate_argnums=1)
    def step(params: StackedParams, state: DistillState, batch: Batch):
        grads, metrics = sharded((state.draft, params), batch)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.draft)
        metrics["grad_norm"] = optax.global_norm(grads)
        draft: Any = optax.apply_updates(state.draft, updates)
        return DistillState(draft=draft, opt_state=opt_state), metrics

    return step

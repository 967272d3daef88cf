"""The jitted steps of the host-driven engine: pure functions of plain arrays.

Steps that need a module's definition are made once per definition (`layer_step`, `outer_steps`): a
definition is slow to hash, so it must not be an argument of a call in the loop.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from dejax.ckpt.expert_codec import Packing, unpack
from dejax.config import ClampedSwiGLU, GQAConfig, MLAConfig, ModelConfig
from dejax.draft.confidence import head_scores
from dejax.draft.expert import draft_output
from dejax.model import (
    DecoderLayer,
    Masks,
    Params,
    attend_cached,
    combine,
    embed,
    logits_of,
    route,
    with_window,
)
from dejax.nn.attention import Cache, init_cache
from dejax.nn.experts import experts_of_rows, unique_weights


@cache
def outer_steps(definition: nnx.GraphDef) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Jitted (params, tokens [R], like) -> x [R, D] in like's dtype, and (params, x) -> logits.

    `definition` is that of a `Transformer` without its layers.
    """

    @jax.jit
    def embed_rows(params: Params, tokens: Int[Array, " R"], like: Array) -> Float[Array, "R D"]:
        return embed(nnx.merge(definition, params), tokens, like.dtype)

    @jax.jit
    def logits_rows(params: Params, x: Float[Array, "R D"]) -> Float[Array, "R V"]:
        return logits_of(nnx.merge(definition, params), x)

    return embed_rows, logits_rows


@cache
def score_step(definition: nnx.GraphDef) -> Callable[..., Any]:
    """Jitted (params, head, x [R, D], entered [R, D]) -> a confidence head's scores [R, M].

    `definition` and `params` as in `outer_steps`; `entered` is what entered the first layer.
    """

    @jax.jit
    def score_rows(params: Params, head: Params, x: Array, entered: Array) -> Float[Array, "R M"]:
        return head_scores(head, nnx.merge(definition, params).norm(x), entered)

    return score_rows


@cache
def layer_step(
    definition: nnx.GraphDef, ahead: nnx.GraphDef | None = None, *, plain: bool = False
) -> Callable[..., Any]:
    """Jitted `_attend_and_route` of layers with this definition; the cache is donated."""
    return jax.jit(partial(_attend_and_route, definition, ahead, plain), donate_argnums=3)


@cache
def shared_step(definition: nnx.GraphDef) -> Callable[..., Any]:
    """Jitted (params, h [R, D]) -> the output of shared experts with this definition, [R, D].

    A step of its own, so that it is computed while the routed experts come.
    """
    return jax.jit(lambda params, h: nnx.merge(definition, params)(h))


def next_router(layer: DecoderLayer) -> tuple[nnx.GraphDef, dict[Any, Any]]:
    """Norm and router of a MoE layer, split: what `layer_step` needs to look ahead to it."""
    definition, state = nnx.split((layer.mlp_norm, layer.router))
    return definition, nnx.to_pure_dict(state)


@cache
def visible(config: ModelConfig, slots: int) -> Callable[..., Masks]:
    """Jitted `visible_rows`: (base, positions [R], ancestors [R, W], ...) -> masks [R, S]."""
    return jax.jit(partial(visible_rows, config, slots))


def visible_rows(
    config: ModelConfig,
    slots: int,
    base: Int[Array, ""],
    positions: Int[Array, " R"],
    ancestors: Bool[Array, "R W"],
    block_positions: Int[Array, " W"],
) -> Masks:
    """The masks [R, S] of a pass over a cache: of some rows of a block of W that begins at `base`.

    A row sees the committed slots, its ancestors in the block, and itself.
    """
    every = jnp.arange(slots, dtype=positions.dtype)
    block = jnp.zeros((ancestors.shape[0], slots), bool)
    block = jax.lax.dynamic_update_slice(block, ancestors, (jnp.zeros_like(base), base))
    # Slots of the block hold rows in the tree's order; committed ones hold their own index.
    slot_positions = jax.lax.dynamic_update_slice(every, block_positions, (base,))
    return with_window(config, (every < base)[None, :] | block, positions, slot_positions)


@partial(jax.jit, donate_argnums=0)
def keep_rows(caches: Any, rows: Int[Array, " W"], base: Int[Array, ""]) -> Any:
    """Moves rows of a block to its begin: slot base + i gets what slot base + rows[i] held."""

    def keep(leaf: Array) -> Array:
        kept = jnp.take(leaf, base + rows, axis=0)
        return jax.lax.dynamic_update_slice_in_dim(leaf, kept, base, axis=0)

    return jax.tree.map(keep, caches)


def _attend_and_route(
    definition: nnx.GraphDef,
    ahead: nnx.GraphDef | None,
    plain: bool,
    params: Params,
    ahead_params: dict[Any, Any] | None,
    x: Float[Array, "R D"],
    cache: Cache,
    start: Int[Array, ""],
    positions: Int[Array, " R"],
    mask: Bool[Array, "R S"],
):
    """Attention, then feed-forward (dense layer) or router (MoE layer).

    Of a MoE layer: residual stream, normed input of its experts, their ids and gates, the
    probabilities of all, and the ids that the next layer's router would choose now (None without
    `ahead`); then the cache. `plain` is the router's.
    """
    layer = nnx.merge(definition, params)
    x, cache = attend_cached(layer, x, cache, start=start, positions=positions, mask=mask)
    # What shared experts give is left to `shared_step`.
    h, routing, always = route(layer, x, plain=plain)
    if routing is None:
        return combine(x, always), cache
    guess = None
    if ahead is not None:
        norm, router = nnx.merge(ahead, ahead_params)
        guess = router(norm(x)).ids
    return (x, h, routing.ids, routing.gates, routing.scores, guess), cache


def _numbers(experts: tuple[Any, ...], packing: Packing | None, dtype: Any) -> tuple[Any, ...]:
    """The experts of a step as numbers, if they were moved as packed bytes."""
    if packing is None:
        return experts
    return tuple(unpack(packing, expert, dtype) for expert in experts)


@partial(jax.jit, static_argnames=("r", "activation", "packing"))
def sum_experts(
    h: Float[Array, "R D"],
    ids: Int[Array, "R K"],
    gates: Float[Array, "R K"],
    unique_ids: Int[Array, " U"],
    experts: tuple[Any, ...],
    before: Float[Array, "R D"] | None,
    *,
    r: int | None,
    activation: ClampedSwiGLU | None,
    packing: Packing | None,
) -> Float[Array, "R D"]:
    """`before` plus the weighted outputs of some unique experts, in ascending order.

    `r`: a row has its first r experts alone, although those of other rows are at hand; None: all.
    """
    weights = unique_weights(ids[:, :r], gates[:, :r], unique_ids)
    numbers = _numbers(experts, packing, h.dtype)
    return experts_of_rows(h, weights, numbers, before=before, activation=activation)


@partial(jax.jit, static_argnames=("r", "activation", "packing"))
def add_experts(
    x: Float[Array, "R D"],
    always: Float[Array, "R D"] | None,
    h: Float[Array, "R D"],
    ids: Int[Array, "R K"],
    gates: Float[Array, "R K"],
    unique_ids: Int[Array, " U"],
    experts: tuple[Any, ...],
    before: Float[Array, "R D"] | None,
    draft: Params | None,
    *,
    r: int | None,
    activation: ClampedSwiGLU | None,
    packing: Packing | None,
) -> Float[Array, "R D"]:
    """Residual stream after the routed experts and, on the draft path, the draft expert.

    `always` is what the shared experts give, None where there are none; `r` as for `sum_experts`.
    """
    weights = unique_weights(ids[:, :r], gates[:, :r], unique_ids)
    numbers = _numbers(experts, packing, h.dtype)
    routed = experts_of_rows(h, weights, numbers, before=before, activation=activation)
    if draft is not None:
        routed = routed + draft_output(draft, h)
    return combine(x, routed) if always is None else combine(x, always, routed)


@partial(jax.jit, static_argnums=(0, 1, 2))
def empty_cache(config: MLAConfig | GQAConfig, slots: int, dtype: Any) -> Cache:
    """One layer's KV cache of zeros, made on the device."""
    return init_cache(config, slots, dtype)


@jax.jit
def take_row(x: Float[Array, "R D"], row: Int[Array, ""]) -> Float[Array, "1 D"]:
    """One row of a pass."""
    return jax.lax.dynamic_slice_in_dim(x, row, 1)

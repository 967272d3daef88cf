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

from dejax.config import MLAConfig
from dejax.draft.expert import draft_output
from dejax.model import Params, attend_cached, combine, embed, logits_of, route
from dejax.nn.experts import experts_of_rows, unique_weights
from dejax.nn.mla import LatentCache, init_cache


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
def layer_step(definition: nnx.GraphDef) -> Callable[..., Any]:
    """Jitted `_attend_and_route` of layers with this definition; the cache is donated."""
    return jax.jit(partial(_attend_and_route, definition), donate_argnums=2)


@partial(jax.jit, static_argnums=0)
def visible(slots: int, start: Int[Array, ""], ancestors: Bool[Array, "R R"]):
    """Mask [R, S]: a row sees the committed slots, its ancestors in the block, and itself."""
    committed = jnp.arange(slots) < start
    block = jnp.zeros((ancestors.shape[0], slots), bool)
    block = jax.lax.dynamic_update_slice(block, ancestors, (jnp.zeros_like(start), start))
    return committed[None, :] | block


def _attend_and_route(
    definition: nnx.GraphDef,
    params: Params,
    x: Float[Array, "R D"],
    cache: LatentCache,
    start: Int[Array, ""],
    positions: Int[Array, " R"],
    mask: Bool[Array, "R S"],
):
    """Attention, then feed-forward (dense layer) or router and shared experts (MoE layer)."""
    layer = nnx.merge(definition, params)
    x, cache = attend_cached(layer, x, cache, start=start, positions=positions, mask=mask)
    h, routing, always = route(layer, x)
    if routing is None:
        return combine(x, always), cache
    return (x, always, h, routing.ids, routing.gates), cache


@jax.jit
def sum_experts(
    h: Float[Array, "R D"],
    ids: Int[Array, "R K"],
    gates: Float[Array, "R K"],
    unique_ids: Int[Array, " U"],
    experts: tuple[Array, ...],
    before: Float[Array, "R D"] | None,
) -> Float[Array, "R D"]:
    """`before` plus the weighted outputs of some unique experts, in ascending order."""
    weights = unique_weights(ids, gates, unique_ids)
    return experts_of_rows(h, weights, experts, before=before)


@jax.jit
def add_experts(
    x: Float[Array, "R D"],
    always: Float[Array, "R D"],
    h: Float[Array, "R D"],
    ids: Int[Array, "R K"],
    gates: Float[Array, "R K"],
    unique_ids: Int[Array, " U"],
    experts: tuple[Array, ...],
    before: Float[Array, "R D"] | None,
    draft: Params | None,
) -> Float[Array, "R D"]:
    """Residual stream after the routed experts and, on the draft path, the draft expert."""
    weights = unique_weights(ids, gates, unique_ids)
    routed = experts_of_rows(h, weights, experts, before=before)
    if draft is not None:
        routed = routed + draft_output(draft, h)
    return combine(x, always, routed)


@partial(jax.jit, static_argnums=(0, 1, 2))
def empty_cache(config: MLAConfig, slots: int, dtype: Any) -> LatentCache:
    """One layer's KV cache of zeros, made on the device."""
    return init_cache(config, slots, dtype)


@jax.jit
def take_row(x: Float[Array, "R D"], row: Int[Array, ""]) -> Float[Array, "1 D"]:
    """One row of a pass."""
    return jax.lax.dynamic_slice_in_dim(x, row, 1)

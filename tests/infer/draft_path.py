"""The draft path over whole sequences, layer by layer: what exported drafters are compared with."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dejax.draft.expert import Draft
from dejax.draft.path import draft_experts
from dejax.model import (
    attend_full,
    combine,
    embed,
    logits_of,
    route,
    sequence_masks,
    split_layer,
)
from dejax.target import Target


def draft_path(target: Target, draft: Draft, tokens: np.ndarray):
    """Logits [B, T, V] of the draft path, and (ids, gates) [B, T, K] of every MoE layer."""
    ids = jnp.asarray(tokens, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    masks = sequence_masks(target.config, positions, jnp.zeros_like(ids))
    x, routing = embed(target.model, ids, jnp.float32), {}
    for index, layer in enumerate(target.model.layers):
        definition, params = split_layer(layer)
        mask = masks.of_layer(target.config.is_windowed(index))
        routed = index in target.config.moe_layers
        expert = draft.layer_params(index) if routed else None
        stack = target.layer_experts(index) if routed else None
        rule = draft.config.top_r, draft.plain, target.config.moe.activation
        x, chosen = _layer(definition, rule, params, expert, stack, x, positions, mask)
        if chosen is not None:
            routing[index] = jax.tree.map(np.asarray, chosen)
    return np.asarray(logits_of(target.model, x)), routing


@partial(jax.jit, static_argnums=(0, 1))
def _layer(definition, rule, params, expert, stack, x, positions, mask):
    layer, (r, plain, activation) = nnx.merge(definition, params), rule
    x = attend_full(layer, x, positions=positions, mask=mask)
    h, routing, always = route(layer, x, plain=plain)
    if routing is None:
        return combine(x, always), None
    experts = draft_experts(stack, expert, r=r, block=16, activation=activation)
    full = layer.router(h)
    return combine(x, always, experts(h, routing)), (full.ids, full.gates)

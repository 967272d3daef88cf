"""A target laid out for training: its MoE layers stacked, so that one scan compiles one layer.

`stack_target` and `unstack_target` convert between the canonical form (a `Transformer` and one
[E, 3, F, D] array a MoE layer) and `StackedParams`; `forward` runs whole sequences.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dejax.config import ModelConfig
from dejax.model import (
    DecoderLayer,
    LayerTap,
    Params,
    Transformer,
    causal_mask,
    embed,
    layer_full,
    split_layer,
    split_outer,
)
from dejax.nn.experts import experts_of_tokens
from dejax.nn.router import Routing
from dejax.pytree import pytree


@pytree(frozen=True)
class StackedParams:
    """Weights of a target for training.

    Attributes:
      outer: everything outside the MoE layers (embedding, leading dense layers, norm, head).
      layers: resident weights of the MoE layers, each array with a leading axis L.
      routed: [L, E, 3, F, D], the routed experts.
    """

    outer: Params
    layers: Params
    routed: Float[Array, "L E 3 F D"]


@dataclass(frozen=True)
class StackedDef:
    """The static side of `StackedParams`: how to rebuild modules from plain arrays."""

    config: ModelConfig
    outer: nnx.GraphDef
    layer: nnx.GraphDef


def stack_target(
    model: Transformer, routed: dict[int, Float[Array, "E 3 F D"]]
) -> tuple[StackedDef, StackedParams]:
    """Stacks the MoE layers of a target; the arrays are copied."""
    config = model.config
    splits = [split_layer(model.layers[i]) for i in config.moe_layers]
    definition = splits[0][0]
    layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(params for _, params in splits))
    outer_def, outer = split_outer(model, layers=config.moe_layers[0])
    stacked = StackedParams(
        outer=outer,
        layers=layers,
        routed=jnp.stack([routed[i] for i in config.moe_layers]),
    )
    return StackedDef(config=config, outer=outer_def, layer=definition), stacked


def unstack_target(
    definition: StackedDef, params: StackedParams
) -> tuple[Transformer, dict[int, Float[Array, "E 3 F D"]]]:
    """The canonical form of stacked weights: the inverse of `stack_target`."""
    model = nnx.merge(definition.outer, params.outer)
    moe_layers = definition.config.moe_layers
    slices = [jax.tree.map(lambda a, i=i: a[i], params.layers) for i in range(len(moe_layers))]
    merged = [nnx.merge(definition.layer, piece) for piece in slices]
    model.layers = nnx.List([*model.layers, *merged])
    return model, {layer: params.routed[i] for i, layer in enumerate(moe_layers)}


def routed_fn(stack: Float[Array, "E 3 F D"], *, block: int) -> Any:
    """The full MoE's expert function over [B, T, D], for `dejax.model.layer_full`."""

    def experts(h: Float[Array, "B T D"], routing: Routing) -> Float[Array, "B T D"]:
        k = routing.ids.shape[-1]
        flat = h.reshape(-1, h.shape[-1])
        ids, gates = routing.ids.reshape(-1, k), routing.gates.reshape(-1, k)
        return experts_of_tokens(flat, ids, gates, stack, block=block).reshape(h.shape)

    return experts


def block_size(tokens: int, config: ModelConfig, *, per_token: int | None = None) -> int:
    """Rows of an expert block: about half of an expert's mean load, between 8 and 128.

    `per_token` are the routed experts of a token (None: the target's own number).
    """
    mean_load = tokens * (per_token or config.moe.top_k) / config.moe.num_experts
    return min(128, max(8, 2 ** round(math.log2(max(mean_load, 2) / 2))))


def embed_outer(
    definition: StackedDef,
    params: StackedParams,
    tokens: Int[Array, "B T"],
    *,
    positions: Int[Array, "B T"],
    mask: Any,
    dtype,
) -> tuple[Transformer, Float[Array, "B T D"]]:
    """The outer model and the residual stream after embedding and the leading dense layers."""
    outer = nnx.merge(definition.outer, params.outer)
    x = embed(outer, tokens, dtype)
    for layer in outer.layers:
        x, _ = layer_full(layer, x, positions=positions, mask=mask, experts=_no_experts)
    return outer, x


def _no_experts(h, routing):
    raise AssertionError("a dense layer has no routed experts")


def forward(
    definition: StackedDef,
    params: StackedParams,
    tokens: Int[Array, "B T"],
    *,
    positions: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    dtype=jnp.float32,
    remat: bool = False,
) -> tuple[Transformer, Float[Array, "B T D"], LayerTap]:
    """Outer model (for the head), final residual stream, taps of all MoE layers [L, ...]."""
    mask = causal_mask(segment_ids)
    outer, x = embed_outer(definition, params, tokens, positions=positions, mask=mask, dtype=dtype)
    block = block_size(tokens.size, definition.config)

    def body(x, layer_params):
        layer: DecoderLayer = nnx.merge(definition.layer, layer_params[0])
        experts = routed_fn(layer_params[1], block=block)
        x, tap = layer_full(layer, x, positions=positions, mask=mask, experts=experts)
        assert tap is not None
        return x, tap

    body = jax.checkpoint(body) if remat else body
    x, taps = jax.lax.scan(body, x, (params.layers, params.routed))
    return outer, x, taps


def expert_counts(
    ids: Int[Array, "L B T K"], mask: Float[Array, "B T"], *, num_experts: int
) -> Float[Array, "L E"]:
    """Assignments of counted tokens that each expert gets, layer by layer."""
    hits = jax.nn.one_hot(ids, num_experts) * mask[None, :, :, None, None]
    return hits.sum(axis=(1, 2, 3))

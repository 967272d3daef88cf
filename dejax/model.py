"""The decoder: one for all families, training, resident decoding and offloaded decoding.

A layer is three pure functions, shared by every engine: *attend and route* (`attend_full` or
`attend_cached`, then `route`), *experts* (whoever owns the routed weights computes them), and
*combine*. A `Transformer` holds the resident weights only; the routed experts are a separate
pytree, one [E, 3, F, D] array a MoE layer, or records of an expert store.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from dejax.config import ModelConfig
from dejax.nn.attention import Cache, make_attention, windowed_mask
from dejax.nn.layers import RMSNorm, SwiGLU, project
from dejax.nn.router import Router, Routing
from dejax.pytree import pytree
from dejax.sharding import look_up

Params = dict[str, Any]
ExpertsFn = Callable[[Float[Array, "*rows D"], Routing], Float[Array, "*rows D"]]


@pytree(frozen=True)
class LayerTap:
    """What a MoE layer saw and did, for losses and statistics.

    Attributes:
      hidden: [*rows, D], the normed input of router and experts; routing: the router's decision;
      routed: [*rows, D], the routed experts' weighted sum.
    """

    hidden: Float[Array, "*rows D"]
    routing: Routing
    routed: Float[Array, "*rows D"]


class DecoderLayer(nnx.Module):
    """Resident weights of one layer: `mlp` if dense, `router` and `shared` if MoE."""

    def __init__(self, config: ModelConfig, index: int, *, dtype=jnp.float32, rngs: nnx.Rngs):
        norm = dict(eps=config.norm_eps, dtype=dtype)
        self.input_norm = RMSNorm(config.width, **norm)
        self.attention = make_attention(config.attention, config.width, rngs=rngs, **norm)
        self.mlp_norm = RMSNorm(config.width, **norm)
        mlp = partial(SwiGLU, config.width, bias=config.mlp_bias, dtype=dtype, rngs=rngs)
        moe = index in config.moe_layers
        shared = moe and config.moe.shared_width > 0
        self.mlp = None if moe else mlp(config.dense_width)
        self.router = Router(config.moe, config.width, dtype=dtype, rngs=rngs) if moe else None
        self.shared = mlp(config.moe.shared_width) if shared else None


class Transformer(nnx.Module):
    """Resident weights of a target: embedding, layers, final norm, head (None when tied)."""

    def __init__(self, config: ModelConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        self.config = config
        shape = (config.vocab_size, config.width)
        self.embedding = nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * 0.02)
        layers = range(config.num_layers)
        self.layers = nnx.List([DecoderLayer(config, i, dtype=dtype, rngs=rngs) for i in layers])
        self.norm = RMSNorm(config.width, eps=config.norm_eps, dtype=dtype)
        head = None if config.tied else jax.random.normal(rngs.params(), shape, dtype) * 0.02
        self.head = None if head is None else nnx.Param(head)


def split_layer(layer: DecoderLayer) -> tuple[nnx.GraphDef, Params]:
    """A layer as a static definition and a plain dictionary of arrays.

    Layers with the same definition share compiled functions: the arrays are arguments.
    """
    definition, state = nnx.split(layer)
    return definition, nnx.to_pure_dict(state)


def split_outer(model: Transformer, *, layers: Sequence[int] = ()) -> tuple[nnx.GraphDef, Params]:
    """As `split_layer`, of everything outside the layers, and of these layers."""
    outer = nnx.clone(model)
    outer.layers = nnx.List([outer.layers[index] for index in layers])
    definition, state = nnx.split(outer)
    return definition, nnx.to_pure_dict(state)


def embed(model: Transformer, tokens: Int[Array, "*rows"], dtype) -> Float[Array, "*rows D"]:
    """Embedding rows of `tokens`, in the compute dtype."""
    return look_up(model.embedding[...], tokens).astype(dtype)


def logits_of(model: Transformer, x: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
    """Final norm and head, in the compute dtype (at least float32)."""
    return project(model.norm(x), head_of(model).astype(x.dtype))


def head_of(model: Transformer) -> Float[Array, "V D"]:
    """The output embedding, which may be the input's."""
    return (model.embedding if model.head is None else model.head)[...]


def attend_full(
    layer: DecoderLayer,
    x: Float[Array, "B T D"],
    *,
    positions: Int[Array, "B T"],
    mask: Bool[Array, "B T S"],
    context: Float[Array, "B T D"] | None = None,
) -> Float[Array, "B T D"]:
    """Residual stream after attention over whole sequences.

    With `context`, another residual stream of the same tokens, rows see its keys and values beside
    their own; S is then 2 T, the context first.
    """
    seen = None if context is None else layer.input_norm(context)
    h = layer.input_norm(x)
    return x + layer.attention.full(h, positions=positions, mask=mask, context=seen)


def attend_cached(
    layer: DecoderLayer,
    x: Float[Array, "R D"],
    cache: Cache,
    *,
    start: Int[Array, ""],
    positions: Int[Array, " R"],
    mask: Bool[Array, "R S"],
) -> tuple[Float[Array, "R D"], Cache]:
    """Residual stream after attention of R new rows over the cache they are written to."""
    attention: Any = layer.attention  # of the kind that the cache is of
    out, cache = attention.cached(
        layer.input_norm(x), cache, start=start, positions=positions, mask=mask
    )
    return x + out, cache


def route(
    layer: DecoderLayer, x: Float[Array, "*rows D"], *, plain: bool = False
) -> tuple[Float[Array, "*rows D"], Routing | None, Float[Array, "*rows D"]]:
    """Normed input of the feed-forward, routing (None in a dense layer), and the always-on output.

    The always-on output is that of the dense feed-forward or of the shared experts (zero without
    any). `plain` is the router's.
    """
    h = layer.mlp_norm(x)
    if layer.router is None:
        assert layer.mlp is not None
        return h, None, layer.mlp(h)
    shared = jnp.zeros_like(h) if layer.shared is None else layer.shared(h)
    return h, layer.router(h, plain=plain), shared


def combine(
    x: Float[Array, "*rows D"],
    always: Float[Array, "*rows D"],
    routed: Float[Array, "*rows D"] | None = None,
) -> Float[Array, "*rows D"]:
    """Residual stream after the feed-forward; routed and always-on output are added first."""
    return x + (always if routed is None else routed + always)


def layer_full(
    layer: DecoderLayer,
    x: Float[Array, "B T D"],
    *,
    positions: Int[Array, "B T"],
    mask: Bool[Array, "B T T"],
    experts: ExpertsFn,
) -> tuple[Float[Array, "B T D"], LayerTap | None]:
    """One layer over whole sequences; `experts` gives the routed output."""
    x = attend_full(layer, x, positions=positions, mask=mask)
    h, routing, always = route(layer, x)
    if routing is None:
        return combine(x, always), None
    routed = experts(h, routing)
    return combine(x, always, routed), LayerTap(hidden=h, routing=routing, routed=routed)


@pytree(frozen=True)
class Masks:
    """Who may see whom in a pass: `whole`, and `windowed` for the layers with a sliding window.

    [B, T, T] over sequences, [R, S] over a cache; `windowed` is None where no layer has a window.
    """

    whole: Bool[Array, "*rows S"]
    windowed: Bool[Array, "*rows S"] | None

    def of_layer(self, windowed: bool | Bool[Array, ""] | None) -> Bool[Array, "*rows S"]:
        """The mask of a layer, given whether it has a window (None: no layer has one)."""
        if self.windowed is None or windowed is None:
            return self.whole
        if isinstance(windowed, bool):
            return self.windowed if windowed else self.whole
        return jnp.where(windowed, self.windowed, self.whole)


def causal_mask(segment_ids: Int[Array, "B T"]) -> Bool[Array, "B T T"]:
    """True where row i may see row j: not later, and in the same document."""
    length = segment_ids.shape[1]
    causal = jnp.tril(jnp.ones((length, length), bool))
    return causal & (segment_ids[:, :, None] == segment_ids[:, None, :])


def sequence_masks(
    config: ModelConfig, positions: Int[Array, "B T"], segment_ids: Int[Array, "B T"]
) -> Masks:
    """The masks of whole sequences, in which a row sees what came before it in its document."""
    return with_window(config, causal_mask(segment_ids), positions, positions)


def with_window(
    config: ModelConfig,
    mask: Bool[Array, "*rows S"],
    positions: Int[Array, "*rows"],
    slot_positions: Int[Array, "*batch S"],
) -> Masks:
    """The masks of all layers, from what a row may see in a layer without a window."""
    window = config.window
    if window is None:
        return Masks(whole=mask, windowed=None)
    windowed = windowed_mask(mask, positions, slot_positions, window)
    return Masks(whole=mask, windowed=windowed)

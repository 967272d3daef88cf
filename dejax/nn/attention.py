"""Grouped-query attention, and the choice between it and multi-head latent attention.

Both kinds have the same two methods: `full` over whole sequences without a cache, `cached` over a
few new rows and the KV cache that they are written to. What a row may see is the caller's mask, the
sliding window included: layers then differ in nothing but arrays.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from dejax.config import GQAConfig, MLAConfig
from dejax.nn.layers import Linear, RMSNorm
from dejax.nn.mla import MLA, LatentCache, init_latent_cache, with_context
from dejax.nn.rope import rotate
from dejax.pytree import pytree


@pytree(frozen=True)
class KeyValueCache:
    """One layer's KV cache, slot by slot: rotated keys and values, [S, G, M] each.

    Slot i holds the token at index i of the sequence, except beyond the committed length, where
    draft and verification write their scratch rows.
    """

    keys: Float[Array, "S G M"]
    values: Float[Array, "S G M"]


Cache = LatentCache | KeyValueCache


class GQA(nnx.Module):
    """Weights of one attention layer, named as in the checkpoint (`self_attn.*`).

    Attributes:
      q_norm, k_norm: norms of queries and keys, or None; sinks: [H], or None.
    """

    def __init__(
        self, config: GQAConfig, width: int, *, eps: float, dtype=jnp.float32, rngs: nnx.Rngs
    ):
        self.config = config
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        linear = partial(Linear, width, bias=config.bias, dtype=dtype, rngs=rngs)
        self.q_proj, self.k_proj, self.v_proj = linear(queries), linear(keys), linear(keys)
        self.o_proj = Linear(queries, width, bias=config.out_bias, dtype=dtype, rngs=rngs)
        whole, norm = config.norm == "whole", partial(RMSNorm, eps=eps, dtype=dtype)
        none = config.norm is None
        self.q_norm = None if none else norm(queries if whole else config.head_dim)
        self.k_norm = None if none else norm(keys if whole else config.head_dim)
        self.sinks = nnx.Param(jnp.zeros(config.heads, dtype)) if config.sinks else None

    def _heads(
        self,
        projection: Linear,
        norm: RMSNorm | None,
        x: Float[Array, "*rows D"],
        positions: Int[Array, "*rows"],
    ) -> Float[Array, "*rows heads M"]:
        """Queries or keys: projected, normed, clipped, split into heads and rotated."""
        config = self.config
        y = projection(x)
        y = norm(y) if norm is not None and config.norm == "whole" else y
        y = self._clipped(y).reshape(*x.shape[:-1], -1, config.head_dim)
        y = norm(y) if norm is not None and config.norm == "head" else y
        return rotate(y, positions[..., None], config.rope)

    def _clipped(self, y: Float[Array, "*rows M"]) -> Float[Array, "*rows M"]:
        clip = self.config.clip
        return y if clip is None else jnp.clip(y, -clip, clip)

    def _queries(self, x: Float[Array, "*rows D"], positions: Int[Array, "*rows"]):
        """Queries [*rows, G, H / G, M]."""
        config = self.config
        queries = self._heads(self.q_proj, self.q_norm, x, positions)
        queries = queries.reshape(*x.shape[:-1], config.kv_heads, -1, config.head_dim)
        return queries * config.head_dim**-0.5

    def _keys_values(self, x: Float[Array, "*rows D"], positions: Int[Array, "*rows"]):
        """Keys and values [*rows, G, M]."""
        keys = self._heads(self.k_proj, self.k_norm, x, positions)
        return keys, self._clipped(self.v_proj(x)).reshape(keys.shape)

    def _probabilities(self, scores: Float[Array, "*shape G J T S"], mask: Bool[Array, "..."]):
        """Softmax over the last axis in at least float32; masked entries get exactly zero.

        A head's sink is one more logit, whose share is dropped.
        """
        wide = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
        wide = jnp.where(mask, wide, -jnp.inf)
        if self.sinks is not None:
            sinks = self.sinks[...].astype(wide.dtype).reshape(self.config.kv_heads, -1, 1, 1)
            sinks = jnp.broadcast_to(sinks, (*wide.shape[:-1], 1))
            wide = jnp.concatenate([wide, sinks], axis=-1)
            return jax.nn.softmax(wide, axis=-1)[..., :-1].astype(scores.dtype)
        return jax.nn.softmax(wide, axis=-1).astype(scores.dtype)

    def full(
        self,
        x: Float[Array, "B T D"],
        *,
        positions: Int[Array, "B T"],
        mask: Bool[Array, "B T S"],
        context: Float[Array, "B T D"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Attention over whole sequences; `mask[b, i, j]` is true where row i may see row j.

        With `context`, rows of another stream stand before those of `x` (S is 2 T).
        """
        queries = self._queries(x, positions)
        keys, values = self._keys_values(*with_context(x, positions, context))
        scores = jnp.einsum("btgjm,bsgm->bgjts", queries, keys)
        probs = self._probabilities(scores, mask[:, None, None])
        out = jnp.einsum("bgjts,bsgm->btgjm", probs, values)
        return self.o_proj(out.reshape(*x.shape[:-1], -1))

    def cached(
        self,
        x: Float[Array, "R D"],
        cache: KeyValueCache,
        *,
        start: Int[Array, ""],
        positions: Int[Array, " R"],
        mask: Bool[Array, "R S"],
    ) -> tuple[Float[Array, "R D"], KeyValueCache]:
        """Attention of R new rows, whose keys and values go to slots start .. start + R - 1.

        `mask[i, s]` is true where row i may see slot s (its own slot included).
        """
        queries = self._queries(x, positions)
        keys, values = self._keys_values(x, positions)
        write = jax.lax.dynamic_update_slice_in_dim
        cache = KeyValueCache(
            keys=write(cache.keys, keys.astype(cache.keys.dtype), start, axis=0),
            values=write(cache.values, values.astype(cache.values.dtype), start, axis=0),
        )
        scores = jnp.einsum("rgjm,sgm->gjrs", queries, cache.keys.astype(x.dtype))
        probs = self._probabilities(scores, mask)
        out = jnp.einsum("gjrs,sgm->rgjm", probs, cache.values.astype(x.dtype))
        return self.o_proj(out.reshape(x.shape[0], -1)), cache


def make_attention(
    config: MLAConfig | GQAConfig, width: int, *, eps: float, dtype=jnp.float32, rngs: nnx.Rngs
) -> MLA | GQA:
    """The attention that a configuration asks for; `eps` is that of the model's norms."""
    if isinstance(config, MLAConfig):
        return MLA(config, width, dtype=dtype, rngs=rngs)
    return GQA(config, width, eps=eps, dtype=dtype, rngs=rngs)


def init_cache(config: MLAConfig | GQAConfig, slots: int, dtype) -> Cache:
    """An empty cache of `slots` slots for one layer."""
    if isinstance(config, MLAConfig):
        return init_latent_cache(config, slots, dtype)
    shape = (slots, config.kv_heads, config.head_dim)
    return KeyValueCache(keys=jnp.zeros(shape, dtype), values=jnp.zeros(shape, dtype))


def windowed_mask(
    mask: Bool[Array, "*rows S"],
    positions: Int[Array, "*rows"],
    slot_positions: Int[Array, "*batch S"],
    window: int,
) -> Bool[Array, "*rows S"]:
    """`mask` without what lies `window` positions or more before a row."""
    distance = positions[..., None] - slot_positions[..., None, :]
    return mask & (distance < window)

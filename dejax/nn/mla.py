"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

Two forms of the same arithmetic. A whole sequence without a cache expands the latent into keys and
values. Decode rows read a cache of latents and absorb the expansion into query and output instead,
so a step costs S * (C + P) per head and never expands the cache.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from dejax.config import MLAConfig
from dejax.nn.layers import Linear, RMSNorm
from dejax.nn.rope import rotate, softmax_scale_factor
from dejax.pytree import pytree


@pytree(frozen=True)
class LatentCache:
    """One layer's KV cache: normed latents and rotated shared keys, slot by slot.

    Attributes:
      latent: [S, C]; rope_key: [S, P]. Slot i holds the token at index i of the sequence, except
        beyond the committed length, where draft and verification write their scratch rows.
    """

    latent: Float[Array, "S C"]
    rope_key: Float[Array, "S P"]


def init_latent_cache(config: MLAConfig, slots: int, dtype) -> LatentCache:
    """An empty cache of `slots` slots for one layer."""
    return LatentCache(
        latent=jnp.zeros((slots, config.kv_rank), dtype),
        rope_key=jnp.zeros((slots, config.rope.dim), dtype),
    )


def _masked_softmax(scores: Float[Array, "... S"], mask: Bool[Array, "... S"]):
    """Softmax in at least float32; masked entries get exactly zero."""
    wide = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
    wide = jnp.where(mask, wide, -jnp.inf)
    return jax.nn.softmax(wide, axis=-1).astype(scores.dtype)


def with_context(
    x: Float[Array, "B T D"],
    positions: Int[Array, "B T"],
    context: Float[Array, "B T D"] | None,
) -> tuple[Float[Array, "B S D"], Int[Array, "B S"]]:
    """Rows whose keys and values are seen, and their positions: the context's first, then `x`'s."""
    if context is None:
        return x, positions
    rows = jnp.concatenate([context, x], axis=1)
    return rows, jnp.concatenate([positions, positions], axis=1)


class MLA(nnx.Module):
    """Weights of one attention layer, named as in the checkpoint (`self_attn.*`)."""

    def __init__(self, config: MLAConfig, width: int, *, dtype=jnp.float32, rngs: nnx.Rngs):
        self.config = config
        q_out = config.heads * (config.nope_dim + config.rope.dim)
        if config.query_rank is None:
            self.q_proj = Linear(width, q_out, dtype=dtype, rngs=rngs)
        else:
            rank = config.query_rank
            self.q_a_proj = Linear(width, rank, bias=config.bias, dtype=dtype, rngs=rngs)
            self.q_a_layernorm = RMSNorm(rank, eps=config.latent_norm_eps, dtype=dtype)
            self.q_b_proj = Linear(rank, q_out, dtype=dtype, rngs=rngs)
        self.kv_a_proj_with_mqa = Linear(
            width, config.kv_rank + config.rope.dim, bias=config.bias, dtype=dtype, rngs=rngs
        )
        self.kv_a_layernorm = RMSNorm(config.kv_rank, eps=config.latent_norm_eps, dtype=dtype)
        self.kv_b_proj = Linear(
            config.kv_rank,
            config.heads * (config.nope_dim + config.value_dim),
            dtype=dtype,
            rngs=rngs,
        )
        self.o_proj = Linear(
            config.heads * config.value_dim, width, bias=config.bias, dtype=dtype, rngs=rngs
        )

    @property
    def scale(self) -> float:
        """Softmax scale, YaRN's factor included."""
        dim = self.config.nope_dim + self.config.rope.dim
        return dim**-0.5 * softmax_scale_factor(self.config.rope)

    def _queries(self, x: Float[Array, "*rows D"], positions: Int[Array, "*rows"]):
        """Per-head queries: non-rotary [*rows, H, M] and rotated [*rows, H, P]."""
        if self.config.query_rank is None:
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.reshape(*x.shape[:-1], self.config.heads, -1)
        q_nope, q_rope = jnp.split(q, [self.config.nope_dim], axis=-1)
        return q_nope, rotate(q_rope, positions[..., None], self.config.rope)

    def _latents(self, x: Float[Array, "*rows D"], positions: Int[Array, "*rows"]):
        """Normed latent [*rows, C] and rotated shared key [*rows, P]: what a cache keeps."""
        latent, key = jnp.split(self.kv_a_proj_with_mqa(x), [self.config.kv_rank], axis=-1)
        return self.kv_a_layernorm(latent), rotate(key, positions, self.config.rope)

    def _up_projections(self, dtype):
        """The two halves of kv_b_proj: keys [H, M, C] and values [H, W, C]."""
        weight = self.kv_b_proj.weight[...].astype(dtype)
        weight = weight.reshape(self.config.heads, -1, self.config.kv_rank)
        return weight[:, : self.config.nope_dim], weight[:, self.config.nope_dim :]

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
        q_nope, q_rope = self._queries(x, positions)
        latent, key_rope = self._latents(*with_context(x, positions, context))
        up_key, up_value = self._up_projections(x.dtype)
        keys = jnp.einsum("btc,hmc->bhtm", latent, up_key)
        values = jnp.einsum("btc,hwc->bhtw", latent, up_value)
        # One product over both halves of a head: a [B, H, T, T] array less in each direction.
        queries = jnp.concatenate([q_nope, q_rope], axis=-1) * self.scale
        shared = jnp.broadcast_to(key_rope[:, None], (*keys.shape[:3], key_rope.shape[-1]))
        keys = jnp.concatenate([keys, shared], axis=-1)
        scores = jnp.einsum("bthm,bhsm->bhts", queries, keys)
        probs = _masked_softmax(scores, mask[:, None])
        out = jnp.einsum("bhts,bhsw->bthw", probs, values)
        return self.o_proj(out.reshape(*x.shape[:-1], -1))

    def cached(
        self,
        x: Float[Array, "R D"],
        cache: LatentCache,
        *,
        start: Int[Array, ""],
        positions: Int[Array, " R"],
        mask: Bool[Array, "R S"],
    ) -> tuple[Float[Array, "R D"], LatentCache]:
        """Attention of R new rows, whose latents are written to slots start .. start + R - 1.

        `mask[i, s]` is true where row i may see slot s (its own slot included).
        """
        q_nope, q_rope = self._queries(x, positions)
        latent, key_rope = self._latents(x, positions)
        write = jax.lax.dynamic_update_slice_in_dim
        cache = LatentCache(
            latent=write(cache.latent, latent.astype(cache.latent.dtype), start, axis=0),
            rope_key=write(cache.rope_key, key_rope.astype(cache.rope_key.dtype), start, axis=0),
        )
        up_key, up_value = self._up_projections(x.dtype)
        latents, rope_keys = cache.latent.astype(x.dtype), cache.rope_key.astype(x.dtype)
        q_latent = jnp.einsum("rhm,hmc->rhc", q_nope, up_key)
        scores = jnp.einsum("rhc,sc->rhs", q_latent, latents)
        scores = (scores + jnp.einsum("rhp,sp->rhs", q_rope, rope_keys)) * self.scale
        probs = _masked_softmax(scores, mask[:, None])
        out = jnp.einsum("rhs,sc->rhc", probs, latents)
        out = jnp.einsum("rhc,hwc->rhw", out, up_value)
        return self.o_proj(out.reshape(x.shape[0], -1)), cache

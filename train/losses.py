"""Losses as pure functions that return a sum and a count, so that batches and shards add up exactly."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Total(NamedTuple):
    """A sum over counted elements and their number (or the sum of their weights)."""

    sum: Float[Array, ""]
    count: Float[Array, ""]

    @property
    def mean(self) -> Float[Array, ""]:
        """sum / count, zero where nothing was counted."""
        return self.sum / jnp.maximum(self.count, 1)


def over_chunks(
    fn: Callable[..., Float[Array, "..."]], *rows: Float[Array, "N ..."], chunk: int
) -> Float[Array, "..."]:
    """Sum of `fn` over chunks of rows, recomputed in the backward pass.

    `fn` maps chunks of every argument to a vector of sums. With logits made inside `fn`, memory is that
    of one chunk: no [N, V] array is ever held. Rows are zero-padded to whole chunks, so `fn` must give
    zero for a padded row (its weight is zero).
    """
    count = rows[0].shape[0]
    chunks = -(-count // chunk)

    def split(a):
        pad = [(0, chunks * chunk - count)] + [(0, 0)] * (a.ndim - 1)
        return jnp.pad(a, pad).reshape(chunks, chunk, *a.shape[1:])

    def body(total, piece):
        return total + fn(*piece), None

    piece = [jax.ShapeDtypeStruct((chunk, *a.shape[1:]), a.dtype) for a in rows]
    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(fn, *piece))
    total, _ = jax.lax.scan(jax.checkpoint(body), zero, tuple(split(a) for a in rows))
    return total


def cross_entropy(
    logits_fn: Callable[[Float[Array, "N D"]], Float[Array, "N V"]],
    hidden: Float[Array, "N D"],
    targets: Int[Array, "N"],
    mask: Float[Array, "N"],
    *,
    chunk: int = 2048,
) -> Total:
    """Next-token cross-entropy in nats, over the rows that `mask` counts."""

    def piece(h, target, weight):
        logits = logits_fn(h)
        log_law = jax.nn.log_softmax(logits, axis=-1)
        chosen = jnp.take_along_axis(log_law, target[:, None], axis=-1)[:, 0]
        return -jnp.sum(chosen * weight)

    return Total(over_chunks(piece, hidden, targets, mask, chunk=chunk), mask.sum())


def load_balance(
    scores: Float[Array, "L B T E"], load: Float[Array, "L E"], mask: Float[Array, "B T"]
) -> Float[Array, "L"]:
    """Global-batch load-balance loss E * sum_e f_e P_e of each layer (arXiv 2501.11873).

    1 when load and mean score are uniform. The gradient reaches the router through the scores only.
    """
    mean_score = jnp.einsum("lbte,bt->le", scores, mask) / jnp.maximum(mask.sum(), 1)
    return scores.shape[-1] * jnp.sum(jax.lax.stop_gradient(load) * mean_score, axis=-1)

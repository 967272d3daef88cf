"""What a predictor of experts is trained on, and its objective.

One pass of target and draft network over the same tokens (`train.distill_step.paired_forward`), the
draft seeing what it sees when decoding (`train.kv_mix`). Token t + 1 is a candidate below token t:
known of it are the draft's state and routes at t and the token itself, wanted the experts that the
target uses for it. With blocks of K tokens candidates of depth 1 to K are equally many.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from dejax.draft.predictor import expert_logits
from dejax.model import Params, embed
from train.distill_step import Batch, paired_forward
from train.losses import Total
from train.stacked import StackedDef, StackedParams

BINS = 10
"""Bins of equal width into which probabilities fall for the calibration error."""


class Candidates(NamedTuple):
    """What is known of the tokens of a batch, each below the one before it, and what is wanted.

    Attributes:
      state, token, parent: as `expert_logits` takes them; wanted: experts that the target uses;
      mask: 1 where there is such a token and it counts.
    """

    state: Float[Array, "B T D"]
    token: Float[Array, "B T D"]
    parent: Int[Array, "B T L K"]
    wanted: Int[Array, "B T L K"]
    mask: Float[Array, "B T"]


def candidates_of(
    definition: StackedDef,
    params: StackedParams,
    draft: Params,
    batch: Batch,
    *,
    r: int,
    dtype: Any = jnp.float32,
) -> Candidates:
    """The candidates of a batch of packed rows with `blocks`, constants to what is trained."""
    outer, _, drafted, pairs = paired_forward(definition, params, draft, batch, r=r, dtype=dtype)

    def by_row(ids: Int[Array, "L B T K"]) -> Int[Array, "B T L K"]:
        return jnp.moveaxis(ids, 0, 2)

    found = Candidates(
        state=drafted[:, :-1],
        token=embed(outer, batch["tokens"][:, 1:], drafted.dtype),
        parent=by_row(pairs.draft_routes)[:, :-1],
        wanted=by_row(pairs.routes)[:, 1:],
        mask=batch["mask"][:, :-1],
    )
    return jax.lax.stop_gradient(found)


def predictor_loss(predictor: Params, found: Candidates) -> tuple[Float[Array, ""], dict[str, Any]]:
    """Binary cross-entropy (nats a layer-expert) of what is predicted, and what a step reports."""
    totals = predictor_totals(predictor, found)
    loss = totals["loss"].mean
    return loss, {"loss": loss, "recall": totals["recall"].mean}


def predictor_totals(predictor: Params, found: Candidates) -> dict[str, Total]:
    """Totals of loss and recall at k; and for the calibration, of each bin of probabilities.

    `predicted` and `needed` are the sums, over the layer-experts of a bin, of the probability and
    of whether it was needed; `chosen` and `chosen_needed` are the same of the predicted top-k.
    """
    logits = expert_logits(predictor, found.state, found.token, found.parent)
    experts, top_k = logits.shape[-1], found.wanted.shape[-1]
    needed = jax.nn.one_hot(found.wanted, experts, dtype=logits.dtype).sum(axis=-2)
    mask = found.mask[..., None, None]
    losses = optax.sigmoid_binary_cross_entropy(logits, needed) * mask
    top, ids = jax.lax.top_k(logits, top_k)
    hits = jnp.take_along_axis(needed, ids, axis=-1)
    rows = found.mask.sum() * logits.shape[-2]

    def binned(probability, right, mask):
        bins = jnp.clip((probability * BINS).astype(int), 0, BINS - 1).ravel()
        counted = jnp.broadcast_to(mask, probability.shape).ravel()
        add = lambda values: jnp.zeros(BINS, logits.dtype).at[bins].add(values * counted)  # noqa: E731
        count = add(jnp.ones_like(counted))
        return Total(add(probability.ravel()), count), Total(add(right.ravel()), count)

    predicted, right = binned(jax.nn.sigmoid(logits), needed, mask)
    chosen, chosen_right = binned(jax.nn.sigmoid(top), hits, mask)
    return {
        "loss": Total(losses.sum(), rows * experts),
        "recall": Total((hits * mask).sum(), rows * top_k),
        "predicted": predicted,
        "needed": right,
        "chosen": chosen,
        "chosen_needed": chosen_right,
    }

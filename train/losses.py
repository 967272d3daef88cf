"""Losses as pure functions that return a sum and a count: batches and shards add up exactly.

The four of distillation are those of DraftExpert (arXiv 2607.24434), section 4: the logits of the
full target, its most likely token, the output of the experts that the draft path leaves out, and
its routers. What comes from the target is a constant to all of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from dejax.errors import UsageError


class Total(NamedTuple):
    """A sum over counted elements and their number (or the sum of their weights).

    Both may be vectors: a total for each layer.
    """

    sum: Float[Array, "*parts"]
    count: Float[Array, "*parts"]

    @property
    def mean(self) -> Float[Array, "*parts"]:
        """sum / count, zero where nothing was counted."""
        return self.sum / jnp.where(self.count > 0, self.count, 1)


def over_chunks(
    fn: Callable[..., Float[Array, "..."]], *rows: Shaped[Array, "N ..."], chunk: int
) -> Float[Array, "..."]:
    """Sum of `fn` over chunks of rows, recomputed in the backward pass.

    `fn` maps chunks of every argument to a vector of sums. With logits made inside `fn`, memory is
    that of one chunk: no [N, V] array is ever held. Rows are zero-padded to whole chunks, so `fn`
    must give zero for a padded row (its weight is zero).
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
    targets: Int[Array, " N"],
    mask: Float[Array, " N"],
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


def gate_concentration(
    gates: Float[Array, "L B T K"], mask: Float[Array, "B T"]
) -> Float[Array, ""]:
    """Mean squared share of a token's gates: 1 / K when all its experts weigh the same, at most 1.

    Kept low, every chosen expert matters, as in large fine-grained MoEs; left alone, a small model
    leans on its top-1 expert.
    """
    shares = gates / jnp.maximum(gates.sum(axis=-1, keepdims=True), 1e-9)
    squared = jnp.sum(jnp.square(shares), axis=-1).mean(axis=0)
    return jnp.sum(squared * mask) / jnp.maximum(mask.sum(), 1)


def load_balance(
    scores: Float[Array, "L B T E"], load: Float[Array, "L E"], mask: Float[Array, "B T"]
) -> Float[Array, " L"]:
    """Global-batch load-balance loss E * sum_e f_e P_e of each layer (arXiv 2501.11873).

    1 when load and mean score are uniform. The gradient reaches the router through the scores only.
    """
    mean_score = jnp.einsum("lbte,bt->le", scores, mask) / jnp.maximum(mask.sum(), 1)
    return scores.shape[-1] * jnp.sum(jax.lax.stop_gradient(load) * mean_score, axis=-1)


# --- distillation ----------------------------------------------------------------------------


@dataclass(frozen=True)
class LossWeights:
    """Weights of the four distillation losses, and the temperature of the logit loss."""

    logit: float = 1.0
    token: float = 0.1
    residual: float = 1.0
    router: float = 0.1
    temperature: float = 1.0

    def __post_init__(self):
        weights = (self.logit, self.token, self.residual, self.router)
        if min(weights) < 0 or max(weights) == 0:
            raise UsageError(f"losses: weights are {weights}; expected none below 0, not all 0")
        if self.temperature <= 0:
            raise UsageError(f"losses: temperature is {self.temperature}; expected > 0")


class VocabularyTotals(NamedTuple):
    """Totals over token positions, from one pass over the vocabulary.

    Attributes:
      logit: T^2 KL(target || draft) of the laws at temperature T, nats; token: cross-entropy of the
      target's most likely token under the draft, nats; agreement: positions where both have the
      same most likely token; full, draft: cross-entropy of the text's next token, nats.
    """

    logit: Total
    token: Total
    agreement: Total
    full: Total
    draft: Total


def vocabulary_losses(
    logits_fn: Callable[[Float[Array, "N D"]], Float[Array, "N V"]],
    teacher: Float[Array, "N D"],
    student: Float[Array, "N D"],
    targets: Int[Array, " N"],
    mask: Float[Array, " N"],
    *,
    temperature: float = 1.0,
    chunk: int = 512,
) -> VocabularyTotals:
    """Everything that compares the logits of the target (`teacher`) and of the draft (`student`).

    Logits are made a chunk of rows at a time, from the final residual streams, and again in the
    backward pass. Gradients reach `student` through `logit`, `token` and `draft` alone.
    """

    def piece(h_teacher, h_student, target, weight):
        full = jax.lax.stop_gradient(logits_fn(h_teacher))
        draft = logits_fn(h_student)
        best = jnp.argmax(full, axis=-1)
        log_full, log_draft = jax.nn.log_softmax(full), jax.nn.log_softmax(draft)
        if temperature == 1.0:
            soft_full, soft_draft = log_full, log_draft
        else:
            soft_full = jax.nn.log_softmax(full / temperature)
            soft_draft = jax.nn.log_softmax(draft / temperature)
        kl = temperature**2 * jnp.sum(jnp.exp(soft_full) * (soft_full - soft_draft), axis=-1)
        columns = [
            kl,
            -jnp.take_along_axis(log_draft, best[:, None], axis=-1)[:, 0],
            (best == jnp.argmax(draft, axis=-1)).astype(kl.dtype),
            -jnp.take_along_axis(log_full, target[:, None], axis=-1)[:, 0],
            -jnp.take_along_axis(log_draft, target[:, None], axis=-1)[:, 0],
        ]
        return jnp.sum(jnp.stack(columns) * weight.astype(kl.dtype), axis=-1)

    teacher = jax.lax.stop_gradient(teacher)
    sums = over_chunks(piece, teacher, student, targets, mask, chunk=chunk)
    count = mask.sum().astype(sums.dtype)
    return VocabularyTotals(*(Total(sums[i], count) for i in range(len(VocabularyTotals._fields))))


def residual_loss(
    output: Float[Array, "*rows D"], missing: Float[Array, "*rows D"], mask: Float[Array, "*rows"]
) -> Total:
    """Squared error of the draft expert, over the squared length of what it stands in for.

    `missing` is the output of the routed experts that the draft path leaves out. The ratio makes
    layers comparable whatever the scale of their outputs.
    """
    missing = jax.lax.stop_gradient(missing)
    error = jnp.sum(jnp.square(output - missing), axis=-1)
    return Total(jnp.sum(error * mask), jnp.sum(jnp.sum(jnp.square(missing), axis=-1) * mask))


def router_loss(
    teacher: Float[Array, "*rows E"], student: Float[Array, "*rows E"], mask: Float[Array, "*rows"]
) -> Total:
    """KL(target || draft), in nats, of a router's law over all routed experts."""
    teacher = jax.lax.stop_gradient(teacher)
    tiny = jnp.finfo(student.dtype).tiny  # a softmax may underflow; its logarithm must not
    log_ratio = jnp.log(jnp.maximum(teacher, tiny)) - jnp.log(jnp.maximum(student, tiny))
    kl = jnp.sum(teacher * log_ratio, axis=-1)
    return Total(jnp.sum(kl * mask), mask.sum().astype(kl.dtype))


def distillation_loss(
    vocabulary: VocabularyTotals, residual: Total, router: Total, weights: LossWeights
) -> Float[Array, ""]:
    """The weighted sum; residual and router totals have one entry a MoE layer and are averaged."""
    return (
        weights.logit * vocabulary.logit.mean
        + weights.token * vocabulary.token.mean
        + weights.residual * residual.mean.mean()
        + weights.router * router.mean.mean()
    )

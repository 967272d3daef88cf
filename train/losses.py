"""Losses as pure functions that return a sum and a count: batches and shards add up exactly.

The four of distillation are those of DraftExpert (arXiv 2607.24434), section 4: the logits of the
full target, its most likely token, the output of the experts that the draft path leaves out, and
its routers. What comes from the target is a constant to all of them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from dejax.errors import UsageError
from dejax.sharding import VocabularyPart, on_host, over_vocabulary


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


def add_up(parts: Iterable[dict[str, Total]]) -> dict[str, Any]:
    """The totals of many batches, name by name, summed in float64 on the host."""
    sums: dict[str, Any] = {}
    for part in parts:
        wide = jax.tree.map(lambda a: np.asarray(a, np.float64), on_host(part))
        sums = jax.tree.map(np.add, sums, wide) if sums else wide
    return sums


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


TERMS = ("logit", "token", "residual", "router")
"""The four losses, in the order of a vector of weights."""


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

    def vector(self) -> Float[np.ndarray, "4"]:
        """The four weights in the order of `TERMS`."""
        return np.array([getattr(self, term) for term in TERMS], np.float32)


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
    head: Float[Array, "V D"],
    teacher: Float[Array, "B T _D"],
    student: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    mask: Float[Array, "B T"],
    *,
    teacher_head: Float[Array, "V _D"] | None = None,
    weights: Any = (1.0, 0.0),
    temperature: float = 1.0,
    chunk: int = 512,
) -> tuple[Float[Array, ""], VocabularyTotals]:
    """Everything that compares the logits of the target (`teacher`) and of the draft (`student`).

    Logits are made from the normed final residual streams a chunk of rows at a time, once: the
    gradient of the objective is taken in the same sweep. On a mesh every device makes the logits of
    its own part of the vocabulary, for all rows of its group; the head is never gathered.

    Args:
      head: output embedding, a constant; teacher_head: that of `teacher`, if it has its own.
      weights: of the logit and the token loss in the objective; numbers or a traced pair.
      chunk: rows of this device whose logits are held at a time.

    Returns:
      weights[0] * the sum behind `logit` + weights[1] * that behind `token`, which alone carries a
      gradient, and to `student` alone; and the totals.
    """
    kind = jnp.promote_types(student.dtype, jnp.float32)
    pair = jnp.asarray(weights, kind)
    rows = jax.lax.stop_gradient((teacher, targets, mask))
    heads = (head,) if teacher_head is None else (head, teacher_head)
    options = (float(temperature), chunk)
    compared: Any = _compared(options, student, heads, pair, rows)
    objective, sums = compared
    count = mask.sum().astype(kind)
    totals = (Total(sums[i], count) for i in range(len(VocabularyTotals._fields)))
    return objective, VocabularyTotals(*totals)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _compared(options, student, heads, weights, rows):
    """The objective and the five sums; `_sweep` without the gradient."""
    return _sweep(options, student, heads, weights, rows, with_gradient=False)[:2]


def _compared_fwd(options, student, heads, weights, rows):
    objective, sums, gradient = _sweep(options, student, heads, weights, rows, with_gradient=True)
    return (objective, sums), (gradient, heads, weights, rows)


def _compared_bwd(options, residual, cotangents):
    gradient, *constants = residual
    return (cotangents[0] * gradient).astype(gradient.dtype), *(None for _ in constants)


_compared.defvjp(_compared_fwd, _compared_bwd)


def _sweep(options, student, heads, weights, rows, *, with_gradient):
    """The objective, the five sums [5], and the objective's gradient [B, T, D] (or zeros [B]).

    `heads` are the student's and the teacher's, or one that serves both.
    """
    temperature, chunk = options

    def local(part: VocabularyPart, heads, rows, weights):
        student, teacher, targets, mask = rows
        width, (batch, length) = student.shape[-1], student.shape[:2]
        flat = (student.reshape(-1, width), teacher.reshape(-1, teacher.shape[-1]))
        flat = (*flat, targets.reshape(-1), mask.reshape(-1))
        size = min(chunk, batch * length)
        count = -(-batch * length // size)

        def split(a):
            pad = [(0, count * size - len(a))] + [(0, 0)] * (a.ndim - 1)
            return jnp.pad(a, pad).reshape(count, size, *a.shape[1:])

        def step(sums, piece):
            rows = tuple(map(part.gather, piece))
            columns, slope = _compare_rows(part, heads, rows, weights, temperature, with_gradient)
            return sums + columns, part.scatter(slope) if with_gradient else None

        zero = jnp.zeros(len(VocabularyTotals._fields), weights.dtype)
        slopes: Any
        sums, slopes = jax.lax.scan(step, zero, tuple(map(split, flat)))
        sums = part.total(sums)
        if not with_gradient:
            return sums, jnp.zeros(batch, student.dtype)
        gradient = jnp.reshape(slopes, (-1, width))[: batch * length]
        return sums, gradient.reshape(student.shape).astype(student.dtype)

    rows = (student, *rows)
    sums, gradient = over_vocabulary(local, heads, rows, weights, out_rows=(False, True))
    return weights[0] * sums[0] + weights[1] * sums[1], sums, gradient


def _compare_rows(part, heads, rows, weights, temperature, with_gradient) -> tuple[Any, Any]:
    """The five sums of some rows, and each row's gradient of the objective ([N, D], this part's).

    d KL_T / d logits = (softmax(draft / T) - softmax(full / T)) / T, times T^2; d CE / d logits =
    softmax(draft) - one-hot.
    """
    student, teacher, targets, mask = rows
    kind = weights.dtype
    product = partial(jnp.einsum, "nd,vd->nv", preferred_element_type=kind)
    tables = [head.astype(student.dtype) for head in heads]
    full, draft = product(teacher, tables[-1]), product(student, tables[0])
    ids = part.first + jnp.arange(len(tables[0]), dtype=targets.dtype)
    mask = mask.astype(kind)

    def log_law(logits):
        top = part.most(logits.max(axis=-1, keepdims=True))
        return logits - top - jnp.log(part.add(jnp.exp(logits - top).sum(-1, keepdims=True)))

    def at(law, wanted):
        return part.add(jnp.where(ids == wanted[:, None], law, 0).sum(axis=-1))

    log_full, log_draft = log_law(full), log_law(draft)
    if temperature == 1.0:
        soft_full, soft_draft = log_full, log_draft
    else:
        soft_full, soft_draft = log_law(full / temperature), log_law(draft / temperature)
    most_likely = _best(part, full)
    kl = part.add(jnp.sum(jnp.exp(soft_full) * (soft_full - soft_draft), axis=-1))
    columns = [
        temperature**2 * kl,
        -at(log_draft, most_likely),
        (most_likely == _best(part, draft)).astype(kind),
        -at(log_full, targets),
        -at(log_draft, targets),
    ]
    sums = jnp.sum(jnp.stack(columns) * mask, axis=-1)
    if not with_gradient:
        return sums, None
    slope = weights[0] * temperature * (jnp.exp(soft_draft) - jnp.exp(soft_full))
    slope += weights[1] * (jnp.exp(log_draft) - (ids == most_likely[:, None]))
    slope = (slope * mask[:, None]).astype(student.dtype)
    return sums, jnp.einsum("nv,vd->nd", slope, tables[0])


def _best(part: VocabularyPart, logits: Float[Array, "N _V"]) -> Int[Array, " N"]:
    """The lowest id of the largest logit, wherever it lies."""
    local = logits.argmax(axis=-1)
    value = jnp.take_along_axis(logits, local[:, None], axis=-1)[:, 0]
    here = value == part.most(value)
    return -part.most(jnp.where(here, -(part.first + local), -(2**31 - 1)))


def most_likely(
    head: Float[Array, "V D"], hidden: Float[Array, "B T D"], *, chunk: int = 512
) -> Int[Array, "B T"]:
    """The most likely token after each row of a normed final residual stream.

    A chunk of rows at a time, and as in `vocabulary_losses` without gathering the head.
    """
    kind = jnp.promote_types(hidden.dtype, jnp.float32)

    def local(part: VocabularyPart, head, hidden, _):
        def picked(rows):
            rows = part.gather(rows)
            product = partial(jnp.einsum, "nd,vd->nv", preferred_element_type=kind)
            ids = _best(part, product(rows, head.astype(rows.dtype))).astype(jnp.int32)
            return part.scatter(jnp.where(part.first == 0, ids, 0))  # one device of the group's

        flat = hidden.reshape(-1, hidden.shape[-1])
        size = min(chunk, len(flat))
        pieces = jnp.pad(flat, ((0, -len(flat) % size), (0, 0))).reshape(-1, size, flat.shape[-1])
        ids = jax.lax.map(picked, pieces)
        return ids.reshape(-1)[: len(flat)].reshape(hidden.shape[:2])

    return over_vocabulary(local, head, hidden, out_rows=True)


def residual_loss(
    output: Float[Array, "*rows D"], missing: Float[Array, "*rows D"], mask: Float[Array, "*rows"]
) -> Total:
    """Squared error of the draft expert, over the squared length of what it stands in for.

    `missing` is the output of the routed experts that the draft path leaves out. The ratio makes
    layers comparable whatever the scale of their outputs.
    """
    kind = jnp.promote_types(output.dtype, jnp.float32)
    missing = jax.lax.stop_gradient(missing).astype(kind)
    error = jnp.sum(jnp.square(output.astype(kind) - missing), axis=-1)
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

"""Draft experts without gradient descent: copied neurons, and a ridge regression of down rows.

Layer by layer over a fixed set of batches: the target's stream and the draft network's stream are
moved up one layer at a time, the most important neurons of the left-out experts become a draft
expert's gate and up rows, and its down rows are the minimiser of the squared error on the very
inputs that the draft network will give it. It takes the time of a few forward passes, and holds two
residual streams and a layer's pair of regression arrays: 4 N D floats for N tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from dejax.draft.expert import draft_output
from dejax.draft.init import copy_neurons, most_important, neuron_importance, neuron_outputs
from dejax.draft.path import below_r
from dejax.errors import UsageError
from dejax.model import Params
from train.distill_step import Batch, TargetHalf, Whole, draft_half, target_half
from train.stacked import StackedDef, StackedParams, block_size, embed_outer

Fit = Literal["zero", "local", "drift", "stream"]
"""What down rows are fitted to: nothing (they stay zero); the left-out output at the target's own
hidden states; the feed-forward's output, or the whole residual stream, at those of the draft
network."""


@dataclass(frozen=True)
class InitConfig:
    """How draft experts start.

    Attributes:
      fit: see `Fit`; tokens: tokens that it is fitted on, about; ridge: regularisation, relative to
      the mean square of a neuron's activation; pool: candidates for each neuron, of which those
      that explain most of the error are kept (1: the most important neurons, unseen).
    """

    fit: Fit = "stream"
    tokens: int = 16384
    ridge: float = 1e-3
    pool: int = 4

    def __post_init__(self):
        if min(self.tokens, self.pool) < 1 or self.ridge <= 0:
            raise UsageError(
                f"init: tokens is {self.tokens}, pool {self.pool}, ridge {self.ridge}; expected "
                "at least 1 token and 1 candidate, and a ridge > 0"
            )


class Moments:
    """Second moments of features and targets, summed in float64 over batches.

    Attributes:
      gram: [P, P], features with features; cross: [D, P], targets with features; energy: the
      targets' squared length; rows: how many were counted.
    """

    def __init__(self, features: int, width: int):
        self.gram = np.zeros((features, features))
        self.cross = np.zeros((width, features))
        self.energy, self.rows = 0.0, 0.0

    def add(
        self,
        features: Float[Array, "*rows P"],
        targets: Float[Array, "*rows D"],
        mask: Float[Array, "*rows"],
    ) -> None:
        """Counts the rows that `mask` counts."""
        sums = jax.device_get(_moments(features, targets, mask))
        gram, cross, energy, rows = (np.asarray(part, np.float64) for part in sums)
        self.gram += gram
        self.cross += cross
        self.energy += float(energy)
        self.rows += float(rows)


@jax.jit
def _moments(features, targets, mask):
    phi = features.reshape(-1, features.shape[-1]) * mask.reshape(-1, 1)
    y = targets.reshape(-1, targets.shape[-1]) * mask.reshape(-1, 1)
    exact = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    return exact(phi.T, phi), exact(y.T, phi), jnp.sum(jnp.square(y)), mask.sum()


def solve_ridge(
    gram: Float[np.ndarray, "P P"], cross: Float[np.ndarray, "D P"], *, ridge: float
) -> Float[np.ndarray, "P D"]:
    """Down rows W = (G + lambda I)^-1 M^T with lambda = ridge * trace(G) / P."""
    scale = float(np.trace(gram)) / len(gram) or 1.0  # 1 where no feature is ever active
    return np.linalg.solve(gram + ridge * scale * np.eye(len(gram)), cross.T)


def pick_features(
    gram: Float[np.ndarray, "P P"], cross: Float[np.ndarray, "D P"], count: int, *, ridge: float
) -> Int[np.ndarray, " count"]:
    """Greedy forward selection: each next feature explains most of what is left of the targets.

    Orthogonal least squares on the moments: what the chosen ones explain is projected out.
    """
    scale = float(np.trace(gram)) / len(gram) or 1.0  # 1 where no feature is ever active
    left, unexplained = gram + ridge * scale * np.eye(len(gram)), cross.copy()
    open_ = np.ones(len(gram), bool)
    chosen = []
    for _ in range(count):
        own = np.maximum(np.diag(left), ridge * scale)
        gain = np.where(open_, np.sum(np.square(unexplained), axis=0) / own, -1)
        best = int(np.argmax(gain))
        chosen.append(best)
        open_[best] = False
        row = left[best] / own[best]
        unexplained -= np.outer(unexplained[:, best], row)
        left -= np.outer(left[:, best], row)
    return np.array(chosen, np.int64)


@partial(jax.jit, static_argnames=("definition", "r", "fit"))
def _climb(
    definition: StackedDef,
    layer_params: Params,
    stack: Array,
    full: Float[Array, "B T D"],
    drafted: Float[Array, "B T D"],
    batch: Batch,
    *,
    r: int,
    fit: Fit,
) -> tuple[TargetHalf, "_Side"]:
    """Both streams through one layer, up to the draft expert."""
    layer = nnx.merge(definition.layer, layer_params)
    whole, tokens = Whole.of(batch), full.shape[0] * full.shape[1]
    block = block_size(tokens, definition.config)
    target = target_half(layer, full, stack, whole, r=r, block=block)
    if fit in ("zero", "local"):
        return target, _Side(target.x, drafted, target.hidden, target.missing)
    small = block_size(tokens, definition.config, per_token=max(r, 1))
    half = draft_half(layer, drafted, stack, whole, r=r, block=small)
    base = half.finish(jnp.zeros_like(half.kept))
    wanted = target.missing + (target.kept - half.kept) + (target.always - half.always)
    wanted = target.x - base if fit == "stream" else wanted
    return target, _Side(target.x, base, half.hidden, wanted)


class _Side(NamedTuple):
    """A batch between two layers.

    Attributes:
      full: the target's stream above the layer; base: the draft's, its draft expert not yet added;
      hidden, wanted: input of the draft expert, and what it should give.
    """

    full: Float[Array, "B T D"]
    base: Float[Array, "B T D"]
    hidden: Float[Array, "B T D"]
    wanted: Float[Array, "B T D"]


_importance = jax.jit(neuron_importance)
_features = jax.jit(neuron_outputs)
_output = jax.jit(draft_output)


def _rank_neurons(
    target: TargetHalf, stack: Array, batch: Batch, *, r: int
) -> Float[np.ndarray, "E F"]:
    """Importance of every routed neuron in one batch, over the experts below the top r."""
    rows = batch["mask"].size
    flat = jax.tree.map(lambda a: a.reshape(rows, -1), below_r(target.routing, r))
    hidden = target.hidden.reshape(rows, -1)
    return np.asarray(_importance(hidden, flat, stack, batch["mask"].reshape(-1)), np.float64)


def fit_draft(
    definition: StackedDef,
    params: StackedParams,
    batches: Sequence[Batch],
    *,
    width: int,
    r: int,
    config: InitConfig,
    dtype: Any = jnp.float32,
) -> tuple[Params, list[float]]:
    """Draft experts of all layers in closed form.

    Args:
      batches: packed rows, all of one shape; at least one.
      width: neurons of a draft expert; r: routed experts that the draft path keeps.

    Returns:
      Stacked draft parameters, and for each layer the share of the squared error that remains on
      these batches (1 where down rows are zero).
    """
    embedded = [_embedded(definition, params, batch, dtype) for batch in batches]
    full, drafted = list(embedded), list(embedded)
    experts, remaining = [], []
    for index in range(params.routed.shape[0]):
        layer_params = jax.tree.map(lambda a, i=index: a[i], params.layers)
        stack = params.routed[index]
        importance, sides = np.zeros((stack.shape[0], stack.shape[2])), []
        for batch, x, y in zip(batches, full, drafted, strict=True):
            target, side = _climb(definition, layer_params, stack, x, y, batch, r=r, fit=config.fit)
            if len(sides) * batch["mask"].size < _RANKING_TOKENS:
                importance += _rank_neurons(target, stack, batch, r=r)
            sides.append(side)
        masks = [batch["mask"] for batch in batches]
        weights, left = _fit_layer(stack, importance, sides, masks, width=width, config=config)
        expert = {"weights": weights, "gamma": jnp.ones((), weights.dtype)}
        experts.append(expert)
        remaining.append(left)
        full = [side.full for side in sides]
        if config.fit in ("drift", "stream"):
            drafted = [side.base + _output(expert, side.hidden) for side in sides]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *experts), remaining


_RANKING_TOKENS = 4096
"""Rows on which neurons are ranked: each is seen by every expert."""


@partial(jax.jit, static_argnames=("definition", "dtype"))
def _embedded(definition: StackedDef, params: StackedParams, batch: Batch, dtype):
    """The residual stream that enters the first MoE layer."""
    whole = Whole.of(batch)
    options = dict(positions=whole.positions, mask=whole.visible, dtype=dtype)
    return embed_outer(definition, params, batch["tokens"], **options)[1]


def _fit_layer(
    stack: Float[Array, "E 3 F D"],
    importance: Float[np.ndarray, "E F"],
    sides: list[_Side],
    masks: list[Float[Array, "B T"]],
    *,
    width: int,
    config: InitConfig,
) -> tuple[Float[Array, "3 P D"], float]:
    """One layer's draft expert, and the share of the squared error that it leaves."""
    if config.fit == "zero":
        return copy_neurons(stack, most_important(importance, width)), 1.0
    candidates = most_important(importance, max(width, min(width * config.pool, importance.size)))
    weights = copy_neurons(stack, candidates)
    moments = Moments(len(candidates), stack.shape[-1])
    for side, mask in zip(sides, masks, strict=True):
        moments.add(_features(weights, side.hidden), side.wanted, mask)
    gram, cross = moments.gram, moments.cross
    picked = np.arange(width)
    if len(candidates) > width:
        picked = np.sort(pick_features(gram, cross, width, ridge=config.ridge))
    gram, cross = gram[np.ix_(picked, picked)], cross[:, picked]
    down = solve_ridge(gram, cross, ridge=config.ridge)
    explained = 2 * np.sum(cross.T * down) - np.sum(down * (gram @ down))
    weights = weights[:, picked].at[2].set(jnp.asarray(down, weights.dtype))
    return weights, 1 - float(explained) / max(moments.energy, np.finfo(np.float64).tiny)


def mean_missing(
    definition: StackedDef,
    params: StackedParams,
    batches: Sequence[Batch],
    *,
    r: int,
    dtype: Any = jnp.float32,
) -> Params:
    """The mean of the left-out output in each layer, {"constant": [L, D]}: the baseline arm."""
    sums, rows = 0.0, 0.0
    for batch in batches:
        sums += np.asarray(_missing_sums(definition, params, batch, r=r, dtype=dtype), np.float64)
        rows += float(batch["mask"].sum())
    return {"constant": jnp.asarray(sums / max(rows, 1.0), dtype)}


@partial(jax.jit, static_argnames=("definition", "r", "dtype"))
def _missing_sums(definition: StackedDef, params: StackedParams, batch: Batch, *, r: int, dtype):
    """Sum over counted tokens of each layer's left-out output, [L, D]."""
    whole = Whole.of(batch)
    block = block_size(batch["tokens"].size, definition.config)
    x = _embedded(definition, params, batch, dtype)

    def body(x, pieces):
        layer = nnx.merge(definition.layer, pieces[0])
        half = target_half(layer, x, pieces[1], whole, r=r, block=block)
        return half.x, jnp.einsum("btd,bt->d", half.missing, batch["mask"].astype(dtype))

    return jax.lax.scan(body, x, (params.layers, params.routed))[1]

"""Draft experts without gradient descent: copied neurons, and a ridge regression of down rows.

Two passes of the target over a few batches. The first ranks the neurons of the routed experts by
what they add to the output that the draft path leaves out; the second takes, for every layer at
once, the second moments of the candidates' activations and of that output. The candidates that
explain most of it become a draft expert's gate and up rows, and its down rows are the minimiser of
the squared error. It takes the time of a few forward passes, and holds no more than a batch.

Fitting on the draft network's own states, layer upon layer, was measured too: it costs a second
network and gained nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from scipy.linalg import cho_factor, cho_solve

from dejax.draft.init import copy_neurons, most_important, neuron_importance
from dejax.draft.path import below_r
from dejax.errors import UsageError
from dejax.model import Params
from dejax.nn.experts import inner_outputs
from dejax.sharding import on_host
from train.distill_step import Batch, TargetHalf, target_half
from train.stacked import Sight, StackedDef, StackedParams, embed_outer, layer_of, scan_layers
from train.teacher import Teacher

RANKING_TOKENS = 4096
"""Rows on which neurons are ranked, about: each of them is seen by every expert."""


@dataclass(frozen=True)
class InitConfig:
    """How draft experts start.

    Attributes:
      fit: what down rows are: `zero` (the draft path is then shared + top-r alone) or `ridge`;
      tokens: how many it is fitted on, about; ridge: regularisation, relative to the mean square
      of a neuron's activation; pool: candidates for each neuron, of which those that explain most
      are kept (1: the most important ones, unseen).
    """

    fit: Literal["zero", "ridge"] = "ridge"
    tokens: int = 16384
    ridge: float = 1e-3
    pool: int = 4

    def __post_init__(self):
        for name in ("tokens", "pool"):
            if getattr(self, name) < 1:
                raise UsageError(f"init.{name} is {getattr(self, name)}; expected at least 1")
        if self.ridge <= 0:
            raise UsageError(f"init.ridge is {self.ridge}; expected > 0")


@dataclass(frozen=True)
class Moments:
    """Second moments of features and targets over counted rows, a layer each, in float64.

    Attributes:
      gram: [L, P, P], features with features; cross: [L, D, P], targets with features; energy: [L],
      the targets' squared length.
    """

    gram: Float[np.ndarray, "L P P"]
    cross: Float[np.ndarray, "L D P"]
    energy: Float[np.ndarray, " L"]


def solve_ridge(
    gram: Float[np.ndarray, "P P"], cross: Float[np.ndarray, "D P"], *, ridge: float
) -> Float[np.ndarray, "P D"]:
    """Down rows W = (G + lambda I)^-1 M^T with lambda = ridge * trace(G) / P."""
    scale = float(np.trace(gram)) / len(gram) or 1.0  # 1 where no feature is ever active
    # Positive definite: half of what a solver for any matrix takes.
    factor = cho_factor(gram + ridge * scale * np.eye(len(gram)), lower=True, overwrite_a=True)
    return cho_solve(factor, cross.T)


def pick_features(
    gram: Float[np.ndarray, "P P"], cross: Float[np.ndarray, "D P"], count: int, *, ridge: float
) -> Int[np.ndarray, " count"]:
    """Greedy forward selection: each next feature explains most of what is left of the targets.

    Orthogonal least squares on the moments: what the chosen ones explain is projected out.
    """
    scale = float(np.trace(gram)) / len(gram) or 1.0
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


def _on_mesh(fn: Callable[..., Any], teacher: Teacher, *args: Any, r: int) -> Any:
    """`fn` of the teacher's definition, weights and `args`, run on its mesh."""
    with jax.set_mesh(teacher.mesh):
        return fn(teacher.definition, teacher.params, *args, r=r, dtype=teacher.dtype)


def _scan_target(
    definition: StackedDef,
    params: StackedParams,
    batch: Batch,
    visit: Any,
    extra: Any,
    *,
    r: int,
    dtype: Any,
) -> Any:
    """`visit(half, stack, extra[l])` for every MoE layer of the target, stacked over layers."""
    sight = Sight.of(definition.config, batch)
    outer, x = embed_outer(definition, params, batch["tokens"], sight, dtype=dtype)

    def body(x, pieces, windowed):
        layer_params, stack, piece = pieces
        layer = layer_of(definition, layer_params)
        path: Any = dict(r=r, config=definition.config, plain=definition.plain)
        half = target_half(layer, x, stack, sight, windowed, **path)
        return half.x, visit(half, stack, piece)

    dense, pieces = partial(sight.dense, definition.config), (params.layers, params.routed, extra)
    return scan_layers(definition, outer, body, dense, x, pieces)[1]


@partial(jax.jit, static_argnames=("definition", "r", "dtype"))
def _importance(
    definition: StackedDef, params: StackedParams, batch: Batch, *, r: int, dtype: Any
) -> Float[Array, "L E F"]:
    """Importance of every routed neuron in one batch, over the experts below the top r."""
    mask = batch["mask"].reshape(-1)

    def visit(half: TargetHalf, stack: Array, _: None):
        flat = jax.tree.map(lambda a: a.reshape(mask.size, -1), below_r(half.routing, r))
        hidden, activation = half.hidden.reshape(mask.size, -1), definition.config.moe.activation
        return neuron_importance(hidden, flat, stack, mask, activation)

    return _scan_target(definition, params, batch, visit, None, r=r, dtype=dtype)


@partial(jax.jit, static_argnames=("definition", "r", "dtype"))
def _moments(
    definition: StackedDef,
    params: StackedParams,
    weights: Float[Array, "L 3 P D"],
    batch: Batch,
    *,
    r: int,
    dtype: Any,
) -> tuple[Float[Array, "L P P"], Float[Array, "L D P"], Float[Array, " L"]]:
    """Sums of one batch for `Moments`, with candidates `weights` [L, 3, P, D]."""
    mask = batch["mask"].reshape(-1, 1).astype(dtype)
    product = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)

    def visit(half: TargetHalf, _: Array, candidates: Array):
        hidden, missing = (a.reshape(mask.size, -1) for a in (half.hidden, half.missing))
        phi, y = inner_outputs(hidden, candidates) * mask, missing * mask
        return product(phi.T, phi), product(y.T, phi), jnp.sum(jnp.square(y))

    return _scan_target(definition, params, batch, visit, weights, r=r, dtype=dtype)


def take_moments(
    teacher: Teacher, weights: Float[Array, "L 3 P D"], batches: Sequence[Batch], *, r: int
) -> Moments:
    """Moments of the activations of neurons `weights` and of the left-out output, over batches."""
    sums = [0.0, 0.0, 0.0]
    for batch in batches:
        parts = on_host(_on_mesh(_moments, teacher, weights, batch, r=r))
        sums = [a + np.asarray(b, np.float64) for a, b in zip(sums, parts, strict=True)]
    return Moments(*(np.asarray(total) for total in sums))


def fit_draft(
    teacher: Teacher, batches: Sequence[Batch], *, width: int, r: int, config: InitConfig
) -> tuple[Params, list[float]]:
    """Draft experts of all layers in closed form.

    Args:
      batches: packed rows, all of one shape; at least one.
      width: neurons of a draft expert; r: routed experts that the draft path keeps.

    Returns:
      Stacked draft parameters, and for each layer the share of the squared error that remains on
      these batches (1 where down rows are zero).

    Raises:
      UsageError: a layer's experts have fewer neurons than `width`.
    """
    few = batches[: max(1, RANKING_TOKENS // batches[0]["tokens"].size)]
    parts = [on_host(_on_mesh(_importance, teacher, batch, r=r)) for batch in few]
    importance = np.sum([part.astype(np.float64) for part in parts], axis=0)
    count = width if config.fit == "zero" else min(width * config.pool, importance[0].size)
    chosen = [most_important(layer, max(width, count)) for layer in importance]
    copy = partial(_copied, teacher.params.routed, width=teacher.config.width)
    copies = [jnp.asarray(on_host(copy(place, ids))) for place, ids in enumerate(chosen)]
    gamma = jnp.ones(len(copies), copies[0].dtype)
    if config.fit == "zero":
        return {"weights": jnp.stack(copies), "gamma": gamma}, [1.0] * len(copies)
    moments = take_moments(teacher, jnp.stack(copies), batches, r=r)
    fits = [
        _fit_layer(weights, gram, cross, float(energy), width=width, ridge=config.ridge)
        for weights, gram, cross, energy in zip(
            copies, moments.gram, moments.cross, moments.energy, strict=True
        )
    ]
    stacked = jnp.stack([weights for weights, _ in fits])
    return {"weights": stacked, "gamma": gamma}, [left for _, left in fits]


@partial(jax.jit, static_argnames="width")
def _copied(
    routed: Float[Array, "L E 3 _F _D"],
    place: Any,
    neurons: Any,
    *,
    width: int,
) -> Float[Array, "3 count D"]:
    """`copy_neurons` from the MoE layer at `place` of the stack."""
    return copy_neurons(routed[place], neurons, width)


def _fit_layer(
    weights: Float[Array, "3 P D"],
    gram: Float[np.ndarray, "P P"],
    cross: Float[np.ndarray, "D P"],
    energy: float,
    *,
    width: int,
    ridge: float,
) -> tuple[Float[Array, "3 F D"], float]:
    """One layer's draft expert, and the share of the squared error that it leaves."""
    picked = np.sort(pick_features(gram, cross, width, ridge=ridge))
    gram, cross = gram[np.ix_(picked, picked)], cross[:, picked]
    down = solve_ridge(gram, cross, ridge=ridge)
    explained = 2 * np.sum(cross.T * down) - np.sum(down * (gram @ down))
    weights = weights[:, picked].at[2].set(jnp.asarray(down, weights.dtype))
    return weights, 1 - float(explained) / max(energy, np.finfo(np.float64).tiny)


def mean_missing(teacher: Teacher, batches: Sequence[Batch], *, r: int) -> Params:
    """The mean of the left-out output in each layer, {"constant": [L, D]}: the baseline arm."""
    sums, rows = 0.0, 0.0
    for batch in batches:
        sums += on_host(_on_mesh(_missing_sums, teacher, batch, r=r)).astype(np.float64)
        rows += float(batch["mask"].sum())
    return {"constant": jnp.asarray(sums / max(rows, 1.0), teacher.dtype)}


@partial(jax.jit, static_argnames=("definition", "r", "dtype"))
def _missing_sums(
    definition: StackedDef, params: StackedParams, batch: Batch, *, r: int, dtype: Any
) -> Float[Array, "L D"]:
    """Sum over counted tokens of each layer's left-out output."""
    mask = batch["mask"].astype(dtype)

    def visit(half: TargetHalf, _: Array, __: None):
        return jnp.einsum("btd,bt->d", half.missing, mask)

    return _scan_target(definition, params, batch, visit, None, r=r, dtype=dtype)

"""One layer of `dejax upcycle`: two residual streams over all windows, and what is fitted between.

The dense stream is the original model's. The MoE's stream is that of the model as it will be
written, weights rounded, except that each fold of windows goes through corrections fitted without
it. Both are held for all tokens, [W, T, D] each; of everything wider only moments are kept.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from dejax.config import ModelConfig
from dejax.model import DecoderLayer, Params, attend_full, causal_mask, combine, split_layer
from dejax.nn.experts import unique_weights
from dejax.nn.router import Router
from train.rows import Batch
from train.upcycle_fit import Correction, Moments, RouterMoments, fit_correction, fit_router
from train.upcycle_split import Activity, order_neurons

FOLDS = 4
"""Parts of the windows: what a correction does to one is judged by a fit on the others."""
BATCH = 4
"""Windows that go through a layer together."""
RANKING_TOKENS = 8192
"""Tokens on which neurons are ranked and put together, about."""
ROUTER_TOKENS = 16384
"""Tokens on which a router is fitted, about."""
SHARPNESS = 0.5
"""Factor on the router's prediction, the logarithm of an expert's output over their mean.

An expert's weight in the dense model is 1. Of 0.02, 0.5, 1 and 2, the first leaves the smallest
error before the correction (0.145, 0.149, 0.160 and 0.191 of the layer's output, in one layer of
SmolLM2), and the first two the same one after it (0.117, 0.117, 0.119, 0.129). The larger of them
has gates that tell experts apart, which is what a router can later be trained by.
"""


@dataclass(frozen=True)
class Windows:
    """The calibration text, and both residual streams over it.

    Attributes:
      batch: packed rows [W, T], W a multiple of `FOLDS` times `rows`; rows: windows that go
        through a layer together, all of one fold; dense, moe: [W, T, D], changed in place.
    """

    batch: Batch
    rows: int
    dense: Float[np.ndarray, "W T D"]
    moe: Float[np.ndarray, "W T D"]

    def __len__(self) -> int:
        """Number of batches."""
        return len(self.dense) // self.rows

    def spread(self, tokens: int) -> list[int]:
        """Batches evenly over all, with about so many tokens."""
        step = max(1, int(self.batch["tokens"].size // tokens))
        return list(range(0, len(self), step))

    def slice(self, index: int) -> slice:
        """The windows of a batch."""
        return slice(index * self.rows, (index + 1) * self.rows)

    def fold(self, index: int) -> int:
        """The fold of a batch: neighbouring windows, which share documents, are in one."""
        return index * FOLDS // len(self)

    def sight(self, index: int) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, "B T"]]:
        """Positions and segments of a batch."""
        part = self.slice(index)
        return self.batch["positions"][part], self.batch["segment_ids"][part]


@dataclass(frozen=True)
class RoutedLayer:
    """A layer's upcycled feed-forward, in the dtype that it will be written in.

    Attributes:
      order: [N], the dense layer's neurons in their new order; router: [E, D]; selection_bias: [E],
        float32; down: [D, N], columns in the new order.
    """

    order: Int[np.ndarray, " N"]
    router: Float[np.ndarray, "E D"]
    selection_bias: Float[np.ndarray, " E"]
    down: Float[np.ndarray, "D N"]


@dataclass(frozen=True)
class LayerReport:
    """What the fit of a layer came to; None where nothing was corrected (see `Correction`)."""

    layer: int
    beta: float | None
    ridge: float | None
    before: float | None
    after: float | None


# --- jitted pieces ---------------------------------------------------------------------------


@partial(jax.jit, static_argnums=0)
def _attend(
    definition: nnx.GraphDef, params: Params, x: Array, positions: Array, segments: Array
) -> Float[Array, "B T D"]:
    layer = nnx.merge(definition, params)
    return attend_full(layer, x, positions=positions, mask=causal_mask(segments))


def _inner(layer: DecoderLayer, y: Float[Array, "B T D"]) -> tuple[Array, Array]:
    """Normed input [R, D] of the feed-forward, and the activations [R, N] of its neurons."""
    assert layer.mlp is not None
    h = layer.mlp_norm(y.reshape(-1, y.shape[-1]))
    return h, jax.nn.silu(layer.mlp.gate_proj(h)) * layer.mlp.up_proj(h)


@partial(jax.jit, static_argnums=0)
def _feed_forward(
    definition: nnx.GraphDef, params: Params, y: Float[Array, "B T D"]
) -> Float[Array, "B T D"]:
    layer = nnx.merge(definition, params)
    assert layer.mlp is not None
    return combine(y, layer.mlp(layer.mlp_norm(y)))


@partial(jax.jit, static_argnums=0)
def _contributions(
    definition: nnx.GraphDef, params: Params, y: Float[Array, "B T D"]
) -> Float[Array, "R N"]:
    """|a_j| * norm(down_j)."""
    layer = nnx.merge(definition, params)
    norms = jnp.linalg.norm(layer.mlp.down_proj.weight[...].astype(y.dtype), axis=0)
    return jnp.abs(_inner(layer, y)[1]) * norms


@partial(jax.jit, static_argnums=(0, 3, 4))
def _expert_norms(
    definition: nnx.GraphDef, params: Params, y: Float[Array, "B T D"], shared: int, experts: int
) -> tuple[Float[Array, "R D"], Float[Array, "R E"]]:
    """Router input, and the logarithm of each expert's output norm less its mean over experts."""
    layer = nnx.merge(definition, params)
    h, inner = _inner(layer, y)
    down = layer.mlp.down_proj.weight[...].astype(y.dtype)[:, shared:]
    down = down.reshape(down.shape[0], experts, -1)
    gram = jnp.einsum("def,deg->efg", down, down)
    inner = inner[:, shared:].reshape(len(h), experts, -1)
    square = jnp.einsum("ref,efg,reg->re", inner, gram, inner)
    logs = jnp.log(jnp.maximum(square, 1e-20)) / 2
    return h, logs - logs.mean(axis=-1, keepdims=True)


def _gated(layer: DecoderLayer, router: Router, y: Float[Array, "B T D"]) -> tuple[Array, Array]:
    """Activations [R, N] of all neurons, and the same times the gates."""
    h, inner = _inner(layer, y)
    routing, experts = router(h), router.config.num_experts
    gates = unique_weights(routing.ids, routing.gates, jnp.arange(experts))
    shared = inner.shape[1] - experts * router.config.expert_width
    gates = jnp.repeat(gates, router.config.expert_width, axis=1)
    return inner, inner * jnp.pad(gates, ((0, 0), (shared, 0)), constant_values=1)


Routed = tuple[nnx.GraphDef, nnx.GraphDef]
"""Definitions of the layer and of the router."""


@partial(jax.jit, static_argnums=0)
def _residuals(
    definitions: Routed, params: Params, gate: Params, y: Array, target: Array
) -> tuple[Float[Array, "R N"], Float[Array, "R D"], Float[Array, "R D"]]:
    """Weighted rows of `Moments.add`; `target` is the dense stream after the layer."""
    layer, router = nnx.merge(definitions[0], params), nnx.merge(definitions[1], gate)
    inner, phi = _gated(layer, router, y)
    target, y = (a.reshape(len(inner), -1) for a in (target, y))
    # What a norm makes of an error counts: the first token of a text is hundreds of times longer.
    weight = jax.lax.rsqrt(jnp.mean(jnp.square(target), axis=-1, keepdims=True) + 1e-12)
    whole, kept = layer.mlp.down_proj(inner), layer.mlp.down_proj(phi)
    return phi * weight, (whole - kept) * weight, (target - y - whole) * weight


@partial(jax.jit, static_argnums=0)
def _advance(
    definitions: Routed, params: Params, gate: Params, down: Float[Array, "D N"], y: Array
) -> Float[Array, "B T D"]:
    layer, router = nnx.merge(definitions[0], params), nnx.merge(definitions[1], gate)
    return y + (_gated(layer, router, y)[1] @ down.astype(y.dtype).T).reshape(y.shape)


# --- a layer ---------------------------------------------------------------------------------


def rounded(params: Params, dtype: Any) -> Params:
    """Weights as they are read back from a checkpoint in `dtype`."""
    return jax.tree.map(lambda a: a.astype(dtype), params)


def dense_layer(layer: DecoderLayer, windows: Windows, dtype: Any) -> None:
    """Takes both streams through a layer that stays dense."""
    definition, params = split_layer(layer)
    short = rounded(params, dtype)
    for index in range(len(windows)):
        part, sight = windows.slice(index), windows.sight(index)
        for stream, weights in ((windows.dense, params), (windows.moe, short)):
            y = _attend(definition, weights, stream[part], *sight)
            stream[part] = _feed_forward(definition, weights, y)


def upcycle_layer(
    layer: DecoderLayer,
    index: int,
    windows: Windows,
    config: ModelConfig,
    *,
    dtype: Any,
    correct: bool,
    seed: int,
    advance: Any,
) -> tuple[RoutedLayer, LayerReport]:
    """Splits a dense layer and fits its router and down projection; takes both streams through it.

    Args:
      layer: the dense one, float32; index: its place.
      config: the MoE's; dtype: what its weights are written in.
      correct: whether to fit down projections; they are the dense layer's otherwise.
      advance: called with the share of the layer's work that has been done since the last call.
    """
    moe = config.moe
    definition, params = split_layer(layer)
    short = rounded(params, dtype)
    activity = _first_pass(definition, params, short, windows, advance)
    rng = np.random.default_rng([seed, index])
    order = order_neurons(activity, shared=moe.shared_width, experts=moe.num_experts, rng=rng)
    short["mlp"] = _reordered(short["mlp"], order)
    gate_definition, gate = _router(definition, short, windows, config, dtype)
    definitions, down = (definition, gate_definition), short["mlp"]["down_proj"]["weight"]
    advance(0.1)
    correction, by_fold = None, [down] * FOLDS
    if not correct:
        advance(0.3)
    else:
        correction = fit_correction(_moments(definitions, short, gate, windows, advance))
        wide = np.asarray(down, np.float32)
        down = jnp.asarray(wide + correction.change, dtype)
        by_fold = [jnp.asarray(wide + change, dtype) for change in correction.by_fold]
    advance(0.1)
    for place in range(len(windows)):
        part, own = windows.slice(place), by_fold[windows.fold(place)]
        windows.moe[part] = _advance(definitions, short, gate, own, windows.moe[part])
    advance(0.2)
    routed = RoutedLayer(
        order=order,
        router=np.asarray(gate["weight"]),
        selection_bias=np.asarray(gate["selection_bias"]),
        down=np.asarray(down),
    )
    return routed, _report(index, correction)


def _report(index: int, correction: Correction | None) -> LayerReport:
    names = ("beta", "ridge", "before", "after")
    return LayerReport(index, *(getattr(correction, name, None) for name in names))


def _first_pass(
    definition: nnx.GraphDef, params: Params, short: Params, windows: Windows, advance: Any
) -> Activity:
    """Takes the dense stream through the layer, the MoE's through its attention."""
    ranked = set(windows.spread(RANKING_TOKENS))
    total, gram, tokens = 0.0, 0.0, 0
    for index in range(len(windows)):
        part, sight = windows.slice(index), windows.sight(index)
        y = _attend(definition, params, windows.dense[part], *sight)
        windows.dense[part] = _feed_forward(definition, params, y)
        windows.moe[part] = _attend(definition, short, windows.moe[part], *sight)
        if index in ranked:
            acts = np.asarray(_contributions(definition, params, y))
            total = total + acts.sum(axis=0, dtype=np.float64)
            gram = gram + (acts.T @ acts).astype(np.float64)
            tokens += len(acts)
        advance(0.3 / len(windows))
    return Activity(np.asarray(total), np.asarray(gram), tokens)


def _reordered(mlp: Params, order: Int[np.ndarray, " N"]) -> Params:
    """A feed-forward with its neurons in another order."""
    gate, up, down = (mlp[name]["weight"] for name in ("gate_proj", "up_proj", "down_proj"))
    return {
        "gate_proj": {"weight": gate[order]},
        "up_proj": {"weight": up[order]},
        "down_proj": {"weight": down[:, order]},
    }


def _router(
    definition: nnx.GraphDef, short: Params, windows: Windows, config: ModelConfig, dtype: Any
) -> tuple[nnx.GraphDef, Params]:
    """The router, fitted to predict which experts' outputs are long."""
    moe = config.moe
    moments = RouterMoments.zero(config.width, moe.num_experts)
    for index in windows.spread(ROUTER_TOKENS):
        y = windows.moe[windows.slice(index)]
        found = _expert_norms(definition, short, y, moe.shared_width, moe.num_experts)
        moments.add(*map(np.asarray, found))
    # With every expert chosen there is nothing to rank, and gates of exactly 1 are best.
    sharpness = SHARPNESS if moe.top_k < moe.num_experts else 0.0
    weight, bias = fit_router(moments, sharpness=sharpness)
    abstract = nnx.eval_shape(lambda: Router(moe, config.width, rngs=nnx.Rngs(0)))
    gate = {"weight": jnp.asarray(weight, dtype), "selection_bias": jnp.asarray(bias, jnp.float32)}
    return nnx.split(abstract)[0], gate


def _moments(
    definitions: Routed, short: Params, gate: Params, windows: Windows, advance: Any
) -> list[Moments]:
    """The moments of each fold."""
    width, neurons = short["mlp"]["down_proj"]["weight"].shape
    folds = [Moments.zero(width, neurons) for _ in range(FOLDS)]
    for index in range(len(windows)):
        part = windows.slice(index)
        rows = _residuals(definitions, short, gate, windows.moe[part], windows.dense[part])
        folds[windows.fold(index)].add(*map(np.asarray, rows))
        advance(0.3 / len(windows))
    return folds

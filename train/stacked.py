"""A target laid out for training: its MoE layers stacked, so that one scan compiles one layer.

`stack_target` and `unstack_target` convert between the canonical form (a `Transformer` and one
[E, 3, F, D] array a MoE layer) and `StackedParams`; `forward` runs whole sequences.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from dejax.config import ModelConfig
from dejax.draft.path import routed_output
from dejax.errors import UsageError
from dejax.model import (
    DecoderLayer,
    ExpertsFn,
    LayerTap,
    Masks,
    Params,
    Transformer,
    embed,
    layer_full,
    sequence_masks,
    split_layer,
    split_outer,
)
from dejax.nn.router import Routing
from dejax.pytree import pytree


@pytree(frozen=True)
class StackedParams:
    """Weights of a target for training.

    Attributes:
      outer: everything outside the MoE layers (embedding, dense layers, norm, head).
      layers: resident weights of the MoE layers, each array with a leading axis L.
      routed: [L, E, 3, F, D], the routed experts.
    """

    outer: Params
    layers: Params
    routed: Float[Array, "L E 3 F D"]


@dataclass(frozen=True)
class StackedDef:
    """The static side of `StackedParams`: how to rebuild modules from plain arrays."""

    config: ModelConfig
    outer: nnx.GraphDef
    layer: nnx.GraphDef

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """The decoder's own index of each layer that `outer` holds."""
        moe = self.config.moe_layers
        return tuple(i for i in range(self.config.num_layers) if i not in moe)

    @property
    def windowed(self) -> Bool[np.ndarray, " L"] | None:
        """Which MoE layers have a sliding window; None where no layer has one."""
        if self.config.window is None:
            return None
        return np.array([self.config.is_windowed(i) for i in self.config.moe_layers])


def stack_target(
    model: Transformer, routed: dict[int, Float[Array, "E 3 F D"]]
) -> tuple[StackedDef, StackedParams]:
    """Stacks the MoE layers of a target; the arrays are copied.

    Raises:
      UsageError: the target is dense.
    """
    config = model.config
    if not config.moe_layers:
        raise UsageError(f"{config.family}: no layer has routed experts; expected a MoE")
    splits = [split_layer(model.layers[i]) for i in config.moe_layers]
    definition = splits[0][0]
    layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(params for _, params in splits))
    dense = [i for i in range(config.num_layers) if i not in config.moe_layers]
    outer_def, outer = split_outer(model, layers=dense)
    stacked = StackedParams(
        outer=outer,
        layers=layers,
        routed=jnp.stack([routed[i] for i in config.moe_layers]),
    )
    return StackedDef(config=config, outer=outer_def, layer=definition), stacked


def unstack_target(
    definition: StackedDef, params: StackedParams
) -> tuple[Transformer, dict[int, Float[Array, "E 3 F D"]]]:
    """The canonical form of stacked weights: the inverse of `stack_target`."""
    model = nnx.merge(definition.outer, params.outer)
    moe_layers = definition.config.moe_layers
    slices = [jax.tree.map(lambda a, i=i: a[i], params.layers) for i in range(len(moe_layers))]
    layers = dict(zip(definition.dense_layers, model.layers, strict=True))
    layers |= {i: nnx.merge(definition.layer, p) for i, p in zip(moe_layers, slices, strict=True)}
    model.layers = nnx.List([layers[i] for i in sorted(layers)])
    return model, {layer: params.routed[i] for i, layer in enumerate(moe_layers)}


def routed_fn(stack: Float[Array, "E 3 F D"], config: ModelConfig, *, block: int) -> ExpertsFn:
    """The full MoE's expert function over [B, T, D], for `dejax.model.layer_full`."""

    def experts(h: Float[Array, "B T D"], routing: Routing) -> Float[Array, "B T D"]:
        return routed_output(h, routing, stack, block=block, activation=config.moe.activation)

    return experts


def block_size(tokens: int, config: ModelConfig, *, per_token: int | None = None) -> int:
    """Rows of an expert block: about half of an expert's mean load, between 8 and 128.

    `per_token` are the routed experts of a token (None: the target's own number).
    """
    mean_load = tokens * (per_token or config.moe.top_k) / config.moe.num_experts
    return min(128, max(8, 2 ** round(math.log2(max(mean_load, 2) / 2))))


@pytree(frozen=True)
class Sight:
    """Where the tokens of whole sequences stand, and who sees whom."""

    positions: Int[Array, "B T"]
    masks: Masks

    @classmethod
    def of(cls, config: ModelConfig, batch: Mapping[str, Any]) -> "Sight":
        """That of a batch of packed rows (its `positions` and `segment_ids`)."""
        positions = batch["positions"]
        masks = sequence_masks(config, positions, batch["segment_ids"])
        return cls(positions=positions, masks=masks)

    def dense(
        self, config: ModelConfig, index: int, layer: DecoderLayer, x: Float[Array, "B T D"]
    ) -> Float[Array, "B T D"]:
        """The residual stream after dense layer `index`."""
        mask = self.masks.of_layer(config.is_windowed(index))
        return layer_full(layer, x, positions=self.positions, mask=mask, experts=_no_experts)[0]


def embed_outer(
    definition: StackedDef,
    params: StackedParams,
    tokens: Int[Array, "B T"],
    sight: Sight,
    *,
    dtype,
) -> tuple[Transformer, Float[Array, "B T D"]]:
    """The outer model and the residual stream after embedding and the leading dense layers."""
    outer, config = nnx.merge(definition.outer, params.outer), definition.config
    x = embed(outer, tokens, dtype)
    for index, layer in zip(definition.dense_layers, outer.layers, strict=True):
        if index < config.moe_layers[0]:
            x = sight.dense(config, index, layer, x)
    return outer, x


def _no_experts(h, routing):
    raise AssertionError("a dense layer has no routed experts")


def scan_layers(
    definition: StackedDef,
    outer: Transformer,
    sight: Sight,
    body: Callable[[Any, Any, Bool[Array, "B T T"]], tuple[Any, Any]],
    carry: Any,
    pieces: Any,
) -> tuple[Any, Any]:
    """`jax.lax.scan` of `body(carry, piece, mask)` over the MoE layers.

    Dense layers between them are applied to every array of the carry, a residual stream each.
    """
    config, flags = definition.config, definition.windowed
    dense = dict(zip(definition.dense_layers, outer.layers, strict=True))
    runs, outputs = _runs(config.moe_layers), []

    def step(carry, piece):
        return body(carry, piece[0], sight.masks.of_layer(piece[1]))

    first = 0
    for run in runs:
        last = first + len(run)
        part = (pieces, flags)
        if len(runs) > 1:
            part = jax.tree.map(lambda a, first=first, last=last: a[first:last], part)
        carry, output = jax.lax.scan(step, carry, part)
        outputs.append(output)
        first, index = last, run[-1] + 1
        while index in dense:
            apply = partial(sight.dense, config, index, dense[index])
            carry, index = jax.tree.map(apply, carry), index + 1
    if len(runs) == 1:
        return carry, outputs[0]
    return carry, jax.tree.map(lambda *parts: jnp.concatenate(parts), *outputs)


def _runs(layers: tuple[int, ...]) -> list[list[int]]:
    """Neighbouring layers together."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][-1] == layer - 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return runs


def forward(
    definition: StackedDef,
    params: StackedParams,
    batch: Mapping[str, Any],
    *,
    dtype=jnp.float32,
    remat: bool = False,
) -> tuple[Transformer, Float[Array, "B T D"], LayerTap]:
    """Outer model (for the head), final residual stream, taps of all MoE layers [L, ...].

    `batch` are packed rows: `tokens`, `positions` and `segment_ids`, [B, T] each.
    """
    config = definition.config
    sight = Sight.of(config, batch)
    outer, x = embed_outer(definition, params, batch["tokens"], sight, dtype=dtype)
    block = block_size(batch["tokens"].size, config)

    def body(x, pieces, mask):
        layer: DecoderLayer = nnx.merge(definition.layer, pieces[0])
        experts = routed_fn(pieces[1], config, block=block)
        x, tap = layer_full(layer, x, positions=sight.positions, mask=mask, experts=experts)
        assert tap is not None
        return x, tap

    body = jax.checkpoint(body) if remat else body
    x, taps = scan_layers(definition, outer, sight, body, x, (params.layers, params.routed))
    return outer, x, taps


def expert_counts(
    ids: Int[Array, "L B T K"], mask: Float[Array, "B T"], *, num_experts: int
) -> Float[Array, "L E"]:
    """Assignments of counted tokens that each expert gets, layer by layer."""
    hits = jax.nn.one_hot(ids, num_experts) * mask[None, :, :, None, None]
    return hits.sum(axis=(1, 2, 3))

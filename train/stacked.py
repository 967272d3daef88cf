"""A target laid out for training: its MoE layers stacked, so that one scan compiles one layer.

Of a dense model all layers are stacked. `stack_target` and `unstack_target` convert between the
canonical form (a `Transformer` and one [E, 3, F, D] array a MoE layer) and `StackedParams`;
`forward` and `dense_forward` run whole sequences.
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
from dejax.model import (
    DecoderLayer,
    ExpertsFn,
    LayerTap,
    Masks,
    Params,
    Transformer,
    attend_full,
    causal_mask,
    combine,
    embed,
    layer_full,
    route,
    sequence_masks,
    split_layer,
    split_outer,
    with_window,
)
from dejax.nn.router import Routing
from dejax.pytree import pytree
from dejax.sharding import gather_layer, split_rows


@pytree(frozen=True)
class StackedParams:
    """Weights of a target for training.

    Attributes:
      outer: everything outside the stacked layers (embedding, a MoE's dense layers, norm, head).
      layers: resident weights of the stacked layers, each array with a leading axis L.
      routed: [L, E, 3, F, D], the routed experts; none (E is 0) of a dense model.
    """

    outer: Params
    layers: Params
    routed: Float[Array, "L E 3 F D"]


@dataclass(frozen=True)
class StackedDef:
    """The static side of `StackedParams`: how to rebuild modules from plain arrays.

    `plain` tells whether draft paths through them have plain gates (`DraftConfig`).
    """

    config: ModelConfig
    outer: nnx.GraphDef
    layer: nnx.GraphDef
    plain: bool = False

    @property
    def stacked_layers(self) -> tuple[int, ...]:
        """The decoder's own index of each stacked layer: MoE layers, or all of a dense model."""
        return self.config.moe_layers or tuple(range(self.config.num_layers))

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """The decoder's own index of each layer that `outer` holds."""
        stacked = self.stacked_layers
        return tuple(i for i in range(self.config.num_layers) if i not in stacked)

    @property
    def windowed(self) -> Bool[np.ndarray, " L"] | None:
        """Which stacked layers have a sliding window; None where no layer has one."""
        if self.config.window is None:
            return None
        return np.array([self.config.is_windowed(i) for i in self.stacked_layers])


def stack_target(
    model: Transformer, routed: dict[int, Float[Array, "E 3 F D"]]
) -> tuple[StackedDef, StackedParams]:
    """Stacks the MoE layers of a target, or all of a dense model; the arrays are copied."""
    config = model.config
    places = config.moe_layers or tuple(range(config.num_layers))
    splits = [split_layer(model.layers[i]) for i in places]
    definition = splits[0][0]
    layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(params for _, params in splits))
    rest = [i for i in range(config.num_layers) if i not in places]
    outer_def, outer = split_outer(model, layers=rest)
    none = jnp.zeros((0, 3, 0, config.width), model.embedding[...].dtype)
    stacked = StackedParams(
        outer=outer, layers=layers, routed=jnp.stack([routed.get(i, none) for i in places])
    )
    return StackedDef(config=config, outer=outer_def, layer=definition), stacked


def unstack_target(
    definition: StackedDef, params: StackedParams
) -> tuple[Transformer, dict[int, Float[Array, "E 3 F D"]]]:
    """The canonical form of stacked weights: the inverse of `stack_target`."""
    model = nnx.merge(definition.outer, params.outer)
    places = definition.stacked_layers
    slices = [jax.tree.map(lambda a, i=i: a[i], params.layers) for i in range(len(places))]
    layers = dict(zip(definition.dense_layers, model.layers, strict=True))
    layers |= {i: nnx.merge(definition.layer, p) for i, p in zip(places, slices, strict=True)}
    model.layers = nnx.List([layers[i] for i in sorted(layers)])
    return model, {layer: params.routed[i] for i, layer in enumerate(definition.config.moe_layers)}


def layer_of(definition: StackedDef, params: Params) -> DecoderLayer:
    """A MoE layer of the stack as a module, its weights gathered for its computation."""
    return nnx.merge(definition.layer, gather_layer(params))


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
    """Where the tokens of whole sequences stand, and who sees whom.

    Attributes:
      masks: who sees whom in a stream; mixed: who sees whom, [B, T, 2 T], in a draft stream whose
      blocks see the target's keys and values of what came before them, or None.
    """

    positions: Int[Array, "B T"]
    masks: Masks
    mixed: Masks | None

    @classmethod
    def of(cls, config: ModelConfig, batch: Mapping[str, Any]) -> "Sight":
        """That of a batch of packed rows (`positions`, `segment_ids`, and `blocks` if it has them).

        `blocks` [B, T] numbers the drafted blocks of a row, as `train.kv_mix.draw_blocks`.
        """
        positions, segments = batch["positions"], batch["segment_ids"]
        masks = sequence_masks(config, positions, segments)
        if "blocks" not in batch:
            return cls(positions=positions, masks=masks, mixed=None)
        own = batch["blocks"][:, :, None] == batch["blocks"][:, None, :]
        causal = causal_mask(segments)
        seen = jnp.concatenate([causal & ~own, causal & own], axis=-1)
        slots = jnp.concatenate([positions, positions], axis=-1)
        mixed = with_window(config, seen, positions, slots)
        return cls(positions=positions, masks=masks, mixed=mixed)

    def attend(
        self, layer: DecoderLayer, x: Float[Array, "B T D"], windowed: Any
    ) -> Float[Array, "B T D"]:
        """The target's residual stream after attention."""
        mask = self.masks.of_layer(windowed)
        return attend_full(layer, x, positions=self.positions, mask=mask)

    def attend_draft(
        self,
        layer: DecoderLayer,
        x: Float[Array, "B T D"],
        full: Float[Array, "B T D"],
        windowed: Any,
    ) -> Float[Array, "B T D"]:
        """The draft's residual stream after attention, `full` being the target's before it."""
        if self.mixed is None:
            return self.attend(layer, x, windowed)
        mask = self.mixed.of_layer(windowed)
        return attend_full(layer, x, positions=self.positions, mask=mask, context=full)

    def dense(
        self, config: ModelConfig, index: int, layer: DecoderLayer, x: Float[Array, "B T D"]
    ) -> Float[Array, "B T D"]:
        """The target's residual stream after dense layer `index`."""
        return _feed_forward(layer, self.attend(layer, x, config.is_windowed(index)))

    def dense_draft(
        self,
        config: ModelConfig,
        index: int,
        layer: DecoderLayer,
        x: Float[Array, "B T D"],
        full: Float[Array, "B T D"],
    ) -> Float[Array, "B T D"]:
        """The draft's residual stream after dense layer `index`, `full` being the target's."""
        return _feed_forward(layer, self.attend_draft(layer, x, full, config.is_windowed(index)))


def _feed_forward(layer: DecoderLayer, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    return combine(x, route(layer, x)[2])


def embed_outer(
    definition: StackedDef,
    params: StackedParams,
    tokens: Int[Array, "B T"],
    sight: Sight,
    *,
    dtype,
) -> tuple[Transformer, Float[Array, "B T D"]]:
    """The outer model and the residual stream after embedding and the leading dense layers."""
    weights = params.outer | {"layers": gather_layer(params.outer.get("layers", {}))}
    outer, config = nnx.merge(definition.outer, weights), definition.config
    x = split_rows(embed(outer, tokens, dtype))
    for index, layer in zip(definition.dense_layers, outer.layers, strict=True):
        if index < definition.stacked_layers[0]:
            x = sight.dense(config, index, layer, x)
    return outer, x


def scan_layers(
    definition: StackedDef,
    outer: Transformer,
    body: Callable[[Any, Any, Any], tuple[Any, Any]],
    dense: Callable[[int, DecoderLayer, Any], Any],
    carry: Any,
    pieces: Any,
) -> tuple[Any, Any]:
    """`jax.lax.scan` of `body(carry, piece, windowed)` over the stacked layers.

    `windowed` tells whether the layer has a sliding window (None: none has). Dense layers between
    them are `dense(index, layer, carry)`.
    """
    flags = definition.windowed
    between = dict(zip(definition.dense_layers, outer.layers, strict=True))
    runs, outputs = _runs(definition.stacked_layers), []

    def step(carry, piece):
        carry, output = body(carry, *piece)
        return jax.tree.map(split_rows, carry), output

    first = 0
    for run in runs:
        last = first + len(run)
        part = (pieces, flags)
        if len(runs) > 1:
            part = jax.tree.map(lambda a, first=first, last=last: a[first:last], part)
        carry, output = jax.lax.scan(step, carry, part)
        outputs.append(output)
        first, index = last, run[-1] + 1
        while index in between:
            carry, index = dense(index, between[index], carry), index + 1
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


def all_but_gathered(primitive: Any, *_: Any, **__: Any) -> bool:
    """The policy of `jax.checkpoint` that keeps everything but weights gathered for a layer.

    Of those, a copy would stay for every layer until the backward pass: the whole model.
    """
    return primitive.name not in ("all_gather", "sharding_constraint")


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

    def body(x, pieces, windowed):
        experts, mask = routed_fn(pieces[1], config, block=block), sight.masks.of_layer(windowed)
        layer = layer_of(definition, pieces[0])
        x, tap = layer_full(layer, x, positions=sight.positions, mask=mask, experts=experts)
        assert tap is not None
        return x, tap

    # A scan keeps its iterations apart: nothing has to keep the compiler from merging them.
    policy = None if remat else all_but_gathered
    body = jax.checkpoint(body, policy=policy, prevent_cse=False)
    dense = partial(sight.dense, config)
    x, taps = scan_layers(definition, outer, body, dense, x, (params.layers, params.routed))
    return outer, x, taps


def dense_forward(
    definition: StackedDef,
    params: StackedParams,
    batch: Mapping[str, Any],
    *,
    dtype=jnp.float32,
) -> tuple[Transformer, Float[Array, "B T D"]]:
    """`forward` of a dense model, which has no taps."""
    sight = Sight.of(definition.config, batch)
    outer, x = embed_outer(definition, params, batch["tokens"], sight, dtype=dtype)

    def body(x, pieces, windowed):
        layer = layer_of(definition, pieces[0])
        return _feed_forward(layer, sight.attend(layer, x, windowed)), None

    dense = partial(sight.dense, definition.config)
    return outer, scan_layers(definition, outer, body, dense, x, (params.layers,))[0]


def expert_counts(
    ids: Int[Array, "L B T K"], mask: Float[Array, "B T"], *, num_experts: int
) -> Float[Array, "L E"]:
    """Assignments of counted tokens that each expert gets, layer by layer."""
    hits = jax.nn.one_hot(ids, num_experts) * mask[None, :, :, None, None]
    return hits.sum(axis=(1, 2, 3))


def load_shares(counts: Float[Array, "L E"]) -> Float[Array, "L E"]:
    """Each expert's share of its layer's assignments, given `expert_counts`."""
    return counts / jnp.maximum(counts.sum(axis=-1, keepdims=True), 1)

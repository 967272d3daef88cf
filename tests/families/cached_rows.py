"""The least that decodes over a KV cache: the functions of `dejax.model`, every expert at hand."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dejax.model import (
    attend_cached,
    combine,
    embed,
    logits_of,
    route,
    split_layer,
    with_window,
)
from dejax.nn.attention import init_cache
from dejax.nn.experts import experts_of_rows, unique_weights
from dejax.target import Target


@partial(jax.jit, static_argnums=(0, 1))
def _layer(definition, activation, params, stack, x, cache, start, positions, mask):
    layer = nnx.merge(definition, params)
    x, cache = attend_cached(layer, x, cache, start=start, positions=positions, mask=mask)
    h, routing, always = route(layer, x)
    if routing is None:
        return combine(x, always), cache, None
    weights = unique_weights(routing.ids, routing.gates, jnp.arange(len(stack)))
    routed = experts_of_rows(h, weights, tuple(stack), activation=activation)
    return combine(x, always, routed), cache, routing.ids


class CachedRows:
    """Decodes blocks of rows of one sequence, padded to `rows`; `ids` holds the experts chosen."""

    def __init__(self, target: Target, slots: int, *, rows: int):
        self.target, self.slots, self.rows = target, slots, rows
        layers = range(target.config.num_layers)
        attention = target.config.attention
        self.caches = [init_cache(attention, slots, target.compute_dtype) for _ in layers]
        self.layers = [split_layer(layer) for layer in target.model.layers]
        self.ids: dict[int, list[np.ndarray]] = {layer: [] for layer in target.config.moe_layers}

    def __call__(self, tokens: list[int], start: int, ancestors: np.ndarray | None = None):
        """Logits [R, V] of rows that see the slots before `start`, their ancestors, themselves.

        `ancestors` [R, R] defaults to a chain: every row sees the rows before it. A window counts
        positions: a row's depth in the tree, not its slot.
        """
        config, count = self.target.config, len(tokens)
        chain = np.tril(np.ones((count, count), bool))
        block = np.eye(self.rows, dtype=bool)  # padding sees itself
        block[:count, :count] = (
            chain if ancestors is None else ancestors | np.eye(count, dtype=bool)
        )
        mask = np.zeros((self.rows, self.slots), bool)
        mask[:count, :start] = True
        mask[:, start : start + self.rows] = block
        positions = np.full(self.rows, start)
        positions[:count] = start + block[:count, :count].sum(1) - 1  # the depth in the block
        slot_positions = np.arange(self.slots)
        slot_positions[start : start + self.rows] = positions
        masks = with_window(config, *map(jnp.asarray, (mask, positions, slot_positions)))
        padded = np.array([*tokens, *[0] * (self.rows - count)])
        x = embed(self.target.model, jnp.asarray(padded), self.target.compute_dtype)
        activation = config.moe.activation if config.experts else None
        for index, (definition, params) in enumerate(self.layers):
            stack = self.target.layer_experts(index) if index in self.ids else None
            place = jnp.asarray(start), jnp.asarray(positions)
            mask = masks.of_layer(config.is_windowed(index))
            x, self.caches[index], ids = _layer(
                definition, activation, params, stack, x, self.caches[index], *place, mask
            )
            if ids is not None:
                self.ids[index].append(np.sort(np.asarray(ids)[:count], axis=-1))
        return np.asarray(logits_of(self.target.model, x))[:count]

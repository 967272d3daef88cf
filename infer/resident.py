"""One jitted autoregressive step with every expert resident: no host in between.

The reference for the host loop's overhead. It computes what the engine computes, from the same
layer functions, with the chosen experts gathered on the device; on models of true width the gather
copies weights and the host loop is the faster one.
"""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from dejax.config import ModelConfig
from dejax.model import (
    attend_cached,
    combine,
    embed,
    logits_of,
    route,
    split_layer,
    split_outer,
    with_window,
)
from dejax.nn.attention import init_cache
from dejax.nn.experts import expert_output
from dejax.target import Target


def _gathered(h: Float[Array, "1 D"], ids, gates, stack: Float[Array, "E 3 _F _D"], activation):
    """Routed output of one row: its experts in ascending id, as everywhere."""
    order = jnp.argsort(ids[0])
    y = jnp.zeros_like(h)
    for index in range(ids.shape[1]):
        expert = order[index]
        weights, record = gates[0, expert][None], stack[ids[0, expert]]
        y = y + expert_output(h, record, weights=weights, activation=activation)
    return y


class ResidentDecoder:
    """Greedy autoregressive decoding with one jitted step a token.

    Raises:
      AssertionError: the target's experts are not loaded (`target.routed` is None).
    """

    def __init__(self, target: Target, capacity: int):
        assert target.routed is not None
        self.target, self.capacity = target, capacity
        outer_def, outer = split_outer(target.model)
        splits = [split_layer(layer) for layer in target.model.layers]
        self._params = (outer, [params for _, params in splits], target.routed)
        definitions = [definition for definition, _ in splits]
        step = partial(_step, outer_def, definitions, target.config, target.compute_dtype, capacity)
        self._step = jax.jit(step, donate_argnums=1)

    def decode(self, prompt: Sequence[int], new_tokens: int) -> tuple[list[int], float]:
        """The greedy continuation, `new_tokens` long, and the seconds all but its first token took.

        End tokens do not stop it.
        """
        config, dtype = self.target.config, self.target.compute_dtype
        make = jax.jit(lambda: init_cache(config.attention, self.capacity, dtype))
        caches: Any = [make() for _ in range(config.num_layers)]
        tokens, began = list(prompt), 0.0
        for index in range(len(prompt) + new_tokens - 1):
            inputs = jax.device_put((np.int32(tokens[index]), np.int32(index)))
            choice, caches = self._step(self._params, caches, *inputs)
            if index + 1 >= len(prompt):
                tokens.append(int(jax.device_get(choice)))
            if index + 1 == len(prompt):
                began = time.perf_counter()
        return tokens[len(prompt) :], time.perf_counter() - began


def _step(
    outer_def: nnx.GraphDef,
    definitions: list[nnx.GraphDef],
    config: ModelConfig,
    dtype: Any,
    capacity: int,
    params: Any,
    caches: list,
    token: Int[Array, ""],
    index: Int[Array, ""],
) -> tuple[Int[Array, ""], list]:
    """The greedy next token after `token` at `index`, and the caches with its KV."""
    outer_params, layer_params, routed = params
    outer = nnx.merge(outer_def, outer_params)
    x = embed(outer, token[None], dtype)
    slots = jnp.arange(capacity)
    masks = with_window(config, (slots <= index)[None], index[None], slots)
    new = []
    for number, (definition, params_l) in enumerate(zip(definitions, layer_params, strict=True)):
        layer = nnx.merge(definition, params_l)
        mask = masks.of_layer(config.is_windowed(number))
        place = dict(start=index, positions=index[None], mask=mask)
        x, cache = attend_cached(layer, x, caches[number], **place)
        new.append(cache)
        h, routing, always = route(layer, x)
        part = None
        if routing is not None:
            chosen = (routing.ids, routing.gates)
            part = _gathered(h, *chosen, routed[number], config.moe.activation)
        x = combine(x, always, part)
    return jnp.argmax(logits_of(outer, x)[0]).astype(jnp.int32), new

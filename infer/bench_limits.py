"""How fast autoregressive decoding could be: its parts measured apart, nothing in the way.

With experts that are moved, a token takes at least

    sum over layers of (attention and router) + max(load of its missing experts,
                                                    shared and routed computation),

plus embedding and head. With every expert resident it takes at least the bytes of weights that it
touches over the rate at which this machine streams weights through the same products.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dejax.nn.layers import project
from dejax.target import Target
from infer.buckets import expert_groups
from infer.decode_options import DecodeOptions
from infer.decoder import Decoder, Offload
from infer.report import rounds_of
from infer.staging import device_form
from infer.steps import add_experts, shared_step

REPEATS = 7


@dataclass(frozen=True)
class Limits:
    """What a token costs at least, in seconds.

    Attributes:
      step: an autoregressive step with every expert on the device.
      feed_forward: of it, shared and routed experts of one MoE layer.
      moe_layers: how many of those there are.
      streamed: bytes of weights that a token touches over the measured rate of streaming them.
    """

    step: float
    feed_forward: float
    moe_layers: int
    streamed: float

    def offloaded(self, load: float) -> float:
        """A token's least seconds if a MoE layer's missing experts take `load` seconds to come."""
        return self.step + self.moe_layers * max(0.0, load - self.feed_forward)


def median_seconds(runs: Sequence[Callable[[], Any]], repeats: int = REPEATS) -> float:
    """Median seconds of `runs`, one after another in turns, until what each returns is there."""
    jax.block_until_ready([run() for run in runs])
    seconds = []
    for repeat in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(runs[repeat % len(runs)]())
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def measure_limits(target: Target, store: Any, prompt: list[int], *, tokens: int = 24) -> Limits:
    """Measures the limits of a target whose experts all fit the device."""
    config = target.config
    options = DecodeOptions(mode="ar", max_new_tokens=tokens, stop_at_eos=False)
    offload = Offload(device_cache=None, host_cache=0)
    with Decoder(target, offload=offload, capacity=len(prompt) + tokens, store=store) as decoder:
        decoder.run(prompt, options)  # fills the device cache
        rounds = rounds_of(decoder.run(prompt, options))
    return Limits(
        step=statistics.median(record.total_seconds for record in rounds),
        feed_forward=_feed_forward(target, store),
        moe_layers=len(config.moe_layers),
        streamed=_touched_bytes(target) / _streaming_rate(target),
    )


def _feed_forward(target: Target, store: Any) -> float:
    """Seconds of a MoE layer's shared and routed experts over one row, in the engine's steps."""
    config, dtype = target.config, np.dtype(target.compute_dtype)
    form = device_form(store, dtype, None)
    h = jax.device_put(np.ones((1, config.width), dtype))
    # Several layers' worth: weights that were just read would come from the processor's cache.
    layers = 4 if form.bytes < 2**21 else 1
    top_k = config.moe.top_k
    ids = jax.device_put(np.arange(top_k, dtype=np.int32)[None])
    gates = jax.device_put(np.ones((1, top_k), dtype))
    experts = [
        jax.device_put(form.parts(np.full(form.shape, i + 1, form.dtype)))
        for i in range(layers * top_k)
    ]
    groups = expert_groups(config, form.bytes, top_k)
    options: Any = dict(r=None, activation=config.moe.activation, packing=form.packing)

    def run(layer: int) -> Any:
        x, first = h, layer * top_k
        for count, size in groups:
            chosen = experts[first : first + count]
            unique = np.array([*range(count), *[-1] * (size - count)], np.int32)
            padded = (*chosen, *chosen[-1:] * (size - count))
            x = add_experts(
                x, None, h, ids, gates, jax.device_put(unique), padded, None, None, **options
            )
            first += count
        return x

    seconds = median_seconds([lambda layer=layer: run(layer) for layer in range(layers)])
    shared = target.model.layers[config.moe_layers[0]].shared
    if shared is not None:
        definition, state = nnx.split(shared)
        params = nnx.to_pure_dict(state)
        seconds += median_seconds([lambda: shared_step(definition)(params, h)])
    return seconds


def _touched_bytes(target: Target) -> int:
    """Bytes of weights that a token's products read, in the compute dtype."""
    config, size = target.config, np.dtype(target.compute_dtype).itemsize
    resident = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(target.model)))
    if not config.tied:  # of the embedding, a row
        resident -= target.model.embedding[...].size
    return size * (resident + config.routes_per_token * int(np.prod(config.expert_shape)))


def _streaming_rate(target: Target) -> float:
    """Bytes a second of weights, read by products with one row, each [F, D] as an expert's."""
    config, dtype = target.config, target.compute_dtype
    _, neurons, width = config.expert_shape
    # Small ones side by side: what is measured is the memory, not the start of a product.
    rows = max(neurons, 2**24 // width)
    weights = [jnp.full((rows, width), i, dtype) for i in range(4)]
    h = jnp.ones((1, width), dtype)
    product = jax.jit(project)
    seconds = median_seconds([lambda weight=weight: product(h, weight) for weight in weights])
    return weights[0].nbytes / seconds

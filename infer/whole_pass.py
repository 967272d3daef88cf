"""Engines whose pass is one jitted step over all layers.

What differs between them is how a layer gets its experts (`ExpertsOf`); rows, masks, KV cache and
results are those of the host-driven engine. Padding rows choose no expert (their ids are -1).

Host/device copies, all explicit: a pass's inputs go in with one `device_put`; its logits, ids and
gates come out with one `device_get`.
"""

import time
from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from dejax.config import ModelConfig
from dejax.draft.expert import draft_output
from dejax.model import attend_cached, combine, embed, logits_of, route, split_layer, split_outer
from infer.blocks import Block, block_of, level_of
from infer.buckets import PREFILL_ROWS
from infer.engine import Engine, PassResult
from infer.steps import visible_rows


@runtime_checkable
class ExpertsOf(Protocol):
    """Routed output [R, D] of a layer, inside the jitted pass; hashable, so that steps are shared.

    `ids` are the experts to use, -1 where a row uses none; `given` is what the engine passes in.
    """

    def __call__(
        self,
        layer: int,
        h: Float[Array, "R D"],
        ids: Int[Array, "R K"],
        gates: Float[Array, "R K"],
        given: Any,
        *,
        drafts: bool,
    ) -> Float[Array, "R D"]: ...

    def __hash__(self) -> int: ...


@cache
def pass_step(
    outer: nnx.GraphDef,
    layers: tuple[nnx.GraphDef, ...],
    config: ModelConfig,
    slots: int,
    experts: ExpertsOf,
    plain: bool = False,
):
    """The jitted pass of targets with these definitions; the caches are donated.

    (params, drafts, caches, given, like [], inputs, rows []; r, last) -> logits, ids [L, R, K], top
    gates [L, R], caches. In a target pass `r` is None and `drafts` is empty; `last` asks for the
    logits of row `rows - 1` only. `plain`: draft passes have plain gates.
    """

    def step(params, drafts, caches, given, like, inputs, rows, *, r: int | None, last: bool):
        outer_params, layer_params = params
        start, positions = inputs.start, inputs.positions
        model = nnx.merge(outer, outer_params)
        x = embed(model, inputs.tokens, like.dtype)
        block = inputs.base, positions, inputs.ancestors, inputs.block_positions
        masks = visible_rows(config, slots, *block)
        in_use = jnp.arange(len(positions), dtype=jnp.int32)[:, None] < rows
        new, all_ids, top_gates = [], [], []
        for index, definition in enumerate(layers):
            layer = nnx.merge(definition, layer_params[index])
            mask = masks.of_layer(config.is_windowed(index))
            place: Any = dict(start=start, positions=positions, mask=mask)
            x, kept = attend_cached(layer, x, caches[index], **place)
            new.append(kept)
            h, routing, always = route(layer, x, plain=plain and r is not None)
            if routing is None:
                x = combine(x, always)
                continue
            ids, gates = jnp.where(in_use, routing.ids, -1)[:, :r], routing.gates[:, :r]
            routed = experts(index, h, ids, gates, given, drafts=r is not None)
            if index in drafts:
                routed = routed + draft_output(drafts[index], h)
            x = combine(x, always, routed)
            all_ids.append(routing.ids)
            top_gates.append(routing.gates[:, 0])
        if last:
            x = jax.lax.dynamic_slice_in_dim(x, rows - 1, 1)
        return logits_of(model, x), tuple(all_ids), tuple(top_gates), new

    return jax.jit(step, static_argnames=("r", "last"), donate_argnums=2)


class WholePassEngine(Engine):
    """An engine whose pass is `pass_step` with `experts_of()`; see `Engine` for its methods."""

    def __post_init__(self):
        super().__post_init__()
        outer, params = split_outer(self.target.model)
        splits = [split_layer(layer) for layer in self.target.model.layers]
        definitions = tuple(definition for definition, _ in splits)
        self._params = (params, [arrays for _, arrays in splits])
        place = (self.target.config, self._slots, self.experts_of())
        plain = self.draft is not None and self.draft.plain
        self._step = pass_step(outer, definitions, *place, plain)
        self._given = self.given()

    def experts_of(self) -> ExpertsOf:
        """How a layer gets its experts."""
        raise NotImplementedError

    def given(self) -> Any:
        """What `experts_of()` is passed, as arrays."""
        raise NotImplementedError

    def warm_up(self, *, rows: int, r: int | None = None, draft_rows: int = 0) -> None:
        """As `Engine.warm_up`.

        The passes have no rows in use, so that no expert is asked for.
        """
        self.begin()
        for size in [*self._sizes(rows, drafts=r is not None), PREFILL_ROWS]:
            self._run([], block_of([], 0, None, size), last=size == PREFILL_ROWS)
        if r is not None:
            self._run([], block_of([], 0, None, 1), r=r)
        for size in self._draft_sizes(draft_rows):
            self._run([], level_of([], 0, (), size), r=r)
        self._warm_moves(draft_rows)

    def _pass(
        self,
        tokens: Sequence[int],
        block: Block,
        *,
        rows_wanted: int,
        kind: Any,
        r: int | None = None,
    ) -> PassResult:
        rows = len(tokens)
        last = len(block.tokens) == PREFILL_ROWS
        logits, ids, gates = self._run(tokens, block, last=last, r=r)
        shown = range(rows - rows_wanted, rows)
        layers = self._moe_layers
        routes = tuple(
            frozenset(
                (layer, e)
                for layer, chosen in zip(layers, ids, strict=True)
                for e in chosen[row].tolist()
            )
            for row in shown
        )
        used = frozenset(
            (layer, e)
            for layer, chosen in zip(layers, ids, strict=True)
            for e in np.unique(chosen[:rows, :r]).tolist()
        )
        top = np.stack(gates, axis=1)[list(shown)] if gates else np.zeros((rows_wanted, 0))
        return PassResult(logits=logits[:rows_wanted], routes=routes, gates=top, used=used)

    def _run(
        self,
        tokens: Sequence[int],
        block: Block,
        *,
        last: bool = False,
        r: int | None = None,
    ) -> tuple[np.ndarray, tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
        """Logits, ids and gates of one run of the step, on the host."""
        rows = jax.device_put(np.int32(len(tokens)))
        caches, self._caches = self._caches, []  # they are donated
        drafts = {} if r is None else self._draft_params
        given = (self._given, self._like, block, rows)
        began, loading = time.perf_counter(), self.clock.loads
        *out, self._caches = self._step(self._params, drafts, caches, *given, r=r, last=last)
        found = jax.device_get(out)
        waited = time.perf_counter() - began
        self.clock.device += max(0.0, waited - (self.clock.loads - loading))
        return tuple(found)

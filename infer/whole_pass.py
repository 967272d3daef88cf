"""Engines whose pass is one jitted step over all layers.

What differs between them is how a layer gets its experts (`ExpertsOf`); rows, masks, KV cache and
results are those of the host-driven engine. Padding rows choose no expert (their ids are -1).

Host/device copies, all explicit: a pass's inputs go in with one `device_put`; its logits, ids and
gates come out with one `device_get`.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from dejax.config import ModelConfig
from dejax.draft.confidence import head_scores
from dejax.draft.expert import draft_output
from dejax.model import attend_cached, combine, embed, logits_of, route, split_layer, split_outer
from infer.blocks import Block, block_of, level_of
from infer.buckets import PREFILL_ROWS
from infer.engine import Engine
from infer.passes import Drafting, PassResult, pass_result
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

    def prefer(
        self,
        layer: int,
        ids: Int[Array, "R K"],
        gates: Float[Array, "R K"],
        given: Any,
        *,
        r: int,
        ratio: float,
    ) -> Int[Array, "R K"]:
        """The order of `dejax.spec.substitute.prefer_resident`."""
        ...

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

    (params, drafts, caches, given, like [], inputs, rows [], head; drafting, last, hidden) ->
    logits, ids [L, R, K], those read [L, R, r], top gates [L, R], stream, scores [R, M], caches. In
    a target pass `drafting` is None and `drafts` is empty; `last` asks for the logits of row
    `rows - 1` only, `hidden` for the residual stream [R, D] after the last layer (else it is None).
    `plain`: draft passes have plain gates. `head` is a confidence head's, None where there are to
    be no scores.
    """

    def step(
        params,
        drafts,
        caches,
        given,
        like,
        inputs,
        rows,
        head,
        *,
        drafting: Drafting | None,
        last: bool,
        hidden: bool,
    ):
        outer_params, layer_params = params
        start, positions = inputs.start, inputs.positions
        model = nnx.merge(outer, outer_params)
        x = entered = embed(model, inputs.tokens, like.dtype)
        block = inputs.base, positions, inputs.ancestors, inputs.block_positions
        masks = visible_rows(config, slots, *block)
        in_use = jnp.arange(len(positions), dtype=jnp.int32)[:, None] < rows
        new, all_ids, read, top_gates = [], [], [], []
        r = None if drafting is None else drafting.r
        for index, definition in enumerate(layers):
            layer = nnx.merge(definition, layer_params[index])
            mask = masks.of_layer(config.is_windowed(index))
            place: Any = dict(start=start, positions=positions, mask=mask)
            x, kept = attend_cached(layer, x, caches[index], **place)
            new.append(kept)
            h, routing, always = route(layer, x, plain=plain and drafting is not None)
            if routing is None:
                x = combine(x, always)
                continue
            ids, gates = jnp.where(in_use, routing.ids, -1), routing.gates
            if drafting is not None and drafting.resident is not None:
                how: Any = dict(r=drafting.r, ratio=drafting.resident)
                order = experts.prefer(index, ids, gates, given, **how)
                ids, gates = (jnp.take_along_axis(of, order, axis=1) for of in (ids, gates))
            ids, gates = ids[:, :r], gates[:, :r]
            routed = experts(index, h, ids, gates, given, drafts=drafting is not None)
            if index in drafts:
                routed = routed + draft_output(drafts[index], h)
            x = combine(x, always, routed)
            all_ids.append(routing.ids)
            read.append(ids)
            top_gates.append(routing.gates[:, 0])
        if last:
            x = jax.lax.dynamic_slice_in_dim(x, rows - 1, 1)
        stream = x if hidden else None
        scores = None if head is None else head_scores(head, model.norm(x), entered)
        out = logits_of(model, x), tuple(all_ids), tuple(read), tuple(top_gates), stream, scores
        return *out, new

    return jax.jit(step, static_argnames=("drafting", "last", "hidden"), donate_argnums=2)


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

    def warm_up(self, *, rows: int, drafting: Drafting | None = None, draft_rows: int = 0) -> None:
        """As `Engine.warm_up`.

        The passes have no rows in use, so that no expert is asked for.
        """
        self.begin()
        for size in [*self._sizes(rows, drafts=drafting is not None), PREFILL_ROWS]:
            self._run([], block_of([], 0, None, size), None, last=size == PREFILL_ROWS)
        if drafting is not None:
            drafting = replace(drafting, prefetch=False)  # as `_pass` has it
            self._run([], block_of([], 0, None, 1), drafting)
            for size in self._draft_sizes(draft_rows):
                self._run([], level_of([], 0, (), size), drafting)
        self._warm_moves(draft_rows)

    def _pass(
        self,
        tokens: Sequence[int],
        block: Block,
        *,
        rows_wanted: int,
        drafting: Drafting | None = None,
    ) -> PassResult:
        rows, layers = len(tokens), self._moe_layers
        # What is asked for ahead is the host-driven engine's: it is no part of the step.
        how = None if drafting is None else replace(drafting, prefetch=False)
        last = len(block.tokens) == PREFILL_ROWS
        logits, ids, read, gates, hidden, scores = self._run(tokens, block, how, last=last)
        return pass_result(
            logits[:rows_wanted],
            range(rows - rows_wanted, rows),
            ids=dict(zip(layers, ids, strict=True)),
            read={layer: of[:rows] for layer, of in zip(layers, read, strict=True)},
            gates=gates,
            hidden=None if hidden is None else hidden[:rows],
            scores=None if scores is None else scores[:rows],
        )

    def _run(
        self, tokens: Sequence[int], block: Block, drafting: Drafting | None, *, last: bool = False
    ) -> tuple[Any, ...]:
        """Logits, ids, ids that were read, gates, stream and scores of one run, on the host."""
        rows = jax.device_put(np.int32(len(tokens)))
        caches, self._caches = self._caches, []  # they are donated
        drafts, head = ({}, None) if drafting is None else (self._draft_params, self._head)
        given = (self._given, self._like, block, rows, head)
        began, loading = time.perf_counter(), self.clock.loads
        hidden = self.predictor is not None and drafting is not None
        options: Any = dict(drafting=drafting, last=last, hidden=hidden)
        *out, self._caches = self._step(self._params, drafts, caches, *given, **options)
        found = jax.device_get(out)
        waited = time.perf_counter() - began
        self.clock.device += max(0.0, waited - (self.clock.loads - loading))
        return tuple(found)

"""Compiling, ahead of the first token, every step that the host-driven engine can need.

Steps run on zeros; the experts' store is not touched.
"""

from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from dejax.model import Params
from infer.blocks import block_of, level_of
from infer.buckets import PREFILL_ROWS, bucket


def warm_up(engine: Any, sizes: Sequence[int], *, levels: Sequence[int], r: int | None) -> None:
    """Runs what passes of an `Engine` can need.

    `sizes` are the row counts of target passes and of chain drafts, `levels` those of a tree's
    later draft passes, r the routed experts that drafts keep (None: there are no such drafts).
    """
    draft = next(iter(engine.experts.draft_params.values()), None)
    for size in dict.fromkeys([*sizes, *levels]):
        drafts = r is not None and size in (1, *levels)
        x, routed = _layers(engine, size, drafts=drafts)
        if drafts:
            engine.scores(x, x)
        if routed and size in sizes:
            prefill = size == PREFILL_ROWS
            _counts(engine, routed, engine.target.config.moe.top_k, size, prefill=prefill)
        if routed and r is not None and drafts:
            _counts(engine, routed, r, size, r=r, draft=draft)
        engine.rows_logits(x, size, 1 if size == PREFILL_ROWS else size)
    for size in levels:
        engine.masks(level_of([], 0, (), size))


def _counts(
    engine: Any,
    routed: tuple,
    least: int,
    size: int,
    *,
    prefill: bool = False,
    r: int | None = None,
    draft: Params | None = None,
) -> None:
    """The expert steps of passes of up to `size` rows that each use `least` experts a layer."""
    buckets, every = engine.experts.buckets, engine.experts.pieces
    # With more experts than a group holds, what is left for the last one may be any number.
    most = min(least * size, engine.target.config.moe.num_experts)
    pieces = {piece for piece in every if piece < most}
    summed = pieces | ({buckets[-1]} if most > buckets[-1] else set())
    # Under a budget a pass may use fewer experts than a row of its own would.
    low = 1 if summed or engine.budget is not None else bucket(least, buckets)
    high = bucket(min(most, buckets[-1]), buckets)
    counts: Collection[int] = {*(b for b in buckets if low <= b <= high), *summed}
    for count in {*buckets[-1:], *pieces} if prefill else counts:
        which: Any = dict(summed=count in summed, after=bool(summed), r=r, draft=draft)
        _experts(engine, routed, count, **which)


def _layers(engine: Any, size: int, *, drafts: bool) -> tuple[Array, tuple]:
    """One run of each kind of layer over `size` rows; the last residual stream and routing."""
    block, moe_layers = block_of([], 0, None, size), engine.target.config.moe_layers
    x, masks = engine.embed(block), engine.masks(block)
    routed = ()
    for index in {0, *moe_layers[:1]}:
        # Drafts look ahead too, if they prefetch.
        for ahead in (False, True) if engine.look_ahead or drafts else (False,):
            for drafting in (False, True) if drafts else (False,):
                out = engine.layer(index, x, block, masks, ahead=ahead, drafting=drafting)
                routed = out if index in moe_layers else routed
    return x, routed


def _experts(
    engine: Any,
    routed: tuple,
    count: int,
    *,
    summed: bool,
    after: bool,
    r: int | None,
    draft: Params | None,
) -> None:
    """The steps over `count` experts: the last one of a layer, and those before it."""
    form = engine.residency.form
    zero = jax.device_put(form.parts(np.zeros(form.shape, form.dtype)))
    ids = jax.device_put(np.full(count, -1, np.int32))
    x, h, chosen, gates, *_ = routed
    always = engine.always(engine.target.config.moe_layers[0], h)
    experts = (zero,) * count
    for before in (None, h) if after else (None,):  # any array of a sum's shape
        engine.experts.add_step(x, always, h, chosen, gates, ids, experts, before, draft, r=r)
        if summed:
            engine.experts.sum_step(h, chosen, gates, ids, experts, before, r=r)

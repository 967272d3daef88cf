"""An upcycled MoE beside the dense model it was made from, and what its routing is like."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from dejax.draft.path import routed_output, top_r
from dejax.model import embed, layer_full, logits_of, sequence_masks, split_layer, split_outer
from dejax.nn.router import Routing
from dejax.routing.overlap import (
    RoutingRecord,
    expert_load,
    expert_shares,
    independent_overlap,
    independent_unique,
    overlap,
    unique_experts,
)
from dejax.target import Target
from infer.console import progress
from train.rows import Batch

Numbers = dict[str, Any]
BLOCKS = (4, 8)
"""Rows of a verification, in the statistics of unique experts."""
RANKS = (0, 1, 2, 3)
"""Routed experts that the draft paths compared with the full MoE keep."""


@partial(jax.jit, static_argnums=(0, 1, 2))
def _layer(
    definition: nnx.GraphDef, r: int, config: Any, params: Any, stack: Any, x: Any, row: Any
) -> tuple[Float[Array, "1 T D"], Int[Array, "T K"] | None]:
    """A layer over one window with the top `r` of its experts (if it has any), and its routing."""
    layer, row = nnx.merge(definition, params), {key: a[None] for key, a in row.items()}
    mask = sequence_masks(config, row["positions"], row["segment_ids"]).whole

    # A dense layer has no stack (None), and asks for no expert.
    def experts(h: Float[Array, "1 T D"], routing: Routing) -> Float[Array, "1 T D"]:
        return routed_output(h, top_r(routing, r), stack, block=32)

    x, tap = layer_full(layer, x, positions=row["positions"], mask=mask, experts=experts)
    return x, None if tap is None else tap.routing.ids[0]


def final_states(
    target: Target, window: Mapping[str, np.ndarray], *, r: int | None = None
) -> tuple[Float[Array, "T D"], Int[np.ndarray, "L T K"]]:
    """The residual stream after all layers over one packed row, and the experts of each MoE layer.

    `r` is of the draft path without a draft expert; None is the full MoE. Dense targets have no
    experts. A sliding window is not honoured.
    """
    x = embed(target.model, jnp.asarray(window["tokens"])[None], target.compute_dtype)
    row = {key: jnp.asarray(window[key]) for key in ("positions", "segment_ids")}
    ids, moe_layers = [], target.config.moe_layers
    kept = target.config.moe.top_k if r is None and moe_layers else r or 0
    for index, layer in enumerate(target.model.layers):
        definition, params = split_layer(layer)
        stack = target.layer_experts(index) if index in moe_layers else None
        x, chosen = _layer(definition, kept, target.config, params, stack, x, row)
        ids += [] if chosen is None else [np.asarray(chosen)]
    empty = np.zeros((0, len(window["tokens"]), 1), int)
    return x[0], np.stack(ids) if ids else empty


def _logits(target: Target, x: Float[Array, "T D"]) -> Float[Array, "T V"]:
    return _outer_logits(*split_outer(target.model), x)


@partial(jax.jit, static_argnums=0)
def _outer_logits(definition: nnx.GraphDef, params: Any, x: Array) -> Float[Array, "T V"]:
    return logits_of(nnx.merge(definition, params), x)


@jax.jit
def _compare(
    dense: Float[Array, "T V"], moe: Float[Array, "T V"], targets: Int[Array, " T"], mask: Any
) -> Float[Array, " 4"]:
    """Sums over counted tokens: both losses, KL of the MoE from the dense model, agreement."""
    law, other = jax.nn.log_softmax(dense), jax.nn.log_softmax(moe)
    own, theirs = (-jnp.take_along_axis(a, targets[:, None], -1)[:, 0] for a in (law, other))
    kl = jnp.sum(jnp.exp(law) * (law - other), axis=-1)
    same = jnp.argmax(dense, -1) == jnp.argmax(moe, -1)
    return jnp.stack([jnp.sum(a * mask) for a in (own, theirs, kl, same)])


def _averages(sums: Float[np.ndarray, " 4"], tokens: float) -> Numbers:
    dense, moe, kl, agreement = sums / max(tokens, 1)
    return {
        "dense_perplexity": float(np.exp(dense)),
        "perplexity": float(np.exp(moe)),
        "kl": float(kl),
        "agreement": float(agreement),
        "tokens": int(tokens),
    }


def compare(dense: Target, moe: Target, windows: Mapping[str, Batch], *, arms: int) -> Numbers:
    """Both models on the same text.

    Args:
      windows: by kind of text, a packed row each.
      arms: windows of each kind on which draft paths are compared with the full MoE.

    Returns:
      quality: by kind and under `all`, perplexity of both, agreement (share of tokens with the same
      most likely successor), KL in nats a token, tokens; routing: statistics, a list over layers
      each (see `dejax.routing.overlap`); draft_agreement: by the routed experts kept, the share of
      tokens on which the draft path and the full MoE have the same most likely successor.
    """
    quality: Numbers = {}
    every, counted = np.zeros(4), 0.0
    ids, documents, positions = [], [], []
    same, arm_tokens = np.zeros(len(RANKS)), 0.0
    total = sum(len(batch["tokens"]) for batch in windows.values())
    with progress("measuring", total, "windows") as bar:
        for kind, batch in windows.items():
            sums, tokens = np.zeros(4), 0.0
            for place in range(len(batch["tokens"])):
                row = {key: array[place] for key, array in batch.items()}
                mask = row["mask"].astype(bool)
                x, chosen = final_states(moe, row)
                logits = _logits(moe, x)
                theirs = _logits(dense, final_states(dense, row)[0])
                sums += np.asarray(_compare(theirs, logits, row["targets"], mask), np.float64)
                tokens += mask.sum()
                real = row["segment_ids"] > 0
                ids.append(chosen[:, real])
                documents.append(row["segment_ids"][real] + 10_000 * len(documents))
                positions.append(row["positions"][real])
                if place < arms:
                    same += _arms(moe, row, np.asarray(jnp.argmax(logits, -1)), mask)
                    arm_tokens += mask.sum()
                bar.advance(1, kind=kind)
            quality[kind] = _averages(sums, tokens)
            every, counted = every + sums, counted + tokens
    record = RoutingRecord(
        np.concatenate(ids, axis=1),
        np.concatenate(documents),
        np.concatenate(positions),
        moe.config.moe.num_experts,
    )
    kept = dict(zip(RANKS, same / max(arm_tokens, 1), strict=True))
    top_k = moe.config.moe.top_k
    return {
        "quality": quality | {"all": _averages(every, counted)},
        "routing": routing_statistics(record),
        "draft_agreement": {r: float(value) for r, value in kept.items() if r <= top_k},
        "draft_tokens": int(arm_tokens),
    }


def _arms(
    moe: Target,
    row: Mapping[str, np.ndarray],
    best: Int[np.ndarray, " T"],
    mask: Bool[np.ndarray, " T"],
) -> Float[np.ndarray, " R"]:
    """Tokens on which each draft path has the full MoE's most likely successor."""
    hits = []
    for r in RANKS:
        x, _ = final_states(moe, row, r=min(r, moe.config.moe.top_k))
        hits.append(np.sum((np.asarray(jnp.argmax(_logits(moe, x), -1)) == best) & mask))
    return np.array(hits, np.float64)


def routing_statistics(record: RoutingRecord) -> Numbers:
    """Load, overlap of neighbours and unique experts of blocks, layer by layer."""
    shares = expert_shares(record)
    load = expert_load(shares)
    unique: dict[str, Sequence[float]] = {}
    for rows in BLOCKS:
        unique[f"unique_{rows}"] = unique_experts(record, rows=rows).tolist()
        unique[f"independent_unique_{rows}"] = independent_unique(shares, rows=rows).tolist()
    return {
        "load_max_over_mean": load.max_over_mean.tolist(),
        "load_min_over_mean": load.min_over_mean.tolist(),
        "unused_experts": load.dead.tolist(),
        "overlap": overlap(record).tolist(),
        "independent_overlap": independent_overlap(shares).tolist(),
    } | unique

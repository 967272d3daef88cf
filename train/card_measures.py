"""The numbers of a model card: held-out loss, what routed experts are worth, routing.

`train.model_card` words them. Text comes from the held-out split of a folder that `train.data`
wrote, teacher-forced: the target reads the text itself, not what it would have written.
"""

import json
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dejax.errors import UsageError
from dejax.model import layer_full
from dejax.nn.experts import expert_output, experts_of_tokens
from dejax.nn.router import Routing
from dejax.routing import overlap as stats
from dejax.routing.overlap import RoutingRecord
from train.data import load_tokens, make_source
from train.distill_step import Batch, compare_vocabulary
from train.evaluate import teacher_forced
from train.losses import VocabularyTotals
from train.packed_rows import pad_rows
from train.pretrain import bits_per_byte
from train.stacked import (
    Sight,
    StackedDef,
    StackedParams,
    block_size,
    embed_outer,
    layer_of,
    routed_fn,
    scan_layers,
)
from train.teacher import Teacher
from train.text import KINDS

BLOCKS = (2, 4, 8)
"""Rows of the blocks whose distinct experts are counted."""

BATCH_TOKENS = 4096
"""Tokens of a batch for the held-out loss."""

Numbers = dict[str, Any]


# --- held-out loss ---------------------------------------------------------------------------


def held_out_loss(
    teacher: Teacher, data: Path, *, seq_len: int, byte_lengths: Int[np.ndarray, " V"]
) -> dict[str, Numbers]:
    """Loss over the whole held-out split beside the trigram model's, by kind and for "all".

    Every token but a document's first is predicted, as for the trigram model; the target sees no
    further back than the row's beginning.

    Returns:
      By kind: bits_per_byte, loss (nats a token), tokens, bytes, trigram (its bits per byte), ratio
      of the two.

    Raises:
      UsageError: DATA has no trigram.json, or one of other text.
    """
    file = data / "trigram.json"
    try:
        trigram = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{file}: cannot be read ({error}); run `python -m train.trigram DIR`"
        ) from None
    sources = make_source(data, seq_len, "heldout")
    sizes = {}
    for kind, source in sources.items():
        rows = (source[index] for index in range(len(source)))
        counted = np.concatenate([row["targets"][row["mask"] > 0] for row in rows])
        sizes[kind] = len(counted), int(byte_lengths[counted].sum())
        known = trigram.get(kind, {}).get("tokens")
        if known != len(counted):
            raise UsageError(
                f"{file}: {known} tokens of {kind}, the held-out split has {len(counted)}; run "
                "`python -m train.trigram DIR` again"
            )
    bits = bits_per_byte(
        teacher.definition,
        teacher.params,
        data,
        byte_lengths=byte_lengths,
        seq_len=seq_len,
        most=max(len(source) for source in sources.values()),
        batch=max(1, BATCH_TOKENS // seq_len),
    )
    rows = [
        (kind, bits[f"bpb_{kind}"] * n_bytes, n, n_bytes) for kind, (n, n_bytes) in sizes.items()
    ]
    _, *columns = zip(*rows, strict=True)
    n_bits, tokens, n_bytes = (sum(column) for column in columns)
    rows.append(("all", n_bits, tokens, n_bytes))
    return {
        kind: {
            "bits_per_byte": n_bits / n_bytes,
            "loss": n_bits * math.log(2) / tokens,
            "tokens": tokens,
            "bytes": n_bytes,
            "trigram": trigram[kind]["bits_per_byte"],
            "ratio": n_bits / n_bytes / trigram[kind]["bits_per_byte"],
        }
        for kind, n_bits, tokens, n_bytes in rows
    }


# --- what the routed experts are worth -------------------------------------------------------


@dataclass(frozen=True)
class HeldOut:
    """Rows of every kind from the held-out split, in batches of one shape.

    Attributes:
      batches: packed rows; documents: [R, T], the document of each token in the split, -1 for
      padding; kinds: [M], index into `KINDS` of each document.
    """

    batches: list[Batch]
    documents: Int[np.ndarray, "R T"]
    kinds: Int[np.ndarray, " M"]


def held_out_rows(data: Path, *, seq_len: int, rows: int, batch_size: int) -> HeldOut:
    """`rows` rows of each kind, or all if there are fewer, spread evenly over the split."""
    arrays = load_tokens(data / "heldout")
    taken, documents = [], []
    for kind, source in make_source(data, seq_len, "heldout").items():
        begin = arrays.offsets[np.flatnonzero(arrays.kinds == KINDS.index(kind))[0]]
        count = min(rows, len(source))
        for index in (i * len(source) // count for i in range(count)):
            row = source[index]
            places = begin + index * seq_len + np.arange(seq_len)
            document = np.searchsorted(arrays.offsets, places, side="right") - 1
            taken.append(row)
            documents.append(np.where(row["segment_ids"] > 0, document, -1))
    stacked = {key: np.stack([row[key] for row in taken]) for key in taken[0]}
    stacked = pad_rows(stacked, -(-len(taken) // batch_size) * batch_size)
    missing = len(stacked["tokens"]) - len(taken)
    return HeldOut(
        batches=[
            {key: a[start : start + batch_size] for key, a in stacked.items()}
            for start in range(0, len(stacked["tokens"]), batch_size)
        ],
        documents=np.pad(np.stack(documents), ((0, missing), (0, 0)), constant_values=-1),
        kinds=arrays.kinds,
    )


def expert_arms(teacher: Teacher, held: HeldOut) -> dict[str, Numbers]:
    """Loss (nats a token) and agreement with the full model, with fewer routed experts a token."""
    arms: dict[str, Numbers] = {}
    for r in range(min(3, teacher.config.moe.top_k - 1) + 1):
        metrics = teacher_forced(teacher, None, held.batches, r=r)
        if not arms:
            arms["full"] = {"loss": metrics["loss_full"], "agreement": 1.0}
        name = f"shared + top-{r}" if r else "shared only"
        arms[name] = {"loss": metrics["loss_draft"], "agreement": metrics["agreement"]}
    return arms


@partial(jax.jit, static_argnames=("definition", "dtype"))
def _beside_shuffled(
    definition: StackedDef,
    params: StackedParams,
    batch: Batch,
    sources: Int[Array, "L N"],
    *,
    dtype: Any,
) -> tuple[VocabularyTotals, Int[Array, "L B T K"]]:
    """The target beside itself with the routing of token `sources[l, n]` at token n.

    Returns their totals, and the experts that the target itself chose.
    """
    sight = Sight.of(definition.config, batch)
    outer, x = embed_outer(definition, params, batch["tokens"], sight, dtype=dtype)
    block = block_size(batch["tokens"].size, definition.config)

    def body(carry, pieces, windowed):
        where = dict(positions=sight.positions, mask=sight.masks.of_layer(windowed))
        full, shuffled = carry
        layer_params, stack, source = pieces
        layer = layer_of(definition, layer_params)
        experts = routed_fn(stack, definition.config, block=block)

        def misrouted(h: Float[Array, "B T D"], routing: Routing) -> Float[Array, "B T D"]:
            def moved(a):
                return a.reshape(-1, a.shape[-1])[source].reshape(a.shape)

            ids, gates = moved(routing.ids), moved(routing.gates)
            return experts(h, Routing(ids=ids, gates=gates, scores=routing.scores))

        full, tap = layer_full(layer, full, experts=experts, **where)
        shuffled, _ = layer_full(layer, shuffled, experts=misrouted, **where)
        assert tap is not None
        return (full, shuffled), tap.routing.ids

    pieces = (params.layers, params.routed, sources)

    def dense(index, layer, carry):
        return tuple(sight.dense(definition.config, index, layer, x) for x in carry)

    (full, shuffled), ids = scan_layers(definition, outer, body, dense, (x, x), pieces)
    return compare_vocabulary(outer, full, shuffled, batch)[1], ids


def other_tokens(
    segment_ids: Int[np.ndarray, "B T"], *, layers: int, rng: np.random.Generator
) -> Int[np.ndarray, "L N"]:
    """For every layer and token, another random token of the batch; each is taken once."""
    sources = np.tile(np.arange(segment_ids.size, dtype=np.int32), (layers, 1))
    tokens = np.flatnonzero(segment_ids)
    for row in sources:
        order = rng.permutation(tokens)
        row[order] = np.roll(order, 1)  # one cycle through all of them: no token keeps its own
    return sources


def shuffled_arm(
    teacher: Teacher, held: HeldOut, *, seed: int = 0
) -> tuple[Numbers, RoutingRecord]:
    """Loss and agreement with routing shuffled among tokens, and the target's own routing."""
    rng = np.random.default_rng(seed)
    layers = len(teacher.config.moe_layers)
    sums, chosen = np.zeros(3), []
    for batch in held.batches:
        sources = other_tokens(batch["segment_ids"], layers=layers, rng=rng)
        totals, ids = jax.device_get(
            _beside_shuffled(
                teacher.definition, teacher.params, batch, sources, dtype=teacher.dtype
            )
        )
        sums += totals.draft.sum, totals.agreement.sum, totals.draft.count
        chosen.append(ids)
    ids = np.concatenate(chosen, axis=1).reshape(layers, -1, teacher.config.moe.top_k)
    positions = np.concatenate([batch["positions"] for batch in held.batches]).ravel()
    documents = held.documents.ravel()
    record = RoutingRecord(ids, documents, positions, teacher.config.moe.num_experts)
    arm = {"loss": float(sums[0] / sums[2]), "agreement": float(sums[1] / sums[2])}
    return arm, record.where(documents >= 0)


# --- routing ---------------------------------------------------------------------------------


def dropped_assignments(record: RoutingRecord, *, block: int) -> int:
    """(token, expert) pairs of the record that the grouped product would leave out.

    Every expert is replaced by one of a single neuron and constant output, so that a token's sum
    counts the experts that were computed for it.
    """
    tokens, k = record.ids.shape[1:]
    h, gates = jnp.ones((tokens, 1)), jnp.ones((tokens, k))
    stack = jnp.ones((record.num_experts, 3, 1, 1))
    unit = expert_output(h[:1], stack[0])
    sums = [experts_of_tokens(h, ids, gates, stack, block=block) for ids in record.ids]
    return sum(int(jnp.round(k - y / unit).sum()) for y in sums)


def routing_numbers(
    record: RoutingRecord, layers: tuple[int, ...], kinds: Int[np.ndarray, " M"]
) -> Numbers:
    """Load, overlap and unique experts, by layer, over all layers, and overlap by kind of text."""
    load = stats.expert_load(stats.expert_shares(record))
    by_layer = {
        "max_over_mean": load.max_over_mean,
        "min_over_mean": load.min_over_mean,
        "dead": load.dead,
    } | _overlaps(record)
    for rows in BLOCKS:
        shares = stats.expert_shares(record)
        by_layer |= {
            f"unique_{rows}": stats.unique_experts(record, rows=rows) / record.top_k,
            f"unique_{rows}_independent": stats.independent_unique(shares, rows=rows)
            / record.top_k,
            f"unique_{rows}_shuffled": stats.shuffled_unique(record, rows=rows) / record.top_k,
        }
    kind_of = kinds[record.documents]
    by_kind = {}
    for index in np.unique(kind_of):
        part = record.where(kind_of == index)
        by_kind[KINDS[index]] = {"documents": len(np.unique(part.documents))} | {
            name: float(values.mean()) for name, values in _overlaps(part).items()
        }
    return {
        "tokens": record.ids.shape[1],
        "documents": len(np.unique(record.documents)),
        "top_k": record.top_k,
        "blocks": BLOCKS,
        "layers": [
            {"layer": layer} | {name: values[i].item() for name, values in by_layer.items()}
            for i, layer in enumerate(layers)
        ],
        "mean": {name: float(values.mean()) for name, values in by_layer.items()},
        "by_kind": by_kind,
    }


def _overlaps(record: RoutingRecord) -> dict[str, Float[np.ndarray, " L"]]:
    """o_1, its two nulls, and the lift over each, layer by layer."""
    measured = stats.overlap(record)
    independent = stats.independent_overlap(stats.expert_shares(record))
    shuffled = stats.shuffled_overlap(record)
    return {
        "overlap": measured,
        "overlap_independent": independent,
        "overlap_shuffled": shuffled,
        "lift_independent": measured / independent,
        "lift_shuffled": measured / shuffled,
    }

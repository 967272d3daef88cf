"""What decoding would accept, from whole sequences: the decode loop's rounds without a cache.

Along the text that the target itself writes, a drafted token is accepted if it is the text's next
one. A draft that begins at token s sees the target's keys and values before s and its own from
there, as `train.kv_mix` lays out; one pass over the text makes all drafts of K tokens that begin at
s, s + K, s + 2 K, ... So K passes make every draft that any round could ask for, and walking from
round to round gives what the decode loop counts, exactly: greedy, drafts of fixed length.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from dejax.model import Params, head_of
from dejax.sharding import on_host, own_rows, place_rows, row_shards
from dejax.spec.accept import draft_limit, finish
from infer.report import alpha_by_position
from infer.trace import Round
from train.distill_step import Batch, paired_forward
from train.losses import most_likely
from train.metrics import Metrics
from train.stacked import StackedDef, StackedParams, forward
from train.teacher import Teacher


@dataclass(frozen=True)
class GreedyText:
    """What a target writes greedily after some prompts.

    Attributes:
      tokens: [P, T], prompt and answer, then padding; prompts, lengths: [P], tokens of the prompt,
      and of prompt and answer; max_new_tokens: that an answer may have.
    """

    tokens: Int[np.ndarray, "P T"]
    prompts: Int[np.ndarray, " P"]
    lengths: Int[np.ndarray, " P"]
    max_new_tokens: int


@partial(jax.jit, static_argnames=("definition", "dtype"))
def _next_tokens(
    definition: StackedDef, params: StackedParams, batch: Batch, *, dtype: Any
) -> Int[Array, "B 1"]:
    """The target's most likely token after row `last` of each sequence."""
    outer, x, _ = forward(definition, params, batch, dtype=dtype)
    rows = jnp.take_along_axis(x, batch["last"][..., None], axis=1)
    return most_likely(head_of(outer), outer.norm(rows))


@partial(jax.jit, static_argnames=("definition", "r", "dtype"))
def _drafted_tokens(
    definition: StackedDef,
    params: StackedParams,
    draft: Params | None,
    batch: Batch,
    *,
    r: int,
    dtype: Any,
) -> Int[Array, "B T"]:
    """The draft's most likely token after each row, within the blocks of `batch`."""
    outer, _, drafted, _ = paired_forward(definition, params, draft, batch, r=r, dtype=dtype)
    return most_likely(head_of(outer), outer.norm(drafted))


def sequence_rows(
    tokens: Int[np.ndarray, "P T"], lengths: Int[np.ndarray, " P"], mesh: Any
) -> tuple[Batch, int]:
    """Sequences as a batch, with empty rows up to what the mesh divides; its number of rows."""
    count = -(-len(tokens) // row_shards(mesh)) * row_shards(mesh)
    places = np.arange(tokens.shape[1])
    inside = (places < lengths[:, None]).astype(np.int32)
    batch = {
        "tokens": tokens,
        "positions": inside * places.astype(np.int32),
        "segment_ids": inside,
        "mask": inside.astype(np.float32),
        "last": (lengths[:, None] - 1).astype(np.int32),
    }
    missing = count - len(tokens)
    return {key: np.pad(a, ((0, missing), (0, 0))) for key, a in batch.items()}, count


def in_blocks(batch: Batch, offset: int, length: int) -> Batch:
    """The rows with drafts of `length` tokens that begin at `offset`, and after each other."""
    places = np.arange(batch["tokens"].shape[1])
    blocks = np.broadcast_to((places - offset) // length, batch["tokens"].shape)
    return batch | {"blocks": blocks.astype(np.int32)}


def placed_rows(batch: Batch, count: int, mesh: Any) -> Batch:
    """A batch of `count` rows, on the mesh."""
    mine = own_rows(mesh, count)
    return place_rows({key: a[mine.start : mine.stop] for key, a in batch.items()}, mesh, count)


def write_greedily(
    teacher: Teacher, prompts: Sequence[Sequence[int]], *, max_new_tokens: int
) -> GreedyText:
    """The target's own text, a token at a time for all prompts, each from the whole sequence.

    It runs where training runs, on any mesh, and needs no second copy of the target.

    Args:
      prompts: token ids, each shorter than the context.
    """
    config = teacher.config
    starts = np.array([len(prompt) for prompt in prompts], np.int64)
    width = min(int(starts.max()) + max_new_tokens, config.context)
    tokens = np.zeros((len(prompts), width), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    lengths, done = starts.copy(), np.zeros(len(prompts), bool)
    while not done.all():
        batch, count = sequence_rows(tokens, lengths, teacher.mesh)
        with jax.set_mesh(teacher.mesh):
            placed = placed_rows(batch, count, teacher.mesh)
            picked = _next_tokens(teacher.definition, teacher.params, placed, dtype=teacher.dtype)
        for row, token in enumerate(on_host(picked)[: len(prompts), 0]):
            if done[row]:
                continue
            tokens[row, lengths[row]] = token
            lengths[row] += 1
            done[row] = (
                int(token) in config.eos_ids
                or lengths[row] - starts[row] == max_new_tokens
                or lengths[row] == config.context
            )
    return GreedyText(tokens, starts, lengths, max_new_tokens)


def simulate(
    teacher: Teacher, draft: Params | None, text: GreedyText, *, draft_length: int, r: int = 1
) -> list[list[Round]]:
    """The rounds of decoding each prompt greedily, with drafts of `draft_length` tokens.

    What a draft would have been after its first wrong token is not known: `drafted` ends with
    that token, while `accepted` and `emitted` are the decode loop's.

    Args:
      draft: stacked draft parameters; None is the draft path without draft experts.
    """
    batch, count = sequence_rows(text.tokens, text.lengths, teacher.mesh)
    passes = []
    for offset in range(draft_length):
        blocks = in_blocks(batch, offset, draft_length)
        with jax.set_mesh(teacher.mesh):
            placed = placed_rows(blocks, count, teacher.mesh)
            picked = _drafted_tokens(
                teacher.definition, teacher.params, draft, placed, r=r, dtype=teacher.dtype
            )
        passes.append(on_host(picked))
    picks = np.stack(passes)
    return [_walk(teacher, text, row, picks[:, row]) for row in range(len(text.tokens))]


def _walk(
    teacher: Teacher, text: GreedyText, row: int, picks: Int[np.ndarray, "K T"]
) -> list[Round]:
    """The rounds of one prompt, from round to round along its text."""
    config, rounds = teacher.config, []
    start, end = int(text.prompts[row]), int(text.lengths[row])
    tokens = text.tokens[row, :end].tolist()
    committed = start + 1
    while committed < end:
        left = dict(context_left=config.context - committed)
        limit = draft_limit(
            len(picks), remaining_new=text.max_new_tokens - (committed - start), **left
        )
        pending, drafted, accepted = committed - 1, [], 0
        while len(drafted) < limit and accepted == len(drafted):
            place = pending + len(drafted)
            drafted.append(int(picks[pending % len(picks), place]))
            accepted += drafted[-1] == tokens[place + 1]
            if drafted[-1] in config.eos_ids:
                break
        emitted, reason = finish(
            tokens[committed : committed + accepted + 1],
            already=committed - start,
            max_new_tokens=text.max_new_tokens,
            eos_ids=config.eos_ids,
            **left,
        )
        rounds.append(
            Round(
                kind="round",
                committed=committed,
                drafted=tuple(drafted),
                accepted=accepted,
                emitted=tuple(emitted),
                finish_reason=reason,
            )
        )
        committed += len(emitted)
    return rounds


def simulated_metrics(rounds: Sequence[Round]) -> Metrics:
    """`tokens_per_round` and acceptance by position, as `infer.report.stats` defines them."""
    if not rounds:
        return {}
    emitted = sum(len(round_.emitted) for round_ in rounds)
    found = {"simulated_tokens_per_round": emitted / len(rounds)}
    alphas = enumerate(alpha_by_position(rounds), start=1)
    return found | {f"simulated_alpha_{place}": value for place, value in alphas}

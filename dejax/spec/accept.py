"""Accepting a verified draft, and ending a generation.

After the target's pass over the pending token and the drafted nodes, `accept` walks the tree and
`finish` cuts what came out; autoregressive decoding is the same two calls with an empty draft.

The rule is "match" (R0 greedy, R4 independent draw, R5 seeded): the target chooses a token at a row
without looking at the draft, and a drafted child survives if it is that token.

Why this is exact. Row r's logits are a function of the tokens on its path from the pending token,
and `picks[r]` is a function of those logits (and, when sampling, of noise that belongs to the
position, not to the pass). The walk starts at the pending token, whose context is committed, and
steps only onto a child that equals the pick of its parent: by induction every row it visits stands
on the sequence that autoregressive decoding would have produced, so every pick it emits is the
token that autoregressive decoding would have emitted. Nothing here asks how a node came to be
drafted. Hence any drafter is allowed, any number of children, and any pruning or truncation, even
one that looks at the drafted values: a missing node ends a walk earlier and changes no token. This
does not carry over to rejection rules (R1-R3), where dropping a node as a function of its own value
changes the law of the output.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Int

from dejax.spec.tree import check_parents

FinishReason = Literal["eos", "length", "context"]


@dataclass(frozen=True)
class Accepted:
    """What a verified tree comes to.

    Attributes:
      rows: rows of the accepted nodes, from the pending token's child down; each >= 1.
      token: the target's choice at the last accepted row (at row 0 if none was accepted): a
        correction, or after a fully accepted path a bonus. It is the next pending token.
    """

    rows: tuple[int, ...]
    token: int


def accept(
    tokens: Int[np.ndarray, " N"] | Sequence[int],
    parents: Int[np.ndarray, " N"] | Sequence[int],
    picks: Int[np.ndarray, " R"] | Sequence[int],
) -> Accepted:
    """Walks down from the pending token while the target's choice is among the drafted children.

    The emitted tokens are `picks[r]` for r in `(0, *rows)`: the drafted ids of the accepted nodes,
    then `token`. Keep the KV of row 0 and of `rows`.

    Args:
      tokens: drafted ids, parents before children (breadth first); node i is row i + 1.
      parents: row of each node's parent; 0 is the pending token. A chain is 0, 1, ..., N - 1.
      picks: the target's own choice after each of the R = N + 1 rows, padding left out.

    Raises:
      ValueError: if the lengths do not fit or a parent does not come before its child.
    """
    if not len(tokens) == len(parents) == len(picks) - 1:
        raise ValueError(
            "a draft of N nodes needs N tokens, N parents and N + 1 picks, "
            f"got {len(tokens)}, {len(parents)} and {len(picks)}"
        )
    check_parents(parents)
    children: dict[tuple[int, int], int] = {}
    for row, (token, parent) in enumerate(zip(tokens, parents, strict=True), start=1):
        children.setdefault((int(parent), int(token)), row)  # equal siblings: the first one counts
    rows: list[int] = []
    row = 0
    while (child := children.get((row, int(picks[row])))) is not None:
        rows.append(child)
        row = child
    return Accepted(tuple(rows), int(picks[row]))


def finish(
    emitted: Sequence[int],
    *,
    already: int,
    max_new_tokens: int,
    context_left: int,
    eos_ids: Collection[int],
) -> tuple[list[int], FinishReason | None]:
    """Cuts newly emitted tokens where the generation ends, and says why it ends.

    Every mode ends here, so the same tokens end in the same place however they were grouped into
    rounds. An end token is kept and is the last one. Where several reasons meet on one token, the
    first of "eos", "length", "context" is given. An empty `emitted` asks whether there is room.

    Args:
      emitted: tokens of this round, in order.
      already: new tokens emitted before this round.
      max_new_tokens: new tokens allowed in all.
      context_left: tokens that the sequence may still grow by before this round: the context
        length minus the prompt minus `already`.
      eos_ids: ids that end a generation.

    Returns:
      The tokens to keep, and the reason, or None if the generation goes on.
    """
    kept: list[int] = []
    for token in emitted:
        if (reason := _limit(already, len(kept), max_new_tokens, context_left)) is not None:
            return kept, reason
        kept.append(int(token))
        if token in eos_ids:
            return kept, "eos"
    return kept, _limit(already, len(kept), max_new_tokens, context_left)


def draft_limit(draft_length: int, *, remaining_new: int, context_left: int) -> int:
    """How many tokens deep the next draft may be; >= 0, and 0 means an autoregressive step.

    A round emits its accepted tokens and one of the target's own. So the last token that may still
    be emitted is never worth drafting: the target's choice at the row before it is that token.
    Within the limit no drafted row lies outside the context, and a fully accepted draft ends
    exactly at the nearer of the two bounds at most.

    Args:
      draft_length: the longest draft that the configuration allows.
      remaining_new: new tokens that may still be emitted.
      context_left: as for `finish`.
    """
    return max(0, min(draft_length, remaining_new - 1, context_left - 1))


def _limit(already: int, kept: int, max_new_tokens: int, context_left: int) -> FinishReason | None:
    if already + kept >= max_new_tokens:
        return "length"
    if kept >= context_left:
        return "context"
    return None

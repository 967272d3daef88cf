"""Acceptance by rejection: the output has the target's law although the draft was sampled.

A drafted token v that was drawn from q is accepted with probability min(1, p(v) / q(v)); after a
rejection the target's law becomes what q has not covered, the normalised positive part of p - q.

- R1, one draft at a row (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318).
- R2, several, drawn independently, tried one after the other (SpecInfer, arXiv 2305.09781).
- R3, several without replacement (Sequoia, arXiv 2402.12374): after a rejection the token also
  leaves q.

They are exact only if what is tried was drawn, whatever it came to: dropping a drafted token as a
function of its own value changes the law of the output. `dejax.spec.rules` refuses what does.
"""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float64

from dejax.spec.accept import Accepted
from dejax.spec.chance import Chance
from dejax.spec.tree import check_parents

Law = Float64[np.ndarray, " V"]


def accept_by_rejection(
    tokens: Sequence[int],
    parents: Sequence[int],
    tries: Sequence[int],
    target_law: Callable[[int], Law],
    draft_law: Callable[[int], Law],
    chance: Chance,
    *,
    replace: bool,
) -> Accepted:
    """Walks down from the pending token, trying each row's children in the order they were drawn.

    Args:
      tokens, parents: the tree, as for `dejax.spec.accept.accept`.
      tries: rows in the order they were drawn; one that was drawn twice is tried twice.
      target_law: row -> the target's law [V] after it; draft_law: row -> the law [V] that its first
        child was drawn from. Asked only for rows that the walk visits.
      replace: whether a row's children were drawn independently (R1, R2), or each without those
        before it (R3).

    Raises:
      ValueError: a parent does not come before its child.
    """
    check_parents(parents)
    children: dict[int, list[int]] = {}
    for child in tries:
        children.setdefault(parents[child - 1], []).append(child)
    rows: list[int] = []
    row = 0
    while True:
        law, tried = target_law(row), children.get(row, [])
        drafted = draft_law(row) if tried else law
        accepted = None
        for child in tried:
            token = tokens[child - 1]
            if chance.flip(_share(law[token], drafted[token])):
                accepted = child
                break
            law = rest(law, drafted)
            if not replace:
                drafted = without(drafted, token)
        if accepted is None:
            return Accepted(tuple(rows), chance.draw(law))
        rows.append(accepted)
        row = accepted


def draw_children(law: Law, count: int, chance: Chance, *, replace: bool) -> list[int]:
    """`count` tokens of a draft's law, in the order drawn; fewer if it runs out of tokens."""
    drawn: list[int] = []
    for _ in range(count):
        if not law.any():
            break
        drawn.append(chance.draw(law))
        if not replace:
            law = without(law, drawn[-1])
    return drawn


def rest(law: Law, drafted: Law) -> Law:
    """The law after a rejection."""
    positive = np.maximum(law - drafted, 0.0)
    whole = positive.sum()
    # Where the laws are equal nothing is ever rejected, but for rounding.
    return positive / whole if whole > 0 else law


def without(law: Law, token: int) -> Law:
    """The law without a token; all zeros if it had no other."""
    left = law.copy()
    left[token] = 0.0
    whole = left.sum()
    return left / whole if whole > 0 else left


def _share(target: float, drafted: float) -> float:
    """Probability of accepting; a token that cannot have been drawn counts as certain of draft."""
    return min(1.0, target / drafted) if drafted > 0 else 0.0

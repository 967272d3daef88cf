"""Acceptance rules as the decode loop uses them: how a draft and the target choose, and who wins.

| rule | the target's token at a row | the draft's children |
| --- | --- | --- |
| match, greedy (R0) | its argmax | its largest |
| match, sampling (R5) | argmax of log p + the position's noise | the largest of log q + it |
| R4 | drawn from p with the position's own number | the largest of q |
| R1, R2, R3 | by rejection | drawn from q, one (R1), independent (R2), distinct (R3) |

R0, R4 and R5 choose a token without looking at the draft: any draft and any pruning is exact, and
the tokens are those of autoregressive decoding under the same rule. R1 to R3 have the right law and
other tokens, and need drafts whose length and shape do not depend on the drafted values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args, runtime_checkable

import numpy as np
from jaxtyping import Float

from dejax.errors import UsageError
from dejax.spec.accept import Accepted, accept
from dejax.spec.chance import Chance, Stream, draw_at
from dejax.spec.control import ControlConfig
from dejax.spec.rejection import Law, accept_by_rejection, draw_children
from dejax.spec.sampling import SamplingConfig, TokenPicker, first_of, law_of, log_probs
from dejax.spec.tree import TreeConfig, depths

Rule = Literal["match", "R1", "R2", "R3", "R4"]
RULES: tuple[Rule, ...] = get_args(Rule)
REJECTION: tuple[Rule, ...] = ("R1", "R2", "R3")
Logits = Float[np.ndarray, " V"]


def check_rule(rule: str, *, control: ControlConfig, tree: TreeConfig) -> None:
    """Refuses drafts with which a rejection rule would not have the target's law.

    Raises:
      UsageError: there is no such rule, or it does not go with the tree or the controller.
    """
    if rule not in RULES:
        raise UsageError(f"rule {rule!r} is unknown; expected one of {', '.join(RULES)}")
    if rule not in REJECTION:
        return
    if rule == "R1" and not tree.is_chain:
        raise UsageError("rule R1 is for chains; give R2 or R3 with --tree, or match")
    if not (tree.is_chain or tree.is_static):
        raise UsageError(
            f"rule {rule} would lose the target's law: this tree keeps nodes by the confidence in "
            "their own drafted tokens; give a full or static tree, or rule match"
        )
    looks = control.controller == "consumer" and control.budget != "off"
    if tree.is_chain and control.truncate and (looks or control.controller == "cost"):
        raise UsageError(
            f"rule {rule} would lose the target's law: controller {control.controller} drops a "
            "drafted token for what its own value routes to; give --controller producer, "
            "--no-truncate, or rule match"
        )


@runtime_checkable
class DraftChooser(Protocol):
    """How a draft chooses tokens at a row of its logits."""

    def pick(self, logits: Logits, *, position: int) -> int:
        """A chain's next token, for this position of the sequence."""
        ...

    def children(self, logits: Logits, *, position: int, count: int) -> list[tuple[int, float]]:
        """A tree's tokens there, in the order they are tried, and the confidence in each."""
        ...

    def confidence(self, logits: Logits) -> float:
        """Largest probability: known before a token is chosen."""
        ...


@dataclass(frozen=True)
class Drafted:
    """A draft to be judged.

    Attributes:
      tokens, parents: the tree (`dejax.spec.tree`).
      tries: rows in the order they were drawn; empty: each once.
      logits: row -> the drafter's logits there; a row without was not drawn from a law but chosen
        by a look at earlier tokens.
    """

    tokens: Sequence[int]
    parents: Sequence[int]
    tries: Sequence[int] = ()
    logits: Mapping[int, Logits] = field(default_factory=dict)


@runtime_checkable
class Acceptance(Protocol):
    """A rule over one generation."""

    @property
    def draft(self) -> DraftChooser: ...

    def choose(self, logits: Logits, *, position: int) -> int:
        """The target's token where nothing was drafted."""
        ...

    def accept(
        self, drafted: Drafted, logits: Float[np.ndarray, "R V"], *, position: int
    ) -> Accepted:
        """What a verified draft comes to; `position` is that of the first drafted token."""
        ...

    def forget(self, before: int) -> None:
        """What is kept for positions below this one is no longer needed."""
        ...


def make_rule(rule: Rule, sampling: SamplingConfig, *, sample: int, vocab_size: int) -> Acceptance:
    """The rule of generation number `sample`.

    Raises:
      UsageError: `sample` does not fit 32 bits.
    """
    picker = TokenPicker(sampling, sample=sample, vocab_size=vocab_size)
    if rule == "match":
        return Match(picker, picker)
    if rule == "R4":
        return Match(IndependentDraw(sampling, sample), LikeliestDraft(sampling))
    stream = Stream(seed=sampling.seed, sample=sample)
    return Rejection(sampling, stream, replace=rule != "R3")


@runtime_checkable
class TargetChooser(Protocol):
    """How the target chooses under a match rule: without looking at any draft."""

    def pick(self, logits: Logits, *, position: int) -> int: ...

    def forget(self, before: int) -> None: ...


@dataclass(frozen=True)
class Match:
    """R0, R4 and R5: a drafted child survives if it is the target's own choice."""

    target: TargetChooser
    draft: DraftChooser

    def choose(self, logits: Logits, *, position: int) -> int:
        return self.target.pick(logits, position=position)

    def accept(
        self, drafted: Drafted, logits: Float[np.ndarray, "R V"], *, position: int
    ) -> Accepted:
        places = position + depths(drafted.parents)
        return accept(drafted.tokens, drafted.parents, _Picks(self.target, logits, places))

    def forget(self, before: int) -> None:
        self.target.forget(before)


class _Picks(Sequence[int]):
    """The target's choices by row, made when asked for: a walk visits few rows of a tree."""

    def __init__(self, target: TargetChooser, logits: np.ndarray, places: np.ndarray):
        self._target, self._logits, self._places = target, logits, places

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, row):
        return self._target.pick(self._logits[row], position=int(self._places[row]))


@dataclass(frozen=True)
class IndependentDraw:
    """R4: the token at a position is drawn from p with a number that is the position's own."""

    sampling: SamplingConfig
    sample: int

    def pick(self, logits: Logits, *, position: int) -> int:
        ids, law = law_of(logits, self.sampling)
        place = dict(seed=self.sampling.seed, sample=self.sample, position=position)
        return int(ids[draw_at(np.exp(law), **place)])

    def forget(self, before: int) -> None:
        """Nothing is kept."""


@dataclass(frozen=True)
class LikeliestDraft:
    """The draft of R4: nothing is known of the target's draw, so the likeliest tokens are best."""

    sampling: SamplingConfig

    def pick(self, logits: Logits, *, position: int) -> int:
        return self.children(logits, position=position, count=1)[0][0]

    def children(self, logits: Logits, *, position: int, count: int) -> list[tuple[int, float]]:
        return first_of(*law_of(logits, self.sampling), count)

    def confidence(self, logits: Logits) -> float:
        return float(np.exp(law_of(logits, self.sampling)[1].max()))


@dataclass(frozen=True)
class Rejection:
    """R1, R2 (`replace`) and R3: the draft is drawn from its law, and rejected from the target's.

    One stream decides for the draft and for the verification, in the order of the decode.
    """

    sampling: SamplingConfig
    chance: Chance
    replace: bool

    @property
    def draft(self) -> "Rejection":
        return self

    def _law(self, logits: Logits) -> Law:
        return np.exp(log_probs(logits, self.sampling))

    def choose(self, logits: Logits, *, position: int) -> int:
        return self.chance.draw(self._law(logits))

    pick = choose

    def children(self, logits: Logits, *, position: int, count: int) -> list[tuple[int, float]]:
        law = self._law(logits)
        drawn = draw_children(law, count, self.chance, replace=self.replace)
        return [(token, float(law[token])) for token in drawn]

    def confidence(self, logits: Logits) -> float:
        return float(self._law(logits).max())

    def accept(
        self, drafted: Drafted, logits: Float[np.ndarray, "R V"], *, position: int
    ) -> Accepted:
        def draft_law(row: int) -> Law:
            if row in drafted.logits:
                return self._law(drafted.logits[row])
            certain = np.zeros(logits.shape[1])
            certain[drafted.tokens[drafted.parents.index(row)]] = 1.0
            return certain

        return accept_by_rejection(
            drafted.tokens,
            drafted.parents,
            drafted.tries or range(1, len(drafted.tokens) + 1),
            lambda row: self._law(logits[row]),
            draft_law,
            self.chance,
            replace=self.replace,
        )

    def forget(self, before: int) -> None:
        """Nothing is kept."""

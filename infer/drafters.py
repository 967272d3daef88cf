"""What proposes tokens: the target's own draft path, token by token, or a look at the text.

Two shapes. A `Drafter` answers every token with logits; a `DraftPhase` makes drafts of them as
Algorithm 1 of DraftExpert (arXiv 2607.24434) does: pick, decide, prefetch. A `Proposer` gives a
whole draft at once and has no logits to give. The decode loop sees proposers only.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float

from dejax.shapes import Pair
from dejax.spec.confidence import Sureness
from dejax.spec.control import DraftController
from dejax.spec.ngram import lookup
from dejax.spec.rules import DraftChooser
from dejax.spec.tree import depths, subtree
from infer.engines import EngineLike
from infer.passes import Drafting
from infer.timing import Timings


@dataclass(frozen=True)
class DraftStep:
    """What a drafter says after consuming a token.

    Attributes:
      logits: [V], its law for the next token.
      routes: experts it predicts for the consumed token's row of the verification.
      used: pairs whose weights its pass read.
      scores: [M], those of a confidence head; None without one.
    """

    logits: Float[np.ndarray, " V"]
    routes: frozenset[Pair]
    used: frozenset[Pair]
    scores: Float[np.ndarray, " M"] | None = None


@runtime_checkable
class Drafter(Protocol):
    """What drafts token by token. It is never trusted: any answer keeps the output unchanged."""

    def consume(self, token: int, *, position: int, kept: bool = False) -> DraftStep:
        """Takes `token` as the next of the sequence, at index `position`.

        `kept`: it will be verified whatever comes, so that the experts that the pass predicts for
        it may be prefetched as they are found.
        """
        ...


@dataclass(frozen=True)
class Proposal:
    """A draft: tokens, and what the drafter's passes were sure of, predicted and read.

    Attributes:
      confidences: one a token, or none from a proposer that estimates nothing.
      routes: one set a row that was drafted from; none from a proposer without passes.
      used: pairs whose weights the passes read.
      parents: of a tree, the row that each token follows (0: the pending token); None: a chain.
      tries: of a tree drawn at random, rows in the order they were drawn (`Drafted`).
      logits: row -> what the drafter said there; none from a proposer without logits.
      passes: draft passes that were run; None: one a row of `routes`.
      predicted: of each token, the experts that a trained predictor expects of its row; none
        without one.
    """

    tokens: Sequence[int] = ()
    confidences: Sequence[float] = ()
    routes: Sequence[frozenset[Pair]] = ()
    used: frozenset[Pair] = frozenset()
    parents: Sequence[int] | None = None
    tries: Sequence[int] = ()
    logits: Mapping[int, Float[np.ndarray, " V"]] = field(default_factory=dict)
    passes: int | None = None
    predicted: Sequence[frozenset[Pair]] = ()

    def cut(self, limit: int) -> "Proposal":
        """Without what is deeper than `limit`: its row would lie outside the context."""
        if self.parents is None:
            kept = self.tokens[:limit], self.confidences[:limit]
            return replace(self, tokens=kept[0], confidences=kept[1])
        if depths(self.parents).max(initial=0) <= limit:
            return self
        rows = np.flatnonzero(depths(self.parents) <= limit)[1:].tolist()
        return self.choose(rows)

    def choose(self, rows: Collection[int]) -> "Proposal":
        """Of a tree, these rows alone.

        Raises:
          ValueError: one is chosen without its parent.
        """
        assert self.parents is not None
        kept, parents = subtree(self.parents, rows)
        index = {0: 0} | {row: place for place, row in enumerate(kept, start=1)}
        return replace(
            self,
            tokens=[self.tokens[row - 1] for row in kept],
            confidences=[self.confidences[row - 1] for row in kept] if self.confidences else (),
            parents=parents,
            tries=[index[row] for row in self.tries if row in index],
            logits={index[row]: law for row, law in self.logits.items() if row in index},
            predicted=[self.predicted[row - 1] for row in kept] if self.predicted else (),
        )


@runtime_checkable
class Proposer(Protocol):
    """What gives a whole draft at once. It is never trusted: any answer keeps the output."""

    def propose(self, tokens: Sequence[int], limit: int) -> Proposal:
        """What may follow `tokens`, at most `limit` deep (more is cut off); `limit` >= 1."""
        ...


@dataclass(frozen=True)
class PathDrafter:
    """The target's own draft path: shared + top-r experts, and the draft expert if there is one.

    `r` and `resident` are those of `infer.passes.Drafting`.
    """

    engine: EngineLike
    r: int
    resident: float | None = None

    def consume(self, token: int, *, position: int, kept: bool = False) -> DraftStep:
        drafting = Drafting(self.r, kept, self.resident)
        result = self.engine.draft_row(token, start=position, drafting=drafting)
        scores = None if result.scores is None else result.scores[0]
        return DraftStep(result.logits[0], result.routes[0], result.used, scores)


@dataclass(frozen=True)
class NGramProposer:
    """What followed the same tokens before, in prompt and output: no pass, no weights.

    It is sure of nothing and predicts no experts: stop rules and prefetching have nothing to go by,
    and a draft ends at `limit`, at an end token, or where the text that was found ends.
    """

    eos_ids: Collection[int] = ()

    def propose(self, tokens: Sequence[int], limit: int) -> Proposal:
        found = lookup(tokens, limit)
        end = next((i for i, token in enumerate(found, start=1) if token in self.eos_ids), limit)
        return Proposal(found[:end])


@dataclass(frozen=True)
class DraftPhase:
    """Algorithm 1's draft phase: a proposer made of a drafter and a controller.

    Attributes:
      sureness: what the controller goes by.
      prefetch: whether the drafter's predictions are prefetched.
      eos_ids: nothing after an end token can be emitted, so none is drafted.
    """

    drafter: Drafter
    controller: DraftController
    chooser: DraftChooser
    sureness: Sureness
    engine: EngineLike
    timings: Timings
    prefetch: bool
    eos_ids: Collection[int]

    def propose(self, tokens: Sequence[int], limit: int) -> Proposal:
        control, residency = self.controller, self.engine.residency
        controlling = self.engine.clock.controlling
        committed = len(tokens)
        drafted: list[int] = []
        confidences: list[float] = []
        steps: list[DraftStep] = []
        with controlling():
            available = residency.available()
        step = self._consume(tokens[-1], committed - 1, steps, kept=True)
        with controlling():
            control.begin_round(
                step.routes,
                available=available,
                times=self.timings.step_times(),
                pending=committed - 1,
            )
        self._prefetch(step)
        while len(drafted) < limit:
            position = committed + len(drafted)
            token = self.chooser.pick(step.logits, position=position)
            with controlling():
                sure = self.sureness.of_chain(step.logits, step.scores, depth=len(drafted) + 1)
                looked = control.needs_look(sure)
            if looked:
                step = self._consume(token, position, steps)
            with controlling():
                available = residency.available()
                kept = control.keep(
                    sure,
                    step.routes if looked else None,
                    available=available,
                    hide_budget=self._hidden_loads(limit - len(drafted) - 1, len(available)),
                )
            if not kept:
                break
            drafted.append(token)
            confidences.append(sure)
            if token in self.eos_ids:
                break
            if not looked and len(drafted) < limit:
                with controlling():
                    available = residency.available()
                step = self._consume(token, position, steps, kept=True)
                with controlling():
                    control.extend(step.routes, available=available)
            elif not looked:
                break
            self._prefetch(step)
        used = frozenset().union(*(step.used for step in steps))
        logits = dict(enumerate(step.logits for step in steps))
        return Proposal(drafted, confidences, [s.routes for s in steps], used, logits=logits)

    def _consume(
        self, token: int, position: int, steps: list[DraftStep], *, kept: bool = False
    ) -> DraftStep:
        clock = self.engine.clock
        began, waited = time.perf_counter(), clock.loads
        step = self.drafter.consume(token, position=position, kept=kept and self.prefetch)
        seconds = time.perf_counter() - began
        self.timings.draft_pass(seconds, waited=clock.loads - waited)
        steps.append(step)
        return step

    def _prefetch(self, step: DraftStep) -> None:
        if self.prefetch:
            self.engine.residency.prefetch(step.routes)

    def _hidden_loads(self, passes_left: int, available: int) -> int:
        """Loads that can hide behind the draft passes that will run if this token is kept."""
        if not self.prefetch:
            return 0
        in_flight = max(0, available - len(self.engine.residency.resident()))
        return self.timings.hidden_loads(passes_left, in_flight=in_flight)

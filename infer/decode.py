"""The decode loop: draft, verify, accept, commit (DraftExpert, arXiv 2607.24434, Algorithm 1).

One loop for every mode. Autoregressive decoding is the loop without a drafter, so it shares
prefill, target pass, token choice and stopping with the others. Tokens are chosen by the target
alone (greedy, or seeded sampling whose noise depends only on seed, sample and position): whatever
the drafter, the controller, the caches or their timing do, only the number of rounds changes.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float

from dejax.config import ModelConfig
from dejax.errors import UsageError
from dejax.shapes import Pair
from dejax.spec.accept import accept, draft_limit, finish
from dejax.spec.control import ControlConfig, DraftController
from dejax.spec.sampling import SamplingConfig, TokenPicker
from infer.engine import ROW_BUCKETS
from infer.engines import EngineLike
from infer.trace import Round

Mode = Literal["ar", "top-r", "draft-expert"]
MODES: tuple[Mode, ...] = ("ar", "top-r", "draft-expert")


@dataclass(frozen=True)
class DecodeOptions:
    """How to decode one sequence.

    Attributes:
      mode: `ar`, `top-r` (shared + top-r routed experts as drafter) or `draft-expert`.
      r: routed experts that the drafter keeps, in the modes that draft.
      prefetch: whether the draft router's predictions are prefetched.
    """

    mode: Mode = "ar"
    r: int = 1
    max_new_tokens: int = 64
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    control: ControlConfig = field(default_factory=ControlConfig)
    prefetch: bool = True
    stop_at_eos: bool = True

    def __post_init__(self):
        if self.mode not in MODES:
            raise UsageError(f"mode {self.mode!r} is unknown; expected one of {', '.join(MODES)}")
        if self.max_new_tokens < 1:
            raise UsageError(f"max_new_tokens is {self.max_new_tokens}; expected 1 or more")
        if self.r < 1:
            raise UsageError(f"r is {self.r}; expected 1 or more routed experts")
        if self.control.draft_length >= ROW_BUCKETS[-1]:
            most = ROW_BUCKETS[-1] - 1
            raise UsageError(f"draft_length {self.control.draft_length} exceeds {most}")


@dataclass(frozen=True)
class DraftStep:
    """What a drafter says after consuming a token.

    Attributes:
      logits: [V], its law for the next token.
      routes: experts it predicts for the consumed token's row of the verification.
      used: pairs whose weights its pass read.
    """

    logits: Float[np.ndarray, " V"]
    routes: frozenset[Pair]
    used: frozenset[Pair]


@runtime_checkable
class Drafter(Protocol):
    """What proposes tokens. It is never trusted: any answer keeps the output unchanged."""

    def consume(self, token: int, *, position: int) -> DraftStep:
        """Takes `token` as the next of the sequence, at index `position`."""
        ...


@dataclass(frozen=True)
class PathDrafter:
    """The target's own draft path: shared + top-r experts, and the draft expert if there is one."""

    engine: EngineLike
    r: int

    def consume(self, token: int, *, position: int) -> DraftStep:
        result = self.engine.draft_row(token, start=position, r=self.r)
        return DraftStep(logits=result.logits[0], routes=result.routes[0], used=result.used)


@dataclass(frozen=True)
class Proposal:
    """A draft: tokens, confidences, and what the drafter's passes predicted and read."""

    tokens: list[int]
    confidences: list[float]
    routes: list[frozenset[Pair]]
    used: frozenset[Pair]


def check_options(options: DecodeOptions, config: ModelConfig, *, drafts: bool) -> None:
    """Refuses options that do not fit a target; `drafts` tells whether it has draft experts.

    Raises:
      UsageError: the mode drafts with routed experts and the target has none, r exceeds its top-k,
        or the mode needs draft experts and there are none.
    """
    if options.mode == "ar":
        return
    if not config.moe_layers:
        raise UsageError(
            f"mode {options.mode} drafts with routed experts, and the target ({config.family}) is "
            "dense; decode it with mode ar"
        )
    top_k = config.moe.top_k
    if options.r > top_k:
        raise UsageError(f"r is {options.r}; the target routes to {top_k} experts per token")
    if drafts != (options.mode == "draft-expert"):
        needs = "takes no draft experts" if drafts else "needs draft experts"
        raise UsageError(f"mode {options.mode} {needs}: give --draft only with draft-expert")


def make_drafter(engine: EngineLike, options: DecodeOptions) -> Drafter | None:
    """The drafter of a mode, None for `ar`.

    Raises:
      UsageError: r exceeds the target's top-k, or the mode needs draft experts and there are none.
    """
    if options.mode == "ar":
        return None
    check_options(options, engine.target.config, drafts=engine.draft is not None)
    return PathDrafter(engine, options.r)


def decode(
    engine: EngineLike,
    prompt: Sequence[int],
    options: DecodeOptions,
    *,
    sample: int = 0,
    drafter: Drafter | None = None,
) -> Iterator[Round]:
    """Decodes one sequence, yielding a trace record after the prefill and after every round.

    The concatenated `emitted` of the records are the new tokens. `sample` tells several samples of
    one prompt apart. The caller owns engine, residency and drafter.
    """
    loop = _Loop(engine, prompt, options, sample, drafter)
    yield loop.prefill()
    while loop.finish_reason is None:
        yield loop.round()


class _Loop:
    """State of one sequence: committed tokens (the last one pending) and the reason it ended."""

    def __init__(
        self,
        engine: EngineLike,
        prompt: Sequence[int],
        options: DecodeOptions,
        sample: int,
        drafter: Drafter | None,
    ):
        self.engine, self.options, self.drafter = engine, options, drafter
        config = engine.target.config
        self.tokens, self.prompt_length = list(prompt), len(prompt)
        self.finish_reason: str | None = None
        self.picker = TokenPicker(options.sampling, sample=sample, vocab_size=config.vocab_size)
        self.controller = None
        if drafter is not None:
            self.controller = DraftController(
                options.control, top_k=config.moe.top_k, moe_layers=len(config.moe_layers)
            )
        self.eos_ids = config.eos_ids if options.stop_at_eos else ()
        self._load_seconds = self._pass_seconds = 0.0

    @property
    def remaining(self) -> int:
        """New tokens that may still be emitted."""
        return self.options.max_new_tokens - (len(self.tokens) - self.prompt_length)

    @property
    def context_left(self) -> int:
        """Tokens that the sequence may still grow by."""
        return self.engine.capacity - len(self.tokens)

    def _emit(self, tokens: list[int]) -> tuple[int, ...]:
        """Commits emitted tokens up to where the generation ends."""
        already = len(self.tokens) - self.prompt_length
        kept, self.finish_reason = finish(
            tokens,
            already=already,
            max_new_tokens=self.options.max_new_tokens,
            context_left=self.context_left,
            eos_ids=self.eos_ids,
        )
        self.tokens += kept
        return tuple(kept)

    def prefill(self) -> Round:
        """Fills the cache with the prompt and chooses the first token."""
        engine, clock = self.engine, self.engine.clock
        engine.residency.take_events()
        clock.device = clock.loads = 0.0
        began = time.perf_counter()
        engine.begin()
        engine.residency.begin_round()
        result = engine.prefill(self.tokens)
        engine.residency.end_round()
        token = self.picker.pick(result.logits[0], position=len(self.tokens))
        emitted = self._emit([token])
        return Round(
            kind="prefill",
            committed=self.prompt_length,
            required=result.used,
            emitted=emitted,
            finish_reason=self.finish_reason,
            loads=tuple(engine.residency.take_events()),
            target_seconds=time.perf_counter() - began,
            total_seconds=time.perf_counter() - began,
            device_seconds=clock.device,
            load_seconds=clock.loads,
        )

    def round(self) -> Round:
        """One round: draft, verify, accept, commit. Without a drafter, one autoregressive step."""
        engine, residency, clock = self.engine, self.engine.residency, self.engine.clock
        clock.device = clock.loads = 0.0
        began = time.perf_counter()
        committed = len(self.tokens)
        residency.begin_round()
        resident = residency.resident()
        proposal = self._draft()
        drafted = time.perf_counter()
        rows = [self.tokens[-1], *proposal.tokens]
        result = engine.target_rows(rows, start=committed - 1)
        verified = time.perf_counter()
        picks = [
            self.picker.pick(logits, position=committed + row)
            for row, logits in enumerate(result.logits)
        ]
        parents = range(len(proposal.tokens))
        outcome = accept(proposal.tokens, parents, picks)
        emitted = self._emit([*(proposal.tokens[row - 1] for row in outcome.rows), outcome.token])
        prefetched = residency.prefetched()
        residency.end_round()
        self.picker.forget(len(self.tokens))
        loads = tuple(residency.take_events())
        self._note_load_time(loads)
        return Round(
            kind="round",
            committed=committed,
            drafted=tuple(proposal.tokens),
            parents=tuple(parents),
            confidences=tuple(proposal.confidences),
            draft_passes=len(proposal.routes),
            draft_routes=tuple(proposal.routes),
            draft_used=proposal.used,
            required=result.used,
            rows_routes=result.routes,
            resident=frozenset(result.used & resident),
            prefetched=frozenset(prefetched),
            accepted=len(outcome.rows),
            emitted=emitted,
            finish_reason=self.finish_reason,
            loads=loads,
            top1_gates=tuple(float(g) for g in result.gates.mean(axis=0)),
            draft_seconds=drafted - began,
            target_seconds=verified - drafted,
            total_seconds=time.perf_counter() - began,
            device_seconds=clock.device,
            load_seconds=clock.loads,
        )

    def _draft(self) -> Proposal:
        """Algorithm 1's draft phase; no tokens when there is no drafter or no room for a draft."""
        control, residency = self.controller, self.engine.residency
        limit = draft_limit(
            self.options.control.draft_length,
            remaining_new=self.remaining,
            context_left=self.context_left,
        )
        tokens: list[int] = []
        confidences: list[float] = []
        steps: list[DraftStep] = []
        if control is None or limit == 0:
            return Proposal(tokens, confidences, [], frozenset())
        step = self._consume(self.tokens[-1], 0, steps)
        control.begin_round(step.routes, available=residency.available())
        self._prefetch(step)
        while len(tokens) < limit:
            token = self.picker.pick(step.logits, position=len(self.tokens) + len(tokens))
            sure = self.picker.confidence(step.logits)
            looked = control.needs_look(sure)
            if looked:
                step = self._consume(token, len(tokens) + 1, steps)
            available = residency.available()
            kept = control.keep(
                sure,
                step.routes if looked else None,
                available=available,
                hide_budget=self._hide_budget(limit - len(tokens)),
            )
            if not kept:
                break
            tokens.append(token)
            confidences.append(sure)
            if token in self.eos_ids:  # nothing after an end token can be emitted
                break
            if not looked and len(tokens) < limit:
                step = self._consume(token, len(tokens), steps)
                control.extend(step.routes, available=residency.available())
            elif not looked:
                break
            self._prefetch(step)
        used = frozenset().union(*(step.used for step in steps))
        return Proposal(tokens, confidences, [step.routes for step in steps], used)

    def _consume(self, token: int, ahead: int, steps: list[DraftStep]) -> DraftStep:
        """Runs the drafter over a token `ahead` places after the pending one."""
        assert self.drafter is not None
        began = time.perf_counter()
        step = self.drafter.consume(token, position=len(self.tokens) - 1 + ahead)
        self._pass_seconds = time.perf_counter() - began
        steps.append(step)
        return step

    def _prefetch(self, step: DraftStep) -> None:
        if self.options.prefetch:
            self.engine.residency.prefetch(step.routes)

    def _hide_budget(self, passes_left: int) -> int:
        """Loads that fit behind the draft passes still to come, from the latest measured times."""
        if self._load_seconds <= 0:
            return 0
        return int(passes_left * self._pass_seconds / self._load_seconds)

    def _note_load_time(self, loads: Sequence) -> None:
        if loads:
            self._load_seconds = sum(load.end - load.start for load in loads) / len(loads)

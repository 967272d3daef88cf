"""The decode loop: draft, verify, accept, commit (DraftExpert, arXiv 2607.24434, Algorithm 1).

One loop for every mode. Autoregressive decoding is the loop without a drafter, so it shares
prefill, target pass, token choice and stopping with the others. Tokens are chosen by the target
alone (greedy, or seeded sampling whose noise depends only on seed, sample and position): whatever
the drafter, the controller, the caches or their timing do, only the number of rounds changes.
"""

import time
from collections.abc import Iterator, Sequence

from dejax.errors import UsageError
from dejax.spec.accept import draft_limit, finish
from dejax.spec.confidence import ByHead, ByProbability, Sureness
from dejax.spec.control import DraftController
from dejax.spec.ecospec import ExpertCost
from dejax.spec.expert_use import ExpertGrid, ExpertUse
from dejax.spec.rules import Drafted, make_rule
from dejax.spec.tree import is_chain
from infer.decode_options import DecodeOptions, check_options
from infer.drafters import Drafter, DraftPhase, NGramProposer, PathDrafter, Proposal, Proposer
from infer.engines import EngineLike
from infer.timing import Pace
from infer.trace import Round
from infer.tree_drafter import Foresee, TreePhase


def make_drafter(engine: EngineLike, options: DecodeOptions) -> Drafter | Proposer | None:
    """The drafter of a mode, None for `ar`.

    Raises:
      UsageError: r exceeds the target's top-k, or the mode needs draft experts and there are none.
    """
    if options.mode == "ar":
        return None
    config = engine.target.config
    check_options(options, config, drafts=engine.draft is not None)
    if (options.mode == "moe-spec") != (engine.budget is not None):
        raise UsageError("a verification budget and mode moe-spec: give both or neither")
    if options.predicts and engine.predictor is None:
        raise UsageError("the predictor is trained, and none was given: load one for this draft")
    if options.mode == "n-gram":
        return NGramProposer(config.eos_ids if options.stop_at_eos else ())
    return PathDrafter(engine, options.r, options.draft_resident)


def decode(
    engine: EngineLike,
    prompt: Sequence[int],
    options: DecodeOptions,
    *,
    sample: int = 0,
    drafter: Drafter | Proposer | None = None,
    pace: Pace | None = None,
    foresee: Foresee | None = None,
) -> Iterator[Round]:
    """Decodes one sequence, yielding a trace record after the prefill and after every round.

    The concatenated `emitted` of the records are the new tokens. `sample` tells several samples of
    one prompt apart. The caller owns engine, residency and drafter, and may keep `pace`, what
    decodes with these options have learned of their speed, from one to the next. `foresee` tells
    trees their true routes, for measurements.
    """
    pace = Pace() if pace is None else pace
    loop = _Loop(engine, prompt, options, sample, drafter, pace, foresee)
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
        drafter: Drafter | Proposer | None,
        pace: Pace,
        foresee: Foresee | None,
    ):
        self.engine, self.options, self.pace, self.foresee = engine, options, pace, foresee
        config = engine.target.config
        self.tokens, self.prompt_length = list(prompt), len(prompt)
        self.finish_reason: str | None = None
        vocab_size = config.vocab_size
        self.rule = make_rule(options.rule, options.sampling, sample=sample, vocab_size=vocab_size)
        self.eos_ids = config.eos_ids if options.stop_at_eos else ()
        self.proposer = drafter if not isinstance(drafter, Drafter) else self._phase(drafter)
        self.exact, self.approximate = 0, 0  # tokens with exact KV, rounds since they were all
        pace.begin()

    def _phase(self, drafter: Drafter) -> Proposer:
        """The draft phase of a drafter that answers token by token."""
        config, options = self.engine.target.config, self.options
        if options.branches and isinstance(drafter, PathDrafter):
            return TreePhase(
                self.engine,
                options.draft_tree,
                drafter.r,
                self._sureness(),
                self.pace.timings,
                prefetch=options.prefetch,
                eos_ids=self.eos_ids,
                choose=self._by_expert_cost() if options.mode == "ecospec" else None,
                foresee=self.foresee,
                resident=drafter.resident,
                predictor=self.engine.predictor if options.predicts else None,
            )
        return DraftPhase(
            drafter,
            DraftController(
                options.control,
                top_k=config.moe.top_k,
                moe_layers=len(config.moe_layers),
                calibration=self.pace.calibration,
            ),
            self.rule.draft,
            self._sureness(),
            self.engine,
            self.pace.timings,
            prefetch=options.prefetch,
            eos_ids=self.eos_ids,
        )

    def _sureness(self) -> Sureness:
        """What tells how sure a draft is: its head, if it has one and is to be asked.

        Under R4 a draft's largest probability is about what acceptance is: no head is fitted to it.
        """
        draft, options = self.engine.draft, self.options
        head = None if draft is None else draft.head
        if head is None or options.confidence != "head" or options.rule == "R4":
            return ByProbability(self.rule.draft)
        readout = head.readout(int(options.sampling.temperature > 0))
        return ByHead(self.rule.draft, options.sampling, readout)

    def _by_expert_cost(self) -> ExpertCost:
        """The choice of mode ecospec, with what earlier prompts have taught."""
        config = self.engine.target.config
        if self.pace.use is None:
            moe = config.moe
            self.pace.use = ExpertUse(ExpertGrid(config.moe_layers, moe.num_experts, moe.top_k))
        return ExpertCost(self.options.eco, self.pace.use)

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
        clock.begin()
        clock.take_control()
        began = time.perf_counter()
        engine.begin()
        engine.residency.begin_round()
        result = engine.prefill(self.tokens)
        self.exact = len(self.tokens)
        engine.residency.end_round()
        token = self.rule.choose(result.logits[0], position=len(self.tokens))
        emitted = self._emit([token])
        return Round(
            kind="prefill",
            committed=self.prompt_length,
            required=result.used,
            emitted=emitted,
            finish_reason=self.finish_reason,
            loads=tuple(engine.residency.take_events()),
            began=began,
            target_seconds=time.perf_counter() - began,
            total_seconds=time.perf_counter() - began,
            device_seconds=clock.device,
            load_seconds=clock.loads,
        )

    def round(self) -> Round:
        """One round: draft, verify, accept, commit. Without a drafter, one autoregressive step."""
        engine, residency, clock = self.engine, self.engine.residency, self.engine.clock
        clock.begin()
        began = time.perf_counter()
        committed = len(self.tokens)
        residency.begin_round()
        resident = residency.resident()
        with clock.controlling():
            governed = self._keeps_plain()
        proposal = Proposal() if governed else self._draft()
        drafted, waited = time.perf_counter(), clock.loads
        rows = [self.tokens[-1], *proposal.tokens]
        parents, tree = proposal.parents, proposal.parents is not None
        if parents is None:
            parents = range(len(proposal.tokens))
        above = [-1, *parents] if tree else None
        result = engine.target_rows(rows, start=committed - 1, parents=above)
        verified = time.perf_counter()
        drafted_tree = Drafted(proposal.tokens, parents, proposal.tries, proposal.logits)
        outcome = self.rule.accept(drafted_tree, result.logits, position=committed)
        if tree:
            engine.keep_rows(outcome.rows, start=committed - 1)
        emitted = self._emit([*(proposal.tokens[row - 1] for row in outcome.rows), outcome.token])
        if self.pace.use is not None:
            with clock.controlling():
                self.pace.use.observe(rows, result.routes, (0, *outcome.rows))
        self._recompute()
        prefetched = residency.prefetched()
        residency.end_round()
        self.rule.forget(len(self.tokens))
        loads = tuple(residency.take_events())
        record = Round(
            kind="round",
            committed=committed,
            drafted=tuple(proposal.tokens),
            parents=tuple(parents),
            confidences=tuple(proposal.confidences),
            draft_passes=len(proposal.routes) if proposal.passes is None else proposal.passes,
            draft_routes=tuple(proposal.routes),
            draft_used=proposal.used,
            predicted=tuple(proposal.predicted),
            required=result.used,
            rows_routes=result.routes,
            resident=frozenset(result.used & resident),
            prefetched=frozenset(prefetched),
            accepted=len(outcome.rows),
            emitted=emitted,
            finish_reason=self.finish_reason,
            loads=loads,
            top1_gates=tuple(float(g) for g in result.gates.mean(axis=0)),
            began=began,
            draft_seconds=drafted - began - clock.aside,
            target_seconds=verified - drafted,
            total_seconds=time.perf_counter() - began - clock.aside,
            device_seconds=clock.device,
            load_seconds=clock.loads,
            control_seconds=clock.take_control(),
            governed=governed,
            rescued=result.rescued,
        )
        with clock.controlling():
            self._note(record, clock.loads - waited)
        return record

    def _recompute(self) -> None:
        """Of a lossy verification: the KV of what it committed, exactly, every so many rounds."""
        budget = self.engine.budget
        if budget is None or not budget.exact_every or self.finish_reason is not None:
            return
        self.approximate += 1
        if self.approximate == budget.exact_every:
            self.engine.prefill(self.tokens[self.exact : -1], start=self.exact)
            self.exact, self.approximate = len(self.tokens) - 1, 0

    def _keeps_plain(self) -> bool:
        """Whether this round must not draft although it might: to measure, or because it is off."""
        if self.proposer is None:
            return False
        governor, control = self.pace.governor, self.options.control
        if governor is not None and not governor.speculates:
            return True
        # "cost" weighs against the autoregressive step, so it has one measured first.
        chain = not self.options.branches
        measures = chain and control.truncate and control.controller == "cost"
        return measures and self.options.mode != "n-gram" and not self.pace.timings.step_seconds

    def _draft(self) -> Proposal:
        """A draft; no tokens when there is no drafter or no room."""
        limit = draft_limit(
            self.options.draft_levels,
            remaining_new=self.remaining,
            context_left=self.context_left,
        )
        if self.proposer is None or limit == 0:
            return Proposal()
        return self.proposer.propose(self.tokens, limit).cut(limit)

    def _note(self, record: Round, waited: float) -> None:
        """Tells `pace` how the round went; `waited`: seconds of its target pass."""
        plain = not (record.drafted or record.draft_passes)
        if is_chain(record.parents):
            self.pace.calibration.observe(record.confidences, record.accepted)
        timings, tokens = self.pace.timings, len(record.emitted)
        rows = 1 + len(record.drafted)
        timings.target_pass(rows, record.target_seconds, waited=waited)
        timings.loads(record.loads)
        timings.round(tokens, record.total_seconds, plain=plain)
        if self.proposer is not None and self.pace.governor is not None:
            self.pace.governor.observe(
                tokens=tokens, seconds=record.total_seconds, speculative=not plain
            )

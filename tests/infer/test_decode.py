"""The decode loop under wrong, lucky and hostile drafters, and what becomes of the KV cache.

Everything in float64. The yardstick is autoregressive decoding through the same loop, which
`test_lossless` holds against whole forward passes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import pytest

from dejax.errors import FailedError, UsageError
from dejax.spec.control import ControlConfig
from dejax.spec.governor import Decision, Governor, GovernorConfig
from dejax.spec.sampling import SamplingConfig
from infer.buckets import ROW_BUCKETS
from infer.decode import decode, make_drafter
from infer.decode_options import DecodeOptions
from infer.decoder import Decoder
from infer.drafters import DraftStep, NGramProposer, PathDrafter, Proposal
from infer.timing import Pace
from tests.infer.random_target import (
    CONTEXT,
    VOCAB,
    draft_of,
    random_prompt,
    with_eos,
)

PROMPT = random_prompt(20, seed=4)
GREEDY, SAMPLED = SamplingConfig(), SamplingConfig(temperature=1.0, seed=9)
NEW = 10


pytestmark = pytest.mark.usefixtures("x64")


@pytest.fixture(scope="module")
def engine(target):
    with jax.enable_x64(True), Decoder(target) as decoder:
        yield decoder.engine


def run(
    engine, prompt=PROMPT, *, drafter=None, sampling=GREEDY, new=NEW, pace=None, **settings: Any
):
    """The trace of one prompt; a draft is never cut short unless `settings` say so."""
    settings.setdefault("truncate", False)
    control = ControlConfig(**settings)
    options = DecodeOptions(max_new_tokens=new, sampling=sampling, control=control)
    return tuple(decode(engine, prompt, options, drafter=drafter, pace=pace))


def outcome(trace):
    return [token for record in trace for token in record.emitted], trace[-1].finish_reason


def rounds(trace):
    return [record for record in trace if record.kind == "round"]


def one_hot(token):
    """Logits that choose `token` under any noise."""
    logits = np.zeros(VOCAB)
    logits[token] = 1e4
    return logits


@dataclass
class Scripted:
    """Proposes what `say(position)` names, without a pass; predicts `routes` for every row."""

    say: Callable[[int], int]
    routes: frozenset = frozenset()
    consumed: list = field(default_factory=list)

    def consume(self, token, *, position, kept=False):
        self.consumed.append((position, token))
        logits = one_hot(self.say(position + 1) % VOCAB)
        return DraftStep(logits=logits, routes=self.routes, used=frozenset())


def oracle(tokens, prompt=PROMPT):
    """Says what the target will say."""
    sequence = [*prompt, *tokens] + [0] * 64
    return Scripted(sequence.__getitem__)


def wrong(tokens, prompt=PROMPT):
    """Never says what the target will say."""
    sequence = [*prompt, *tokens] + [0] * 64
    return Scripted(lambda position: sequence[position] + 1)


def mostly_right(tokens, prompt=PROMPT):
    """Says what the target will say, except at every third position."""
    sequence = [*prompt, *tokens] + [0] * 64
    return Scripted(lambda position: sequence[position] + (position % 3 == 0))


def noise(tokens, prompt=PROMPT):
    generator = np.random.default_rng(0)
    return Scripted(lambda position: int(generator.integers(VOCAB)))


class Echo:
    """Says again what it was given."""

    def consume(self, token, *, position, kept=False):
        return DraftStep(logits=one_hot(token), routes=frozenset(), used=frozenset())


def echo(tokens, prompt=PROMPT):
    return Echo()


def nobody(tokens, prompt=PROMPT):
    return None


@dataclass
class AtOnce:
    """Proposes what another drafter says, all at once; more than was asked for if `eager`."""

    inner: Scripted
    eager: int = 0

    def propose(self, tokens, limit):
        places = range(len(tokens), len(tokens) + limit + self.eager)
        return Proposal([self.inner.say(place) % VOCAB for place in places])


def at_once(tokens, prompt=PROMPT):
    return AtOnce(oracle(tokens, prompt))


def too_much(tokens, prompt=PROMPT):
    return AtOnce(mostly_right(tokens, prompt), eager=50)


def n_gram(tokens, prompt=PROMPT):
    return NGramProposer()


DRAFTERS = [oracle, wrong, mostly_right, noise, echo, at_once, too_much, n_gram]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("make", DRAFTERS, ids=lambda make: make.__name__)
def test_no_drafter_changes_a_token(engine, make, sampling):
    tokens, reason = outcome(run(engine, sampling=sampling))
    for length in (1, 3, ROW_BUCKETS[-1] - 1):
        trace = run(engine, drafter=make(tokens), sampling=sampling, draft_length=length)
        assert outcome(trace) == (tokens, reason)
        for record in rounds(trace):
            assert record.emitted[: record.accepted] == record.drafted[: record.accepted]
            assert len(record.drafted) <= length


@pytest.mark.parametrize("length", [1, 2, 4, 10])
def test_an_oracle_needs_the_fewest_rounds(engine, length):
    tokens, _ = outcome(run(engine))
    trace = rounds(run(engine, drafter=oracle(tokens), draft_length=length))
    assert len(trace) == math.ceil((NEW - 1) / (length + 1))
    assert all(record.accepted == len(record.drafted) for record in trace)
    assert all(len(record.emitted) == record.accepted + 1 for record in trace)


def test_a_drafter_that_is_never_right_costs_an_autoregressive_step_a_token(engine):
    tokens, _ = outcome(run(engine))
    trace = rounds(run(engine, drafter=wrong(tokens), draft_length=4))
    assert len(trace) == len(rounds(run(engine))) == NEW - 1
    assert all(record.accepted == 0 and len(record.emitted) == 1 for record in trace)
    # The last token is never worth drafting.
    assert [len(record.drafted) for record in trace] == [4] * (NEW - 5) + [3, 2, 1, 0]


def test_a_drafter_is_told_every_token_at_its_position(engine):
    tokens, _ = outcome(run(engine))
    drafter = mostly_right(tokens)
    run(engine, drafter=drafter, draft_length=4)
    sequence = [*PROMPT, *tokens]
    for (position, token), (_, before) in zip(drafter.consumed[1:], drafter.consumed, strict=False):
        drafted = drafter.say(position) % VOCAB
        assert token in (sequence[position], drafted), (position, token, before)
    pending = [position for position, token in drafter.consumed if token == sequence[position]]
    assert len(PROMPT) in pending


@pytest.mark.parametrize("routes", ["none", "random", "all", "wrong"])
@pytest.mark.parametrize("budget", [3, "cache"])
def test_predicted_routes_change_no_token(engine, routes, budget):
    tokens, _ = outcome(run(engine))
    pairs = engine.residency._pairs
    right = frozenset().union(*(record.required for record in rounds(run(engine))))
    generator = np.random.default_rng(1)
    chosen = {
        "none": frozenset(),
        "all": frozenset(pairs),
        "random": frozenset(pair for pair in pairs if generator.random() < 0.3),
        "wrong": frozenset(pairs) - right,
    }[routes]
    drafter = oracle(tokens)
    drafter.routes = chosen
    control = {"truncate": True, "tau": 1.1, "budget": budget, "draft_length": 4}
    assert outcome(run(engine, drafter=drafter, **control))[0] == tokens


def test_a_drafter_that_says_nothing_finite_is_a_clean_failure(engine):
    class Broken:
        def consume(self, token, *, position, kept=False):
            return DraftStep(logits=np.full(VOCAB, np.nan), routes=frozenset(), used=frozenset())

    with pytest.raises(FailedError, match="at position 21 is nan"):
        run(engine, drafter=Broken())
    assert outcome(run(engine)) == outcome(run(engine, drafter=noise([])))


# Controllers, the governor, and drafts without a model.

CONTROLLERS = [
    {"controller": "cost"},
    {"controller": "random", "keep": 0.5},
    {"budget": "cache", "tau": 1.1},
    {"budget": "off"},
]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("control", CONTROLLERS, ids=lambda control: "-".join(map(str, control)))
def test_no_controller_changes_a_token(engine, control, sampling):
    tokens, reason = outcome(run(engine, sampling=sampling))
    for make in (oracle, wrong, mostly_right, noise):
        options = dict(control, truncate=True, draft_length=4)
        trace = run(engine, drafter=make(tokens), sampling=sampling, **options)
        assert outcome(trace) == (tokens, reason)


def test_cost_measures_a_step_first_and_only_once(engine):
    tokens, _ = outcome(run(engine))
    pace, control = Pace(), {"truncate": True, "controller": "cost", "draft_length": 3}
    first, *others = rounds(run(engine, drafter=oracle(tokens), pace=pace, **control))
    assert first.governed and not first.drafted and not first.draft_passes
    assert not any(record.governed for record in others)
    assert len(others[0].drafted) == 3  # unmeasured: as long as it may be
    again = rounds(run(engine, drafter=oracle(tokens), pace=pace, **control))
    assert not any(record.governed for record in again)


def dear(engine, seconds):
    """Makes every draft pass look so long."""
    pace = Pace()
    pace.timings.round(1, 1.0, plain=True)
    for _ in range(64):
        pace.timings.draft_pass(seconds, waited=0.0)
    return pace


def test_cost_drafts_nothing_that_its_passes_are_too_dear_for(engine):
    tokens, _ = outcome(run(engine))
    control = {"truncate": True, "controller": "cost", "draft_length": 4}
    trace = run(engine, drafter=oracle(tokens), pace=dear(engine, 100.0), **control)
    assert outcome(trace)[0] == tokens
    assert not any(record.drafted for record in rounds(trace)[:4])
    assert all(record.draft_passes == 1 for record in rounds(trace)[:4])  # none looks further
    trace = run(engine, drafter=oracle(tokens), pace=dear(engine, 0.0), **control)
    assert len(rounds(trace)[0].drafted) == 4


def governed_by(config, decisions=None):
    decisions = [] if decisions is None else decisions
    return Pace(governor=Governor(config, on_decision=decisions.append))


@pytest.mark.parametrize("make", [oracle, wrong, noise, n_gram], ids=lambda make: make.__name__)
def test_the_governor_changes_no_token(engine, make):
    tokens, reason = outcome(run(engine, new=30))
    config = GovernorConfig(first_measure=2, measure=1, test=2, set=3, rest=3, credit=1e6)
    decisions: list[Decision] = []
    pace = governed_by(config, decisions)
    trace = run(engine, drafter=make(tokens), new=30, draft_length=3, pace=pace)
    assert outcome(trace) == (tokens, reason)
    plain = [record for record in rounds(trace) if record.governed]
    assert len(plain) >= 2 and all(record.governed for record in rounds(trace)[:2])
    assert not any(record.drafted or record.draft_passes for record in plain)
    if make is not n_gram:
        assert decisions and decisions[0].first


def test_what_the_governor_learned_is_kept_from_prompt_to_prompt(engine):
    tokens, _ = outcome(run(engine))
    pace = governed_by(GovernorConfig(first_measure=3, test=1000, credit=1e6, bank=1e6))
    governed = [
        [record.governed for record in rounds(run(engine, drafter=wrong(tokens), pace=pace))]
        for _ in range(2)
    ]
    assert governed[0][:4] == [True, True, True, False]
    assert not any(governed[1]), "it measures no second time"


def test_nothing_is_governed_where_nothing_drafts(engine):
    pace = governed_by(GovernorConfig())
    assert not any(record.governed for record in run(engine, pace=pace))


def test_n_grams_are_found_in_prompt_and_output(engine):
    prompt = random_prompt(12, seed=8) * 3
    tokens, _ = outcome(run(engine, prompt, new=24))
    trace = rounds(run(engine, prompt, drafter=NGramProposer(), new=24, draft_length=3))
    assert [token for record in trace for token in record.emitted] == tokens[1:]
    drafting = [record for record in trace if record.drafted]
    assert drafting
    sequence = [*prompt, *tokens]
    for record in drafting:
        seen = sequence[: record.committed]
        size = len(record.drafted)
        pieces = {tuple(seen[i : i + size]) for i in range(len(seen))}
        assert record.drafted in pieces, "a draft is a piece of the text so far"
        assert not (record.confidences or record.draft_passes or record.draft_routes)


def test_n_grams_end_at_an_end_token():
    text = [1, 2, 3, 9, 4, 1, 2]
    assert NGramProposer().propose(text, 4).tokens == [3, 9, 4, 1]
    assert NGramProposer(eos_ids=(9,)).propose(text, 4).tokens == [3, 9]
    assert NGramProposer(eos_ids=(9,)).propose(text, 1).tokens == [3]


# Ends.


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("make", [nobody, oracle, mostly_right, noise], ids=lambda m: m.__name__)
@pytest.mark.parametrize("end", [0, 2, 3, 6])
def test_an_end_token_ends_anywhere_in_a_draft(target, engine, make, sampling, end):
    tokens, _ = outcome(run(engine, sampling=sampling))
    end = tokens.index(tokens[end])  # where it comes first
    with Decoder(with_eos(target, tokens[end], VOCAB + 7)) as decoder:
        drafter = make(tokens)
        trace = run(decoder.engine, drafter=drafter, sampling=sampling, draft_length=4)
        assert outcome(trace) == (tokens[: end + 1], "eos")


def test_end_tokens_are_passed_over_on_request(target, engine):
    tokens, _ = outcome(run(engine))
    with Decoder(with_eos(target, tokens[3])) as decoder:
        options = DecodeOptions(max_new_tokens=NEW, stop_at_eos=False)
        assert outcome(tuple(decode(decoder.engine, PROMPT, options))) == (tokens, "length")


def test_a_drafter_that_proposes_the_end_does_not_end_anything(target, engine):
    tokens, _ = outcome(run(engine))
    never = next(token for token in range(VOCAB) if token not in tokens)
    with Decoder(with_eos(target, never)) as decoder:
        for drafter in (Scripted(lambda position: never), oracle(tokens[:4] + [never] * 20)):
            trace = run(decoder.engine, drafter=drafter, draft_length=5)
            assert any(never in record.drafted for record in rounds(trace))
            assert outcome(trace) == (tokens, "length")


@pytest.mark.parametrize(
    "make", [oracle, wrong, mostly_right, too_much], ids=lambda make: make.__name__
)
@pytest.mark.parametrize("room", [0, 1, 2, 5])
def test_the_context_ends_every_mode_at_the_same_token(engine, make, room):
    prompt = random_prompt(CONTEXT - room)
    trace = run(engine, prompt)
    tokens, reason = outcome(trace)
    assert len(tokens) == room and reason == "context"
    trace = run(engine, prompt, drafter=make(tokens, prompt), draft_length=8)
    assert outcome(trace) == (tokens, reason)
    assert all(len(r.drafted) <= max(0, CONTEXT - r.committed - 1) for r in rounds(trace))


@pytest.mark.parametrize("new", [1, 2, 3])
@pytest.mark.parametrize("make", [oracle, wrong], ids=lambda make: make.__name__)
def test_few_new_tokens(engine, new, make):
    tokens, _ = outcome(run(engine))
    trace = run(engine, drafter=make(tokens), new=new, draft_length=8)
    assert outcome(trace) == (tokens[:new], "length")
    assert len(rounds(trace)) <= new - 1


# Options.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"r": 0}, "r is 0"),
        ({"control": ControlConfig(draft_length=33)}, "draft_length"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        DecodeOptions(**options)


def test_a_mode_needs_its_drafter(target, engine):
    assert make_drafter(engine, DecodeOptions(mode="ar")) is None
    with pytest.raises(UsageError, match="r is 4; the target routes to 3 experts"):
        make_drafter(engine, DecodeOptions(mode="top-r", r=4))
    with pytest.raises(UsageError, match="mode draft-expert needs draft experts"):
        make_drafter(engine, DecodeOptions(mode="draft-expert"))
    with Decoder(target, draft=draft_of(target)) as decoder:
        with pytest.raises(UsageError, match="mode top-r takes no draft experts"):
            make_drafter(decoder.engine, DecodeOptions(mode="top-r"))
        assert make_drafter(decoder.engine, DecodeOptions(mode="ar")) is None


# The KV cache.


def slots(engine, count):
    """A copy of the first `count` slots of every layer's cache."""
    return [np.array(leaf)[:count] for leaf in jax.tree.leaves(engine._caches)]


def assert_same(a, b):
    for left, right in zip(a, b, strict=True):
        np.testing.assert_array_equal(left, right)


@dataclass
class Watching:
    """A drafter that looks at the committed slots before and after each of its passes."""

    inner: PathDrafter
    committed: list | None = None
    passes: int = 0

    def consume(self, token, *, position, kept=False):
        engine = self.inner.engine
        if self.committed is None:  # the first pass of a round is over the pending token
            self.committed = slots(engine, position)
        step = self.inner.consume(token, position=position, kept=kept)
        assert_same(self.committed, slots(engine, len(self.committed[0])))
        self.passes += 1
        return step


@pytest.mark.parametrize("truncate", [True, False])
def test_drafting_leaves_the_committed_cache_alone(engine, truncate):
    """And verification too: what is committed is never written again, to the last bit."""
    watching = Watching(PathDrafter(engine, 1))
    before = None
    control = ControlConfig(draft_length=4, truncate=truncate, budget=1)
    options = DecodeOptions(max_new_tokens=24, control=control)
    for record in decode(engine, PROMPT, options, drafter=watching):
        if before is not None:
            assert_same(before, slots(engine, len(before[0])))
            assert watching.committed is None or len(watching.committed[0]) == len(before[0])
        committed = record.committed + len(record.emitted)
        before = slots(engine, committed - 1)  # the pending token's slot is not written yet
        watching.committed = None
    assert watching.passes > 20


@pytest.mark.parametrize("mode", ["top-r", "draft-expert"])
def test_the_cache_at_the_end_is_that_of_autoregressive_decoding(target, mode):
    """Bit for bit over the prompt, which the same passes wrote. After it to 1e-12: a product of
    several rows may add in another order than that of one, and float64 leaves some 1e-14 of that.
    """
    control = ControlConfig(draft_length=4, truncate=False)
    with Decoder(target, draft=draft_of(target) if mode == "draft-expert" else None) as decoder:
        ends = []
        for each in ("ar", mode):
            options = DecodeOptions(mode=each, max_new_tokens=30, control=control)
            drafter = make_drafter(decoder.engine, options)
            trace = tuple(decode(decoder.engine, PROMPT, options, drafter=drafter))
            # Both have written every token but the last one emitted.
            ends.append((outcome(trace), slots(decoder.engine, len(PROMPT) + 29)))
    assert 0 < sum(record.accepted for record in trace) < sum(len(r.drafted) for r in trace)
    assert ends[0][0] == ends[1][0]
    for left, right in zip(ends[0][1], ends[1][1], strict=True):
        np.testing.assert_array_equal(left[: len(PROMPT)], right[: len(PROMPT)])
        np.testing.assert_allclose(left, right, rtol=0, atol=1e-12)

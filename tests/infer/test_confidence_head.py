"""Decoding by a confidence head: the tokens stay, all engines ask the same, training sees the same.

In float64. What the head says is at random here: what must not matter.
"""

from dataclasses import replace

import jax
import numpy as np
import pytest

from dejax.errors import UsageError
from dejax.spec.confidence import law_features
from dejax.spec.control import ControlConfig
from dejax.spec.governor import Governor
from dejax.spec.sampling import SamplingConfig
from dejax.spec.tree_options import parse_tree
from infer.decode import decode, make_drafter
from infer.decode_options import DecodeOptions
from infer.decoder import Decoder, Offload
from infer.decoding_arguments import DecodingArguments
from infer.drafters import PathDrafter
from infer.generate import generate
from infer.timing import Pace
from tests.infer.head_cases import headed
from tests.infer.random_target import draft_of, random_prompt, random_target
from tests.infer.test_engine import compilations
from train.confidence_fit import estimates
from train.draft_outcomes import draft_outcomes
from train.teacher import as_teacher

GREEDY, SEEDED = SamplingConfig(), SamplingConfig(temperature=0.8, seed=5)
PROMPT = random_prompt(9)
RULES = {
    "tau": ControlConfig(draft_length=5, tau=0.5, budget="off"),
    "consumer": ControlConfig(draft_length=5, tau=0.6, budget=2),
    "producer": ControlConfig(draft_length=5, tau=0.6, budget=2, controller="producer"),
    "cost": ControlConfig(draft_length=5, controller="cost"),
}


pytestmark = pytest.mark.usefixtures("x64")


def options(sampling=GREEDY, **changed):
    given = dict(mode="draft-expert", max_new_tokens=20, sampling=sampling, stop_at_eos=False)
    return DecodeOptions(**(given | changed))


def tokens_of(trace):
    return [token for record in trace for token in record.emitted]


def run(decoder, how):
    """As `Decoder.run`, which would compile all sizes of which few are needed."""
    pace = Pace(governor=Governor() if how.governor else None)
    drafter = make_drafter(decoder.engine, how)
    return tuple(decode(decoder.engine, PROMPT, how, drafter=drafter, pace=pace))


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_no_word_of_a_head_changes_a_token(target, sampling):
    # Target passes of one shape: compiling takes most of the time.
    with Decoder(target, draft=headed(target), strict_rows=9) as decoder:
        reference = tokens_of(run(decoder, options(sampling, mode="ar")))
        lengths = {}
        for confidence in ("head", "probability"):
            for name, control in RULES.items():
                how = options(sampling, control=control, confidence=confidence)
                trace = run(decoder, how)
                assert tokens_of(trace) == reference, (name, confidence)
                lengths[name, confidence] = [len(record.drafted) for record in trace]
            for mode, tree in (("draft-expert", "best8"), ("ecospec", "2x3:4")):
                way = dict(mode=mode, tree=parse_tree(tree), confidence=confidence)
                trace = run(decoder, options(sampling, **way))
                assert tokens_of(trace) == reference, (mode, confidence)
                lengths[mode, confidence] = [record.parents for record in trace]
        for name in ("tau", "draft-expert", "ecospec"):  # or its word would not have counted
            counts = name == "tau" or sampling is GREEDY  # sampled trees do without
            assert (lengths[name, "head"] != lengths[name, "probability"]) == counts, name


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["bare", "groups"])
def test_nor_does_it_where_drafting_is_governed(shape):
    target = random_target(shape)
    draft = headed(target, seed=1)
    common = dict(max_new_tokens=24, temperature=0.8, seed=2)
    (expected,) = generate(target, [PROMPT], **common)
    for control in RULES.values():
        (found,) = generate(
            target, [PROMPT], draft=draft, mode="draft-expert", control=control, **common
        )
        assert found.tokens == expected.tokens


def without_times(trace):
    names = ("committed", "drafted", "parents", "confidences", "draft_routes", "emitted")
    return [[getattr(record, name) for name in names] for record in trace]


@pytest.mark.parametrize("tree", ["chain", pytest.param("best8", marks=pytest.mark.slow)])
def test_without_a_head_or_unasked_drafts_are_as_ever(target, tree):
    """Bit by bit: the confidences of a draft are those of its probabilities."""
    how = options(SEEDED, tree=parse_tree(tree), control=RULES["tau"])
    traces = []
    for draft, confidence in (
        (draft_of(target), "head"),
        (draft_of(target), "probability"),
        (headed(target), "probability"),
    ):
        with Decoder(target, draft=draft) as decoder:
            traces.append(without_times(run(decoder, replace(how, confidence=confidence))))
    assert traces[0] == traces[1] == traces[2]
    with Decoder(target, draft=headed(target)) as decoder:
        asked = without_times(run(decoder, how))
    # A sampled tree goes by its own probabilities, head or none.
    assert (asked == traces[0]) == (tree != "chain")


def confidences(target, engine, cache, how):
    """What drafts of a decode were sure of; `cache` is in experts, None all."""
    size = 8 * int(np.prod(target.config.expert_shape))
    offload = Offload(None if cache is None else cache * size, engine=engine)
    with Decoder(target, draft=headed(target), offload=offload) as decoder:
        with jax.transfer_guard("disallow"):
            trace = run(decoder, how)
    return [record.confidences for record in trace]


@pytest.mark.parametrize("tree", ["chain", pytest.param("2x2", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "engine, cache",
    [("host", 5), ("resident", None), pytest.param("callback", 0, marks=pytest.mark.slow)],
)
def test_all_engines_and_caches_ask_the_same(target, engine, cache, tree):
    control = ControlConfig(draft_length=2, truncate=False)
    sampling = SEEDED if tree == "chain" else GREEDY
    how = options(sampling, control=control, tree=parse_tree(tree), max_new_tokens=8)
    expected = confidences(target, "host", 0, how)
    found = confidences(target, engine, cache, how)
    assert sum(map(len, expected)) > 4
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_training_sees_what_the_decode_loop_asks(target, sampling):
    """The passes over whole texts, and the rounds: the same estimate of every token reached."""
    draft, length = headed(target), 3
    control = ControlConfig(draft_length=length, truncate=False)
    with Decoder(target, draft=draft) as decoder:
        trace = run(decoder, options(sampling, control=control, max_new_tokens=24))
    answer = tokens_of(trace)
    teacher, embedding = as_teacher(target), np.asarray(target.model.embedding[...])
    outcomes = draft_outcomes(
        teacher,
        draft.stacked_params(),
        [(PROMPT, answer)],
        draft_length=length,
        temperature=sampling.temperature,
    )
    regime = int(sampling.temperature > 0)
    expected = estimates(draft.head, regime, outcomes, embedding)
    # A draft is known by its place: passes are made by offset.
    begins = len(PROMPT) + np.arange(len(answer) - 1)
    order = sorted(begins, key=lambda begin: (begin % length, begin))
    place = {begin: row for row, begin in enumerate(order)}
    compared = accepted = 0
    for record in trace[1:]:
        row = place.get(record.committed - 1)
        for at, confidence in enumerate(record.confidences[: record.accepted + 1]):
            if row is not None and outcomes.inside[row, at]:
                assert confidence == pytest.approx(expected[row, at], abs=1e-9)
                if sampling is GREEDY:
                    assert outcomes.accepted[row, at] == float(at < record.accepted)
                compared, accepted = compared + 1, accepted + (at < record.accepted)
    assert compared > 12 and 0 < accepted < compared


class Forced:
    """A drafter that has the second token of every draft replaced."""

    def __init__(self, drafter, second):
        self.drafter, self.second, self.begun = drafter, second, False

    def consume(self, token, *, position, kept=False):
        token = self.second if self.begun else token
        self.begun = not self.begun
        return self.drafter.consume(token, position=position, kept=kept)


def test_the_estimate_of_a_token_is_the_same_whatever_that_token_is(target):
    """With another v_1 consumed, c_1 is as it was; c_2, which may know v_1, is not."""
    control = ControlConfig(draft_length=2, truncate=False)
    how = options(control=control, max_new_tokens=4)
    found = []
    for second in (3, 17, 40):
        with Decoder(target, draft=headed(target)) as decoder:
            drafter = Forced(PathDrafter(decoder.engine, 1), second)
            given = dict(drafter=drafter, pace=Pace())
            first = list(decode(decoder.engine, PROMPT, how, **given))[1]
            found.append(first.confidences)
    firsts, seconds = zip(*found, strict=True)
    assert len(set(firsts)) == 1 and len(set(seconds)) == 3


def test_features_are_those_that_training_computes():
    from train.draft_outcomes import law_features_on_device

    logits = np.random.default_rng(0).normal(size=(6, 40)) * 5
    logits[1, 3] = 200.0
    law = logits - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
    law -= logits.max(1, keepdims=True)
    found = law_features_on_device(jax.numpy.asarray(law))
    expected = [law_features(row, GREEDY) for row in logits]
    np.testing.assert_allclose(found, expected, atol=1e-9)


def test_the_option_is_for_modes_that_have_a_draft():
    plain = DecodingArguments(confidence="probability")
    plain.check_mode("draft-expert", drafts=True)
    assert plain.options("ecospec").confidence == plain.given()["confidence"] == "probability"
    assert DecodingArguments().options("ecospec").confidence == "head"
    with pytest.raises(UsageError, match="--confidence is for --mode draft-expert or ecospec"):
        plain.check_mode("top-r", drafts=False)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["host", "resident"])
def test_after_warm_up_a_head_compiles_nothing(engine):
    """Of dimensions that no other test uses, so that nothing has been compiled before."""
    config = replace(random_target("bare").config, width=24, vocab_size=44)
    target = random_target(config)
    with Decoder(
        target, draft=headed(target), offload=Offload(None, engine=engine), capacity=40
    ) as decoder:
        for tree in ("chain", "2x2"):
            control = ControlConfig(draft_length=2, truncate=False)
            how = options(control=control, tree=parse_tree(tree), max_new_tokens=8)
            with compilations() as compiled:
                decoder.warm_up(how)
            assert compiled
            with compilations() as compiled:
                decoder.run(random_prompt(5, vocab=44), how)
            assert compiled == [], tree

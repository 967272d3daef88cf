"""The head's estimate on the host: its formula, its blindness to the drafted value, its shares."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dejax.spec.confidence import LEAST, ByHead, ByProbability, Readout, law_features
from dejax.spec.rules import make_rule
from dejax.spec.sampling import SamplingConfig

GREEDY, SAMPLED = SamplingConfig(), SamplingConfig(temperature=0.7, seed=3)
READOUT = Readout(np.array([0.5, 1.0, -0.25]), np.array([0.1, -0.2]), np.array([1.0, 2.0]))
LOGITS = np.log([0.5, 0.25, 0.125, 0.125])
SCORES = np.array([0.3, -0.9])


def sure(sampling, rule="match", *, sample=0, vocab=4):
    chooser = make_rule(rule, sampling, sample=sample, vocab_size=vocab).draft
    return ByHead(chooser, sampling, READOUT)


def test_features_of_a_law_by_hand():
    top, margin, entropy = law_features(LOGITS, GREEDY)
    assert (top, margin) == pytest.approx((math.log(0.5), math.log(2)))
    assert entropy == pytest.approx(1.75 * math.log(2))
    # A temperature of one half squares probabilities: 16, 4, 1, 1 of 22.
    top, margin, entropy = law_features(LOGITS, SamplingConfig(temperature=0.5))
    law = np.array([16, 4, 1, 1]) / 22
    assert (top, margin) == pytest.approx((math.log(16 / 22), math.log(4)))
    assert entropy == pytest.approx(-(law * np.log(law)).sum())


def test_a_law_of_one_token_has_the_largest_margin():
    only = law_features(LOGITS, SamplingConfig(temperature=1.0, top_k=1))
    np.testing.assert_array_equal(only, [0.0, -LEAST, 0.0])
    certain = law_features(np.array([0.0, -1e4, -np.inf]), GREEDY)
    np.testing.assert_allclose(certain, [0.0, -LEAST, 0.0], atol=1e-12)


def test_the_estimate_by_hand():
    features = law_features(LOGITS, GREEDY)
    whole = 0.3 + 0.5 * math.log(0.5) + math.log(2) - 0.25 * 1.75 * math.log(2)
    at_first, later = 1 / (1 + math.exp(-(whole + 0.1))), 1 / (1 + math.exp(-(whole - 0.2) / 2))
    found = [sure(GREEDY).of_chain(LOGITS, SCORES, depth=depth) for depth in (1, 2, 9)]
    assert found == pytest.approx([at_first, later, later])
    assert READOUT(0.3, features, 1) == found[0]


def test_each_way_of_choosing_has_a_score_of_its_own():
    features = law_features(LOGITS, SAMPLED)
    assert sure(SAMPLED).of_chain(LOGITS, SCORES, depth=1) == READOUT(-0.9, features, 1)


@pytest.mark.parametrize("rule", ["match", "R1", "R2", "R3"])
def test_the_estimate_does_not_know_the_drafted_token(rule):
    """Other noise has other tokens drafted; the estimate is the same, and no chance is spent."""
    values, tokens = set(), set()
    for sample in range(40):
        asked = sure(SAMPLED, rule, sample=sample)
        unasked = sure(SAMPLED, rule, sample=sample)
        values.add(asked.of_chain(LOGITS, SCORES, depth=1))
        token = asked.chooser.pick(LOGITS, position=5)
        assert token == unasked.chooser.pick(LOGITS, position=5)
        values.add(asked.of_chain(LOGITS, SCORES, depth=1))
        tokens.add(token)
    assert len(values) == 1 and len(tokens) > 1


@settings(max_examples=60)
@given(
    logits=st.lists(st.floats(-30, 30), min_size=2, max_size=8),
    score=st.floats(-30, 30),
    count=st.integers(1, 8),
)
def test_children_share_what_the_first_one_leaves(logits, score, count):
    logits, scores = np.array(logits), np.array([score, np.nan])
    asked = sure(GREEDY, vocab=len(logits))
    place = dict(position=4, depth=2, count=count)
    children = asked.of_children(logits, scores, **place)
    plain = ByProbability(asked.chooser).of_children(logits, None, **place)
    assert [token for token, _ in children] == [token for token, _ in plain]
    owns = [own for _, own in children]
    assert owns[0] == asked.of_chain(logits, scores, depth=2)
    assert all(0 <= own <= 1 for own in owns) and sum(owns) <= 1 + 1e-6
    assert owns == sorted(owns, reverse=True)


def test_sampled_trees_keep_the_probabilities_that_know_the_noise():
    asked, place = sure(SAMPLED), dict(position=4, depth=1, count=3)
    children = asked.of_children(LOGITS, SCORES, **place)
    assert children == asked.chooser.children(LOGITS, position=4, count=3)


def test_without_scores_the_probability_counts():
    place = dict(position=4, depth=1, count=3)
    plain = ByProbability(sure(GREEDY).chooser)
    assert sure(GREEDY).of_chain(LOGITS, None, depth=1) == plain.of_chain(LOGITS, None, depth=1)
    assert sure(GREEDY).of_children(LOGITS, None, **place) == plain.of_children(
        LOGITS, None, **place
    )
    assert plain.of_chain(LOGITS, SCORES, depth=1) == pytest.approx(0.5)

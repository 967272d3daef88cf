"""Judging a divergence: near-ties are told from real ones, and a lost token is never excused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax.spec.sampling import SamplingConfig
from infer.divergence import NEAR_TIE, first_difference, in_float64, judge, next_logits
from tests.infer.random_target import random_target

PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def target():
    return random_target("shared", dtype=jnp.float32)


@pytest.fixture(scope="module")
def ranked(target):
    """Token ids after the prompt, the likeliest first."""
    return np.argsort(-next_logits(target, PROMPT)).tolist()


def test_first_difference():
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([], [4]) == 0


def test_equal_tokens_are_no_divergence(target):
    assert judge(target, PROMPT, [1, 2], [1, 2], SamplingConfig(), id="a") is None


@pytest.mark.slow
def test_another_token_is_real(target, ranked):
    found = judge(target, PROMPT, ranked[:1], ranked[5:6], SamplingConfig(), id="a")
    assert found is not None and found.float64_verdict == "real" and found.margin > NEAR_TIE
    assert (found.id, found.index, found.reference, found.emitted) == ("a", 0, ranked[0], ranked[5])


def test_a_tie_is_near(target, ranked):
    # Two tokens with the same output row have the same logit: no arithmetic can prefer one.
    head = target.model.head[...]
    model = jax.tree.map(lambda a: a, target.model)
    model.head[...] = head.at[ranked[1]].set(head[ranked[0]])
    tied = dataclasses.replace(target, model=model)
    found = judge(tied, PROMPT, ranked[:1], ranked[1:2], SamplingConfig(), id="a")
    assert found is not None and found.float64_verdict == "near-tie" and found.margin == 0.0


def test_two_tokens_that_tie_far_below_the_best_are_real(target, ranked):
    head = target.model.head[...]
    model = jax.tree.map(lambda a: a, target.model)
    model.head[...] = head.at[ranked[-1]].set(head[ranked[-2]])
    tied = dataclasses.replace(target, model=model)
    found = judge(tied, PROMPT, ranked[-1:], ranked[-2:-1], SamplingConfig(), id="a")
    assert found is not None and found.float64_verdict == "real"


def test_a_missing_token_is_real(target, ranked):
    found = judge(target, PROMPT, ranked[:2], ranked[:1], SamplingConfig(), id="a")
    assert found is not None and found.index == 1 and found.float64_verdict == "real"


def test_seeded_choices_are_judged_with_their_noise(target):
    sampling = SamplingConfig(temperature=1.0, seed=4)
    logits = next_logits(target, PROMPT)
    from dejax.spec.sampling import TokenPicker

    picker = TokenPicker(sampling, sample=0, vocab_size=len(logits))
    chosen = picker.pick(logits, position=len(PROMPT))
    other = int(np.argsort(-picker.scores(logits, position=len(PROMPT)))[7])
    assert judge(target, PROMPT, [chosen], [other], sampling, id="a").float64_verdict == "real"


def test_widening_keeps_every_weight(target):
    with jax.enable_x64(True):
        wide = in_float64(target)
        assert wide.model.embedding[...].dtype == jnp.float64
        same = np.asarray(wide.model.embedding[...], np.float32)
        logits = next_logits(wide, PROMPT)
    assert np.array_equal(same, np.asarray(target.model.embedding[...]))
    assert logits.dtype == np.float64
    assert np.allclose(logits, next_logits(target, PROMPT), atol=1e-3)

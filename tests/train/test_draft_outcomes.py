"""Outcomes under seeded sampling: the chance that draft and target choose alike."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.infer.random_target import draft_of, random_prompt, random_target
from train.draft_outcomes import draft_outcomes, match_given
from train.teacher import as_teacher


def laws(seed, vocab=6):
    rng = np.random.default_rng(seed)
    logits = 1.5 * rng.normal(size=(2, vocab))
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def matches(p, q):
    """`match_given` of every token."""
    tiled = [jnp.tile(jnp.asarray(law), (len(p), 1)) for law in (p, q)]
    return np.asarray(match_given(*tiled, jnp.arange(len(p))))


def test_the_chance_of_a_match_is_that_of_the_noise():
    p, q = laws(0)
    noise = np.random.default_rng(1).gumbel(size=(200_000, len(p)))
    target, draft = (p + noise).argmax(1), (q + noise).argmax(1)
    found = matches(p, q)
    for token in range(len(p)):
        at = target == token
        assert found[token] == pytest.approx(np.mean(draft[at] == token), abs=0.02)
    assert np.exp(p) @ found == pytest.approx(np.mean(target == draft), abs=0.005)


def test_equal_laws_always_match_and_distance_bounds_the_chance():
    for seed in range(20):
        p, q = laws(seed)
        np.testing.assert_allclose(matches(p, p), 1, rtol=1e-5)
        chance = np.exp(p) @ matches(p, q)
        distance = np.abs(np.exp(p) - np.exp(q)).sum() / 2
        assert (1 - distance) / (1 + distance) - 1e-6 <= chance <= 1 - distance + 1e-6


@pytest.mark.slow
def test_few_passes_have_some_of_the_drafts():
    with jax.enable_x64(True):
        target = random_target("shared")
        teacher, draft = as_teacher(target), draft_of(target).stacked_params()
        texts = [(random_prompt(5), random_prompt(13, seed=1)), (random_prompt(9), [4, 8, 2])]
        every = draft_outcomes(teacher, draft, texts, draft_length=4)
        some = draft_outcomes(teacher, draft, texts, draft_length=4, passes=2)
    assert len(every.tokens) == 12 + 2 and len(some.tokens) == 6 + 1
    rows = {row.tobytes(): place for place, row in enumerate(every.hidden)}
    for place, row in enumerate(some.hidden):
        other = rows[row.tobytes()]
        np.testing.assert_array_equal(some.accepted[place], every.accepted[other])
        assert some.prompts[place] == every.prompts[other]
    assert every.inside.sum() == sum(min(4, left) for left in [*range(1, 13), 1, 2])

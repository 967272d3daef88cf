"""Rounds simulated from whole sequences are those of the decode loop."""

import dataclasses

import jax
import numpy as np
import pytest

from dejax.ckpt.draft_state import load_draft, save_draft
from dejax.spec.control import ControlConfig
from infer import buckets
from infer.generate import generate
from infer.report import stats
from tests.infer.random_target import CONTEXT, SHAPES, draft_of, random_prompt, random_target
from train.simulate import simulate, simulated_metrics, write_greedily
from train.teacher import as_teacher

PROMPTS = [random_prompt(length, seed=length) for length in (9, 3, 14, 6)]


@pytest.fixture(autouse=True)
def one_capacity(monkeypatch):
    """That of other tests of these targets, which have it compiled."""
    monkeypatch.setattr(buckets, "CAPACITY_STEP", CONTEXT)


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def decoded(target, draft, *, draft_length, new_tokens):
    """The rounds of the decode loop, prompt by prompt, and the tokens."""
    generations = generate(
        target,
        PROMPTS,
        draft=draft,
        mode="top-r" if draft is None else "draft-expert",
        max_new_tokens=new_tokens,
        governor=False,
        control=ControlConfig(draft_length=draft_length, truncate=False),
    )
    rounds = [[r for r in g.trace if r.kind == "round"] for g in generations]
    return rounds, [g.tokens for g in generations]


def counted(rounds):
    """What both know of each round."""
    return [[(r.committed, r.accepted, r.emitted, r.finish_reason) for r in p] for p in rounds]


@pytest.mark.slow
@pytest.mark.parametrize("draft_length", [3, 1])
def test_rounds_are_those_of_the_decode_loop(draft_length):
    target = random_target("shared")  # with end tokens that it does write
    draft = draft_of(target)
    teacher = as_teacher(target)
    text = write_greedily(teacher, PROMPTS, max_new_tokens=24)
    rounds, tokens = decoded(target, draft, draft_length=draft_length, new_tokens=24)
    for row, prompt in enumerate(PROMPTS):
        assert text.tokens[row, : text.lengths[row]].tolist() == prompt + tokens[row]
    found = simulate(teacher, draft.stacked_params(), text, draft_length=draft_length)
    assert counted(found) == counted(rounds)
    accepted = [round_.accepted for prompt in found for round_ in prompt]
    assert 0 < np.mean(accepted) < draft_length  # or the comparison would say nothing
    metrics = simulated_metrics([round_ for prompt in found for round_ in prompt])
    expected = stats([round_ for prompt in rounds for round_ in prompt])
    alphas = [metrics[f"simulated_alpha_{i}"] for i in range(1, draft_length + 1)]
    assert metrics["simulated_tokens_per_round"] == expected["tokens_per_round"]
    assert alphas == expected["alpha_pos"]


@pytest.mark.slow
@pytest.mark.parametrize("name, context", [("bare", 320), ("groups", 320), ("groups", 22)])
def test_other_shapes_and_the_end_of_the_context(name, context):
    target = random_target(dataclasses.replace(SHAPES[name], context=context))
    teacher = as_teacher(target)
    text = write_greedily(teacher, PROMPTS, max_new_tokens=12)
    rounds, _ = decoded(target, None, draft_length=3, new_tokens=12)
    assert counted(simulate(teacher, None, text, draft_length=3)) == counted(rounds)


@pytest.mark.slow
def test_a_saved_draft_loaded_afresh_has_the_rounds_that_training_saw(tmp_path):
    target = random_target("shared")
    draft = draft_of(target)
    teacher = as_teacher(target)
    text = write_greedily(teacher, PROMPTS, max_new_tokens=24)
    found = simulate(teacher, draft.stacked_params(), text, draft_length=4)
    save_draft(tmp_path / "draft", draft, target.config)
    rounds, _ = decoded(target, load_draft(tmp_path / "draft"), draft_length=4, new_tokens=24)
    assert counted(found) == counted(rounds)


@pytest.mark.slow
def test_nothing_is_simulated_of_an_answer_of_one_token():
    target = random_target("shared")
    teacher = as_teacher(target)
    text = write_greedily(teacher, PROMPTS[:2], max_new_tokens=1)
    assert simulate(teacher, None, text, draft_length=2) == [[], []]
    assert simulated_metrics([]) == {}

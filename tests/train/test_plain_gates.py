"""Distilling a draft path with plain gates, which is an ordinary model with fewer experts."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from dejax.config import DraftConfig
from dejax.draft.expert import random_draft
from dejax.errors import UsageError
from dejax.model import logits_of
from dejax.target import load_target
from tests.families.random_folder import raw_config, write_folder
from tests.infer.draft_path import draft_path
from tests.train.rows import random_batch
from tests.train.test_distill_families import CONFIG
from train.distill import distill, draft_config
from train.distill_step import paired_forward
from train.evaluate import all_arms
from train.teacher import as_teacher, drafting

PLAIN = DraftConfig(width=8, gates="plain")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    raw = raw_config("v3", num_hidden_layers=2)
    return load_target(write_folder(tmp_path_factory.mktemp("plain") / "m", raw))


@pytest.mark.slow
def test_training_sees_the_draft_path_that_is_decoded(target):
    draft = random_draft(target.config, PLAIN, seed=1, identity=target.identity)
    batch = random_batch(target.config, rows=2, length=16, documents=1)
    teacher = drafting(as_teacher(target), PLAIN)
    with jax.set_mesh(teacher.mesh):
        outer, full, drafted, _ = jax.jit(
            lambda params, d: paired_forward(teacher.definition, params, d, batch, r=1)
        )(teacher.params, draft.stacked_params())
    tokens = np.asarray(batch["tokens"])
    logits, _ = draft_path(target, draft, tokens)
    np.testing.assert_allclose(logits_of(outer, drafted), logits, atol=2e-4)
    np.testing.assert_allclose(logits_of(outer, full), target(tokens), atol=2e-4)
    other, _ = draft_path(target, replace(draft, config=DraftConfig(width=8)), tokens)
    assert np.abs(other - logits).max() > 0.01


@pytest.mark.slow
def test_the_loss_falls_and_the_draft_says_so(target):
    batch = random_batch(target.config, rows=2, length=32)
    config = replace(CONFIG, draft=PLAIN)
    draft, log = distill(target, lambda step, rows: batch, config)
    losses = [row["loss"] for row in log]
    assert np.isfinite(losses).all() and losses[-1] < 0.98 * losses[0]
    assert draft.plain and draft.config == PLAIN
    # What is evaluated is the draft path with these gates.
    whole = random_batch(target.config, rows=2, length=32, documents=1)
    tokens = np.asarray(whole["tokens"])
    p, q = (jax.nn.log_softmax(x) for x in (target(tokens), draft_path(target, draft, tokens)[0]))
    kl = float((np.exp(p) * (p - q)).sum(-1).mean())
    assert all_arms(target, draft, [whole], [whole])["draft"]["kl"] == pytest.approx(kl, rel=1e-3)


def test_other_families_are_refused(target):
    greedy = replace(target.config, experts=replace(target.config.moe, scoring="softmax"))
    with pytest.raises(UsageError, match="draft.gates is plain"):
        draft_config(replace(CONFIG, draft=PLAIN), greedy)
    with pytest.raises(UsageError, match="one routed expert or more"):
        draft_config(replace(CONFIG, draft=replace(PLAIN, top_r=0)), target.config)

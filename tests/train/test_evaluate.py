"""Evaluation: totals over batches, arms, and the program with its tables and its JSON."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from dejax.errors import UsageError
from tests.infer.random_target import draft_of, random_target
from tests.train.rows import random_batch
from tests.train.small_model import write_documents, write_model
from train import evaluate as program
from train.evaluate import all_arms, teacher_forced
from train.teacher import as_teacher


@pytest.fixture(scope="module")
def teacher():
    return as_teacher(random_target("shared", dtype=jnp.float32))


@pytest.fixture(scope="module")
def batches(teacher):
    return [random_batch(teacher.config, rows=2, length=20, seed=seed) for seed in range(3)]


@pytest.mark.slow
def test_batches_are_weighted_by_what_they_count(teacher, batches):
    empty = batches[0] | {key: jnp.zeros_like(batches[0][key]) for key in ("mask", "segment_ids")}
    parts = [teacher_forced(teacher, None, [batch]) for batch in batches]
    whole = teacher_forced(teacher, None, [*batches, empty])
    counts = np.array([part["tokens"] for part in parts])
    assert whole["tokens"] == counts.sum()
    for name in ("kl", "agreement", "router_agreement", "router_top1", "loss_full", "loss_draft"):
        values = np.array([part[name] for part in parts])
        np.testing.assert_allclose(whole[name], (values * counts).sum() / counts.sum(), rtol=1e-5)
    assert 0 < whole["prefetch_recall"] < 1 and 0 < whole["prefetch_precision"] < 1


@pytest.mark.slow
def test_more_experts_kept_are_nearer_to_the_target(teacher, batches):
    kl = [teacher_forced(teacher, None, batches, r=r)["kl"] for r in (0, 1, 3)]
    assert kl[0] > kl[1] > kl[2] and abs(kl[2]) < 1e-6


@pytest.mark.slow
def test_every_arm_is_told_by_name(teacher, batches):
    draft = draft_of(random_target("shared", dtype=jnp.float32))
    arms = all_arms(teacher, draft, batches[:1], batches[1:])
    names = ["shared only", "top-1", "top-2", "top-3", "top-1 + mean", "draft"]
    assert list(arms) == names
    assert arms["top-3"]["agreement"] == 1
    assert arms["top-1"]["residual"] == pytest.approx(1, rel=1e-6)
    assert abs(arms["top-1 + mean"]["residual"] - 1) > 1e-4
    assert list(all_arms(teacher, None, batches[:1], batches[1:])) == names[:-1]


def test_nothing_to_evaluate_on_is_refused(teacher):
    with pytest.raises(UsageError, match="no rows to evaluate on"):
        teacher_forced(teacher, None, [])


@pytest.mark.slow
def test_the_program(tmp_path, capsys):
    model = write_model(tmp_path / "model")
    documents = write_documents(tmp_path / "documents.jsonl")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "a", "prompt": "the draft"}\n{"id": "b", "prompt": "path"}')
    argv = [str(model), "--draft", "init:1", "--data", str(documents), "--seq-len", "32"]
    argv += ["--prompts", str(prompts), "--max-new-tokens", "6", "--json", str(tmp_path / "r")]
    assert program.main(argv) == 0
    result = json.loads((tmp_path / "r").read_text())
    assert set(result) == {"target", "teacher_forced", "in_loop"}
    assert result["teacher_forced"]["draft"]["tokens"] > 100
    loop = result["in_loop"]
    assert loop["accepted"] <= loop["drafted"] and 2 <= loop["emitted"] <= 12
    shown = capsys.readouterr().out
    assert "teacher-forced" in shown and "in the loop" in shown and "top-1 + mean" in shown
    draft = result["teacher_forced"]["draft"]
    for share in (draft["agreement"], draft["prefetch_recall"], loop["acceptance_rate"]):
        assert 0 <= share <= 1 and f" {100 * share:.1f} %" in shown


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    model = write_model(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()
    with pytest.raises(UsageError, match="no tokenizer, and the data is text"):
        program.main([str(model), "--draft", "init"])

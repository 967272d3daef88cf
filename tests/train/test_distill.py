"""Distillation from end to end: what changes, what does not, stopping and going on, the program."""

import contextlib
import hashlib
import json
import shutil
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax import cli
from dejax.ckpt.draft_state import load_draft
from dejax.config import DraftConfig
from dejax.errors import FailedError, UsageError
from tests.infer.random_target import random_target
from tests.train.rows import random_batch
from tests.train.small_model import write_documents, write_model
from train import distill as program
from train.checkpoints import checkpointer
from train.closed_form import InitConfig
from train.distill import DistillConfig, distill, draft_config, initial_draft
from train.evaluate import teacher_forced
from train.loop import LoopConfig
from train.optimizer import OptimizerConfig
from train.teacher import as_teacher

CONFIG = DistillConfig(
    draft=DraftConfig(width=8),
    init=InitConfig(fit="zero", tokens=64),
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2, decay_steps=4),
    loop=LoopConfig(steps=8, log_every=1, save_every=4),
    seq_len=16,
    batch_size=4,
)


@pytest.fixture(scope="module")
def target():
    return random_target("shared", dtype=jnp.float32)


@pytest.fixture(scope="module")
def batch_at(target):
    return lambda step, rows=None: random_batch(target.config, rows=4, length=16, seed=step % 4)


def bytes_of(target) -> str:
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves((target.model, target.routed)):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


def same(one, other) -> bool:
    pairs = zip(*(jax.tree.leaves(d.stacked_params()) for d in (one, other)), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


@pytest.fixture(scope="module")
def straight(target, batch_at, tmp_path_factory):
    """A whole run with checkpoints: folder, draft, log, and the target's bytes before and after."""
    workdir = tmp_path_factory.mktemp("straight")
    before = bytes_of(target)
    draft, log = distill(target, batch_at, CONFIG, workdir=workdir)
    return workdir, draft, log, (before, bytes_of(target))


@pytest.mark.slow
def test_the_draft_gets_nearer_and_the_target_stays(straight, target, batch_at):
    _, draft, log, (before, after) = straight
    assert before == after
    assert [row["step"] for row in log] == list(range(1, 9))
    assert log[-1]["loss"] < log[0]["loss"]
    batches = [batch_at(step) for step in range(4)]
    trained, alone = (
        teacher_forced(target, params, batches) for params in (draft.stacked_params(), None)
    )
    assert trained["kl"] < alone["kl"] and trained["residual"] < 1
    assert draft.identity == target.identity
    assert draft.training["losses"]["router"] == 0.1 and draft.training["steps"] == 8


def test_checkpoints_hold_what_is_trained_and_nothing_else(straight):
    workdir, draft, _, _ = straight
    with contextlib.closing(checkpointer(workdir, 2)) as saver:
        state = saver.load()
    trained = sorted(np.shape(leaf) for leaf in jax.tree.leaves(draft.stacked_params()))
    assert sorted(np.shape(leaf) for leaf in jax.tree.leaves(state["draft"])) == trained
    arrays = [leaf for leaf in jax.tree.leaves(state["opt_state"]) if np.size(leaf) > 1]
    assert sorted(np.shape(leaf) for leaf in arrays) == sorted(2 * trained)  # two moments each


@pytest.mark.slow
def test_stopped_and_resumed_equals_straight(straight, target, batch_at, tmp_path):
    _, whole, log, _ = straight

    class Stop(Exception):
        pass

    def stops(step, rows):
        if step == 6:
            raise Stop
        return batch_at(step)

    with pytest.raises(Stop):
        distill(target, stops, CONFIG, workdir=tmp_path)
    draft, rest = distill(target, batch_at, CONFIG, workdir=tmp_path)
    assert [row["step"] for row in rest] == [5, 6, 7, 8]
    assert [row["loss"] for row in rest] == [row["loss"] for row in log[4:]]
    assert same(draft, whole)
    # Done: there is nothing left to train.
    again, nothing = distill(target, batch_at, CONFIG, workdir=tmp_path)
    assert nothing == [] and same(again, whole)


def test_another_run_is_not_continued(straight, target, batch_at):
    workdir = straight[0]
    run = partial(distill, batch_at=batch_at, config=CONFIG, workdir=workdir)
    with pytest.raises(UsageError, match="another run .target was random-0, now random-1.; choose"):
        run(replace(target, identity="random-1"))
    with pytest.raises(UsageError, match="another run .seed was 0, now 1.; choose another folder"):
        run(target, config=replace(CONFIG, seed=1))
    with pytest.raises(UsageError, match="draft.width was 8, now 9"):
        run(target, config=replace(CONFIG, draft=DraftConfig(width=9)))
    with pytest.raises(UsageError, match="has checkpoints; resume, or choose another folder"):
        run(target, resume=False)


def test_given_parameters_are_started_from_and_left_alone(straight, target, batch_at):
    teacher = as_teacher(target)
    initial = initial_draft(teacher, batch_at, CONFIG)
    kept = jax.tree.map(np.array, initial)
    draft, _ = distill(teacher, batch_at, CONFIG, initial=initial)
    assert same(draft, straight[1])
    for a, b in zip(jax.tree.leaves(initial), jax.tree.leaves(kept), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_the_local_stage_trains_too(target, batch_at):
    config = replace(CONFIG, objective="residual-local")
    _, log = distill(target, batch_at, config)
    assert log[-1]["residual"] < log[0]["residual"]
    assert {"loss", "residual", "grad_norm"} <= set(log[0]) and "kl" not in log[0]


def test_the_width_is_one_routed_experts_unless_told(target):
    assert draft_config(replace(CONFIG, draft=None), target.config) == DraftConfig(width=16)
    with pytest.raises(UsageError, match="top_r is 4; expected less than the 3 experts"):
        draft_config(replace(CONFIG, draft=DraftConfig(width=1, top_r=4)), target.config)


@pytest.mark.parametrize("fields", [dict(seq_len=0), dict(batch_size=0)])
def test_bad_shapes_are_refused(fields):
    with pytest.raises(UsageError, match="expected at least 1"):
        DistillConfig(**fields)


# --- the program -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A model folder and documents."""
    folder = tmp_path_factory.mktemp("inputs")
    write_model(folder / "model")
    return folder / "model", write_documents(folder / "documents.jsonl")


def settings(inputs, *more: str) -> list[str]:
    model, documents = inputs
    small = ["seq_len=32", "batch_size=4", "loop.steps=3", "loop.save_every=2", "init.tokens=128"]
    return ["distill_tiny", "--set", f"target={model}", f"data={documents}", *small, *more]


@pytest.mark.slow
def test_the_program_writes_a_draft_that_loads(inputs, tmp_path, capsys):
    out = tmp_path / "run"
    argv = [*settings(inputs), "--out", str(out), "--json", str(tmp_path / "result.json")]
    assert program.main(argv) == 0
    draft = load_draft(out / "draft")
    assert draft.config.width == 32 and sorted(draft.experts) == [0, 1, 2]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["target"] == draft.identity and result["config"]["seq_len"] == 32
    assert 0 <= result["heldout"]["heldout_agreement"] <= 1
    assert result["log"][-1]["step"] == 3
    assert "held-out text" in capsys.readouterr().out
    assert (out / "metrics.jsonl").read_text().count("\n") >= 1
    with pytest.raises(UsageError, match="has checkpoints"):
        program.main([*argv, "--resume", "none"])


@pytest.mark.slow
def test_a_dry_run_reads_no_weights(inputs, tmp_path, capsys):
    model, documents = inputs
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((model / "config.json").read_bytes())
    argv = [*settings((bare, documents)), "--dry-run", "--json", str(tmp_path / "plan.json")]
    assert program.main(argv) == 0
    plan = json.loads((tmp_path / "plan.json").read_text())
    config = json.loads((model / "config.json").read_text())
    width, layers = config["hidden_size"], config["num_hidden_layers"]
    assert plan["trained_params"] == layers * (3 * 32 * width + 1)
    assert plan["tokens"] == 3 * 4 * 32
    # Parameters and two moments in float32, and the optimizer's counters.
    assert 0 <= plan["state_bytes"] - 12 * plan["trained_params"] < 64
    header = 64 * 1024  # the rest of the file is weights
    assert plan["target_bytes"] == 4 * plan["frozen_params"]
    assert 0 < (model / "model.safetensors").stat().st_size - plan["target_bytes"] < header
    assert plan["step_bytes"] > 0
    assert "trained params" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bare", "plan.json"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["pretrain_tiny"], "makes a PretrainConfig, no DistillConfig"),
        (["distill_tiny", "--set", "losses.logits=1"], "did you mean 'logit'"),
        (["distill_tiny", "--set", "target=nowhere", "--dry-run"], "nowhere does not exist"),
        (["distill_tiny", "--set", "draft.top_r=9", "seq_len=64", "--dry-run"], "top_r is 9"),
    ],
)
def test_bad_calls_are_one_line(argv, message, inputs, tmp_path):
    if "draft.top_r=9" in argv:
        argv = [argv[0], "--set", f"target={inputs[0]}", *argv[2:]]
    with pytest.raises(UsageError, match=message):
        program.main([*argv, "--out", str(tmp_path)])


def test_rows_longer_than_the_context_are_refused(inputs, tmp_path):
    with pytest.raises(UsageError, match="seq_len is 999; expected at most the target's 128"):
        program.main([*settings(inputs, "seq_len=999"), "--out", str(tmp_path)])


def test_a_full_disk_is_told_before_anything_is_read(inputs, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(FailedError, match=r"out: .* are to be written, but only 97.7 KiB are free"):
        program.main(
            [*settings(inputs, "batch_size=2", "seq_len=32"), "--out", str(tmp_path / "out")]
        )
    assert not (tmp_path / "out").exists()


def test_a_draft_expert_stands_in_for_something(target):
    with pytest.raises(UsageError, match="top_r is 3; expected less than the 3 experts"):
        draft_config(replace(CONFIG, draft=DraftConfig(width=1, top_r=3)), target.config)


@pytest.mark.parametrize("name", ["simulate_every", "decode_every"])
def test_prompts_that_fit_no_context_are_told_before_anything_is_read(inputs, tmp_path, name):
    argv = settings(inputs, "seq_len=32", "batch_size=2", f"loop.{name}=1000")
    with pytest.raises(UsageError, match=r"fits its context of 128 .*simulate_every to 0"):
        program.main([*argv, "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_the_local_stage_has_one_loss():
    with pytest.raises(UsageError, match="residual-local has one loss"):
        replace(CONFIG, objective="residual-local", losses_from=CONFIG.losses)


@pytest.mark.parametrize("text", ["localhost:99999,2,0", ":1234,2,0", "localhost:0,2,0", "a:1,2,2"])
def test_addresses_that_cannot_be_are_refused(text, capsys):
    assert cli.main(["distill", "distill_tiny", "--distributed", text]) == 2
    assert "expected none, auto, or HOST:PORT,COUNT,INDEX" in capsys.readouterr().err

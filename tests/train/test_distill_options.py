"""What a distillation may also do: average its drafts, ramp its losses, measure, stop when told."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax.config import DraftConfig
from dejax.errors import UsageError
from tests.infer.random_target import draft_of, random_target
from tests.train.on_devices import ROOT, environment, on_devices
from tests.train.rows import random_batch
from tests.train.small_model import write_documents, write_model
from train import distill as program
from train import distill_measures
from train.checkpoints import checkpointer
from train.distill import DistillConfig, distill
from train.loop import LoopConfig
from train.losses import TERMS, LossWeights
from train.optimizer import OptimizerConfig
from train.teacher import as_teacher

STEPS, EMA = 6, 0.75
METRICS = ("kl", "token", "residual", "router")
CONFIG = DistillConfig(
    draft=DraftConfig(width=8),
    losses=LossWeights(logit=1.0, token=0.0, residual=0.0, router=0.0),
    losses_from=LossWeights(logit=0.0, token=1.0, residual=0.5, router=2.0),
    ramp_steps=4,
    ema=EMA,
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=0, decay_steps=0),
    loop=LoopConfig(steps=STEPS, log_every=1, norms_every=2, save_every=1, keep=STEPS),
    seq_len=16,
    batch_size=4,
)


def rows_of(workdir):
    """The whole lines of a run's metrics."""
    file = workdir / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


class Stop(Exception):
    """A run ends before a step."""


class Run:
    """A run with all of these options, and the same one again in another folder."""

    def __init__(self, workdir):
        target = random_target("shared", dtype=jnp.float32)
        self.teacher, self.workdir = as_teacher(target), workdir
        self.initial = draft_of(target).stacked_params()
        self.draft, _ = self.again(workdir)

    def again(self, workdir, *, stop=None):
        """Steps from the fifth on have the first one's batch."""

        def batch_at(step, rows):
            if step == stop:
                raise Stop
            return random_batch(self.teacher.config, rows=4, length=16, seed=step % 4)

        return distill(self.teacher, batch_at, CONFIG, workdir=workdir, initial=self.initial)

    def states(self):
        """What was saved after each step."""
        with contextlib.closing(checkpointer(self.workdir, STEPS)) as saver:
            return [saver.load(step) for step in range(1, STEPS + 1)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return Run(tmp_path_factory.mktemp("run"))


def assert_same(one, other):
    for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_the_average_is_its_closed_form_and_what_is_saved(run):
    states = run.states()
    for name, first in run.initial.items():
        expected = EMA**STEPS * np.asarray(first, np.float64)
        for age, state in enumerate(reversed(states)):
            expected += (1 - EMA) * EMA**age * np.asarray(state["draft"][name], np.float64)
        np.testing.assert_allclose(states[-1]["average"][name], expected, rtol=1e-5, atol=1e-6)
        assert np.abs(expected - states[-1]["draft"][name]).max() > 1e-3
    assert_same(run.draft.stacked_params(), states[-1]["average"])
    assert run.draft.raw is not None
    last = replace(run.draft, experts=run.draft.raw)
    assert_same(last.stacked_params(), states[-1]["draft"])


@pytest.mark.slow
def test_a_resumed_run_keeps_average_and_ramp(run, tmp_path):
    with pytest.raises(Stop):
        run.again(tmp_path, stop=3)
    draft, rest = run.again(tmp_path)
    assert [row["step"] for row in rest] == [4, 5, 6]
    assert_same(draft.stacked_params(), run.draft.stacked_params())
    assert [row["loss"] for row in rows_of(tmp_path)] == [
        row["loss"] for row in rows_of(run.workdir)
    ]


def test_weights_go_in_a_straight_line():
    found = [CONFIG.loss_weights(step).tolist() for step in range(6)]
    assert TERMS == ("logit", "token", "residual", "router")
    assert found[:3] == [[0, 1, 0.5, 2], [0.25, 0.75, 0.375, 1.5], [0.5, 0.5, 0.25, 1]]
    assert found[4] == found[5] == [1, 0, 0, 0]
    constant = replace(CONFIG, losses_from=None)
    assert constant.loss_weights(0).tolist() == [1, 0, 0, 0]


def test_a_ramp_between_temperatures_is_refused():
    with pytest.raises(UsageError, match="losses_from: has another temperature than losses"):
        replace(CONFIG, losses_from=LossWeights(temperature=2.0))


@pytest.mark.slow
def test_each_step_uses_the_weights_of_its_place_in_the_ramp(run):
    for step, row in enumerate(rows_of(run.workdir)):
        share = min(step / 4, 1)
        weights = (share, 1 - share, 0.5 * (1 - share), 2 * (1 - share))
        terms = [row[name] for name in METRICS]
        assert row["loss"] == pytest.approx(np.dot(weights, terms), rel=1e-5)


@pytest.mark.slow
def test_norms_of_each_loss_are_measured_when_due(run):
    names = {f"grad_norm_{term}" for term in TERMS}
    rows = rows_of(run.workdir)
    assert [row["step"] for row in rows if names & set(row)] == [2, 4, 6]
    assert all(row[name] > 0 for row in rows for name in names & set(row))


@pytest.mark.slow
def test_the_only_loss_left_has_the_norm_of_the_step(run):
    """Measured after the fourth step, which is before the fifth, on the batch that both have."""
    rows = rows_of(run.workdir)
    assert rows[4]["grad_norm"] == pytest.approx(rows[3]["grad_norm_logit"], rel=1e-4)


# --- the program -----------------------------------------------------------------------------


def decode_on_the_way(out):
    """A distillation of the embedded target that decodes two prompts; returns its metrics."""
    distill_measures.MOST_PROMPTS = 2
    small = ["seq_len=32", "batch_size=4", "init.tokens=128", "draft.width=8"]
    loop = ["loop.steps=3", "loop.log_every=1", "loop.decode_every=2", "loop.save_every=0"]
    program.main(["distill_tiny", "--set", *small, *loop, "--out", out])
    return rows_of(Path(out))


@pytest.mark.slow
def test_decoding_is_measured_when_due_on_several_devices(tmp_path):
    """Decoding is one device's, within a run that is all devices'."""
    args = (__name__, "decode_on_the_way", str(tmp_path / "run"))
    rows = on_devices(2, *args, result=tmp_path / "found.json")
    measured = {row["step"]: row for row in rows if "decode_acceptance_rate" in row}
    assert sorted(measured) == [2, 3]
    for row in measured.values():
        assert 0 <= row["decode_acceptance_rate"] <= 1
        assert row["decode_tokens_per_round"] >= 1


_DEJAX = "import sys; from dejax.cli import main; sys.exit(main())"


@pytest.fixture
def command(tmp_path):
    """`dejax distill` of a small model, logging every step, with these settings changed."""
    write_model(tmp_path / "model")
    documents = write_documents(tmp_path / "documents.jsonl")
    settings = [f"target={tmp_path / 'model'}", f"data={documents}", "init.fit=zero"]
    settings += ["seq_len=32", "batch_size=4", "init.tokens=128", "loop.log_every=1"]
    settings += ["loop.eval_every=0", "loop.save_every=0"]
    start = [
        sys.executable,
        "-c",
        _DEJAX,
        "distill",
        "distill_tiny",
        "--out",
        str(tmp_path / "run"),
    ]
    return lambda *more: [*start, "--set", *settings, *more]


@pytest.mark.slow
def test_a_run_that_is_told_to_stop_saves_and_goes_on_later(command, tmp_path):
    out, options = tmp_path / "run", dict(cwd=ROOT, env=environment(), text=True)
    with subprocess.Popen(command("loop.steps=100000"), stderr=subprocess.PIPE, **options) as child:
        ends = time.monotonic() + 300
        while not rows_of(out) and child.poll() is None and time.monotonic() < ends:
            time.sleep(0.05)
        child.send_signal(signal.SIGTERM)
        told = child.communicate(timeout=120)[1]
    assert child.returncode == 1, told
    step = rows_of(out)[-1]["step"]
    assert told.splitlines()[-1] == (
        f"dejax: error: distill: told to stop, after step {step} of 100000; "
        "its checkpoint is saved: the same command goes on from there"
    )
    assert not (out / "draft").exists()
    rest = command(f"loop.steps={step + 2}")
    done = subprocess.run(rest, capture_output=True, timeout=300, **options)
    assert done.returncode == 0, done.stderr
    assert f"resuming from step {step} of {step + 2}" in done.stderr
    assert [row["step"] for row in rows_of(out)] == list(range(1, step + 3))
    assert (out / "draft").is_dir()

"""A run that was stopped goes on as if it had not been."""

import json
import shutil
import signal
import subprocess
import sys
from contextlib import closing
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax.errors import FailedError, UsageError
from tests.infer.random_target import random_target
from tests.train.on_devices import ROOT, environment, on_devices
from tests.train.toy_run import LOOP, STEPS, batch_at, initial_state, step_fn, toy_run
from train import loop
from train.checkpoints import checkpointer
from train.config_files import to_json
from train.distill import DistillConfig, distill
from train.loop import LoopConfig


class Stop(Exception):
    """A run ends in the middle of a step."""


def stops_at(step):
    """`batch_at`, until the batch of a step (from 0) is asked for."""

    def batches(at):
        if at == step:
            raise Stop
        return batch_at(at)

    return batches


def stopped(workdir, *, step=5, **changes):
    """A run that was stopped after `step` steps."""
    with pytest.raises(Stop):
        toy_run(workdir, batch_at=stops_at(step), **changes)
    return workdir


def equal(one, other) -> bool:
    """Bit for bit."""
    pairs = zip(*map(jax.tree.leaves, (one, other)), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def steps_saved(workdir):
    with closing(checkpointer(workdir, STEPS)) as saver:
        return [found.step for found in saver.checkpoints]


def metrics_of(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def straight():
    """The state and the losses of a run that was never stopped."""
    state, log = toy_run(None)
    return jax.tree.map(np.array, state), [row["loss"] for row in log]


def goes_on_as(straight, workdir) -> bool:
    """Whether what is left of a run equals a whole one's: losses, state, and metrics on disk."""
    whole, losses = straight
    state, rest = toy_run(workdir)
    rows = metrics_of(workdir)
    return (
        [row["step"] for row in rest] == list(range(STEPS - len(rest) + 1, STEPS + 1))
        and [row["step"] for row in rows] == list(range(1, STEPS + 1))
        and [row["loss"] for row in rows] == losses
        and equal(state, whole)
    )


def test_a_stopped_run_goes_on_bit_for_bit(straight, tmp_path):
    stopped(tmp_path)
    assert [row["step"] for row in metrics_of(tmp_path)] == [1, 2, 3, 4, 5]
    assert goes_on_as(straight, tmp_path)


@pytest.mark.parametrize("part", ["optimizer", "moments", "average", "draft", "step"])
def test_a_part_left_out_would_be_noticed(straight, tmp_path, monkeypatch, part):
    class Forgetful(loop.Saver):
        def newest(self, state):
            step, loaded = super().newest(state)
            fresh = initial_state()
            if part == "optimizer":
                loaded = replace(loaded, opt_state=fresh.opt_state)
            if part == "moments":  # all of it but its counters
                kept = jax.tree.map(
                    lambda new, old: new if new.ndim else old, fresh.opt_state, loaded.opt_state
                )
                loaded = replace(loaded, opt_state=kept)
            if part == "average":
                loaded = replace(loaded, average=fresh.average)
            if part == "draft":
                loaded = replace(loaded, draft=fresh.draft)
            return step - (part == "step"), loaded

    stopped(tmp_path)
    monkeypatch.setattr(loop, "Saver", Forgetful)
    assert not goes_on_as(straight, tmp_path)


def test_a_half_written_line_is_dropped(straight, tmp_path):
    stopped(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"loss": 0.5, "st')
    assert goes_on_as(straight, tmp_path)


def test_what_is_on_disk_is_the_state_of_its_step(tmp_path):
    """Saving goes on while the state is donated to the next steps."""
    copies = {}

    def recorded(state, batch):
        state, metrics = step_fn(state, batch)
        copies[len(copies) + 1] = jax.tree.map(np.array, state)
        return state, metrics

    toy_run(tmp_path, step_fn=recorded, config=replace(LOOP, save_every=1))
    with closing(checkpointer(tmp_path, STEPS)) as saver:
        for step in range(1, STEPS + 1):
            assert equal(saver.load(step, initial_state()), copies[step]), step
    assert not equal(copies[1], copies[2])


@pytest.mark.parametrize(("log_every", "told_at"), [(1, 5), (3, 6)])
def test_a_loss_that_is_not_finite_ends_the_run(tmp_path, log_every, told_at):
    def poisoned(step):
        batch = batch_at(step)
        return {"tokens": batch["tokens"] * (np.nan if step == 4 else 1)}

    config = replace(LOOP, log_every=log_every, save_every=2)
    message = rf"step {told_at}: kl, loss is not finite \(last good checkpoint: 4\); lower the"
    with pytest.raises(FailedError, match=message):
        toy_run(tmp_path, batch_at=poisoned, config=config)
    assert steps_saved(tmp_path) == [2, 4]
    with closing(checkpointer(tmp_path, STEPS)) as saver:
        for leaf in jax.tree.leaves(saver.load(4, initial_state())):
            assert np.isfinite(leaf).all()
    # The same again fails at the same step, from there.
    with pytest.raises(FailedError, match=message):
        toy_run(tmp_path, batch_at=poisoned, config=config)


def test_without_a_checkpoint_none_is_named(tmp_path):
    with pytest.raises(FailedError, match=r"step 1: kl, loss .* \(last good checkpoint: none\)"):
        toy_run(tmp_path, batch_at=lambda step: {"tokens": np.full((4, 1024), np.inf, np.float32)})
    assert steps_saved(tmp_path) == []


def test_other_data_is_another_run(tmp_path):
    target = random_target("shared", dtype=jnp.float32)
    config = DistillConfig(loop=LoopConfig(steps=2), seq_len=16, batch_size=2)
    info = {"target": target.identity, "config": to_json(config), "data": "1234"}
    with closing(checkpointer(tmp_path, 1)) as saver:
        saver.save(1, {"weight": jnp.zeros(3)}, custom_metadata=info)
    message = "another run .data was 1234, now 5678.; choose another folder"
    with pytest.raises(UsageError, match=message) as error:
        distill(target, lambda step, rows: {}, config, workdir=tmp_path, data="5678")
    assert "\n" not in str(error.value)


# --- processes that are killed, other devices --------------------------------------------------

_CALL = "import sys, tests.train.resume_cases as cases; getattr(cases, sys.argv[1])(*sys.argv[2:])"


@pytest.mark.slow
@pytest.mark.parametrize("before", ["create", "finalize"])
def test_killed_while_saving_goes_on_from_the_last_whole_checkpoint(straight, tmp_path, before):
    command = [sys.executable, "-c", _CALL, "toy_run_killed_while_saving"]
    done = subprocess.run(
        [*command, str(tmp_path), "6", before],
        cwd=ROOT,
        env=environment(XLA_FLAGS=""),  # bit for bit the same program as here
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert steps_saved(tmp_path) == [2, 4]
    assert goes_on_as(straight, tmp_path)
    assert steps_saved(tmp_path) == [2, 4, 6, 8]


CASES = "tests.train.resume_cases"


@pytest.fixture(scope="module")
def on_eight(tmp_path_factory):
    """A run on eight devices with a checkpoint every second step, and what it recorded."""
    folder = tmp_path_factory.mktemp("eight")
    mesh = json.dumps(dict(data=2, fsdp=2, expert=2))
    found = on_devices(
        8, CASES, "train", str(folder / "run"), mesh, "1", result=folder / "found.json"
    )
    return folder / "run", found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "axes", "split"),
    [(4, dict(data=1, fsdp=4), True), (2, dict(data=1, expert=2), False)],
)
def test_a_run_goes_on_on_other_devices(on_eight, tmp_path, count, axes, split):
    run, whole = on_eight
    shutil.copytree(run / "checkpoints" / "2", tmp_path / "run" / "checkpoints" / "2")
    found = on_devices(
        count,
        CASES,
        "train",
        str(tmp_path / "run"),
        json.dumps(axes),
        str(int(split)),
        result=tmp_path / "found.json",
    )
    assert found["states"]["loaded 2"] == whole["states"]["saved 2"]
    left = [str(step) for step in range(3, 7)]
    assert list(found["losses"]) == left
    assert found["batches"] == {step: whole["batches"][step] for step in left}
    for step in left:
        assert found["losses"][step] == pytest.approx(whole["losses"][step], rel=1e-4)

"""Resuming: what a run may go on with, what is told of it, and what is refused."""

import copy

import jax.numpy as jnp
import pytest

from dejax.errors import UsageError
from train.checkpoints import check_resume, checkpointer

INFO = {
    "model": {"layers": 2, "rope": {"theta": 1.0}},
    "loop": {"steps": 10},
    "optimizer": {"kind": "adamw", "decay_steps": 4},
    "seed": 0,
}
DISTILLED = {"target": "identity", "config": {"target": "a", "losses": {"token": 0.1}}}


def changed(info, path, value):
    """A copy of `info` with one setting changed, or taken away if the value is None."""
    copied = copy.deepcopy(info)
    *parents, last = path.split(".")
    part = copied
    for parent in parents:
        part = part[parent]
    part[last] = value
    if value is None:
        del part[last]
    return copied


def saved(workdir, info):
    saver = checkpointer(workdir, 1)
    saver.save(5, {"weight": jnp.zeros(3)}, custom_metadata=info)
    saver.close()
    return workdir


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("run"), INFO)


def test_a_new_run_has_nothing_to_resume(tmp_path):
    for resume in (True, False):
        assert check_resume(tmp_path / "new", INFO, resume=resume, steps=10) is None


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("seed", 0, ""),
        ("loop.steps", 20, "; changed: loop.steps was 10, now 20"),
        ("optimizer.decay_steps", 8, "; changed: optimizer.decay_steps was 4, now 8"),
        ("start", "tiny", ""),  # a setting that the older run did not know
    ],
)
def test_what_may_change_is_told(run, path, value, told, capsys):
    assert check_resume(run, changed(INFO, path, value), resume=True, steps=20) == 5
    assert capsys.readouterr().err == f"{run}: resuming from step 5 of 20{told}\n"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("seed", 1, "another run .seed was 0, now 1.; choose another folder"),
        ("optimizer.kind", "muon", "optimizer.kind was adamw, now muon"),
        ("model.rope.theta", 2.0, "model.rope.theta was 1.0, now 2.0"),
        ("model.heads", 4, "model.heads was None, now 4"),
        ("model.layers", None, "model.layers was 2, now None"),
    ],
)
def test_what_makes_another_run_is_refused(run, path, value, message):
    with pytest.raises(UsageError, match=message):
        check_resume(run, changed(INFO, path, value), resume=True, steps=20)


def test_a_run_that_is_over(run, capsys):
    assert check_resume(run, INFO, resume=True, steps=5) == 5
    assert "all 5 steps done" in capsys.readouterr().err
    with pytest.raises(UsageError, match="at step 5, beyond loop.steps 4; train for longer"):
        check_resume(run, INFO, resume=True, steps=4)
    with pytest.raises(UsageError, match="has checkpoints; resume, or choose another folder"):
        check_resume(run, INFO, resume=False, steps=20)


def test_a_target_is_known_by_its_identity(tmp_path, capsys):
    run = saved(tmp_path, DISTILLED)
    assert check_resume(run, changed(DISTILLED, "config.target", "b"), resume=True, steps=9) == 5
    assert "changed: target was a, now b" in capsys.readouterr().err
    for path, message in (("target", "target was identity"), ("config.losses.token", "losses.tok")):
        with pytest.raises(UsageError, match=message):
            check_resume(run, changed(DISTILLED, path, 3), resume=True, steps=9)

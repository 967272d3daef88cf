"""Checkpoints that are damaged, half-written, or cannot be written: one line, and nothing lost."""

import errno
import json
import shutil

import pytest
from orbax.checkpoint import v1 as ocp

from dejax.errors import FailedError, UsageError
from tests.train.toy_run import STEPS, toy_run
from train.checkpoints import check_resume
from train.metrics import MetricsFile


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run that is over, with a checkpoint of every second step."""
    folder = tmp_path_factory.mktemp("finished")
    toy_run(folder)
    return folder


@pytest.fixture
def workdir(finished, tmp_path):
    """A copy of it."""
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def steps(workdir):
    return sorted(path.name for path in (workdir / "checkpoints").iterdir())


def resumed(workdir):
    """The step that a run would go on from."""
    return check_resume(workdir, {}, resume=True, steps=STEPS)


def test_what_is_not_whole_is_left_out(workdir, capsys):
    folder = workdir / "checkpoints"
    (folder / "999999").mkdir()
    (folder / "8" / "_CHECKPOINT_METADATA").write_text("{")
    (folder / "6" / "commit_success.txt").unlink()
    (folder / "7.orbax-checkpoint-tmp").mkdir()
    assert resumed(workdir) == 4
    assert steps(workdir) == ["2", "4", "6.damaged", "8.damaged", "999999.damaged"]
    told = capsys.readouterr().err
    assert "999999: is no whole checkpoint; it is left out, and called 999999.damaged" in told
    _, log = toy_run(workdir)
    assert [row["step"] for row in log] == [5, 6, 7, 8]
    assert resumed(workdir) == 8


@pytest.mark.parametrize("damage", ["cut", "removed"])
def test_damaged_arrays_are_told_in_one_line(workdir, damage):
    state = workdir / "checkpoints" / str(STEPS) / "state"
    largest = max((p for p in state.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    if damage == "cut":
        largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    else:
        shutil.rmtree(state)
    with pytest.raises(
        FailedError, match=r"checkpoints/8: cannot be read \(.*; move it away"
    ) as told:
        resumed(workdir)
        toy_run(workdir)
    assert "\n" not in str(told.value)
    shutil.move(workdir / "checkpoints" / str(STEPS), workdir / "away")
    _, log = toy_run(workdir)
    assert [row["step"] for row in log] == [7, 8]


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(UsageError, match="checkpoints: is no folder"):
        resumed(tmp_path)


def test_lines_that_are_no_metrics_are_dropped(workdir):
    file = workdir / "metrics.jsonl"
    rows = file.read_text().splitlines()[:6]
    junk = [b'{"step":"a"}', b"null", b"\xff\xfe", b'{"step": null}', b"[1]"]
    file.write_bytes(b"\n".join([*map(str.encode, rows), *junk]) + b"\n")
    with MetricsFile(workdir, first=6) as metrics:
        metrics.write({"step": 7, "loss": 1.0})
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [*range(1, 8)]


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_told_by_the_metrics(tmp_path, monkeypatch):
    wanted = r"metrics.jsonl: cannot be written \(no space left"
    with (
        pytest.raises(FailedError, match=wanted),
        MetricsFile(tmp_path, first=0) as metrics,
    ):
        monkeypatch.setattr(metrics._file, "flush", full, raising=False)
        metrics.write({"step": 1, "loss": 1.0})


def test_a_full_disk_is_told_by_a_save(workdir, monkeypatch):
    shutil.rmtree(workdir / "checkpoints" / "8")
    monkeypatch.setattr(ocp.training.Checkpointer, "save_async", full)
    with pytest.raises(
        FailedError, match=r"no space left on the device\); last good checkpoint: 6"
    ):
        toy_run(workdir)

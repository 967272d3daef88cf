"""Paths that cannot be used: each is one line, whatever the system calls it."""

import os

import pytest

from dejax import load_draft, load_target
from dejax.errors import UsageError
from dejax.paths import (
    check_creatable,
    existing_file,
    existing_folder,
    kind_of,
    read_file,
    shown,
)

LONG = "a" * 300
DEEP = "/".join(["a" * 200] * 30)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("x")
    return path


def test_kinds(tmp_path, file):
    assert kind_of(tmp_path) == "folder" and kind_of(file) == "file"
    assert kind_of("/dev/null") == "other" and kind_of(tmp_path / "none") is None


@pytest.mark.parametrize("path", ["", "a\0b", LONG, DEEP, f"{{}}/{LONG}", "{}/file.txt/x"])
@pytest.mark.parametrize(
    "use",
    [
        kind_of,
        check_creatable,
        lambda path: existing_folder(path, "a folder"),
        lambda path: existing_file(path, "a file"),
        lambda path: read_file(path, "a file"),
        load_target,
        load_draft,
    ],
)
def test_what_the_system_does_not_take_is_one_line(use, path, tmp_path, file):
    with pytest.raises(UsageError) as raised:
        use(path.format(tmp_path))
    line = str(raised.value)
    assert "\n" not in line and "\0" not in line and len(line) < 400


def test_another_kind_than_expected(tmp_path, file):
    with pytest.raises(UsageError, match="file.txt is not a folder; expected a model"):
        existing_folder(file, "a model")
    with pytest.raises(UsageError, match="is a folder; expected JSON"):
        read_file(tmp_path, "JSON")
    with pytest.raises(UsageError, match="none does not exist; expected JSON"):
        existing_file(tmp_path / "none", "JSON")


@pytest.mark.parametrize(
    "name", [LONG, f"new/{LONG}", f"new/{LONG}/x", "file.txt/x", "file.txt/x/y"]
)
def test_what_cannot_be_made_is_told_before(name, tmp_path, file):
    check_creatable(tmp_path / "new" / "x")
    with pytest.raises(UsageError):
        check_creatable(tmp_path / name)


def test_permissions(tmp_path, file, monkeypatch):
    def denied(path, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UsageError, match="no permission to write to"):
        check_creatable(tmp_path / "new")
    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", denied)
        with pytest.raises(UsageError, match="file.txt: permission denied; give another path"):
            kind_of(file)
    monkeypatch.setattr("pathlib.Path.read_bytes", denied)
    with pytest.raises(UsageError, match=r"cannot be read \(permission denied\); expected JSON"):
        read_file(file, "JSON")


def test_long_and_unprintable_paths_are_shown_short():
    assert shown("a/b") == "a/b" and shown("a\nb") == "'a\\nb'"
    assert len(shown(DEEP)) < 160 and shown(DEEP).endswith(f"({len(DEEP)} characters)")

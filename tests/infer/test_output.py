"""Results: JSON to a file or to standard output, and places that are checked before any work."""

import io
import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from dejax.errors import FailedError, UsageError
from infer.output import check_output, check_output_folder, report, write_json, write_whole


@dataclass(frozen=True)
class Decoding:
    draft_length: int = 8
    temperature: float = 0.0


RESULT = {
    "array": np.arange(4, dtype=np.int32).reshape(2, 2),
    "scalar": np.float32(0.5),
    "rate": float("nan"),
    "rates": (1.0, float("inf")),
    "path": Path("a/b"),
    "text": "é\ud800",
    "decoding": Decoding(),
    3: None,
}
PLAIN = {
    "array": [[0, 1], [2, 3]],
    "scalar": 0.5,
    "rate": None,
    "rates": [1.0, None],
    "path": "a/b",
    "text": "é\ud800",
    "decoding": {"draft_length": 8, "temperature": 0.0},
    "3": None,
}


def test_write_json(tmp_path):
    path = tmp_path / "new" / "result.json"
    write_json(path, {"old": 1})
    write_json(path, RESULT)
    assert json.loads(path.read_bytes()) == PLAIN
    assert [file.name for file in path.parent.iterdir()] == ["result.json"]


def test_write_json_to_standard_output(capsys):
    write_json("-", RESULT)
    assert json.loads(capsys.readouterr().out) == PLAIN


def test_write_json_follows_links_and_leaves_devices_alone(tmp_path):
    (tmp_path / "link").symlink_to("real.json")
    write_json(tmp_path / "link", [1])
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real.json").exists()
    write_json("/dev/null", [1])
    assert Path("/dev/null").is_char_device()


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    write_json(path, {"old": 1})

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(FailedError, match="result.json: cannot be written: No space left"):
        write_json(path, {"new": 1})
    assert json.loads(path.read_text()) == {"old": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["result.json"]
    with pytest.raises(FailedError, match="cannot be written: Is a directory"):
        write_json(tmp_path, {"new": 1})


def test_outputs_are_checked_before_any_work(tmp_path):
    (tmp_path / "file").write_text("x")
    for place in (None, "-", tmp_path / "new" / "a.json", tmp_path / "file", "/dev/null"):
        check_output(place)
    for place in ("", tmp_path, tmp_path / "file" / "a.json"):
        with pytest.raises(UsageError):
            check_output(place)


def test_a_pipe_is_written_to_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, b"hello")
    assert os.read(reader, 10) == b"hello" and pipe.is_fifo()
    os.close(reader)


def test_output_folders_are_checked_before_any_work(tmp_path):
    (tmp_path / "file").write_text("x")
    for place in (tmp_path, tmp_path / "new" / "deeper"):
        check_output_folder(place)
    for place in ("", "-", tmp_path / "file", tmp_path / "file" / "new", tmp_path / ("a" * 300)):
        with pytest.raises(UsageError):
            check_output_folder(place)


def test_a_file_of_the_longest_name_is_written(tmp_path):
    write_whole(tmp_path / ("a" * 255), b"x")
    assert [len(path.name) for path in tmp_path.iterdir()] == [255]


def test_json_on_standard_output_is_alone(capsys, tmp_path):
    report(Path("-"), {"a": 1}, lambda: print("table"))
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"a": 1} and printed.err == "table\n"
    report(tmp_path / "a.json", {"a": 1}, lambda: print("table"))
    report(None, {"a": 1}, lambda: print("table"))
    assert capsys.readouterr().out == "table\ntable\n"


def test_json_on_a_terminal_that_is_not_utf8(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="backslashreplace")
    monkeypatch.setattr("sys.stdout", stream)
    write_json("-", {"text": "caf\u00e9 \u4e16"})
    assert json.loads(stream.buffer.getvalue()) == {"text": "caf\u00e9 \u4e16"}

"""Command lines to dataclasses, prompt files in, JSON results out."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pytest

from dejax.errors import FailedError, UsageError
from infer import arguments
from infer.arguments import (
    Bytes,
    ParsedBy,
    Positional,
    PositiveInt,
    check_output,
    parse_bytes,
    write_whole,
)


@dataclass(frozen=True, kw_only=True)
class Decoding:
    draft_length: PositiveInt = 8
    """Tokens drafted in a round at most."""
    temperature: float = 0.0
    """0 is greedy."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    model: Positional[str]
    """A Hugging Face folder."""
    data: tuple[Path, ...] = ()
    """Files to read."""
    out: Path
    """Where the result goes."""
    mode: Literal["ar", "top-r"] = "ar"
    """How to decode."""
    device_cache: Bytes = None
    """Room for experts."""
    draft: str | None = None
    """Draft experts."""
    truncate: bool = True
    """Whether to truncate."""
    link: Annotated[tuple[str, float], ParsedBy(lambda text: ("sim", float(text)), "LINK")] = (
        "real",
        0.0,
    )
    """The link."""
    decoding: Decoding = field(default_factory=Decoding)

    def __post_init__(self):
        if self.mode == "top-r" and self.draft is not None:
            raise ValueError("--mode top-r takes no --draft")


def parse(*argv: str) -> Arguments:
    return arguments.parse(Arguments, list(argv), prog="dejax verb", description="Decodes.")


def test_defaults():
    parsed = parse("tiny", "--out", "x")
    assert parsed == Arguments(model="tiny", out=Path("x"))
    assert type(parsed) is Arguments and type(parsed.decoding) is Decoding


def test_every_kind_of_field():
    parsed = parse(
        *["tiny", "--out=x", "--data", "a", "b", "--data", "c", "--mode", "top-r", "--no-truncate"],
        *["--device-cache", "1KiB", "--link", "2.5", "--draft-length", "3", "--temperature", "1"],
    )
    assert parsed == Arguments(
        model="tiny",
        out=Path("x"),
        data=(Path("a"), Path("b"), Path("c")),
        mode="top-r",
        truncate=False,
        device_cache=1024,
        link=("sim", 2.5),
        decoding=Decoding(draft_length=3, temperature=1.0),
    )
    assert parse("tiny", "--out", "x", "--draft", "init:3").draft == "init:3"
    assert parse("tiny", "--out", "x", "--truncate").truncate


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "Missing from dejax verb: MODEL A Hugging Face folder. (required) --out PATH "),
        (["tiny"], "Missing from dejax verb: --out PATH Where the result goes. (required) (see `"),
        (["tiny", "--ot=x"], "unknown option --ot; did you mean '--out'?"),
        (["--mde", "ar"], "unknown option --mde; did you mean '--mode'?"),
        (["tiny", "--out"], "Missing value for argument '--out'."),
        (["tiny", "--out", "x", "--temperature", "a"], "--temperature: 'a' is not a number"),
        (["tiny", "--out", "x", "--temperature", "nan"], "--temperature: 'nan' is not a number"),
        (
            ["tiny", "--out", "x", "--draft-length", "0"],
            "--draft-length: '0' is out of range; expected a whole number >= 1",
        ),
        (["tiny", "--out", "x", "--draft-length", "2.5"], "'2.5' is not a whole number"),
        (["tiny", "--out", "x", "--mode", "top"], "--mode: 'top' is not one of ar, top-r"),
        (["tiny", "--out", "x", "--device-cache", "5 apples"], "'5 apples' is not a size"),
        (["tiny", "--out", "x", "--link", "q"], "--link: could not convert string to float: 'q'"),
        (["tiny", "--out", "x", "--no-trunc"], "unknown option --no-trunc; did you mean '--no-tr"),
        (["tiny", "--out", "x", "--draft-lenth=3"], "--draft-lenth; did you mean '--draft-length'"),
        (["tiny", "--out", "x", "--xyz"], "unknown option --xyz (see `dejax verb --help`)"),
        (["tiny", "more", "--out", "x"], "unexpected argument 'more' (see `dejax verb --help`)"),
        (["tiny", "--out", "x", "--mode", "top-r", "--draft", "d"], "--mode top-r takes no --dra"),
    ],
)
def test_mistakes_are_one_line(argv, message, capsys):
    with pytest.raises(UsageError) as raised:
        parse(*argv)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value) and "╭" not in str(raised.value)
    assert capsys.readouterr().err == ""


def test_help(capsys):
    with pytest.raises(SystemExit) as stopped:
        parse("--help")
    assert stopped.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    assert out.startswith("usage: dejax verb [-h] [OPTIONS] MODEL Decodes.")
    for part in (
        "--device-cache BYTES",
        "Room for experts. (default: all)",
        "--draft-length INT",
        "Tokens drafted in a round at most. (default: 8)",
        "--mode {ar,top-r}",
        "--draft STR Draft experts. (default: none)",
        "--truncate, --no-truncate",
    ):
        assert part in out


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("17", 17),
        ("17B", 17),
        ("512MiB", 512 * 2**20),
        ("512mib", 512 * 2**20),
        ("1.5GB", 1_500_000_000),
        ("2 TiB", 2 * 2**40),
        ("all", None),
    ],
)
def test_parse_bytes(text, size):
    assert parse_bytes(text) == size
    assert parse_bytes(arguments.format_bytes(size)) == (size and pytest.approx(size, rel=1e-3))


@pytest.mark.parametrize("text", ["", "-1", "MiB", "1M", "1e6", "nan", "inf", "1.MiB", "ALL", "１"])
def test_parse_bytes_refuses(text):
    with pytest.raises(UsageError, match="is not a size; expected"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("function", "good", "bad"),
    [
        (arguments.positive_int, "1", "0"),
        (arguments.non_negative_int, "0", "-1"),
        (arguments.positive_float, "0.1", "0"),
        (arguments.non_negative_float, "0", "-0.1"),
        (arguments.zero_to_one, "1", "1.1"),
    ],
)
def test_ranges(function, good, bad):
    assert function(good) == float(good)
    with pytest.raises(UsageError, match=f"'{bad}' is out of range; expected a"):
        function(bad)


def test_read_prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"id": "a", "prompt": "One", "source": {"x": 1}}\r\n\n'
        + '  {"prompt": "a\u2028b"}'.encode()
    )
    assert arguments.read_prompts(path) == [
        {"id": "a", "prompt": "One", "source": {"x": 1}},
        {"id": 3, "prompt": "a\u2028b"},
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no prompts; expected JSON lines"),
        (b"\n \n", "no prompts; expected JSON lines"),
        (b'{"prompt": "\xff"}', "not UTF-8 (byte 12)"),
        (b'{"prompt": "a"}\n{"prompt": ', "line 2 is not JSON"),
        (b"[" * 100_000, "line 1 is not JSON"),
        (b'{"prompt": "a", "x": NaN}', "line 1 is not JSON: NaN"),
        (b'\n{"text": "a"}', "line 2: no prompt"),
        (b'["prompt"]', "line 1: no prompt"),
        (b'{"prompt": 3}', "line 1: prompt is 3; expected a string"),
        (b'{"prompt": "\\ud800"}', "line 1: prompt holds half a surrogate pair"),
    ],
)
def test_read_prompts_refuses(tmp_path, content, message):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    with pytest.raises(UsageError) as raised:
        arguments.read_prompts(path)
    assert str(raised.value).startswith(f"{path}: ") and message in str(raised.value)


def test_read_prompts_of_no_file(tmp_path):
    with pytest.raises(UsageError, match="nowhere: cannot be read: No such file"):
        arguments.read_prompts(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        arguments.read_prompts(tmp_path)


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
    arguments.write_json(path, {"old": 1})
    arguments.write_json(path, RESULT)
    assert json.loads(path.read_bytes()) == PLAIN
    assert [file.name for file in path.parent.iterdir()] == ["result.json"]


def test_write_json_to_standard_output(capsys):
    arguments.write_json("-", RESULT)
    assert json.loads(capsys.readouterr().out) == PLAIN


def test_write_json_follows_links_and_leaves_devices_alone(tmp_path):
    (tmp_path / "link").symlink_to("real.json")
    arguments.write_json(tmp_path / "link", [1])
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real.json").exists()
    arguments.write_json("/dev/null", [1])
    assert Path("/dev/null").is_char_device()


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    arguments.write_json(path, {"old": 1})

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(FailedError, match="result.json: cannot be written: No space left"):
        arguments.write_json(path, {"new": 1})
    assert json.loads(path.read_text()) == {"old": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["result.json"]
    with pytest.raises(FailedError, match="cannot be written: Is a directory"):
        arguments.write_json(tmp_path, {"new": 1})


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


def test_a_size_beyond_any_machine_is_refused():
    with pytest.raises(UsageError, match="400 digits"):
        parse_bytes("9" * 400)

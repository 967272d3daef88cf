"""Command lines to dataclasses, and one line for a wrong one."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pytest

from dejax.errors import UsageError
from infer import argument_types, arguments
from infer.argument_types import Bytes, ParsedBy, Positional, PositiveInt


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
        ([], "MODEL is missing: a Hugging Face folder; --out is missing: where the result goes ("),
        (["tiny"], "--out is missing: where the result goes (see `dejax verb --help`)"),
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
        "--draft TEXT Draft experts. --truncate, --no-truncate Whether to truncate. (default: on)",
        "--data PATH ... Files to read. --out PATH Where the result goes. (required)",
    ):
        assert part in out


@pytest.mark.parametrize(
    ("function", "good", "bad"),
    [
        (argument_types.positive_int, "1", "0"),
        (argument_types.non_negative_int, "0", "-1"),
        (argument_types.positive_float, "0.1", "0"),
        (argument_types.non_negative_float, "0", "-0.1"),
        (argument_types.zero_to_one, "1", "1.1"),
    ],
)
def test_ranges(function, good, bad):
    assert function(good) == float(good)
    with pytest.raises(UsageError, match=f"'{bad}' is out of range; expected a"):
        function(bad)


@dataclass(frozen=True)
class Renamed:
    as_: Literal["one", "two"] | None = None
    """A word that Python keeps for itself."""


def test_a_trailing_underscore_is_no_part_of_a_flag(capsys):
    def parse_renamed(*argv: str) -> Renamed:
        return arguments.parse(Renamed, list(argv), prog="dejax verb", description="Renames.")

    assert parse_renamed("--as", "two").as_ == "two" and parse_renamed().as_ is None
    with pytest.raises(UsageError, match="--as: 'three' is not one of one, two"):
        parse_renamed("--as", "three")
    with pytest.raises(UsageError, match="did you mean '--as'"):
        parse_renamed("--ass", "two")
    with pytest.raises(SystemExit):
        parse_renamed("--help")
    assert "--as {one,two}" in capsys.readouterr().out

"""Types of the programs' options: what a word of the command line may be, and what it becomes.

A parser takes a word, and raises UsageError with the word and what was expected; `parse` of
`infer.arguments` adds the flag.
"""

import difflib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from dejax.errors import UsageError
from dejax.paths import existing_file, existing_folder, kind_of
from infer.output import check_output, check_output_folder
from infer.units import format_bytes, parse_bytes

T = TypeVar("T")

POSITIONAL = "positional"

Positional = Annotated[T, POSITIONAL]
"""`model: Positional[str]`: given by its place, without a flag."""


@dataclass(frozen=True)
class ParsedBy:
    """How one word of the command line becomes a field's value: `Annotated[int, ParsedBy(...)]`.

    Attributes:
        parse: word -> value; raises ValueError with a message that tells word and expectation.
        metavar: what stands for the word in the help.
        show: value -> the word that gives it, for the help's `(default: ...)`.
    """

    parse: Callable[[str], Any]
    metavar: str
    show: Callable[[Any], str] = str


def integer(text: str) -> int:
    """`"12"` -> 12."""
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{text!r} is not a whole number") from None


def number(text: str) -> float:
    """`"0.5"` -> 0.5; finite."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UsageError(f"{text!r} is not a number")
    return value


def positive_int(text: str) -> int:
    """A whole number >= 1."""
    return _checked(integer(text), text, lambda value: value >= 1, "a whole number >= 1")


def non_negative_int(text: str) -> int:
    """A whole number >= 0."""
    return _checked(integer(text), text, lambda value: value >= 0, "a whole number >= 0")


def drafted_tokens(text: str) -> int:
    """New tokens of a run that is to draft: the last one is never drafted, nor the first."""
    expected = "3 or more, the fewest with which a token is drafted"
    return _checked(integer(text), text, lambda value: value >= 3, expected)


def positive_float(text: str) -> float:
    """A number > 0."""
    return _checked(number(text), text, lambda value: value > 0, "a number > 0")


def non_negative_float(text: str) -> float:
    """A number >= 0."""
    return _checked(number(text), text, lambda value: value >= 0, "a number >= 0")


def zero_to_one(text: str) -> float:
    """A number from 0 to 1."""
    return _checked(number(text), text, lambda value: 0 <= value <= 1, "a number from 0 to 1")


def choice(values: Iterable[Any]) -> Callable[[str], Any]:
    """The parser that takes one of `values` by its spelling."""
    spelled = {str(value): value for value in values}

    def parse_choice(text: str) -> Any:
        if text not in spelled:
            hint = did_you_mean(text, spelled)
            raise UsageError(f"{text!r} is not one of {', '.join(spelled)}{hint}")
        return spelled[text]

    return parse_choice


Bytes = Annotated[int | None, ParsedBy(parse_bytes, "BYTES", format_bytes)]
PositiveInt = Annotated[int, ParsedBy(positive_int, "INT")]
DraftedTokens = Annotated[int, ParsedBy(drafted_tokens, "INT")]
NonNegativeInt = Annotated[int, ParsedBy(non_negative_int, "INT")]
PositiveFloat = Annotated[float, ParsedBy(positive_float, "FLOAT")]
NonNegativeFloat = Annotated[float, ParsedBy(non_negative_float, "FLOAT")]
ZeroToOne = Annotated[float, ParsedBy(zero_to_one, "FLOAT")]


def not_empty(text: str) -> str:
    """A name or path that is not empty: Python takes an empty path for the current folder."""
    if not text:
        raise UsageError("the path is empty; expected a name")
    return text


def _path(text: str) -> Path:
    kind_of(text)  # refuses what the system does not take
    return Path(text)


def _input_file(text: str) -> Path:
    return existing_file(text, "a file")


def _input_folder(text: str) -> Path:
    return existing_folder(text, "a folder")


def _output_file(text: str) -> Path:
    check_output(text)
    return Path(text)


def _named_file(text: str) -> Path:
    if text == "-":
        raise UsageError("this is not written to standard output; expected a file's name")
    return _output_file(text)


def _output_folder(text: str) -> Path:
    check_output_folder(text)
    return Path(text)


InputFile = Annotated[Path, ParsedBy(_input_file, "FILE")]
"""A file that is there."""
InputFolder = Annotated[Path, ParsedBy(_input_folder, "DIR")]
"""A folder that is there."""
OutputFile = Annotated[Path, ParsedBy(_output_file, "FILE")]
"""A place where a file can be written, or `-`, which is standard output."""
NamedFile = Annotated[Path, ParsedBy(_named_file, "FILE")]
"""A place where a file can be written that has others beside it, or is no text."""
OutputFolder = Annotated[Path, ParsedBy(_output_folder, "DIR")]
"""A place where a folder can be made or is."""
Model = Annotated[str, ParsedBy(not_empty, "MODEL")]
"""A model folder, or the name `tiny`."""
DraftSpec = Annotated[str, ParsedBy(not_empty, "DIR|init[:SEED]")]
"""What `dejax.ckpt.draft_state.resolve_draft` reads."""
Config = Annotated[str, ParsedBy(not_empty, "CONFIG")]
"""A config file, or the name of one that comes with dejax."""
Settings = tuple[Annotated[str, ParsedBy(str, "KEY=VALUE")], ...]
"""What `train.config_files.load_config` applies."""

BY_TYPE = {
    int: ParsedBy(integer, "INT"),
    float: ParsedBy(number, "FLOAT"),
    str: ParsedBy(str, "TEXT"),
    Path: ParsedBy(_path, "PATH"),
}
"""How a word of a plain type is read."""


def _checked(value: T, text: str, holds: Callable[[T], bool], expected: str) -> T:
    if not holds(value):
        raise UsageError(f"{text!r} is out of range; expected {expected}")
    return value


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` for the nearest known word, or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""

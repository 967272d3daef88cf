"""Command lines of the programs: a frozen dataclass in, its instance or one line of complaint out.

A program declares its options as a dataclass, one docstring a field, and calls `parse`. What tyro
needs to know beyond the type is said with this module's markers, so that a program's module stays
importable without tyro. Prompts are read and `--json FILE` is written here too.
"""

import contextlib
import dataclasses
import difflib
import io
import json
import math
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from dejax.errors import FailedError, UsageError

T = TypeVar("T")

_POSITIONAL = "positional"

Positional = Annotated[T, _POSITIONAL]
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


# Values. Each raises UsageError with the word and what was expected; `parse` adds the flag.


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


_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}


def parse_bytes(text: str) -> int | None:
    """`"512MiB"`, `"1.5GB"`, `"0"` -> bytes; `"all"` -> None, no limit."""
    if text == "all":
        return None
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)", text)
    units = {unit.lower(): size for unit, size in _UNITS.items()}
    if match is None or match[2].lower() not in units:
        raise UsageError(f"{text!r} is not a size; expected for example 512MiB, 1.5GB, 0 or all")
    size = float(match[1]) * units[match[2].lower()]
    if not math.isfinite(size):
        raise UsageError(
            f"the size has {len(match[1])} digits; expected one that a machine can have"
        )
    return int(size)


def format_bytes(size: int | None) -> str:
    """`536870912` -> `"512MiB"`, four digits; None -> `"all"`. The inverse of `parse_bytes`."""
    if size is None:
        return "all"
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size >= _UNITS[unit]:
            return f"{size / _UNITS[unit]:.4g}{unit}"
    return f"{size}B" if size else "0"


Bytes = Annotated[int | None, ParsedBy(parse_bytes, "BYTES", format_bytes)]
PositiveInt = Annotated[int, ParsedBy(positive_int, "INT")]
NonNegativeInt = Annotated[int, ParsedBy(non_negative_int, "INT")]
PositiveFloat = Annotated[float, ParsedBy(positive_float, "FLOAT")]
NonNegativeFloat = Annotated[float, ParsedBy(non_negative_float, "FLOAT")]
ZeroToOne = Annotated[float, ParsedBy(zero_to_one, "FLOAT")]

_BY_TYPE = {
    int: ParsedBy(integer, "INT"),
    float: ParsedBy(number, "FLOAT"),
    str: ParsedBy(str, "STR"),
    Path: ParsedBy(Path, "PATH"),
}


def _checked(value: T, text: str, holds: Callable[[T], bool], expected: str) -> T:
    if not holds(value):
        raise UsageError(f"{text!r} is out of range; expected {expected}")
    return value


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` for the nearest known word, or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


# Parsing.


class _Rejected(Exception):
    """A bad value on its way out through tyro, which swallows only ValueError."""


def parse(cls: type[T], argv: list[str], *, prog: str, description: str) -> T:
    """`argv` as an instance of the frozen dataclass `cls`.

    A field is `--kebab-case` (or by its place if `Positional`), `bool` is `--flag/--no-flag`,
    `tuple[X, ...]` takes several words and may be repeated. Fields may be bool, int, float, str,
    Path, Literal, these or None, such tuples, nested dataclasses (their flags join in without a
    prefix), and `Annotated[..., ParsedBy(...)]`.

    Raises:
        UsageError: one line that names the argument, what was given and what was expected; also
            for what `cls` itself refuses with a ValueError.
        SystemExit: with status 0, once `--help` has been printed.
    """
    import tyro

    mirror = _mirror(cls)
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            parsed, unknown = tyro.cli(
                mirror,
                args=argv,
                prog=prog,
                description=description,
                return_unknown_args=True,
                config=(tyro.conf.OmitArgPrefixes,),
            )
    except _Rejected as error:
        raise UsageError(str(error)) from None
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        # tyro complains of what is missing first; a misspelt flag is the likelier reason.
        unknown = [word for word in argv if word.startswith("--") and not _is_flag(word, cls)]
        if not unknown:
            line = _one_line(complaint.getvalue())
            raise UsageError(f"{line} (see `{prog} --help`)") from None
    if unknown:
        raise UsageError(_unknown(unknown[0], cls, prog))
    try:
        return _rebuild(cls, parsed)
    except UsageError:
        raise
    except ValueError as error:
        raise UsageError(str(error)) from error


def _mirror(cls: type) -> type:
    """`cls` with its annotations in tyro's words and without its own checks, which `_rebuild` runs.

    A subclass, since tyro finds a field's help in the source of the class or of its bases.
    """
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = []
    for field in dataclasses.fields(cls):
        annotation = _annotation(field.name, hints[field.name])
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if dataclasses.is_dataclass(default):  # tyro wants an instance of what it has been told
            default = annotation(**vars(default))
        mirrored = dataclasses.field(default=default, kw_only=bool(field.kw_only))
        fields.append((field.name, annotation, mirrored))
    namespace = {"__post_init__": lambda self: None, "__module__": cls.__module__}
    return dataclasses.make_dataclass(
        cls.__name__, fields, bases=(cls,), namespace=namespace, frozen=True
    )


def _annotation(name: str, hint: Any) -> Any:
    """The annotation that makes tyro read a field of ours with our parser, name and metavar."""
    import tyro

    base, metadata, optional = _unwrap(hint)
    if dataclasses.is_dataclass(base):
        return _mirror(typing.cast(type, base))
    if base is bool:
        return bool
    by_place = _POSITIONAL in metadata
    label = name.upper() if by_place else "--" + name.replace("_", "-")
    several = _takes_several(base, metadata)
    if several:
        base, metadata, _ = _unwrap(typing.get_args(base)[0])
    word = Annotated[Any, _word(label, by_place, base, metadata, optional)]
    if several and by_place:
        return tyro.conf.Positional[tuple[word, ...]]
    if several:
        return tyro.conf.UseAppendAction[tuple[tuple[word, ...], ...]]
    return tyro.conf.Positional[word] if by_place else word


def _word(label: str, by_place: bool, base: Any, metadata: list[Any], optional: bool) -> Any:
    """The tyro specification of one word with the parser that its type or its marker asks for."""
    import tyro

    parser = next((mark for mark in metadata if isinstance(mark, ParsedBy)), _BY_TYPE.get(base))
    if typing.get_origin(base) is Literal:
        values = typing.get_args(base)
        parser = ParsedBy(choice(values), "{" + ",".join(map(str, values)) + "}")
    if parser is None:
        raise TypeError(f"{label}: no parser for the type {base}; mark it with ParsedBy")

    def read(words: list[str]) -> Any:
        try:
            return parser.parse(words[0])
        except ValueError as error:
            raise _Rejected(f"{label}: {error}") from error

    def show(value: Any) -> list[str]:
        return ["none" if value is None and optional else parser.show(value)]

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=label if by_place else parser.metavar,
        instance_from_str=read,
        is_instance=lambda value: True,
        str_from_instance=show,
    )


def _unwrap(hint: Any) -> tuple[Any, list[Any], bool]:
    """A hint without `Annotated` and `| None`: the type, the annotations, whether None may be."""
    metadata: list[Any] = []
    optional = False
    while not any(isinstance(mark, ParsedBy) for mark in metadata):
        args = typing.get_args(hint)
        if typing.get_origin(hint) is Annotated:
            hint, metadata = args[0], [*metadata, *args[1:]]
        elif typing.get_origin(hint) in (typing.Union, types.UnionType) and len(args) == 2:
            if type(None) not in args:
                break
            hint, optional = next(arg for arg in args if arg is not type(None)), True
        else:
            break
    return hint, metadata, optional


def _takes_several(base: Any, metadata: list[Any]) -> bool:
    """Whether a field is `tuple[X, ...]` of words rather than one word that ends as a tuple."""
    parsed_whole = any(isinstance(mark, ParsedBy) for mark in metadata)
    return typing.get_origin(base) is tuple and not parsed_whole


def _rebuild(cls: type[T], parsed: Any) -> T:
    """The instance of `cls` itself, with its checks run, from the mirror's."""
    hints = typing.get_type_hints(cls, include_extras=True)
    values = {}
    for field in dataclasses.fields(typing.cast(Any, cls)):
        value = getattr(parsed, field.name)
        base, metadata, _ = _unwrap(hints[field.name])
        if dataclasses.is_dataclass(base):
            value = _rebuild(typing.cast(type, base), value)
        elif _takes_several(base, metadata) and _POSITIONAL not in metadata:
            value = tuple(word for words in value for word in words)
        values[field.name] = value
    return cls(**values)


def _flags(cls: type) -> list[str]:
    """Every flag of `cls`, those of nested dataclasses and `--no-...` included."""
    flags = ["--help"]
    for name, hint in typing.get_type_hints(cls, include_extras=True).items():
        base, metadata, _ = _unwrap(hint)
        if dataclasses.is_dataclass(base):
            flags += _flags(typing.cast(type, base))
        elif _POSITIONAL not in metadata:
            flags.append("--" + name.replace("_", "-"))
            flags += ["--no-" + name.replace("_", "-")] if base is bool else []
    return flags


def _is_flag(word: str, cls: type) -> bool:
    return word.split("=")[0].replace("_", "-") in _flags(cls)


def _unknown(word: str, cls: type, prog: str) -> str:
    if not word.startswith("-"):
        return f"unexpected argument {word!r} (see `{prog} --help`)"
    flag = word.split("=")[0]
    hint = did_you_mean(flag.replace("_", "-"), _flags(cls))
    return f"unknown option {flag}{hint or f' (see `{prog} --help`)'}"


def _one_line(boxed: str) -> str:
    """tyro's box of complaint as one line, without its title and its pointer to the help."""
    plain = re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯─]|-{4,}", "", boxed).split("For full helptext")[0]
    _title, *lines = [line.strip() for line in plain.splitlines() if line.strip()]
    return " ".join(lines)


# Files.


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """The prompts of a JSON lines file: objects with `id`, `prompt` and whatever else they carry.

    A missing `id` becomes the line's number; blank lines are skipped.

    Raises:
        UsageError: with file and line, for what is no UTF-8, no JSON object, or has no `prompt`.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 (byte {error.start}); expected JSON lines") from error
    # JSON may hold the other separators of `splitlines` unescaped.
    lines = enumerate(text.split("\n"), start=1)
    prompts = [_prompt(line, f"{path}: line {n}", n) for n, line in lines if line.strip()]
    if not prompts:
        raise UsageError(f'{path}: no prompts; expected JSON lines such as {{"prompt": "Hello"}}')
    return prompts


def _prompt(line: str, where: str, line_number: int) -> dict[str, Any]:
    def no_number(word: str) -> Any:
        raise ValueError(f"{word} is not a JSON number")

    try:
        record = json.loads(line, parse_constant=no_number)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not JSON: {error}") from error
    if not isinstance(record, dict) or "prompt" not in record:
        raise UsageError(f'{where}: no prompt; expected an object such as {{"prompt": "Hello"}}')
    if not isinstance(record["prompt"], str):
        raise UsageError(f"{where}: prompt is {record['prompt']!r}; expected a string")
    if any("\ud800" <= character <= "\udfff" for character in record["prompt"]):
        raise UsageError(f"{where}: prompt holds half a surrogate pair, which is no text")
    return {"id": line_number} | record


def to_plain(value: Any) -> Any:
    """`value` as JSON has it: dataclasses are objects, arrays lists, nan and inf null."""
    if dataclasses.is_dataclass(value):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): to_plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(entry) for entry in value]
    if isinstance(value, Path):
        return str(value)
    tolist = getattr(value, "tolist", None)  # numpy and jax, arrays and scalars
    if tolist is not None:
        return to_plain(tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: Path | str, value: Any) -> None:
    """Writes `to_plain(value)` to a file, whole or not at all, or to standard output for `-`.

    Folders on the way are made. Raises FailedError where the file cannot be written.
    """
    text = json.dumps(to_plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    # Half a surrogate pair, which UTF-8 lacks, becomes the escape that JSON has for it.
    data = text.encode("utf-8", "backslashreplace")
    if str(path) == "-":
        sys.stdout.write(data.decode())
        sys.stdout.flush()
        return
    write_whole(Path(path), data)


def check_output(path: Path | str | None) -> None:
    """Refuses, before any work is done, a place for results that cannot be a file.

    Raises:
      UsageError: it is empty, a folder, or below something that is no folder.
    """
    if path is None or str(path) == "-":
        return
    if not str(path) or str(path) == ".":
        raise UsageError(
            "the output file has an empty name; expected a path, or - for standard output"
        )
    if Path(path).is_dir():
        raise UsageError(f"{path} is a folder; expected a file to write to")
    parent = Path(path).resolve().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise UsageError(f"{path} cannot be written: {parent} is no folder")


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file, whole or not at all; pipes and devices are written to, not replaced.

    Folders on the way are made. Raises FailedError where the file cannot be written.
    """
    path = path.resolve()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():  # a pipe or a device cannot be replaced
            path.write_bytes(data)
            return
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with unfinished.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise FailedError(f"{path}: cannot be written: {error.strerror}") from error

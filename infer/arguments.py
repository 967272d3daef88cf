"""Command lines of the programs: a frozen dataclass in, its instance or one line of complaint out.

A program declares its options as a dataclass, one docstring a field, and calls `parse`. What tyro
needs to know beyond the type is said with this module's markers, so that a program's module stays
importable without tyro.
"""

import contextlib
import dataclasses
import difflib
import io
import math
import re
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from dejax.errors import UsageError
from dejax.paths import existing_file, existing_folder, kind_of
from infer.output import check_output, check_output_folder
from infer.units import format_bytes, parse_bytes

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


Bytes = Annotated[int | None, ParsedBy(parse_bytes, "BYTES", format_bytes)]
PositiveInt = Annotated[int, ParsedBy(positive_int, "INT")]
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


def _output_folder(text: str) -> Path:
    check_output_folder(text)
    return Path(text)


InputFile = Annotated[Path, ParsedBy(_input_file, "FILE")]
"""A file that is there."""
InputFolder = Annotated[Path, ParsedBy(_input_folder, "DIR")]
"""A folder that is there."""
OutputFile = Annotated[Path, ParsedBy(_output_file, "FILE")]
"""A place where a file can be written, or `-`, which is standard output."""
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

_BY_TYPE = {
    int: ParsedBy(integer, "INT"),
    float: ParsedBy(number, "FLOAT"),
    str: ParsedBy(str, "TEXT"),
    Path: ParsedBy(_path, "PATH"),
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
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        annotation = _annotation(field.name, hints[field.name], default)
        if dataclasses.is_dataclass(default):  # tyro wants an instance of what it has been told
            default = annotation(**vars(default))
        mirrored = dataclasses.field(default=default, kw_only=bool(field.kw_only))
        fields.append((field.name, annotation, mirrored))
    namespace = {"__post_init__": lambda self: None, "__module__": cls.__module__}
    return dataclasses.make_dataclass(
        cls.__name__, fields, bases=(cls,), namespace=namespace, frozen=True
    )


def _annotation(name: str, hint: Any, default: Any) -> Any:
    """The annotation that makes tyro read a field of ours with our parser, name and help."""
    import tyro

    base, metadata, optional = _unwrap(hint)
    if dataclasses.is_dataclass(base):
        return _mirror(typing.cast(type, base))
    if base is bool:
        return _told(bool, None, "on" if default else "off")
    by_place = _POSITIONAL in metadata
    label = name.upper() if by_place else _flag_of(name)
    several = _takes_several(base, metadata)
    if several:
        base, metadata, _ = _unwrap(typing.get_args(base)[0])
    parser = _parser(label, base, metadata)
    word = Annotated[Any, _word(label, by_place, parser)]
    if several and by_place:
        return tyro.conf.Positional[tuple[word, ...]]
    if several:
        words = tyro.conf.UseAppendAction[tuple[tuple[word, ...], ...]]
        return _told(words, f"{parser.metavar} ...", "")
    if by_place:
        return tyro.conf.Positional[word]
    # An option without a default says in its own words what happens without it.
    none = default is dataclasses.MISSING or (optional and default is None)
    told = _told(word, None, "" if none else parser.show(default))
    return told if by_place else Annotated[told, tyro.conf.arg(name=label.removeprefix("--"))]


def _told(annotation: Any, metavar: str | None, default: str) -> Any:
    """An annotation with what its help shows for a value, and after the sentence."""
    import tyro

    hint = f"(default: {default})" if default else ""
    return Annotated[annotation, tyro.conf.arg(metavar=metavar, help_behavior_hint=hint)]


def _flag_of(name: str) -> str:
    """The flag of a field; `as_` is what Python leaves of `as`."""
    return "--" + name.rstrip("_").replace("_", "-")


def _parser(label: str, base: Any, metadata: list[Any]) -> ParsedBy:
    """How a word of this type is read: as its marker says, else as the type does."""
    parser = next((mark for mark in metadata if isinstance(mark, ParsedBy)), _BY_TYPE.get(base))
    if typing.get_origin(base) is Literal:
        values = typing.get_args(base)
        parser = ParsedBy(choice(values), "{" + ",".join(map(str, values)) + "}")
    if parser is None:
        raise TypeError(f"{label}: no parser for the type {base}; mark it with ParsedBy")
    return parser


def _word(label: str, by_place: bool, parser: ParsedBy) -> Any:
    """The tyro specification of one word that `parser` reads."""
    import tyro

    def read(words: list[str]) -> Any:
        try:
            return parser.parse(words[0])
        except ValueError as error:
            raise _Rejected(f"{label}: {error}") from error

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=label if by_place else parser.metavar,
        instance_from_str=read,
        is_instance=lambda value: True,
        str_from_instance=lambda value: [str(value)],
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
            flags.append(_flag_of(name))
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
    _title, *lines = [line.rstrip() for line in plain.splitlines() if line.strip()]
    if not lines or "Missing from" not in lines[0]:
        return " ".join(line.strip() for line in lines)
    # Each that is missing is as far in as the first, its help below it farther.
    far_in = " " * (len(lines[1]) - len(lines[1].lstrip()))
    return "; ".join(map(_missing, re.split(rf"\n{far_in}(?=\S)", "\n".join(lines))[1:]))


def _missing(told: str) -> str:
    """`--out DIR`, and below it its help, as `--out is missing: folder to write`."""
    label, _, text = told.partition("\n")
    sentence = " ".join(text.split()).removesuffix("(required)").rstrip(" .")
    if re.match("[A-Z][a-z ]", sentence):
        sentence = sentence[0].lower() + sentence[1:]
    return f"{label.split()[0]} is missing: {sentence}"

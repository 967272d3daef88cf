"""Command lines of the programs: a frozen dataclass in, its instance or one line of complaint out.

A program declares its options as a dataclass, one docstring a field, and calls `parse`. What tyro
needs to know beyond the type is said with the markers of `infer.argument_types`, so that a
program's module stays importable without tyro.
"""

import contextlib
import dataclasses
import io
import re
import types
import typing
from typing import Annotated, Any, Literal, TypeVar

from dejax.errors import UsageError
from infer.argument_types import BY_TYPE, POSITIONAL, ParsedBy, choice, did_you_mean

T = TypeVar("T")


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
    by_place = POSITIONAL in metadata
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
    parser = next((mark for mark in metadata if isinstance(mark, ParsedBy)), BY_TYPE.get(base))
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
        elif _takes_several(base, metadata) and POSITIONAL not in metadata:
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
        elif POSITIONAL not in metadata:
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

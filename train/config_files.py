"""Experiments from Python files: load one, change single settings, write down what resulted.

A config file defines `get_config()`, which returns a frozen dataclass. `--set a.b=c` replaces the
field `b` of its part `a`, read by the field's annotation.
"""

import dataclasses
import re
import traceback
import types
import typing
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from dejax.errors import UsageError
from dejax.paths import kind_of, shown
from infer.argument_types import choice, did_you_mean, integer, not_empty, number
from infer.output import to_plain
from train.config_types import group_of, short, wrong_types

INSTALLED = Path(__file__).resolve().parent.parent / "configs"
"""The configs that come with dejax: the package beside this one."""


def load_config(path_or_name: str, overrides: Sequence[str] = ()) -> Any:
    """The frozen dataclass that a config file's `get_config()` returns, with `overrides` applied.

    Args:
        path_or_name: a file, or the name of a config that comes with dejax, with or without
            `configs/` and `.py`.
        overrides: `a.b=c`; the last one of a key counts. All are applied at once, so that a
            dataclass checks only the combination asked for.

    Raises:
        UsageError: one line with the file or the key, what was expected, and the nearest name.
    """
    path = _find(path_or_name)
    config = _execute(path)
    tree: dict[str, Any] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise UsageError(f"--set {override}: expected KEY=VALUE, such as a.b=3")
        _insert(tree, key, text)
    return _replace(config, type(config), tree, "")


def to_json(config: Any) -> dict[str, Any]:
    """The resolved config as plain JSON values, for checkpoints and results."""
    return to_plain(config)


def _find(path_or_name: str) -> Path:
    path = Path(path_or_name)
    if kind_of(path_or_name) in ("file", "other"):
        return path
    name = path_or_name.removeprefix("configs/").removesuffix(".py")
    names = sorted(file.stem for file in INSTALLED.glob("[!_]*.py"))
    if name in names:
        return INSTALLED / f"{name}.py"
    known = did_you_mean(name, names) or f"; dejax comes with: {', '.join(names) or 'none'}"
    raise UsageError(f"config {shown(path)!r}: no such file, and none of dejax's{known}")


def _execute(path: Path) -> Any:
    """Runs a config file; whatever goes wrong in it is told with its line, without a traceback."""
    try:
        module = types.ModuleType(path.stem)
        module.__file__ = str(path)
        exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
        if not callable(getattr(module, "get_config", None)):
            raise UsageError("defines no get_config(); expected a function that returns the config")
        config = module.get_config()
    except SyntaxError as error:
        line = "" if error.lineno is None else f"line {error.lineno}: "
        raise UsageError(f"{error.filename or path}: {line}not Python: {error.msg}") from error
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        where = f"{path}: line {lines[-1]}" if lines else f"{path}"
        kind = "" if isinstance(error, UsageError) else f"{type(error).__name__}: "
        raise UsageError(f"{where}: {_cause(error) or f'{kind}{error}'}") from error
    parameters = getattr(config, "__dataclass_params__", None)
    if parameters is None or isinstance(config, type) or not parameters.frozen:
        raise UsageError(
            f"{path}: get_config() returned {type(config).__name__}; expected a frozen dataclass"
        )
    if wrong := wrong_types(config):
        raise UsageError(f"{path}: {wrong}")
    return config


def _cause(error: BaseException) -> str:
    """The values of a wrong type over which a dataclass's own checks fell, or nothing."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        checked = frame.f_locals.get("self")
        if frame.f_code.co_name == "__post_init__" and dataclasses.is_dataclass(checked):
            if wrong := wrong_types(checked):
                return f"{type(checked).__name__}: {wrong}"
    return ""


def _insert(tree: dict[str, Any], key: str, text: str) -> None:
    """Hangs `text` into the tree of overrides: `a.b=c` becomes `{"a": {"b": "c"}}`."""
    *parents, last = key.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise UsageError(f"--set {key}={text}: {parent} has been set as a whole already")
    if isinstance(tree.get(last), dict):
        raise UsageError(f"--set {key}={text}: parts of {last} have been set already")
    tree[last] = text


def _replace(start: Any, kind: type, tree: dict[str, Any], prefix: str) -> Any:
    """`start`, a `kind`, with the fields of `tree` replaced, innermost first; None is a new one."""
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    changes = {}
    for name, entry in tree.items():
        key = prefix + name
        if name not in fields:
            hint = did_you_mean(name, fields)
            raise UsageError(f"--set {key}: no such key{hint} (known: {', '.join(fields)})")
        if isinstance(entry, dict):
            # A default is an attribute of the class.
            current = getattr(kind if start is None else start, name, None)
            group = type(current) if dataclasses.is_dataclass(current) else group_of(hints[name])
            if group is None:
                first = f"{key}.{next(iter(entry))}"
                raise UsageError(f"--set {first}: {key} is {short(current)}, no group")
            changes[name] = _replace(current, group, entry, f"{key}.")
            continue
        try:
            changes[name] = _value(entry, hints[name])
        except ValueError as error:
            raise UsageError(f"--set {key}={entry}: {error}") from None
    if not changes:
        return start
    needed = [prefix + name for name, f in fields.items() if name not in changes and _is_needed(f)]
    if start is None and needed:
        raise UsageError(
            f"--set {prefix}{next(iter(tree))}: {prefix[:-1]} is None, and a new one needs "
            f"{', '.join(needed)}; set that too"
        )
    try:
        return (kind if start is None else partial(dataclasses.replace, start))(**changes)
    except ValueError as error:
        raise UsageError(f"--set{_at_fault(tree, prefix, str(error))}: {error}") from error


def _is_needed(field: dataclasses.Field) -> bool:
    return field.default is field.default_factory is dataclasses.MISSING


def _at_fault(tree: dict[str, Any], prefix: str, message: str) -> str:
    """Those settings that a message names; if none, the only one that there is."""
    settings = dict(_settings(tree, prefix))
    words = set(re.findall(r"\w+", message))
    named = [key for key in settings if key.split(".")[-1] in words]
    named = named or (list(settings) if len(settings) == 1 else [])
    return "".join(f" {key}={settings[key]}" for key in named)


def _settings(tree: dict[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    """(a.b, c) of every `a.b=c` in a tree."""
    for name, entry in tree.items():
        if isinstance(entry, dict):
            yield from _settings(entry, f"{prefix}{name}.")
        else:
            yield prefix + name, entry


def _value(text: str, hint: Any) -> Any:
    """`text` as a value of the annotated type; ValueError tells what was expected."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _value_of_union(text, args)
    if origin is tuple:
        return _value_of_tuple(text, args)
    if origin is Literal:
        return choice(args)(text)
    if (group := group_of(hint)) is not None:
        names = ", ".join(field.name for field in dataclasses.fields(group))
        raise UsageError(f"is a group; set one of its keys: {names}")
    parsers = {bool: _boolean, int: _integer, float: number, str: str}
    if hint is Path:
        return Path(not_empty(text))
    if hint not in parsers:
        raise UsageError(f"a {hint} cannot be given as text; edit the config file")
    return parsers[hint](text)


def _value_of_union(text: str, members: tuple[Any, ...]) -> Any:
    if type(None) in members and text.lower() in ("none", "null"):
        return None
    # Every text is a str: that reading comes last.
    others = sorted((m for m in members if m is not type(None)), key=lambda m: m is str)
    complaints = []
    for member in others:
        try:
            return _value(text, member)
        except UsageError as error:
            complaints.append(str(error))
    raise UsageError(" and ".join(complaints) + " (or none)" * (type(None) in members))


def _value_of_tuple(text: str, members: tuple[Any, ...]) -> tuple[Any, ...]:
    """`1,2`, `(1, 2)` or `[1, 2]`; nothing between the brackets is the empty tuple."""
    bare = text.strip()
    if bare[:1] + bare[-1:] in ("()", "[]"):
        bare = bare[1:-1]
    words = [word.strip() for word in bare.rstrip(", ").split(",")] if bare.strip() else []
    if len(members) == 2 and members[1] is Ellipsis:
        members = members[:1] * len(words)
    if len(words) != len(members):
        raise UsageError(f"expected {len(members)} values with commas between, got {len(words)}")
    return tuple(_value(word, member) for word, member in zip(words, members, strict=True))


def _integer(text: str) -> int:
    value = integer(text)
    if abs(value) >= 2**32:
        raise UsageError(f"{text!r} is out of range; expected less than 2^32")
    return value


def _boolean(text: str) -> bool:
    words = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}
    if text.lower() not in words:
        raise UsageError(f"{text!r} is not true or false")
    return words[text.lower()]

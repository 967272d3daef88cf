"""Experiments from Python files: load one, change single settings, write down what resulted.

A config file defines `get_config()`, which returns a frozen dataclass. `--set a.b=c` replaces the
field `b` of its part `a`, read by the field's annotation.
"""

import dataclasses
import traceback
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from dejax.errors import UsageError
from dejax.paths import kind_of, shown
from infer.arguments import choice, did_you_mean, integer, number
from infer.output import to_plain

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
    return _replace(config, tree, "")


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
        raise UsageError(
            f"{error.filename}: line {error.lineno}: not Python: {error.msg}"
        ) from error
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        where = f"{path}: line {lines[-1]}" if lines else f"{path}"
        kind = "" if isinstance(error, UsageError) else f"{type(error).__name__}: "
        raise UsageError(f"{where}: {kind}{error}") from error
    parameters = getattr(config, "__dataclass_params__", None)
    if parameters is None or isinstance(config, type) or not parameters.frozen:
        raise UsageError(
            f"{path}: get_config() returned {type(config).__name__}; expected a frozen dataclass"
        )
    return config


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


def _replace(config: Any, tree: dict[str, Any], prefix: str) -> Any:
    """`config` with the fields of `tree` replaced, innermost first."""
    hints = typing.get_type_hints(type(config))
    names = [field.name for field in dataclasses.fields(config)]
    changes = {}
    for name, entry in tree.items():
        key = prefix + name
        if name not in names:
            hint = did_you_mean(name, names)
            raise UsageError(f"--set {key}: no such key{hint} (known: {', '.join(names)})")
        current = getattr(config, name)
        if isinstance(entry, dict):
            if not dataclasses.is_dataclass(current):
                raise UsageError(f"--set {key}.{next(iter(entry))}: {key} is {current!r}, no group")
            changes[name] = _replace(current, entry, f"{key}.")
            continue
        try:
            changes[name] = _value(entry, hints[name])
        except ValueError as error:
            raise UsageError(f"--set {key}={entry}: {error}") from None
    if not changes:
        return config
    try:
        return dataclasses.replace(config, **changes)
    except ValueError as error:
        what = " ".join(f"{prefix}{name}={entry}" for name, entry in tree.items())
        raise UsageError(f"--set {what}: {error}") from error


def _value(text: str, hint: Any) -> Any:
    """`text` as a value of the annotated type; ValueError tells what was expected."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _value_of_union(text, args)
    if origin is tuple:
        return _value_of_tuple(text, args)
    if origin is Literal:
        return choice(args)(text)
    if dataclasses.is_dataclass(hint):
        names = ", ".join(field.name for field in dataclasses.fields(hint))
        raise UsageError(f"is a group; set one of its keys: {names}")
    parsers = {bool: _boolean, int: _integer, float: number, str: str, Path: Path}
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

"""What the fields of a config may hold: values against annotations."""

import dataclasses
import sys
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

_MOST_TOLD, _MOST_SHOWN = 3, 60  # problems of a config; characters of a value


def wrong_types(config: Any) -> str:
    """What of a dataclass is not as annotated: `loop.steps is '9'; expected a whole number`.

    Nested dataclasses are looked into; a whole number may stand for a float, but no bool for a
    number. Empty if all is well, and the first few if much is wrong.
    """
    problems = list(_of_fields(config, ""))
    more = len(problems) - _MOST_TOLD
    return "; ".join(problems[:_MOST_TOLD]) + (f"; and {more} more" if more > 0 else "")


def group_of(hint: Any) -> type | None:
    """The dataclass that is annotated, alone or as `X | None`; None if there is none."""
    return next((kind for kind in (hint, *typing.get_args(hint)) if _is_group(kind)), None)


def short(value: Any) -> str:
    """A value as messages show it: on one line, cut if it is long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."


def _of_fields(config: Any, prefix: str) -> Iterator[str]:
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        name = field.name
        yield from _problems(getattr(config, name, None), hints[name], prefix + name)


def _problems(value: Any, hint: Any, name: str) -> Iterator[str]:
    args = typing.get_args(hint)
    if _is_union(hint):
        # Of the member that it is meant to be, a problem is told where it lies.
        kind = group_of(hint)
        if kind is not None and isinstance(value, kind):
            yield from _of_fields(value, f"{name}.")
            return
        if any(not list(_problems(value, member, name)) for member in args):
            return
    elif typing.get_origin(hint) is tuple and isinstance(value, tuple):
        members = args[:1] * len(value) if args[1:] == (Ellipsis,) else args
        if len(members) == len(value):
            for index, (each, member) in enumerate(zip(value, members, strict=True)):
                yield from _problems(each, member, f"{name}[{index}]")
            return
    elif _is_group(hint) and isinstance(value, hint):
        yield from _of_fields(value, f"{name}.")
        return
    elif _fits(value, hint):
        return
    yield f"{name} is {short(value)}; expected {_expected(hint)}"


def _fits(value: Any, hint: Any) -> bool:
    if typing.get_origin(hint) is Literal:
        return any(type(value) is type(a) and value == a for a in typing.get_args(hint))
    if hint in (int, float) and isinstance(value, bool):
        return False
    if hint is float:
        largest = sys.float_info.max
        return isinstance(value, int | float) and -largest <= value <= largest
    kind = typing.get_origin(hint) or hint
    return not isinstance(kind, type) or isinstance(value, kind)


def _expected(hint: Any) -> str:
    args = typing.get_args(hint)
    if _is_union(hint):
        return " or ".join(_expected(member) for member in args)
    if typing.get_origin(hint) is Literal:
        *others, last = map(repr, args)
        return f"{', '.join(others)} or {last}" if others else last
    if typing.get_origin(hint) is tuple:
        whole = args[1:] == (Ellipsis,)
        return f"a tuple, each {_expected(args[0])}" if whole else f"a tuple of {len(args)}"
    words = {int: "a whole number", float: "a number", str: "a string", bool: "True or False"}
    name = getattr(typing.get_origin(hint) or hint, "__name__", str(hint))
    name = "None" if hint is type(None) else f"{name}(...)" if _is_group(hint) else f"a {name}"
    return words.get(hint, name)


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _is_group(hint: Any) -> bool:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)

"""Paths that a user gives: what is there, and one line where a path cannot be used.

The system refuses a path in many ways (too long, a NUL in it, a file on the way, no permission).
`pathlib` raises some of them and hides others; here each is a UsageError.
"""

import os
import stat
from pathlib import Path
from typing import Literal

from dejax.errors import UsageError

Kind = Literal["folder", "file", "other"]
"""What a path leads to; "other" is a pipe or a device, which can be read or written like a file."""

_MOST_SHOWN = 160  # characters of a path in a message


def shown(path: str | Path) -> str:
    """A path as messages show it: printable, on one line, its middle left out if it is long."""
    text = str(path)
    text = text if text.isprintable() else ascii(text)
    if len(text) <= _MOST_SHOWN:
        return text
    return f"{text[:80]}...{text[-40:]} ({len(text)} characters)"


def reason(error: OSError | ValueError) -> str:
    """Why the system did not take a path, in a few words."""
    if isinstance(error, NotADirectoryError):
        return "a part of this path is a file, not a folder"
    if isinstance(error, OSError):
        return (error.strerror or str(error)).lower()
    return "a path cannot hold a NUL character" if "null" in str(error) else str(error)


def kind_of(path: str | Path) -> Kind | None:
    """What is at a path (links followed); None if nothing is.

    Raises:
      UsageError: the path is empty, or the system does not take it.
    """
    if not str(path):
        raise UsageError("the path is empty; expected a name")
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UsageError(f"{shown(path)}: {reason(error)}; give another path") from None
    return "folder" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "other"


def existing_folder(path: str | Path, expected: str) -> Path:
    """`path`, which is a folder; `expected` ends the message where it is not.

    Raises:
      UsageError: nothing is there, or something else is.
    """
    kind = kind_of(path)
    if kind != "folder":
        problem = "is not a folder" if kind else "does not exist"
        raise UsageError(f"{shown(path)} {problem}; expected {expected}")
    return Path(path)


def existing_file(path: str | Path, expected: str) -> Path:
    """`path`, which can be read like a file; `expected` ends the message where it cannot.

    Raises:
      UsageError: nothing is there, or a folder is.
    """
    kind = kind_of(path)
    if kind in (None, "folder"):
        problem = "is a folder" if kind else "does not exist"
        raise UsageError(f"{shown(path)} {problem}; expected {expected}")
    return Path(path)


def read_file(path: str | Path, expected: str) -> bytes:
    """The bytes of a file; UsageError as `existing_file`, and where the system denies them."""
    try:
        return existing_file(path, expected).read_bytes()
    except OSError as error:
        raise UsageError(
            f"{shown(path)} cannot be read ({reason(error)}); expected {expected}"
        ) from error


def check_creatable(path: str | Path) -> None:
    """Refuses a path at which nothing could be made: the folders on the way may be missing.

    Raises:
      UsageError: a name is too long, a part of the path is a file, or it may not be written to.
    """
    kind_of(path)
    whole = Path(os.path.abspath(path))
    there, missing = whole.parent, [whole.name]
    while kind_of(there) is None:
        there, missing = there.parent, [*missing, there.name]
    if kind_of(there) != "folder":
        raise UsageError(f"{shown(path)} cannot be written: {shown(there)} is not a folder")
    for name in missing:  # below a missing folder the system would not yet say "too long"
        kind_of(there / name)
    if not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(
            f"{shown(path)} cannot be written: no permission to write to {shown(there)}"
        )

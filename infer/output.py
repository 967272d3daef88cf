"""Where results go: tables on standard output, JSON in a file (`--json FILE`) or there instead.

A file is written whole or not at all, and its place is checked before any work is done.
"""

import contextlib
import dataclasses
import json
import math
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dejax.errors import FailedError, UsageError
from dejax.paths import check_creatable, kind_of, reason, shown
from infer.units import format_bytes


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


def report(path: Path | None, value: Any, show: Callable[[], None]) -> None:
    """A verb's result: `show` prints it, and `value` goes to the file of `--json`, if one is given.

    With `--json -`, standard output has the JSON alone and what is printed goes to standard error.
    """
    alone = str(path) == "-"
    with contextlib.redirect_stdout(sys.stderr) if alone else contextlib.nullcontext():
        show()
    if path is not None:
        write_json(path, value)


def write_json(path: Path | str, value: Any) -> None:
    """Writes `to_plain(value)` to a file, whole or not at all, or to standard output for `-`.

    Folders on the way are made. Raises FailedError where the file cannot be written.
    """
    to_stdout = str(path) == "-"
    # A terminal that is not UTF-8 gets the escapes that JSON has for all other characters.
    narrow = to_stdout and (sys.stdout.encoding or "").lower() not in ("utf-8", "utf8")
    text = json.dumps(to_plain(value), indent=2, ensure_ascii=narrow, allow_nan=False) + "\n"
    # Half a surrogate pair, which UTF-8 lacks, becomes the escape that JSON has for it.
    data = text.encode("utf-8", "backslashreplace")
    if to_stdout:
        sys.stdout.write(data.decode())
        sys.stdout.flush()
        return
    write_whole(Path(path), data)


def check_output(path: Path | str | None) -> None:
    """Refuses, before any work is done, a place for a result that cannot be a file.

    None and `-` (standard output) are fine.

    Raises:
      UsageError: it is empty, a folder, or cannot be made or written to.
    """
    if path is None or str(path) == "-":
        return
    if kind_of(path) == "folder":
        raise UsageError(f"{shown(path)} is a folder; expected a file to write to")
    if kind_of(path) != "other":
        check_creatable(path)
    elif not os.access(path, os.W_OK):
        raise UsageError(f"{shown(path)} cannot be written: no permission")


def check_room(folder: Path, needed: int) -> None:
    """Refuses to begin to write so many bytes, under a folder that may not be there yet.

    Raises:
      FailedError: the disk has less room.
    """
    there = next(part for part in (folder.absolute(), *folder.absolute().parents) if part.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise FailedError(
            f"{folder}: {format_bytes(needed)} are to be written, but only {format_bytes(free)} "
            "are free; make room, or choose a folder on another disk"
        )


def check_output_folder(path: Path | str) -> None:
    """Refuses, before any work is done, a place for results that cannot be a folder.

    Raises:
      UsageError: it is empty, `-`, a file, or cannot be made or written to.
    """
    if str(path) == "-":
        raise UsageError("a folder is not written to standard output; expected a folder's name")
    kind = kind_of(path)
    if kind not in (None, "folder"):
        raise UsageError(f"{shown(path)} is a file; expected a folder to write to")
    check_creatable(path if kind is None else Path(path) / "new")


def make_folder(path: Path) -> None:
    """Makes a folder and those on the way; FailedError where that is not possible."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FailedError(f"{shown(path)}: cannot be made: {reason(error)}") from error


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
        # Cut, so that it is a name that the system takes wherever it takes the file's own.
        unfinished = path.with_name(f".{path.name[:40]}.{os.getpid()}")
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

"""Folders that are there whole or not at all, whatever stops the program or the machine."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from dejax.errors import FailedError


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder to write to in the place of `folder`, which it takes when the block ends well.

    What was there goes only after that. Folders on the way are made; of a block that fails nothing
    is left, of a program that is killed at most a hidden folder.

    Raises:
      FailedError: it cannot be written.
    """
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        for path in (*partial.iterdir(), partial):
            _sync(path)
        old = partial.with_suffix(".old")
        if folder.exists():
            folder.rename(old)
        partial.rename(folder)
        _sync(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise FailedError(f"{folder}: cannot be written: {error.strerror or error}") from error
    except SafetensorError as error:  # how safetensors tells of a full disk
        raise FailedError(f"{folder}: cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""Files dropped from the operating system's page cache, so that reads come from the disk."""

import os
import time
from pathlib import Path

_DROPS = 10
"""How often a file is dropped before it is said to stay."""


def drop(path: str | Path, offset: int, *, flush: bool = False) -> bool:
    """Drops a file from the page cache; whether its byte at `offset` is gone from there.

    `flush` first writes out what is not on the disk yet, which else stays.

    Raises:
      OSError: the file cannot be opened or written out.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        if flush:
            os.fsync(handle)
        return any(_dropped(handle, offset) for _ in range(_DROPS))
    finally:
        os.close(handle)


def _dropped(handle: int, offset: int) -> bool:
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        os.preadv(handle, [bytearray(1)], offset, os.RWF_NOWAIT)
    except BlockingIOError:  # it would have to wait for the disk
        return True
    time.sleep(0.001)  # a page that is being read ahead or written cannot be dropped yet
    return False

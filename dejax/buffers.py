"""Memory for records of experts: aligned, and used again once nobody refers to it any more.

New memory is dear: its pages are made one by one when they are first written, which takes longer
than reading an expert into memory that is there already. On CPU `jax.device_put` takes over aligned
memory as it is, so that a buffer may be written again only when the array over it is gone too.
"""

import collections
import ctypes
import math
import mmap
import weakref
from collections.abc import Sequence

import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Shaped

ALIGNMENT = 64
"""Bytes: what starts at a multiple of them is taken over by JAX on CPU."""


class BufferPool:
    """Hands out buffers, and takes them back when the last array over them is gone. Thread-safe."""

    def __init__(self) -> None:
        self._free: dict[int, collections.deque[mmap.mmap]] = {}
        self.made = 0

    def take(self, shape: Sequence[int], dtype: DTypeLike) -> Shaped[np.ndarray, "..."]:
        """A C-contiguous array at a page's start; zeros, or what its last user left there.

        It counts as used as long as any array, of NumPy or JAX, lies over it.
        """
        dtype = np.dtype(dtype)
        size = math.prod(shape) * dtype.itemsize
        free = self._free.setdefault(size, collections.deque())
        try:
            block = free.pop()
        except IndexError:
            block = _new_block(size)
            self.made += 1
        # Every array over the block refers to this object, views of views too.
        lease = (ctypes.c_ubyte * size).from_buffer(block)
        weakref.finalize(lease, free.append, block).atexit = False
        return np.frombuffer(memoryview(lease), dtype).reshape(shape)

    def clear(self) -> None:
        """Lets go of what nobody uses."""
        for free in self._free.values():
            free.clear()


def _new_block(size: int) -> mmap.mmap:
    # Shared memory, the default, would get no huge pages.
    block = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= 2**21 and hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE)
    return block

"""The inputs of a pass: rows of a tree (or chain) that hangs below the committed sequence.

A block of rows begins at a cache slot, row i at slot base + i, whatever the shape of the tree; a
row's position is that of the slot plus its depth. A target pass runs a whole block; a pass of a
tree's draft runs one level of it, and sees the levels before, which lie in the slots before.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Int

from infer.buckets import PREFILL_ROWS

SCRATCH = PREFILL_ROWS
"""Slots behind the committed ones; a draft's levels lie in them one after another."""


class Block(NamedTuple):
    """R rows (padding included) of a block of W.

    Attributes:
      start: slot of the first row; base: that of the block.
      ancestors: which rows of the block a row sees, itself included.
      block_positions: of all rows of the block, for sliding windows.
    """

    tokens: Int[Array, " R"]
    positions: Int[Array, " R"]
    start: Int[Array, ""]
    ancestors: Bool[Array, "R W"]
    base: Int[Array, ""]
    block_positions: Int[Array, " W"]


def block_of(tokens: Sequence[int], base: int, parents: Sequence[int] | None, size: int) -> Block:
    """A whole block, padded to `size` rows, on the device in one transfer.

    `parents[i]` is the row that row i follows, -1 for the committed sequence; None is a chain.
    """
    ancestors = np.eye(size, dtype=bool)
    depth = np.arange(size, dtype=np.int32)
    if parents is None:
        ancestors = np.tri(size, dtype=bool)
    else:
        _descend(ancestors, depth, parents)
    padded = np.zeros(size, np.int32)
    padded[: len(tokens)] = tokens
    inputs = (padded, base + depth, np.int32(base), ancestors)
    tokens_in, positions, start, seen = jax.device_put(inputs)
    return Block(tokens_in, positions, start, seen, start, positions)


def level_of(tokens: Sequence[int], base: int, parents: Sequence[int], size: int) -> Block:
    """The last `len(tokens)` rows of a block whose rows have these parents, padded to `size`.

    The rows before them are in the cache already.
    """
    first = len(parents) - len(tokens)
    ancestors = np.eye(SCRATCH, dtype=bool)
    depth = np.zeros(SCRATCH, np.int32)
    _descend(ancestors, depth, parents)
    padded = np.zeros(size, np.int32)
    padded[: len(tokens)] = tokens
    rows = slice(first, first + size)
    positions = (base + depth).astype(np.int32)
    inputs = (
        padded,
        positions[rows],
        np.int32(base + first),
        ancestors[rows],
        np.int32(base),
        positions,
    )
    return Block(*jax.device_put(inputs))


def _descend(ancestors: np.ndarray, depth: np.ndarray, parents: Sequence[int]) -> None:
    for row, parent in enumerate(parents):
        if parent >= 0:
            ancestors[row] |= ancestors[parent]
        depth[row] = 0 if parent < 0 else depth[parent] + 1

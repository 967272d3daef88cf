"""Rows of fixed length, cut from documents that lie next to each other."""

from collections.abc import Sequence

import numpy as np

Batch = dict[str, np.ndarray]
"""tokens, targets, segment_ids, positions: int32 [B, T]; mask: float32 [B, T], 1 = counts."""


def as_row(
    tokens: np.ndarray,
    bounds: np.ndarray,
    first: int,
    *,
    seq_len: int,
    counts: np.ndarray | None = None,
) -> Batch:
    """A row of `seq_len` tokens, and as targets the ones after them.

    Args:
      tokens: int [n <= seq_len + 1], those from place `first` on; what is missing is padding.
      bounds: int64 [m + 1], the places where documents begin, and where the last one ends.
      counts: bool [n], whether each token counts as a target; None: all do.

    The mask is 0 where target and token are of different documents.
    """
    n = len(tokens)
    row = np.zeros(seq_len + 1, np.int32)
    row[:n] = tokens
    document = np.searchsorted(bounds, np.arange(first, first + n), side="right")
    segments = np.zeros(seq_len + 1, np.int32)
    segments[:n] = document - document[0] + 1
    positions = np.zeros(seq_len + 1, np.int32)
    positions[:n] = np.arange(first, first + n) - np.maximum(bounds[document - 1], first)
    counted = (segments[1:] == segments[:-1]) & (segments[1:] > 0)
    if counts is not None:
        counted[: n - 1] &= counts[1:]
    return {
        "tokens": row[:-1],
        "targets": row[1:],
        "segment_ids": segments[:-1],
        "positions": positions[:-1],
        "mask": counted.astype(np.float32),
    }


def stack_rows(rows: Sequence[Batch]) -> Batch:
    """Rows as one batch."""
    return {key: np.stack([row[key] for row in rows]) for key in rows[0]}

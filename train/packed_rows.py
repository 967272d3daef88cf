"""Tokenized documents as packed rows, for distillation and its evaluation.

Rows are those of `train.rows`: the documents are one sequence in a given order, cut every
`seq_len` tokens. Only the tokens of a row that is asked for are read.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from dejax.errors import UsageError
from train.rows import Batch, as_row, stack_rows
from train.token_cache import TokenizedDocuments

HELD_OUT_EVERY = 16
"""One document of so many is kept for evaluation."""


def split_documents(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Places of (those trained on, those held out): every `HELD_OUT_EVERY`-th document is."""
    places = np.arange(count)
    held = places % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
    return places[~held], places[held]


class PackedRows:
    """Rows of `seq_len` tokens of documents, one after the other; a source for grain.

    Args:
      order: the places of the documents that are packed, in that order.

    Raises:
      UsageError: there are no tokens.
    """

    def __init__(
        self,
        documents: TokenizedDocuments,
        order: Sequence[int] | np.ndarray,
        *,
        seq_len: int,
    ):
        order = np.asarray(order, np.int64)
        self._documents, self._seq_len = documents, seq_len
        self._order = order[documents.lengths[order] > 0]
        ends = np.cumsum(documents.lengths[self._order], dtype=np.int64)
        self._bounds = np.concatenate([np.zeros(1, np.int64), ends])
        if self._bounds[-1] < 2:
            raise UsageError("data: the documents have no tokens to predict; give more text")

    def __len__(self) -> int:
        return -(-(int(self._bounds[-1]) - 1) // self._seq_len)

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        first = index * self._seq_len
        last = min(first + self._seq_len + 1, int(self._bounds[-1]))
        tokens, counts = [], []
        place = int(np.searchsorted(self._bounds, first, side="right")) - 1
        while (start := int(self._bounds[place])) < last:
            ids, counted = self._documents[int(self._order[place])]
            inside = slice(max(first - start, 0), last - start)
            tokens.append(ids[inside])
            counts.append(counted[inside])
            place += 1
        return as_row(
            np.concatenate(tokens),
            self._bounds,
            first,
            seq_len=self._seq_len,
            counts=np.concatenate(counts),
        )

    def batches(self, batch_size: int, *, most: int | None = None) -> Iterator[Batch]:
        """All rows in order (the first `most`); the last batch is filled up with empty rows."""
        count = len(self) if most is None else min(most, len(self))
        for start in range(0, count, batch_size):
            rows = [self[index] for index in range(start, min(start + batch_size, count))]
            yield pad_rows(stack_rows(rows), batch_size)


def pad_rows(batch: Batch, rows: int) -> Batch:
    """A batch filled up to `rows` rows with zeros, which no mask counts."""
    missing = rows - len(batch["tokens"])
    return {key: np.pad(a, ((0, missing), (0, 0))) for key, a in batch.items()}

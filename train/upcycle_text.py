"""Text for `dejax upcycle`: windows to fit on, and other windows, by kind, to measure on.

Kinds of text (a document's `kind`, else the name of its file) get the same number of tokens each,
as long as they last: a model is moved less by what it has seen, and the aim is to move it little
everywhere.
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dejax.errors import UsageError
from train.data import Batch
from train.upcycle_documents import (
    Document,
    PackedRows,
    encode_documents,
    read_documents,
    split_documents,
)

LONGEST_WINDOW = 512
"""Tokens of a window; fewer where the model's context is shorter."""
PIECES = 4
"""Windows that one document gives at most."""


def by_kind(documents: Sequence[Document], name: str) -> dict[str, list[Document]]:
    """Documents under their `kind`, or under `name` where they have none; order is kept."""
    kinds: dict[str, list[Document]] = defaultdict(list)
    for document in documents:
        kinds[str(document.get("kind", name))].append(document)
    return dict(kinds)


def _read_files(files: Sequence[Path]) -> list[tuple[str, list[Document]]]:
    """Kind and documents of each file, one entry a kind of it."""
    found = []
    for file in files:
        found += by_kind(read_documents(file), file.name.split(".")[0]).items()
    return found


def calibration_windows(
    tokenizer: Any, files: Sequence[Path], *, tokens: int, window: int, multiple: int, seed: int
) -> Batch:
    """Windows of text, no token of them padding: the demo's training documents and `files`.

    Args:
      tokens: how many to take, rounded down to `multiple` whole windows.
      multiple: the number of windows is one of this.

    Returns:
      A batch of packed rows; a function of the texts, the tokenizer and `seed` alone.

    Raises:
      UsageError: `tokens` are too few for `multiple` windows, or the text has fewer.
    """
    if tokens < multiple * window:
        raise UsageError(
            f"--tokens: {tokens} calibration tokens are too few; expected at least "
            f"{multiple * window} ({multiple} windows of {window})"
        )
    trained, _ = split_documents(read_documents("demo"))
    kinds: dict[str, list[Document]] = defaultdict(list)
    for kind, documents in [*by_kind(trained, "demo").items(), *_read_files(files)]:
        kinds[kind] += documents
    count = tokens // (multiple * window) * multiple
    rng = np.random.default_rng(seed)
    # One more token than the windows hold: a row's last target.
    chosen, found = _evenly(kinds, tokenizer, rng, tokens=count * window + 1, window=window)
    if found <= count * window:
        raise UsageError(
            f"the calibration text has {found} tokens; expected more than {count * window}: give "
            "more text with --calibration, or fewer --tokens"
        )
    return PackedRows(chosen, window).rows(range(count))


def _evenly(
    kinds: dict[str, list[Document]],
    tokenizer: Any,
    rng: np.random.Generator,
    *,
    tokens: int,
    window: int,
) -> tuple[list[list[int]], int]:
    """Encoded documents in a random order, the kind with the fewest tokens so far next.

    Of a long document a part is taken, `PIECES` windows from a random one on. Also how many tokens
    they have: `tokens` or somewhat more, or fewer where there is no more text.
    """
    waiting = {kind: [own[i] for i in rng.permutation(len(own))] for kind, own in kinds.items()}
    taken = dict.fromkeys(waiting, 0)
    chosen, found = [], 0
    while found < tokens and any(waiting.values()):
        kind = min((kind for kind, own in waiting.items() if own), key=lambda kind: taken[kind])
        (ids,) = encode_documents([waiting[kind].pop()], tokenizer)
        begin = int(rng.integers(max(1, -(-len(ids) // window) - PIECES + 1))) * window
        ids = ids[begin : begin + PIECES * window]
        chosen.append(ids)
        taken[kind] += len(ids)
        found += len(ids)
    return chosen, found


def held_out_windows(
    tokenizer: Any, files: Sequence[Path], *, window: int, most: int
) -> dict[str, Batch]:
    """At most `most` windows of each kind to measure on: of `files`, or of the demo's held-out."""
    _, held = split_documents(read_documents("demo"))
    found = _read_files(files) if files else list(by_kind(held, "demo").items())
    windows = {}
    for kind, documents in found:
        rows = PackedRows(encode_documents(documents, tokenizer), window)
        windows[kind] = rows.rows(range(min(most, len(rows))))
    return windows

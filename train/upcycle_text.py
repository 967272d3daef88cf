"""Text for `dejax upcycle`: windows to fit on, and other windows, by kind, to measure on.

Kinds of text (a document's `kind`, else the name of its file) get the same number of tokens each,
as long as they last: the model is to stay near the dense one everywhere.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from dejax.errors import UsageError
from train.document_files import Document, open_source
from train.encoding import encode_documents
from train.packed_rows import split_documents
from train.rows import Batch, as_row, stack_rows

LONGEST_WINDOW = 512
"""Tokens of a window; fewer where the model's context is shorter."""
PIECES = 4
"""Windows that one document gives at most."""

Kinds = dict[str, list[Document]]


def read_kinds(name: str | Path) -> Kinds:
    """The documents of a source under their `kind`, or under its name; order is kept."""
    kinds: Kinds = defaultdict(list)
    for document in open_source(str(name)).documents():
        kinds[document.kind or Path(name).name.split(".")[0]].append(document)
    return dict(kinds)


def _demo(*, held: bool) -> Kinds:
    """The demo's documents that are trained on, or those held out."""
    documents = list(open_source("demo").documents())
    kinds: Kinds = defaultdict(list)
    for place in split_documents(len(documents))[int(held)]:
        kinds[documents[place].kind or "demo"].append(documents[place])
    return kinds


def _encode(document: Document, tokenizer: Any) -> np.ndarray:
    return encode_documents([document], tokenizer)[0][0]


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
    kinds, own = _demo(held=False), set()
    for kind, documents in chain.from_iterable(read_kinds(file).items() for file in files):
        kinds[kind] += documents
        own.add(kind)
    count = tokens // (multiple * window) * multiple
    rng = np.random.default_rng(seed)
    # One more token than the windows hold: a row's last target.
    chosen, taken = _evenly(kinds, tokenizer, rng, tokens=count * window + 1, window=window)
    found = sum(map(len, chosen))
    if found <= count * window:
        raise UsageError(
            f"the calibration text has {found} tokens; expected more than {count * window}: give "
            "more text with --calibration, or fewer --tokens"
        )
    if missing := sorted(kind for kind in own if not taken[kind]):
        raise UsageError(
            f"--calibration: no token was taken of kind {', '.join(missing)}; expected text that "
            f"is not empty, and --tokens of at least {len(kinds) * PIECES * window} for "
            f"{len(kinds)} kinds"
        )
    return _pack(chosen, window, count)


def _evenly(
    kinds: Kinds, tokenizer: Any, rng: np.random.Generator, *, tokens: int, window: int
) -> tuple[list[np.ndarray], dict[str, int]]:
    """Encoded documents in a random order, the kind with the fewest tokens so far next.

    Of a long document a part is taken, `PIECES` windows from a random one on. They have `tokens`
    tokens or somewhat more, or fewer where there is no more text; beside them the tokens by kind.
    """
    waiting = {kind: [own[i] for i in rng.permutation(len(own))] for kind, own in kinds.items()}
    taken = dict.fromkeys(waiting, 0)
    chosen = []
    while sum(taken.values()) < tokens and any(waiting.values()):
        kind = min((kind for kind, own in waiting.items() if own), key=lambda kind: taken[kind])
        ids = _encode(waiting[kind].pop(), tokenizer)
        begin = int(rng.integers(max(1, -(-len(ids) // window) - PIECES + 1))) * window
        chosen.append(ids[begin : begin + PIECES * window])
        taken[kind] += len(chosen[-1])
    return chosen, taken


def check_apart(files: Sequence[Path], held_out: Sequence[Path]) -> None:
    """Refuses text to measure on (the demo's, unless files are given) that may be fitted on.

    Raises:
      UsageError: a document is in both.
    """
    fitted = [read_kinds(file) for file in files] + ([_demo(held=False)] if held_out else [])
    measured = [read_kinds(file) for file in held_out] or [_demo(held=True)]
    contents = {_content(d) for kinds in fitted for own in kinds.values() for d in own}
    for kinds in measured:
        for document in chain.from_iterable(kinds.values()):
            if _content(document) in contents:
                raise UsageError(
                    f"{document.where}: calibration text and measured on too; expected documents "
                    "that are in --calibration (and the demo's) or in --held-out, not in both"
                )


def _content(document: Document) -> str:
    return json.dumps([document.text, document.messages, document.token_ids])


def _pack(documents: Sequence[np.ndarray], window: int, count: int) -> Batch:
    """The first `count` rows (or all there are) of documents put one after the other."""
    documents = [ids for ids in documents if len(ids)]
    tokens = np.concatenate(documents)
    bounds = np.cumsum([0, *map(len, documents)], dtype=np.int64)
    starts = range(0, min(count * window, len(tokens) - 1), window)
    return stack_rows(
        [as_row(tokens[i : i + window + 1], bounds, i, seq_len=window) for i in starts]
    )


def held_out_windows(
    tokenizer: Any, files: Sequence[Path], *, window: int, most: int
) -> dict[str, Batch]:
    """At most `most` windows of each kind to measure on: of `files`, or of the demo's held-out."""
    kinds: Kinds = defaultdict(list)
    for found in [read_kinds(file) for file in files] or [_demo(held=True)]:
        for kind, documents in found.items():
            kinds[kind] += documents
    windows = {}
    for kind, documents in kinds.items():
        encoded = []
        for document in documents:
            encoded.append(_encode(document, tokenizer)[: PIECES * window])
            if sum(map(len, encoded)) > most * window:
                break
        if sum(map(len, encoded)) < 2:
            raise UsageError(f"--held-out: the text of kind {kind} has no tokens to predict")
        windows[kind] = _pack(encoded, window, most)
    return windows

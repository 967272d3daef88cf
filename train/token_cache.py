"""Tokenized documents on disk, mapped into memory: a second start does not tokenize again.

Hugging Face `datasets` keeps them in the user's cache folder, under a name made of what they depend
on: the source, the tokenizer with its template, and what counts.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from dejax.errors import FailedError, UsageError
from infer.console import progress
from train.document_files import Source, open_source
from train.encoding import Encoded, LossOn, encode_documents, tokenizer_key

_VERSION = 1
"""Of what is kept: another one reads nothing that an earlier one wrote."""

_AT_A_TIME = 256  # documents that are encoded together


class TokenizedDocuments:
    """Encoded documents by their place in the source; tokens are read from disk where asked for.

    Attributes:
      lengths: tokens of each document; counted: those that count.
      largest: the largest token id, -1 if there is none.
      fingerprint: another one for other tokens, another order, or where others count.
    """

    lengths: Int64[np.ndarray, " m"]
    counted: Int64[np.ndarray, " m"]
    largest: int
    fingerprint: str

    def __init__(self, dataset: Any):
        """Takes a `datasets.Dataset` with the columns of `features`."""
        table = dataset.data
        self._tokens = [_ListChunk(chunk) for chunk in table.column("tokens").chunks]
        self._counts = [_ListChunk(chunk) for chunk in table.column("counts").chunks]
        self._starts = np.cumsum([0, *(len(chunk) for chunk in self._tokens)])
        lengths = [np.diff(chunk.offsets) for chunk in self._tokens]
        self.lengths = np.concatenate([np.zeros(0, np.int64), *lengths]).astype(np.int64)
        self.counted = table.column("counted").to_numpy().astype(np.int64)
        self.largest = int(table.column("largest").to_numpy().max(initial=-1))
        digest = hashlib.sha256()
        for chunk in table.column("digest").chunks:
            digest.update(b"".join(chunk.to_pylist()))
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Encoded:
        chunk = int(np.searchsorted(self._starts, index, side="right")) - 1
        within = index - int(self._starts[chunk])
        return self._tokens[chunk][within], self._counts[chunk][within]


class _ListChunk:
    """A chunk of a list column: its values stay on disk until a list is asked for."""

    def __init__(self, chunk: Any):
        self.offsets = chunk.offsets.to_numpy()
        self._values = chunk.values

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        first, last = int(self.offsets[index]), int(self.offsets[index + 1])
        return self._values.slice(first, last - first).to_numpy(zero_copy_only=False)


def open_documents(
    name: str,
    tokenizer: Any,
    *,
    loss_on: LossOn = "all",
    text_column: str = "text",
    cache_dir: Path | None = None,
) -> TokenizedDocuments:
    """The documents of a source (`train.document_files`), tokenized now or by an earlier start.

    Args:
      tokenizer: of `transformers`; None serves for data that is token ids already.
      cache_dir: where `datasets` keeps them; its own folder unless given.

    Raises:
      UsageError: there is no such source, or a row of it is no document or cannot be encoded.
      FailedError: it cannot be fetched, or the cache cannot be written.
    """
    source = open_source(name, text_column=text_column, cache_dir=cache_dir)
    parts = [_VERSION, source.key, tokenizer_key(tokenizer), loss_on]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
    import datasets
    from datasets import config
    from datasets.exceptions import DatasetGenerationError

    with _quiet(datasets):
        try:
            dataset = datasets.Dataset.from_generator(
                lambda: _encoded_rows(source, tokenizer, loss_on),
                features=features(),
                cache_dir=None if cache_dir is None else str(cache_dir),  # type: ignore[arg-type]
                fingerprint=key,
            )
        except DatasetGenerationError as error:
            cause = error.__cause__ or error
            if isinstance(cause, UsageError | FailedError):
                raise cause from None
            raise FailedError(f"{name}: cannot be tokenized ({_line(cause)})") from error
        except (OSError, ValueError) as error:  # the disk's errors, and Arrow's of a damaged file
            folder = cache_dir or config.HF_DATASETS_CACHE
            raise FailedError(
                f"{name}: tokenized documents cannot be kept in {folder}, or read back "
                f"({_line(error)}); remove what is there, or name another folder in HF_HOME"
            ) from error
    return TokenizedDocuments(dataset)


def check_vocabulary(name: str, documents: TokenizedDocuments, vocab_size: int) -> None:
    """Refuses token ids that the target's vocabulary does not have.

    Raises:
      UsageError: there are such.
    """
    if documents.largest >= vocab_size:
        raise UsageError(
            f"{name}: has token {documents.largest}, and the target's vocabulary has {vocab_size} "
            "tokens; expected text, or tokens of this target or one that shares its tokenizer"
        )


def features() -> Any:
    """The columns that are kept of a document, as `datasets.Features`."""
    import datasets

    value = datasets.Value
    return datasets.Features(
        tokens=datasets.List(value("int32")),
        counts=datasets.List(value("bool")),
        counted=value("int64"),
        largest=value("int32"),
        digest=value("binary"),
    )


def _encoded_rows(source: Source, tokenizer: Any, loss_on: LossOn) -> Iterator[dict[str, Any]]:
    with progress("tokenize", None, "documents") as bar:
        found = source.documents()
        while documents := list(islice(found, _AT_A_TIME)):
            for tokens, counts in encode_documents(documents, tokenizer, loss_on=loss_on):
                yield {
                    "tokens": tokens,
                    "counts": counts,
                    "counted": int(counts.sum()),
                    "largest": int(tokens.max(initial=-1)),
                    "digest": _digest(tokens, counts),
                }
            bar.advance(len(documents))


def _digest(tokens: np.ndarray, counts: np.ndarray) -> bytes:
    content = tokens.astype("<i4").tobytes() + np.packbits(counts).tobytes()
    return hashlib.sha256(len(tokens).to_bytes(8, "little") + content).digest()[:16]


@contextlib.contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    """Without the bars of `datasets`: dejax shows its own."""
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]

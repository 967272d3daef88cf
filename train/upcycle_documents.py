"""Documents of JSON lines files, with their kinds, as packed rows: what `upcycle` fits on."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dejax.errors import UsageError
from dejax.paths import read_file
from train.data import Batch, RowSource, TokenArrays
from train.text import KINDS
from train.tokenizer import END_OF_TEXT

DEMO_DOCUMENTS = (
    Path(__file__).resolve().parent.parent / "dejax" / "assets" / "demo" / "distill.jsonl.gz"
)
"""The documents that come with dejax; named `demo` on the command line."""

HELD_OUT_EVERY = 16
"""One document of so many is kept for evaluation."""

Document = dict[str, Any]


def read_documents(path: str | Path) -> list[Document]:
    """The documents of a .jsonl or .jsonl.gz file, or of `demo`.

    Raises:
      UsageError: the file is missing, unreadable, has no documents, or a line is not one (with its
        number).
    """
    path = DEMO_DOCUMENTS if str(path) == "demo" else Path(path)
    data = read_file(path, "documents as JSON lines, or the name demo")
    try:
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise UsageError(f"{path}: cannot be read as JSON lines ({error})") from None
    documents = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path}: line {number} is not JSON ({error})") from None
        if not isinstance(document, dict) or not _is_document(document):
            raise UsageError(
                f"{path}: line {number} is no document; expected an object with text, with "
                "messages (role and content each), or with prompt and completion"
            )
        documents.append(document)
    if not documents:
        raise UsageError(f"{path}: no documents; expected one JSON object a line")
    return documents


def _is_document(document: Document) -> bool:
    if "messages" in document:
        turns = document["messages"]
        good = isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns)
        return (
            good
            and bool(turns)
            and all(isinstance(turn.get(key), str) for turn in turns for key in ("role", "content"))
        )
    if "text" in document:
        return isinstance(document["text"], str)
    return all(isinstance(document.get(key), str) for key in ("prompt", "completion"))


def split_documents(documents: Sequence[Document]) -> tuple[list[Document], list[Document]]:
    """(trained on, held out): every `HELD_OUT_EVERY`-th document is held out; order is kept."""
    held = range(HELD_OUT_EVERY - 1, len(documents), HELD_OUT_EVERY)
    return [d for i, d in enumerate(documents) if i not in held], [documents[i] for i in held]


def _render(document: Document, tokenizer: Any, end: str) -> str:
    if "text" in document and "messages" not in document:
        return document["text"] + end
    turns = document.get("messages")
    if turns is None:
        turns = [
            {"role": "user", "content": document["prompt"]},
            {"role": "assistant", "content": document["completion"]},
        ]
    if tokenizer.chat_template is None:
        return "\n".join(turn["content"] for turn in turns) + end
    return tokenizer.apply_chat_template(turns, tokenize=False)


def encode_documents(documents: Sequence[Document], tokenizer: Any) -> list[list[int]]:
    """Token ids of each document, its end mark included."""
    end = END_OF_TEXT if END_OF_TEXT in tokenizer.get_vocab() else tokenizer.eos_token or ""
    texts = [_render(document, tokenizer, end) for document in documents]
    # Not verbose: rows are cut to length later, so a long document is nothing to warn of.
    return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]


class PackedRows:
    """Rows of `seq_len` tokens packed from encoded documents, in the documents' order.

    Raises:
      UsageError: there are no tokens.
    """

    def __init__(self, documents: Sequence[Sequence[int]], seq_len: int):
        documents = [ids for ids in documents if len(ids)]
        if sum(map(len, documents)) < 2:
            raise UsageError("data: the documents have no tokens to predict; give more text")
        kind = KINDS[0]  # the rows do not depend on it
        arrays = TokenArrays(
            tokens=np.concatenate([np.asarray(ids, np.int32) for ids in documents]),
            offsets=np.cumsum([0, *map(len, documents)], dtype=np.int64),
            kinds=np.zeros(len(documents), np.int8),
            chat=np.zeros(len(documents), bool),
        )
        self._source = RowSource(arrays, kind, seq_len)

    def __len__(self) -> int:
        return len(self._source)

    def rows(self, indices: Sequence[int]) -> Batch:
        """The rows named by `indices`, as one batch."""
        parts = [self._source[index] for index in indices]
        return {key: np.stack([part[key] for part in parts]) for key in parts[0]}

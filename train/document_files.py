"""Documents where they lie: JSON lines, Parquet, what `dejax generate --json` wrote, the hub.

The first step of `train.documents`. A source is a file, a folder, a pattern such as `text/*.jsonl`,
`hub:NAME[:CONFIG][:SPLIT]` (through Hugging Face `datasets`), or `demo`. Its rows become documents
one after the other; none but the one being read is held.
"""

import contextlib
import glob
import gzip
import hashlib
import io
import itertools
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dejax.errors import FailedError, UsageError
from dejax.paths import existing_file, kind_of, reason, shown
from infer.prompts import is_text

DEMO_DOCUMENTS = (
    Path(__file__).resolve().parent.parent / "dejax" / "assets" / "demo" / "distill.jsonl.gz"
)
"""The documents that come with dejax; named `demo` on the command line."""

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")
"""What is read of a folder. A file that is named itself may have any name."""

FORMS = (("prompt_tokens", "tokens"), ("messages",), ("text",), ("prompt", "completion"))
"""Columns of a document: the first of these that a row has whole, null being absent."""

EXPECTED = (
    "text; messages (role and content each); prompt with completion; or prompt_tokens with tokens, "
    "as `dejax generate --json` writes"
)

HUB = "hub:"


@dataclass(frozen=True)
class Document:
    """One document, in one of three forms.

    Attributes:
      where: what messages call it, such as `text.jsonl: line 3`.
      text: plain text; or
      messages: a chat, role and content each, and whatever else the template reads; or
      token_ids: (what was given, what a model answered).
      kind: what sort of text it is, where a row of JSON says so.
    """

    where: str
    text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    token_ids: tuple[list[int], list[int]] | None = None
    kind: str | None = None


@dataclass(frozen=True)
class Source:
    """Where documents come from.

    Attributes:
      key: another one where the documents may have changed; documents: reads them anew.
    """

    key: str
    documents: Callable[[], Iterator[Document]]


def open_source(name: str, *, text_column: str = "text", cache_dir: Path | None = None) -> Source:
    """The source of that name; what is on the hub is fetched.

    Args:
      text_column: the column that has the text; another name than `text` is the only one read.
      cache_dir: where `datasets` keeps what it fetched; its own folder unless given.

    Raises:
      UsageError: there is no such source. `documents` raises it for a row that is no document.
      FailedError: it cannot be fetched.
    """
    if name.startswith(HUB):
        return _hub_source(name, text_column, cache_dir)
    files = find_files(name)
    stamps = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]

    def documents() -> Iterator[Document]:
        read = (_file_documents(path, text_column) for path in files)
        first = next(found := itertools.chain.from_iterable(read), None)
        if first is None:
            raise UsageError(f"{shown(name)}: no documents; expected one JSON object a line")
        yield first
        yield from found

    return Source(hashlib.sha256(repr((stamps, text_column)).encode()).hexdigest(), documents)


def find_files(name: str) -> list[Path]:
    """The files of a file, a folder (and those below), a pattern, or `demo`; sorted by path.

    Raises:
      UsageError: there are none.
    """
    if name == "demo":
        return [DEMO_DOCUMENTS]
    expected = "documents (JSON lines or Parquet), a folder or pattern of them, hub:NAME, or demo"
    kind = kind_of(name)
    if kind == "folder":
        found = sorted(p for p in Path(name).rglob("*") if p.name.endswith(SUFFIXES))
        files = [path for path in found if path.is_file() and not path.name.startswith(".")]
        if not files:
            raise UsageError(f"{shown(name)}: holds no {', '.join(SUFFIXES)}; expected {expected}")
        return files
    if kind is None and glob.has_magic(name):
        files = [Path(p) for p in sorted(glob.glob(name, recursive=True)) if Path(p).is_file()]
        if not files:
            raise UsageError(f"{shown(name)}: no file has such a name; expected {expected}")
        return files
    if kind == "other":
        raise UsageError(f"{shown(name)} is a pipe or a device; expected a file, to read it again")
    return [existing_file(name, expected)]


# --- files -----------------------------------------------------------------------------------


def _file_documents(path: Path, text_column: str) -> Iterator[Document]:
    try:
        with path.open("rb") as file, contextlib.ExitStack() as stack:
            begin = file.peek(4)[:4]
            if begin == b"PAR1":
                rows = _parquet_rows(path, text_column)
            else:
                plain: Any = gzip.open(file) if begin[:2] == b"\x1f\x8b" else file
                # JSON may hold other separators of lines unescaped: only \n ends one.
                text = io.TextIOWrapper(plain, "utf-8-sig", newline="\n")
                rows = _json_rows(stack.enter_context(text), path)
            for where, row in rows:
                document = as_document(row, where, text_column)
                kind = row.get("kind")
                yield replace(document, kind=kind) if isinstance(kind, str) else document
    except OSError as error:  # gzip's too: a stream that is damaged
        raise UsageError(f"{shown(path)} cannot be read ({reason(error)})") from None
    except (UnicodeDecodeError, EOFError, zlib.error) as error:
        raise UsageError(f"{shown(path)} cannot be read as JSON lines ({error})") from None


def _json_rows(text: io.TextIOWrapper, path: Path) -> Iterator[tuple[str, Any]]:
    """(where, row) of JSON lines; of one JSON value instead, its list or its `generations`."""
    first = True
    for number, line in enumerate(text, start=1):
        if not line.strip():
            continue
        where = f"{shown(path)}: line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            several = first and (line.strip() == "{" or line.lstrip().startswith("["))
            row = _whole_value(line + text.read()) if several else None
            if row is None:
                raise UsageError(f"{where} is not JSON ({error})") from None
            row = row if isinstance(row, list) or "generations" in row else [row]
        first = False
        rows = row.get("generations") if isinstance(row, dict) else row
        if isinstance(rows, list):
            yield from ((f"{shown(path)}: document {i}", r) for i, r in enumerate(rows, start=1))
        else:
            yield where, row


def _whole_value(text: str) -> list[Any] | dict[str, Any] | None:
    """A JSON list or object that takes several lines; None if the text is no such thing."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, list | dict) else None


def _parquet_rows(path: Path, text_column: str) -> Iterator[tuple[str, Any]]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            columns = _columns(file.schema_arrow.names, shown(path), text_column)
            number = 0
            for batch in file.iter_batches(batch_size=256, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{shown(path)}: row {number}", row
    except pyarrow.ArrowException as error:
        first_line = str(error).strip().splitlines()[0]
        raise UsageError(f"{shown(path)} cannot be read as Parquet ({first_line})") from None


# --- the hub ---------------------------------------------------------------------------------


def _hub_source(name: str, text_column: str, cache_dir: Path | None) -> Source:
    dataset_name, *words = name.removeprefix(HUB).split(":")
    if not dataset_name or len(words) > 2 or not all(words):
        raise UsageError(
            f"data {name!r}: expected hub:NAME, hub:NAME:SPLIT or hub:NAME:CONFIG:SPLIT"
        )
    config, split = (words[0] if len(words) == 2 else None), (words[-1] if words else "train")
    import datasets
    from datasets.exceptions import DatasetNotFoundError

    try:
        dataset: Any = datasets.load_dataset(
            dataset_name,
            config,
            split=split,
            cache_dir=None if cache_dir is None else str(cache_dir),
        )
    except Exception as error:  # the network, the hub and the data set's own files: any kind
        first_line = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        kind = UsageError if isinstance(error, DatasetNotFoundError | ValueError) else FailedError
        raise kind(
            f"{name}: cannot be fetched ({first_line}); check the name, the split and the network, "
            "or give a local file"
        ) from None
    columns = _columns(dataset.column_names, name, text_column)

    def documents() -> Iterator[Document]:
        for number, row in enumerate(dataset.select_columns(columns), start=1):
            yield as_document(row, f"{name}: row {number}", text_column)

    return Source(f"{dataset._fingerprint}-{text_column}", documents)


# --- rows ------------------------------------------------------------------------------------


def _columns(names: Sequence[str], where: str, text_column: str) -> list[str]:
    """The columns to read of those that there are; UsageError if they make no document."""
    forms = FORMS if text_column == "text" else ((text_column,),)
    whole = [form for form in forms if set(form) <= set(names)]
    if not whole:
        raise UsageError(
            f"{where}: has the columns {', '.join(names) or '(none)'}; expected "
            f"{EXPECTED if text_column == 'text' else f'{text_column!r}, which text_column names'}"
        )
    return list(dict.fromkeys(itertools.chain.from_iterable(whole)))


def as_document(row: Any, where: str, text_column: str = "text") -> Document:
    """The document of a row.

    Raises:
      UsageError: it is none, with what it has and what was expected.
    """
    if not isinstance(row, Mapping):
        raise UsageError(f"{where} is no document; expected an object with {EXPECTED}")
    names = [name for name, value in row.items() if value is not None]
    columns = _columns(names, f"{where} is no document", text_column)
    if columns[:2] == list(FORMS[0]):
        prompt, answer = (_token_ids(row[name], where, name) for name in FORMS[0])
        return Document(where, token_ids=(prompt, answer))
    if columns[0] == "messages":
        return Document(where, messages=_turns(row["messages"], where, "messages"))
    if columns[0] == text_column:
        return Document(where, text=_text(row[text_column], where, text_column))
    sides = []
    for name, role in (("prompt", "user"), ("completion", "assistant")):
        whole_turns = isinstance(row[name], list)
        said = None if whole_turns else {"role": role, "content": _text(row[name], where, name)}
        sides += [said] if said is not None else _turns(row[name], where, name)
    return Document(where, messages=tuple(sides))


def _text(value: Any, where: str, name: str) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{where} is no document: {name} is {_short(value)}; expected a string")
    if not is_text(value):
        raise UsageError(f"{where}: {name} holds half a surrogate pair, which is no text")
    return value


def _turns(value: Any, where: str, name: str) -> tuple[dict[str, Any], ...]:
    """The turns of a chat, without what is null in them: Parquet fills in what a turn lacks."""
    if not isinstance(value, list) or not value:
        raise UsageError(
            f"{where} is no document: {name} is {_short(value)}; expected a list of turns"
        )
    turns = []
    for turn in value:
        if not isinstance(turn, Mapping):
            raise UsageError(
                f"{where} is no document: a turn of {name} is {_short(turn)}; expected role and "
                "content"
            )
        for key in ("role", "content"):
            _text(turn.get(key), where, f"{key} of a turn of {name}")
        turns.append({key: entry for key, entry in turn.items() if entry is not None})
    return tuple(turns)


def _token_ids(value: Any, where: str, name: str) -> list[int]:
    if not isinstance(value, list) or not all(type(i) is int and 0 <= i < 2**31 for i in value):
        raise UsageError(
            f"{where} is no document: {name} is {_short(value)}; expected a list of token ids"
        )
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."

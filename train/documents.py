"""The rows of a distillation: from what its `data` names to the batch of a step.

    document_files -> encoding -> token_cache -> packed_rows -> here

A batch is a function of (data, seed, step) alone, so the position in the data is the step; a host
asks for its rows of a batch, and any number of hosts sees the same batches.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from dejax.errors import UsageError
from dejax.paths import kind_of
from train.data import BatchStream, Phase, heldout_rows, load_tokens, make_stream, mix_sources
from train.document_files import HUB, find_files
from train.encoding import LossOn
from train.packed_rows import PackedRows, pad_rows, split_documents
from train.rows import Batch, stack_rows
from train.token_cache import TokenizedDocuments, check_vocabulary, open_documents

HELD_OUT_ROWS = 64
"""Held-out rows at most."""

T = TypeVar("T")


BatchAt = Callable[..., Batch]
"""(step, rows=None) -> the packed rows of the batch of a step (from 0), or only `rows` of them."""


@dataclass(frozen=True)
class Data:
    """The rows of a run.

    Attributes:
      batch_at: the batch to train on at a step.
      held_out: batches of text that is not trained on, the last filled up; maybe none.
      fingerprint: another one for other batches: other documents, another order, seq_len or seed.
    """

    batch_at: BatchAt
    held_out: tuple[Batch, ...]
    fingerprint: str


def check_data(name: str) -> None:
    """Refuses, before anything is loaded, data that is not there; the hub is not asked."""
    if not name.startswith(HUB) and not is_token_folder(name):
        find_files(name)


def open_data(
    name: str,
    tokenizer: Any,
    *,
    vocab_size: int,
    seq_len: int,
    batch_size: int,
    seed: int = 0,
    loss_on: LossOn = "all",
    text_column: str = "text",
    cache_dir: Path | None = None,
) -> Data:
    """The rows that `name` names, packed; of documents one in sixteen is held out.

    Args:
      name: a source of documents (`train.document_files`), or a folder that `python -m train.data`
        wrote.
      tokenizer: the target's; None serves for data that is token ids already.
      vocab_size: the target's.
      loss_on: which tokens count; text_column: as `open_source` takes it.
      cache_dir: where `datasets` keeps tokenized documents; its own folder unless given.

    Raises:
      UsageError: there is no such data, it does not fit the target, or nothing of it counts.
      FailedError: it cannot be fetched or kept.
    """
    if is_token_folder(name):
        if loss_on != "all":
            raise UsageError(f"{name}: token arrays have no turns; set loss_on=all")
        return _open_tokens(
            Path(name), vocab_size=vocab_size, seq_len=seq_len, batch_size=batch_size, seed=seed
        )
    documents = open_documents(
        name, tokenizer, loss_on=loss_on, text_column=text_column, cache_dir=cache_dir
    )
    check_vocabulary(name, documents, vocab_size)
    if loss_on == "assistant":
        _check_counted(name, documents)
    places, held = split_documents(len(documents))
    order = np.random.default_rng(seed).permutation(places)
    rows = PackedRows(documents, order, seq_len=seq_len)
    stream = BatchStream(
        [Phase(start=0, seq_len=seq_len, batch_size=batch_size)],
        [mix_sources({name: rows}, {name: 1.0}, seed)],
    )
    held_out: tuple[Batch, ...] = ()
    if documents.lengths[held].sum() > 1 and documents.counted[held].any():
        others = PackedRows(documents, held, seq_len=seq_len)
        held_out = tuple(others.batches(batch_size, most=HELD_OUT_ROWS))
    return Data(stream.batch_at, held_out, _hash(documents.fingerprint, seq_len, seed))


def _open_tokens(
    folder: Path, *, vocab_size: int, seq_len: int, batch_size: int, seed: int
) -> Data:
    """The rows of token arrays (`train.data`)."""
    stream = make_stream(folder, [Phase(0, seq_len, batch_size)], seed=seed)
    kinds = [row for _, row in heldout_rows(folder, seq_len, most=HELD_OUT_ROWS // 8)]
    parts = [kinds[start : start + batch_size] for start in range(0, len(kinds), batch_size)]
    arrays = load_tokens(folder / "train")
    largest = int(arrays.tokens.max(initial=0))
    if largest >= vocab_size:
        raise UsageError(
            f"{folder}: has token {largest}, and the target's vocabulary has {vocab_size} tokens"
        )
    digest = hashlib.sha256()
    for array in (arrays.tokens, arrays.offsets, arrays.kinds):
        digest.update(np.ascontiguousarray(array).data)
    digest.update((folder / "train" / "meta.json").read_bytes())  # the weights of the kinds
    return Data(
        stream.batch_at,
        tuple(pad_rows(stack_rows(part), batch_size) for part in parts),
        _hash(digest.hexdigest(), seq_len, seed),
    )


def read_ahead(
    get: Callable[[int], T], steps: Iterable[int], *, ahead: int = 2
) -> Generator[T, None, None]:
    """`get` of each of `steps` in order, the next `ahead` of them made meanwhile in a thread.

    What `get` raises is raised at the step that it belongs to. The thread ends with the iterator.
    """
    left = iter(steps)
    waiting: deque = deque()
    with ThreadPoolExecutor(1, thread_name_prefix="data") as thread:
        try:
            for step in left:
                waiting.append(thread.submit(get, step))
                if len(waiting) > ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def is_token_folder(name: str) -> bool:
    """Whether `python -m train.data` wrote it."""
    if name == "demo" or name.startswith(HUB) or kind_of(name) != "folder":
        return False
    return any((Path(name) / "train" / file).exists() for file in ("tokens.npy", "meta.json"))


def _check_counted(name: str, documents: TokenizedDocuments) -> None:
    """Refuses a mask that tells nothing apart."""
    counted, total = int(documents.counted.sum()), int(documents.lengths.sum())
    if counted == 0:
        raise UsageError(
            f"{name}: loss_on is assistant, and none of its {total} tokens counts: no document has "
            "an assistant's turn that the template marks; set loss_on=all, or give chats"
        )
    if counted == total:
        raise UsageError(
            f"{name}: loss_on is assistant, and every one of its {total} tokens counts: the "
            "template marks whole chats as the assistant's; correct the template or set loss_on=all"
        )


def _hash(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

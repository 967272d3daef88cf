"""Token arrays on disk, their rows, and batches addressed by the training step.

    python -m train.data --out DIR FILE... [--exclude PROMPTS.jsonl]

reads the files (`train.text`), trains the tokenizer if DIR has none, and writes

    DIR/tokenizer/                    transformers folder
    DIR/{train,heldout}/tokens.npy    uint16 [n], the documents of one kind next to each other
    DIR/{train,heldout}/documents.npz offsets int64 [m + 1], kinds int8 [m], chat bool [m]
    DIR/{train,heldout}/meta.json     kinds, weights, counts

Training reads the arrays back through `make_stream(...).batch_at(step)`: a batch is a function of
(arrays, phases, seed, step) alone, so the position in the data is the step, and a resumed run
sees what the uninterrupted one would have seen. Kinds are mixed in every batch by weight; a kind
that is used up starts again in a new order.
"""

import json
import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from dejax.ckpt.tensor_files import read_json
from dejax.cli import run_module
from dejax.errors import UsageError
from infer.argument_types import InputFile, OutputFolder, Positional
from infer.arguments import parse
from train import text
from train.rows import Batch, as_row, stack_rows
from train.text import KINDS, Document
from train.tokenizer import load_tokenizer, save_tokenizer, token_lengths, train_tokenizer

# Shares of the rows of a batch.
WEIGHTS = {
    "t0": 0.28,
    "gsm8k": 0.15,
    "code": 0.20,
    "pydocs": 0.11,
    "sotu": 0.09,
    "sqlite": 0.07,
    "novel": 0.04,
    "prompts": 0.06,
}

MAX_CHAT_TOKENS = 1024  # a longer exchange would have its answer cut off from its question
TOKENIZER_CHARS = 40_000_000  # text that the tokenizer is trained on, shared out by weight


# --- writing ---------------------------------------------------------------------------------


def prepare(
    paths: Iterable[Path | str],
    out: Path | str,
    *,
    exclude: Iterable[Path | str] = (),
    weights: Mapping[str, float] = WEIGHTS,
    vocab_size: int = 4096,
) -> dict[str, dict]:
    """Write tokenizer and token arrays of `paths` under `out`; return the two `meta.json`.

    Documents that share a 12-word run with a prompt of the `exclude` files are left out
    altogether; training documents that share one with a held-out document are dropped (see
    `text.drop_overlaps`). Each folder is complete or absent: it is renamed into place.
    """
    out = Path(out)
    cache = out / "cache"
    documents = text.read_documents(paths, cache_dir=cache)
    prompts = [row["prompt"] for path in exclude for row in text.read_rows(path, cache_dir=cache)]
    documents, excluded = text.drop_overlaps(documents, prompts)
    documents, repeated = text.cap_repeats(documents)
    train, heldout = text.split_heldout(documents)
    train, overlapping = text.drop_overlaps(train, [d.whole for d in heldout])
    # In the order of the hashes: neighbours in the arrays have nothing to do with each other.
    train, heldout = (
        sorted(d, key=lambda d: (KINDS.index(d.kind), text.origin_of(d.whole)))
        for d in (train, heldout)
    )
    if not (out / "tokenizer" / "tokenizer.json").is_file():
        tokenizer = train_tokenizer(_tokenizer_texts(train, weights), vocab_size=vocab_size)
        _write_folder(out / "tokenizer", lambda d: save_tokenizer(tokenizer, d))
    tokenizer = load_tokenizer(out / "tokenizer")
    metas = {}
    for split, part in (("train", train), ("heldout", heldout)):
        arrays = tokenize(part, tokenizer)
        meta = _meta(arrays, tokenizer, weights)
        if split == "train":
            meta |= {
                "dropped_excluded": len(excluded),
                "dropped_repeated": len(repeated),
                "dropped_overlapping": len(overlapping),
            }
        _write_folder(out / split, lambda d, a=arrays, m=meta: _save_tokens(d, a, m))
        metas[split] = meta
    return metas


@dataclass(frozen=True)
class TokenArrays:
    """Encoded documents: tokens uint16 [n]; offsets int64 [m + 1]; kinds int8, chat bool [m]."""

    tokens: np.ndarray
    offsets: np.ndarray
    kinds: np.ndarray
    chat: np.ndarray
    too_long: int = 0


def tokenize(documents: Sequence[Document], tokenizer) -> TokenArrays:
    """Encode `documents` in order; exchanges longer than `MAX_CHAT_TOKENS` are left out."""
    pieces, kinds, chat, too_long = [], [], [], 0
    for start in range(0, len(documents), 1000):  # bounds what the encoder holds at a time
        part = documents[start : start + 1000]
        encoded = tokenizer.backend_tokenizer.encode_batch_fast(
            [text.render(d, tokenizer) for d in part], add_special_tokens=False
        )
        for document, encoding in zip(part, encoded, strict=True):
            if document.prompt is not None and len(encoding.ids) > MAX_CHAT_TOKENS:
                too_long += 1
                continue
            pieces.append(np.array(encoding.ids, np.uint16))
            kinds.append(KINDS.index(document.kind))
            chat.append(document.prompt is not None)
    return TokenArrays(
        tokens=np.concatenate([np.zeros(0, np.uint16), *pieces]),
        offsets=np.cumsum([0, *map(len, pieces)], dtype=np.int64),
        kinds=np.array(kinds, np.int8),
        chat=np.array(chat, bool),
        too_long=too_long,
    )


def _tokenizer_texts(documents: Sequence[Document], weights: Mapping[str, float]):
    left = {kind: TOKENIZER_CHARS * weights[kind] for kind in KINDS}
    for document in documents:
        if left[document.kind] > 0:
            left[document.kind] -= len(document.whole)
            yield document.whole


def _meta(arrays: TokenArrays, tokenizer, weights: Mapping[str, float]) -> dict:
    lengths = token_lengths(tokenizer)
    counts = {}
    for index, kind in enumerate(KINDS):
        mine = np.flatnonzero(arrays.kinds == index)
        if not len(mine):
            continue
        span = arrays.tokens[arrays.offsets[mine[0]] : arrays.offsets[mine[-1] + 1]]
        n_bytes = int(lengths[span].sum())
        counts[kind] = {
            "documents": len(mine),
            "chat_documents": int(arrays.chat[mine].sum()),
            "tokens": len(span),
            "bytes": n_bytes,
            "bytes_per_token": round(n_bytes / len(span), 3),
        }
    return {
        "kinds": list(KINDS),
        "weights": {k: weights[k] for k in counts},
        "counts": counts,
        "dropped_too_long": arrays.too_long,
    }


def _save_tokens(folder: Path, arrays: TokenArrays, meta: dict) -> None:
    np.save(folder / "tokens.npy", arrays.tokens)
    np.savez(folder / "documents.npz", offsets=arrays.offsets, kinds=arrays.kinds, chat=arrays.chat)
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")


def _write_folder(folder: Path, write) -> None:
    """Call `write` on a sibling folder and rename it to `folder`, replacing an old one."""
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


# --- reading ---------------------------------------------------------------------------------


def load_tokens(folder: Path | str) -> TokenArrays:
    """Map the token arrays of one split (`DIR/train` or `DIR/heldout`) into memory."""
    folder = Path(folder)
    if not (folder / "meta.json").is_file():
        raise UsageError(f"data: {folder} has no token arrays; run `python -m train.data` first")
    try:
        with np.load(folder / "documents.npz") as d:
            return TokenArrays(
                tokens=np.load(folder / "tokens.npy", mmap_mode="r"),
                offsets=d["offsets"],
                kinds=d["kinds"],
                chat=d["chat"],
            )
    except (OSError, ValueError, KeyError, AttributeError, EOFError, BadZipFile) as error:
        raise UsageError(
            f"data: {folder}: its arrays cannot be read ({error}); run `python -m train.data` again"
        ) from None


class RowSource:
    """Rows of one kind, by index: a random-access source for `grain.MapDataset.source`.

    The documents of the kind are one sequence, cut every `seq_len` tokens; row i has the tokens
    [i * seq_len, (i + 1) * seq_len] of it, so every token but the first is a target once.
    Documents longer than a row go on in the next one. `segment_ids` number the documents of a
    row from 1 (0 is padding, in a kind's last row only); positions start at 0 in each segment.
    """

    def __init__(self, arrays: TokenArrays, kind: str, seq_len: int) -> None:
        if seq_len < 1:
            raise UsageError(f"data: seq_len is {seq_len}, expected at least 1")
        mine = np.flatnonzero(arrays.kinds == KINDS.index(kind))
        if not len(mine):
            raise UsageError(f"data: there is no document of kind {kind!r}")
        self.kind, self.seq_len = kind, seq_len
        self._tokens = arrays.tokens
        self._bounds = arrays.offsets[mine[0] : mine[-1] + 2]
        self._length = int(self._bounds[-1] - self._bounds[0])

    def __len__(self) -> int:
        return max(1, -(-(self._length - 1) // self.seq_len))

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        first = int(self._bounds[0]) + index * self.seq_len
        last = min(first + self.seq_len + 1, int(self._bounds[-1]))
        return as_row(self._tokens[first:last], self._bounds, first, seq_len=self.seq_len)


def make_source(tokens_dir: Path | str, seq_len: int, split: str = "train") -> dict[str, RowSource]:
    """Return the row source of each kind present in `tokens_dir/split`, by kind."""
    arrays = load_tokens(Path(tokens_dir) / split)
    present = set(arrays.kinds.tolist())
    return {k: RowSource(arrays, k, seq_len) for i, k in enumerate(KINDS) if i in present}


@dataclass(frozen=True)
class Phase:
    """From step `start` on, batches have `batch_size` rows of `seq_len` tokens."""

    start: int
    seq_len: int
    batch_size: int


class BatchStream:
    """The batches of a run: `batch_at(step)` for any step >= 0, in any order."""

    def __init__(self, phases: Sequence[Phase], datasets: Sequence) -> None:
        """Takes an endless `grain.MapDataset` of rows for each phase."""
        self.phases = tuple(phases)
        self._datasets = tuple(datasets)

    def batch_at(self, step: int, rows: range | None = None) -> Batch:
        """The batch of training step `step`, or only those `rows` of it: no other is read."""
        if step < 0:
            raise UsageError(f"data: step is {step}, expected at least 0")
        index = sum(phase.start <= step for phase in self.phases) - 1
        phase, dataset = self.phases[index], self._datasets[index]
        rows = range(phase.batch_size) if rows is None else rows
        if not rows or min(rows) < 0 or max(rows) >= phase.batch_size:
            raise UsageError(f"data: {rows} of a batch of {phase.batch_size} rows")
        first = (step - phase.start) * phase.batch_size
        return stack_rows([dataset[first + row] for row in rows])


def make_stream(
    tokens_dir: Path | str,
    phases: Sequence[Phase],
    *,
    seed: int,
    split: str = "train",
    weights: Mapping[str, float] | None = None,
) -> BatchStream:
    """Build the stream of a run whose row length and batch size change at the given steps.

    `phases` start at step 0 and ascend; each shuffles anew from `seed`. `weights` (default: the
    stored ones) are the kinds' shares of every batch. Raises `UsageError` if they make no sense.
    """
    starts = [p.start for p in phases]
    if not starts or starts[0] != 0 or starts != sorted(set(starts)):
        raise UsageError(f"data: phases start at {starts}, expected ascending steps from 0")
    if not (Path(tokens_dir) / split / "meta.json").is_file():
        raise UsageError(
            f"data: {tokens_dir} has no {split} tokens; expected a folder that "
            "`python -m train.data` wrote"
        )
    if weights is None:
        file = Path(tokens_dir) / split / "meta.json"
        shares: Mapping[str, float] = read_json(file).get("weights", {})
        if not isinstance(shares, dict) or not shares:
            raise UsageError(f"data: {file} has no weights of the kinds of text")
    else:
        shares = weights
    datasets = []
    for index, phase in enumerate(phases):
        sources = make_source(tokens_dir, phase.seq_len, split)
        if phase.batch_size < 1:
            raise UsageError(f"data: batch_size is {phase.batch_size}, expected at least 1")
        datasets.append(mix_sources(sources, shares, seed + index))
    return BatchStream(phases, datasets)


def mix_sources(sources: Mapping[str, Any], weights: Mapping[str, float], seed: int):
    """An endless `grain.MapDataset` of the rows of `sources`; item i needs no item before it.

    A source has `len` and rows by index; it is shuffled, and anew once it is used up. Raises
    `UsageError` if none has a weight.
    """
    import grain

    used = [k for k in sources if weights.get(k, 0.0) > 0]
    if not used:
        raise UsageError("data: nothing to draw: no kind has a weight above 0")
    parts = [
        grain.MapDataset.source(sources[k]).shuffle(seed=seed + 1000 * i).repeat()
        for i, k in enumerate(used)
    ]
    return grain.MapDataset.mix(parts, weights=[weights[k] for k in used])


def heldout_rows(
    tokens_dir: Path | str, seq_len: int, *, most: int | None = None, split: str = "heldout"
):
    """Yield (kind, row) over the rows of `split` in order, or `most` of each kind evenly spread."""
    for kind, source in make_source(tokens_dir, seq_len, split).items():
        count = len(source) if most is None else min(most, len(source))
        for index in range(count):
            yield kind, source[index * len(source) // count]


@dataclass(frozen=True)
class Arguments:
    """Arguments of `python -m train.data`."""

    files: Positional[tuple[InputFile, ...]]
    """Files of documents."""
    out: OutputFolder
    """Folder to write."""
    exclude: tuple[InputFile, ...] = ()
    """Files of documents that must not be trained on."""


def main(argv: list[str]) -> int:
    """Runs `python -m train.data`: prepares the data and prints the counts."""
    about = "Prepare documents for pretraining."
    args = parse(Arguments, argv, prog="python -m train.data", description=about)
    for split, meta in prepare(args.files, args.out, exclude=args.exclude).items():
        dropped = {k: v for k, v in meta.items() if k.startswith("dropped")}
        print(split, dropped)
        for kind, c in meta["counts"].items():
            print(f"  {kind:8}", *(f"{k} {v:>9}" for k, v in c.items()))
    return 0


if __name__ == "__main__":
    sys.exit(run_module("data", main))

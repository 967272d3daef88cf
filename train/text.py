"""Documents for training: read, typed, cut into chat turns, split into train and held-out.

The first step of `python -m train.data`. Rows come from JSON lines (plain or gzipped) or Parquet
files through Hugging Face `datasets`; each file has one kind, read off its name. Two forms of
document leave here: plain text, and one chat exchange (`Document.prompt` set). The five kinds of
evaluation prompt are covered so:

- math: GSM8K questions; code: MBPP prompts with their reference, and functions of the Python
  standard library cut out under "Write a Python function ...";
- chat and instruction: prompts that have a reference, and T0 rows; rows without a reference are
  left out (there is nothing to answer with);
- summarization: sections of the prose sources under "Summarize: ", answered by their lead
  sentence. A lead sentence is a crude summary: it teaches the form, not the skill.
"""

import ast
import hashlib
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import UInt64

from dejax.errors import UsageError
from train.tokenizer import END_OF_TEXT

KINDS = ("t0", "gsm8k", "code", "pydocs", "sotu", "sqlite", "novel", "prompts")

# A file's kind is the first of these that its name contains.
KIND_OF_NAME = {
    "gsm8k": "gsm8k",
    "python_stdlib": "code",
    "python_docs": "pydocs",
    "sqlite": "sqlite",
    "sotu": "sotu",
    "novel": "novel",
    "t0": "t0",
    "train": "prompts",
    "prompts": "prompts",
}

RUN = 12  # words: two texts are said to overlap when they share a run of this many


@dataclass(frozen=True)
class Document:
    """One training document.

    Attributes:
      kind: one of `KINDS`.
      origin: name of the source document; all documents of one origin fall on one side of the
        train/held-out split.
      text: the whole text, or the assistant's answer if `prompt` is set.
      prompt: the user's turn, or None for a plain text.
    """

    kind: str
    origin: str
    text: str
    prompt: str | None = None

    @property
    def messages(self) -> list[dict[str, str]]:
        """The chat turns, as `apply_chat_template` takes them; empty for a plain text."""
        if self.prompt is None:
            return []
        return [
            {"role": "user", "content": self.prompt},
            {"role": "assistant", "content": self.text},
        ]

    @property
    def whole(self) -> str:
        """Prompt and text, without any markup."""
        return self.text if self.prompt is None else f"{self.prompt}\n{self.text}"


def render(document: Document, tokenizer) -> str:
    """Return the text that is encoded: a rendered chat, or the plain text + `<|endoftext|>`.

    A chat ends with `<|im_end|>` and a newline, so the two forms are told apart by their end.
    """
    if document.prompt is None:
        return document.text + END_OF_TEXT
    return tokenizer.apply_chat_template(document.messages, tokenize=False)


# --- reading ---------------------------------------------------------------------------------


def kind_of(path: Path | str) -> str:
    """Return the kind of a data file by its name; raises `UsageError` for an unknown name."""
    name = Path(path).name.lower()
    for part, kind in KIND_OF_NAME.items():
        if part in name:
            return kind
    raise UsageError(f"data: cannot tell the kind of {path}; its name should contain one of "
                     f"{', '.join(KIND_OF_NAME)}")  # fmt: skip


def read_rows(path: Path | str, *, cache_dir: Path | str) -> Iterator[dict]:
    """Yield the rows of a .jsonl, .jsonl.gz or .parquet file; `datasets` caches in `cache_dir`.

    Raises `UsageError` if the file is missing or is of another format.
    """
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"data: no such file: {path}")
    if path.name.endswith((".jsonl", ".jsonl.gz", ".json", ".json.gz")):
        builder = "json"
    elif path.name.endswith(".parquet"):
        builder = "parquet"
    else:
        raise UsageError(f"data: {path} is neither .jsonl, .jsonl.gz nor .parquet")
    import datasets

    rows = datasets.load_dataset(
        builder, data_files=str(path), split="train", cache_dir=str(cache_dir)
    )
    for row in rows:
        yield dict(row)


def read_documents(paths: Iterable[Path | str], *, cache_dir: Path | str) -> list[Document]:
    """Read every file of `paths` into documents, exact repeats left out, in the files' order."""
    seen: set[str] = set()
    documents = []
    for path in paths:
        kind = kind_of(path)
        for row in read_rows(path, cache_dir=cache_dir):
            for document in documents_of_row(row, kind):
                key = f"{document.prompt}\0{document.text}"
                if key not in seen and document.text.strip():
                    seen.add(key)
                    documents.append(document)
    return documents


def documents_of_row(row: Mapping, kind: str) -> list[Document]:
    """Turn one row into its documents (none if the row has no answer to learn from)."""
    if "completion" in row:
        prompt = row["prompt"].strip()
        # The source ends each answer with its own end mark; ours is the end of the turn.
        answer = row["completion"].removesuffix("<|endoftext|>").strip()
        return [Document(kind, origin_of(prompt), answer, prompt)]
    if "prompt" in row:
        return _documents_of_prompt(row, kind)
    text = row["text"].replace("\r\n", "\n").strip()
    if kind == "gsm8k":
        question, _, answer = text.removeprefix("Question: ").partition("\nAnswer: ")
        return [Document(kind, origin_of(question), answer.strip(), question.strip())]
    if kind == "novel":
        chapters = re.split(r"\n(?=CHAPTER \d)", text)
        return [Document(kind, origin_of(c), c.strip()) for c in chapters]
    plain = Document(kind, origin_of(text), text)
    cut = cut_functions if kind == "code" else cut_summaries
    return [plain, *cut(plain)]


def _documents_of_prompt(row: Mapping, kind: str) -> list[Document]:
    # Maths rows of the prompt set repeat GSM8K, which comes in whole with its own file.
    if row.get("category") == "math" or not row.get("reference"):
        return []
    prompt, answer = (str(row[k]).replace("\r\n", "\n") for k in ("prompt", "reference"))
    return [Document(kind, origin_of(prompt), answer.replace("\t", "    ").strip(), prompt.strip())]


def origin_of(text: str) -> str:
    """Name a source document: 16 hexadecimal digits of the hash of its words."""
    return hashlib.sha256(" ".join(text.split()).encode()).hexdigest()[:16]


# --- chat turns cut out of plain documents ---------------------------------------------------


def cut_functions(document: Document, *, max_lines: int = 40) -> list[Document]:
    """Cut documented functions of at most `max_lines` lines out of Python source.

    The prompt states the name, the arguments and the docstring's first paragraph.
    """
    try:
        tree = ast.parse(document.text)
    except (SyntaxError, ValueError):
        return []
    lines = document.text.split("\n")
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("test"):
            continue
        summary = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
        size = (node.end_lineno or 0) - node.lineno + 1
        if not 20 <= len(summary) <= 300 or not 4 <= size <= max_lines:
            continue
        code = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
        prompt = f"Write a Python function `{node.name}({ast.unparse(node.args)})`: {summary}"
        found.append(Document(document.kind, document.origin, code, prompt))
    return found


def cut_summaries(
    document: Document, *, most: int = 6, chars: tuple[int, int] = (600, 2200)
) -> list[Document]:
    """Cut up to `most` sections out of prose and answer "Summarize: " with their lead sentence.

    `chars` are the least and the most characters of a section. The sections are spread evenly
    over the document.
    """
    sections = [s for s in _sections(document.text, chars[1]) if len(s) >= chars[0]]
    step = max(1, len(sections) // most)
    found = []
    for section in sections[::step][:most]:
        lead = lead_sentence(section)
        if lead:
            found.append(Document(document.kind, document.origin, lead, f"Summarize: {section}"))
    return found


def _sections(text: str, most: int) -> Iterator[str]:
    """Join paragraphs (sentences where a text has no paragraphs) to pieces up to `most` long."""
    pattern, glue = (r"\n{2,}", "\n\n") if text.count("\n\n") > 3 else (r"(?<=[.!?]) ", " ")
    piece = ""
    for part in re.split(pattern, text):
        if len(piece) + len(part) > most:
            yield piece
            piece = ""
        piece = f"{piece}{glue}{part}" if piece else part.strip()
    yield piece


def lead_sentence(section: str) -> str:
    """Return the first sentence of prose in `section` (40-300 characters), or an empty string."""
    for paragraph in section.split("\n\n"):
        flat = " ".join(paragraph.split())
        match = re.match(r"[A-Z][^|=<>{}]{38,298}?[.!?](?= |$)", flat)
        if match:
            return match.group(0)
    return ""


# --- train and held-out ----------------------------------------------------------------------


def split_heldout(
    documents: list[Document], *, share: float = 0.015, least: int = 4
) -> tuple[list[Document], list[Document]]:
    """Split into (train, held-out) by the hash of each origin; deterministic.

    Of each kind the `share` of origins with the lowest hashes is held out, `least` of them if
    there are that many to spare. Order within each side is kept.
    """
    held: set[tuple[str, str]] = set()
    for kind in {d.kind for d in documents}:
        origins = sorted({d.origin for d in documents if d.kind == kind})
        n = min(max(least, round(share * len(origins))), len(origins) // 2)
        held.update((kind, o) for o in origins[:n])
    train = [d for d in documents if (d.kind, d.origin) not in held]
    return train, [d for d in documents if (d.kind, d.origin) in held]


class RunHasher:
    """Hashes the `RUN`-word runs of texts, so that overlaps are found by set operations.

    Words are compared without case and punctuation. Two different runs share a hash with
    probability about 2^-64.
    """

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        rng = np.random.default_rng(0)
        self._codes = rng.integers(0, 2**64, 1 << 16, dtype=np.uint64)
        self._rng = rng

    def runs(self, text: str) -> UInt64[np.ndarray, " n"]:
        """Return one hash for each run of words in `text`, in order (empty if it is shorter)."""
        words = re.findall(r"\w+", text.lower())
        if len(words) < RUN:
            return np.zeros(0, np.uint64)
        ids = np.array([self._ids.setdefault(w, len(self._ids)) for w in words])
        while len(self._ids) > len(self._codes):
            more = self._rng.integers(0, 2**64, len(self._codes), dtype=np.uint64)
            self._codes = np.concatenate([self._codes, more])
        codes = self._codes[ids]
        n = len(codes) - RUN + 1
        total = np.zeros(n, np.uint64)
        for i in range(RUN):  # Horner's rule modulo 2^64: the order of the words counts
            total = total * np.uint64(0x9E3779B97F4A7C15) + codes[i : i + n]
        return total


def cap_repeats(
    documents: list[Document], *, times: int = 4, share: float = 0.75
) -> tuple[list[Document], list[Document]]:
    """Split `documents` into (kept, dropped) so that no text is asked about again and again.

    Instruction sets wrap one passage in many templates and questions. A chat document is dropped
    if more than `share` of its 12-word runs are each in `times` kept ones already; which ones are
    kept goes by their hashes. Order is kept; plain documents stay.
    """
    hasher = RunHasher()
    uses: Counter[int] = Counter()
    dropped = set()
    chats = [i for i, d in enumerate(documents) if d.prompt is not None]
    for i in sorted(chats, key=lambda i: origin_of(documents[i].whole)):
        runs = hasher.runs(documents[i].whole).tolist()
        if sum(uses[run] >= times for run in runs) > share * len(runs):
            dropped.add(i)
        else:
            uses.update(set(runs))
    kept = [d for i, d in enumerate(documents) if i not in dropped]
    return kept, [documents[i] for i in sorted(dropped)]


def drop_overlaps(
    train: list[Document], others: Iterable[str], *, common: int = 50, share: float = 0.05
) -> tuple[list[Document], list[Document]]:
    """Split `train` into (kept, dropped) by overlap in 12-word runs with the texts `others`.

    A chat document is dropped for one shared run; a plain one (many pages) once the shared runs
    are more than `share` of its own, for quotations and licence headers recur everywhere. Runs
    that more than `common` training documents have are templates and count for nothing.
    """
    hasher = RunHasher()
    other_runs = [hasher.runs(t) for t in others]
    wanted = np.unique(np.concatenate([np.zeros(0, np.uint64), *other_runs]))
    own = [hasher.runs(d.whole) for d in train]
    shared = [r[_found(r, wanted)] for r in own]
    seen, counts = np.unique(
        np.concatenate([np.zeros(0, np.uint64), *(np.unique(s) for s in shared)]),
        return_counts=True,
    )
    templates = seen[counts > common]
    kept, dropped = [], []
    for document, all_runs, hits in zip(train, own, shared, strict=True):
        n = np.count_nonzero(~_found(hits, templates))
        limit = 0 if document.prompt is not None else share * len(all_runs)
        (dropped if n > limit else kept).append(document)
    return kept, dropped


def _found(
    values: UInt64[np.ndarray, " n"],
    among: UInt64[np.ndarray, " m"],
) -> np.ndarray:
    """Which `values` are in the sorted array `among` (`np.isin` would sort it again each time)."""
    if not len(among):
        return np.zeros(len(values), bool)
    return among[np.minimum(np.searchsorted(among, values), len(among) - 1)] == values

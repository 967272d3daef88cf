"""`dejax distill CONFIG --show-mask N`: documents token by token, with what counts in the losses.

What training sees, since it is read from the tokenized documents themselves. On a terminal a
document is its text, what counts in green; elsewhere a line a token, `+` before what counts.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from dejax.errors import UsageError
from infer.output import report
from train.documents import is_token_folder
from train.encoding import LossOn
from train.token_cache import TokenizedDocuments, check_vocabulary, open_documents

COUNTS = ("black on green", "black on bright_green")
"""Styles of tokens that count, by turns, so that each is seen to end."""
CONTEXT = ("", "dim")


@dataclass(frozen=True)
class ShownDocument:
    """A document as it is shown.

    Attributes:
      tokens, texts: ids and what each stands for; counts: whether each is a target of the losses.
    """

    tokens: list[int]
    texts: list[str]
    counts: list[bool]


def show_mask(
    name: str,
    tokenizer: Any,
    *,
    most: int,
    loss_on: LossOn,
    text_column: str,
    json: Path | None,
    vocab_size: int | None = None,
) -> None:
    """Shows the first `most` documents of a source, and writes them to `json` if that is given.

    Args:
      vocab_size: tokens that the target has; those of the tokenizer unless given.

    Raises:
      UsageError: as `open_documents`, or a token is beyond the vocabulary; a mask that is the same
        everywhere is shown, not refused.
    """
    if is_token_folder(name):
        raise UsageError(f"{name}: holds token arrays, of which every token counts; give documents")
    documents = open_documents(name, tokenizer, loss_on=loss_on, text_column=text_column)
    if vocab_size is None and tokenizer is not None:
        vocab_size = len(tokenizer)
    if vocab_size is not None:
        check_vocabulary(name, documents, vocab_size)
    shown = shown_documents(documents, tokenizer, most)
    report(json, {"documents": shown}, lambda: print_mask(shown, documents))


def shown_documents(
    documents: TokenizedDocuments, tokenizer: Any, most: int
) -> list[ShownDocument]:
    """The first `most` documents. No document's first token counts: nothing predicts it."""
    shown = []
    for index in range(min(most, len(documents))):
        tokens, counts = documents[index]
        texts = [str(i) if tokenizer is None else tokenizer.decode([i]) for i in tokens.tolist()]
        counted = np.concatenate([np.zeros(1, bool), counts[1:]])[: len(tokens)]
        shown.append(ShownDocument(tokens.tolist(), texts, counted.tolist()))
    return shown


def print_mask(shown: list[ShownDocument], documents: TokenizedDocuments) -> None:
    """Prints documents on standard output, and how much of all of them counts."""
    terminal = sys.stdout.isatty()
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    for number, document in enumerate(shown, start=1):
        print(f"document {number}: {sum(document.counts)} of {len(document.tokens)} tokens count")
        if terminal:
            console.print(_colored(document))
        else:
            for text, token, counts in zip(
                document.texts, document.tokens, document.counts, strict=True
            ):
                print(f"{'+' if counts else '-'} {token:>7} {text!r}")
        print()
    total = int(documents.lengths.sum())
    share = int(documents.counted.sum()) / max(total, 1)
    print(f"in all: {len(documents)} documents, {total} tokens, {share:.1%} of them count")


def _colored(document: ShownDocument) -> Text:
    """The text of a document; an end of line is shown as one, and ends one."""
    text = Text()
    for place, (piece, counts) in enumerate(zip(document.texts, document.counts, strict=True)):
        styles = COUNTS if counts else CONTEXT
        text.append(piece.replace("\n", "\u23ce\n"), style=styles[place % 2])
    return text

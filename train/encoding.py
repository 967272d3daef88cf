"""Documents to token ids, and which of them count in the losses.

With `loss_on` "all" every token counts; with "assistant" what the assistant said: of a chat, what
the template encloses in `{% generation %}` marks; of a generation, the tokens that the model
answered; of plain text nothing, which is then context alone.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Int32

from dejax.errors import UsageError
from train.document_files import Document
from train.tokenizer import END_OF_TEXT

LossOn = Literal["all", "assistant"]

Encoded = tuple[Int32[np.ndarray, " n"], Bool[np.ndarray, " n"]]
"""(token ids, whether each counts as a target)."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_SPANS = list[tuple[int, int]]


def encode_documents(
    documents: Sequence[Document], tokenizer: Any, *, loss_on: LossOn = "all"
) -> list[Encoded]:
    """Token ids of each document, its end mark included, and which of them count.

    Raises:
      UsageError: text without a tokenizer, a chat that the template refuses, or `loss_on`
        "assistant" with a template that does not mark what the assistant says.
    """
    encoded: dict[int, Encoded] = {}
    plain: dict[int, tuple[str, _SPANS]] = {}
    chats: dict[int, list[dict[str, Any]]] = {}
    template = _template(tokenizer)
    for index, document in enumerate(documents):
        if document.token_ids is not None:
            given, answer = document.token_ids
            counts = np.ones(len(given) + len(answer), bool)
            counts[: len(given)] = loss_on == "all"
            encoded[index] = (np.array(given + answer, np.int32), counts)
        elif tokenizer is None:
            raise UsageError(
                f"{document.where}: the model's folder has no tokenizer, and the data is text"
            )
        elif document.messages is None or template is None:
            plain[index] = _plain_text(document, tokenizer)
        else:
            _check_template(template, loss_on, document)
            chats[index] = list(document.messages)
    if chats:
        encoded |= zip(chats, _encode_chats(chats, documents, tokenizer, loss_on), strict=True)
    if plain:
        encoded |= zip(plain, _encode_texts(list(plain.values()), tokenizer, loss_on), strict=True)
    return [encoded[index] for index in range(len(documents))]


def tokenizer_key(tokenizer: Any) -> str:
    """Another one for another tokenizer or template, and the same in every process."""
    if tokenizer is None:
        return "none"
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        parts = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())]
    else:
        parts = json.loads(backend.to_str())
        # What the last call asked for, not what the tokenizer is.
        parts = [{k: v for k, v in parts.items() if k not in ("truncation", "padding")}]
    parts += [tokenizer.chat_template, tokenizer.eos_token]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _template(tokenizer: Any) -> str | None:
    if tokenizer is None or tokenizer.chat_template is None:
        return None
    return tokenizer.get_chat_template()


def _check_template(template: str, loss_on: LossOn, document: Document) -> None:
    if loss_on == "assistant" and not _GENERATION.search(template):
        raise UsageError(
            f"{document.where}: loss_on is assistant, and the tokenizer's chat template does not "
            "mark what the assistant says; put {% generation %} and {% endgeneration %} around it "
            "in the model folder's template, or set loss_on=all"
        )


def _plain_text(document: Document, tokenizer: Any) -> tuple[str, _SPANS]:
    """The text that is encoded, and where in it the assistant speaks."""
    end = END_OF_TEXT if END_OF_TEXT in tokenizer.get_vocab() else tokenizer.eos_token or ""
    if document.messages is None:
        return (document.text or "") + end, []
    text, spans = "", []
    for number, turn in enumerate(document.messages):
        text += "\n" if number else ""
        start = len(text)
        text += turn["content"] + (end if turn is document.messages[-1] else "")
        spans += [(start, len(text))] if turn["role"] == "assistant" else []
    return text, spans


def _encode_texts(
    texts: Sequence[tuple[str, _SPANS]], tokenizer: Any, loss_on: LossOn
) -> list[Encoded]:
    # Not verbose: rows are cut to length later, so a long document is nothing to warn of.
    options: dict[str, Any] = {"add_special_tokens": False, "verbose": False}
    if loss_on == "all":
        found = tokenizer([text for text, _ in texts], **options)["input_ids"]
        return [_all_count(ids) for ids in found]
    found = tokenizer([text for text, _ in texts], return_offsets_mapping=True, **options)
    encoded = []
    for ids, places, (_, spans) in zip(
        found["input_ids"], found["offset_mapping"], texts, strict=True
    ):
        counts = [any(a < end and start < b for start, end in spans) for a, b in places]
        encoded.append((np.array(ids, np.int32), np.array(counts, bool)))
    return encoded


def _encode_chats(
    chats: dict[int, list[dict[str, Any]]],
    documents: Sequence[Document],
    tokenizer: Any,
    loss_on: LossOn,
) -> list[Encoded]:
    def encode(turns: list[list[dict[str, Any]]]) -> list[Encoded]:
        if loss_on == "all":
            texts = tokenizer.apply_chat_template(turns, tokenize=False)
            return _encode_texts([(text, []) for text in texts], tokenizer, loss_on)
        found = tokenizer.apply_chat_template(
            turns,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"verbose": False},
        )
        pairs = zip(found["input_ids"], found["assistant_masks"], strict=True)
        return [(np.array(ids, np.int32), np.array(mask, bool)) for ids, mask in pairs]

    try:
        return encode(list(chats.values()))
    except Exception:  # whatever a template raises: which document was it?
        encoded = []
        for index, turns in chats.items():
            try:
                encoded += encode([turns])
            except Exception as error:
                first_line = f"{type(error).__name__}: {error}".strip().splitlines()[0]
                raise UsageError(
                    f"{documents[index].where}: the chat template does not take it ({first_line})"
                ) from None
        return encoded


def _all_count(ids: Sequence[int]) -> Encoded:
    return np.array(ids, np.int32), np.ones(len(ids), bool)

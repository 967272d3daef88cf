"""Documents to token ids, and which of them count."""

import copy

import numpy as np
import pytest

from dejax.errors import UsageError
from dejax.target import load_tokenizer, model_folder
from tests.train.document_cases import CHAT, GENERATION, MARKED, PAIR, TEXT, marked_tokenizer
from tests.train.small_model import tokenizer_of
from train.document_files import as_document
from train.encoding import encode_documents, tokenizer_key

LONG_CHAT = {
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "So."},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "the end"},
    ]
}


def documents(*rows):
    return [as_document(row, f"row {number}") for number, row in enumerate(rows, start=1)]


def counted(tokenizer, encoded):
    """The text of what counts, a piece a run."""
    tokens, counts = encoded
    edges = np.flatnonzero(np.diff(np.concatenate([[0], counts.astype(np.int8), [0]])))
    return [tokenizer.decode(tokens[a:b]) for a, b in edges.reshape(-1, 2)]


def test_documents_are_rendered_as_pretraining_rendered_them():
    tokenizer = tokenizer_of()
    chat, text, pair = encode_documents(documents(CHAT, TEXT, PAIR), tokenizer)
    np.testing.assert_array_equal(chat[0], pair[0])
    decoded = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\nSo.<|im_end|>\n"
    assert tokenizer.decode(chat[0]) == decoded
    assert tokenizer.decode(text[0]) == "plain<|endoftext|>"
    assert chat[1].all() and text[1].all()


def test_what_the_template_marks_counts():
    tokenizer = marked_tokenizer()
    rows = documents(LONG_CHAT, TEXT, PAIR, GENERATION)
    chat, text, pair, generation = encode_documents(rows, tokenizer, loss_on="assistant")
    assert counted(tokenizer, chat) == ["So.<|im_end|>", "the end<|im_end|>"]
    assert counted(tokenizer, text) == []
    assert counted(tokenizer, pair) == ["So.<|im_end|>"]
    assert generation[0].tolist() == [5, 6, 7, 8]
    assert generation[1].tolist() == [False, False, True, True]
    for (tokens, _), (same, every) in zip(
        (chat, text, pair, generation), encode_documents(rows, tokenizer), strict=True
    ):
        np.testing.assert_array_equal(tokens, same)
        assert every.all()


def test_a_document_alone_is_what_it_is_among_others():
    tokenizer = marked_tokenizer()
    rows = documents(LONG_CHAT, TEXT, GENERATION, CHAT)
    together = encode_documents(rows, tokenizer, loss_on="assistant")
    for row, (tokens, counts) in zip(rows, together, strict=True):
        ((alone, marks),) = encode_documents([row], tokenizer, loss_on="assistant")
        np.testing.assert_array_equal(tokens, alone)
        np.testing.assert_array_equal(counts, marks)


def test_without_a_template_chats_are_their_contents():
    tokenizer = copy.deepcopy(tokenizer_of())
    tokenizer.chat_template = None
    rows = documents(LONG_CHAT, CHAT, TEXT)
    long, chat, text = encode_documents(rows, tokenizer, loss_on="assistant")
    assert tokenizer.decode(chat[0]) == "Why?\nSo.<|endoftext|>"
    assert counted(tokenizer, chat) == ["So.<|endoftext|>"]
    assert counted(tokenizer, long) == ["So.", "the end<|endoftext|>"]
    assert counted(tokenizer, text) == []
    every = encode_documents(rows, tokenizer)
    np.testing.assert_array_equal(every[0][0], long[0])
    assert all(counts.all() for _, counts in every)


def test_the_end_is_the_tokenizers_own_where_it_is_another():
    class Plain:
        chat_template, eos_token = None, "</s>"

        def get_vocab(self):
            return {}

        def __call__(self, texts, **_):
            return {"input_ids": [[ord(letter) for letter in text] for text in texts]}

    encoded = encode_documents(documents(CHAT, TEXT), Plain())
    assert ["".join(map(chr, ids)) for ids, _ in encoded] == ["Why?\nSo.</s>", "plain</s>"]


def test_token_ids_need_no_tokenizer_and_text_does():
    ((tokens, counts),) = encode_documents(documents(GENERATION), None)
    assert tokens.tolist() == [5, 6, 7, 8] and counts.all()
    with pytest.raises(UsageError, match="row 2: the model's folder has no tokenizer, and"):
        encode_documents(documents(GENERATION, TEXT), None)


def test_a_template_without_marks_is_refused_for_chats_alone():
    tokenizer = load_tokenizer(model_folder("tiny"))
    message = "row 2: loss_on is assistant, and the .* template does not mark .* or set loss_on=all"
    with pytest.raises(UsageError, match=message):
        encode_documents(documents(TEXT, CHAT), tokenizer, loss_on="assistant")
    encode_documents(documents(TEXT, GENERATION), tokenizer, loss_on="assistant")


@pytest.mark.parametrize("loss_on", ["all", "assistant"])
def test_the_chat_that_a_template_refuses_is_named(loss_on):
    refuse = "{% if messages[0].role == 'system' %}{{ raise_exception('No system') }}{% endif %}"
    tokenizer = marked_tokenizer(refuse + MARKED)
    with pytest.raises(UsageError, match="row 2: the chat template does not take it .*No system"):
        encode_documents(documents(CHAT, LONG_CHAT, CHAT), tokenizer, loss_on=loss_on)


def test_the_key_tells_tokenizers_and_templates_apart_and_calls_not():
    tokenizer = marked_tokenizer()
    key = tokenizer_key(tokenizer)
    tokenizer(["a", "b b"], padding=True, truncation=True, max_length=2)
    assert tokenizer_key(tokenizer) == key
    others = [tokenizer_of(), load_tokenizer(model_folder("tiny")), None]
    assert len({key, *map(tokenizer_key, others)}) == 4

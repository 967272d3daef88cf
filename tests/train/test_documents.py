"""Documents to packed rows: reading, splitting, rendering, the order of batches."""

import gzip
import json

import numpy as np
import pytest

from dejax.errors import UsageError
from tests.train.small_model import tokenizer_of
from train.packed_rows import (
    PackedRows,
    encode_documents,
    pad_rows,
    read_documents,
    split_documents,
)

CHAT = {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]}
TEXT = {"text": "plain", "kind": "novel"}
PAIR = {"prompt": "Why?", "completion": "So."}


def write(path, documents):
    lines = "\n".join(json.dumps(document) for document in documents).encode()
    path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)
    return path


@pytest.mark.parametrize("name", ["d.jsonl", "d.jsonl.gz"])
def test_reads_documents_plain_and_compressed(tmp_path, name):
    path = write(tmp_path / name, [CHAT, TEXT, PAIR])
    assert read_documents(path) == [CHAT, TEXT, PAIR]


def test_the_documents_that_come_with_dejax_are_documents():
    documents = read_documents("demo")
    trained, held = split_documents(documents)
    assert len(trained) > 10 * len(held) > 1000
    assert len(trained) + len(held) == len(documents)
    assert held[0] == documents[15] and held[1] == documents[31]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no documents; expected one JSON object a line"),
        (b"{\n", "line 1 is not JSON"),
        (b'{"text": "a"}\n\n["text"]', "line 3 is no document"),
        (b'{"text": 1}', "line 1 is no document"),
        (b'{"prompt": "a"}', "line 1 is no document"),
        (b'{"messages": []}', "line 1 is no document"),
        (b'{"messages": [{"role": "user"}]}', "line 1 is no document"),
        (b"\xff\xfe", "cannot be read as JSON lines"),
    ],
)
def test_what_is_no_document_is_told_with_its_line(tmp_path, content, message):
    (tmp_path / "d.jsonl").write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read_documents(tmp_path / "d.jsonl")


def test_missing_and_damaged_files(tmp_path):
    with pytest.raises(UsageError, match="nowhere.jsonl does not exist; expected documents"):
        read_documents(tmp_path / "nowhere.jsonl")
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}')[:-4])
    with pytest.raises(UsageError, match="cannot be read"):
        read_documents(tmp_path / "d.jsonl.gz")


def test_documents_are_rendered_as_pretraining_rendered_them():
    tokenizer = tokenizer_of()
    chat, text, pair = encode_documents([CHAT, TEXT, PAIR], tokenizer)
    assert chat == pair
    decoded = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\nSo.<|im_end|>\n"
    assert tokenizer.decode(chat) == decoded
    assert tokenizer.decode(text) == "plain<|endoftext|>"


def test_a_tokenizer_without_a_template_gets_plain_text():
    class Plain:
        chat_template, eos_token = None, "</s>"

        def get_vocab(self):
            return {}

        def __call__(self, texts, **_):
            return {"input_ids": [[ord(letter) for letter in text] for text in texts]}

    texts = ["".join(map(chr, ids)) for ids in encode_documents([CHAT, TEXT], Plain())]
    assert texts == ["Why?\nSo.</s>", "plain</s>"]


def test_rows_hold_the_documents_one_after_the_other():
    rows = PackedRows([[5, 6, 7], [8, 9], [], [10, 11, 12, 13]], 4)
    assert len(rows) == 2
    batch = rows.rows([0, 1])
    assert batch["tokens"].tolist() == [[5, 6, 7, 8], [9, 10, 11, 12]]
    assert batch["targets"].tolist() == [[6, 7, 8, 9], [10, 11, 12, 13]]
    assert batch["segment_ids"].tolist() == [[1, 1, 1, 2], [1, 2, 2, 2]]
    assert batch["positions"].tolist() == [[0, 1, 2, 0], [0, 0, 1, 2]]
    assert batch["mask"].tolist() == [[1, 1, 0, 1], [0, 1, 1, 1]]


def test_batches_are_a_function_of_seed_and_step():
    rows = PackedRows([list(range(100))], 4)
    draw = [rows.batch_at(step, batch_size=3, seed=1) for step in range(9)]
    again = rows.batch_at(7, batch_size=3, seed=1)
    np.testing.assert_array_equal(draw[7]["tokens"], again["tokens"])
    other = rows.batch_at(7, batch_size=3, seed=2)
    assert not np.array_equal(draw[7]["tokens"], other["tokens"])
    # 25 rows: the first pass is all of them once, the second starts in another order.
    firsts = np.concatenate([batch["tokens"][:, 0] for batch in draw])
    assert sorted(firsts[:25]) == list(range(0, 100, 4))
    assert firsts[:2].tolist() != firsts[25:].tolist()


def test_the_last_batch_is_filled_with_rows_that_count_nothing():
    rows = PackedRows([list(range(21))], 4)
    batches = list(rows.batches(2))
    assert [batch["tokens"].shape for batch in batches] == [(2, 4)] * 3
    assert batches[-1]["mask"][1].sum() == batches[-1]["segment_ids"][1].sum() == 0
    assert len(list(rows.batches(2, most=3))) == 2
    assert pad_rows(rows.rows([0]), 3)["mask"].sum() == 4


def test_no_text_is_refused():
    with pytest.raises(UsageError, match="no tokens to predict"):
        PackedRows([[], [3]], 4)

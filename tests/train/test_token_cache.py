"""Tokenized documents on disk: made once, told apart, and the same from every format."""

import numpy as np
import pytest

from dejax.errors import FailedError, UsageError
from tests.train.document_cases import CHAT, GENERATION, PAIR, TEXT, marked_tokenizer, write
from tests.train.small_model import tokenizer_of
from train import token_cache
from train.token_cache import open_documents

DOCUMENTS = [CHAT, TEXT, PAIR, GENERATION, {"text": ""}] * 60  # more than are encoded together


@pytest.fixture
def encoded(monkeypatch):
    """The number of documents of each call of `encode_documents`."""
    calls, encode = [], token_cache.encode_documents

    def counting(documents, tokenizer, *, loss_on):
        calls.append(len(documents))
        return encode(documents, tokenizer, loss_on=loss_on)

    monkeypatch.setattr(token_cache, "encode_documents", counting)
    return calls


def test_documents_are_tokenized_once(tmp_path, encoded):
    name = str(write(tmp_path / "d.jsonl", DOCUMENTS))
    first = open_documents(name, tokenizer_of(), cache_dir=tmp_path / "cache")
    assert sum(encoded) == len(first) == 300 and max(encoded) < 300
    second = open_documents(name, tokenizer_of(), cache_dir=tmp_path / "cache")
    assert sum(encoded) == 300
    assert second.fingerprint == first.fingerprint
    for index in range(300):
        for one, other in zip(first[index], second[index], strict=True):
            np.testing.assert_array_equal(one, other)
        assert first.lengths[index] == len(first[index][0])
        assert first.counted[index] == first[index][1].sum()
    assert first.largest == max(int(first[i][0].max(initial=-1)) for i in range(300))
    assert first[0][0].dtype == np.int32 and first[0][1].dtype == bool


def test_tokens_stay_on_disk(tmp_path):
    name = str(write(tmp_path / "d.jsonl", DOCUMENTS))
    documents = open_documents(name, tokenizer_of(), cache_dir=tmp_path / "cache")
    assert documents[0][0].base is not None and not documents[0][0].flags.writeable
    assert list((tmp_path / "cache").rglob("*.arrow"))


def test_other_text_tokenizers_and_marks_are_tokenized_anew(tmp_path, encoded):
    path = write(tmp_path / "d.jsonl", [CHAT, GENERATION])
    cache = tmp_path / "cache"
    opened = [
        open_documents(str(path), tokenizer_of(), cache_dir=cache),
        open_documents(str(path), marked_tokenizer(), cache_dir=cache),
        open_documents(str(path), marked_tokenizer(), loss_on="assistant", cache_dir=cache),
    ]
    write(path, [GENERATION, CHAT, CHAT])
    opened.append(open_documents(str(path), tokenizer_of(), cache_dir=cache))
    assert encoded == [2, 2, 2, 3]
    # The second differs from the first in how it came about alone.
    prints = [documents.fingerprint for documents in opened]
    assert prints[0] == prints[1] and len(set(prints)) == 3


def test_the_order_is_part_of_the_fingerprint(tmp_path):
    names = [
        str(write(tmp_path / f"{n}.jsonl", documents))
        for n, documents in enumerate([[CHAT, TEXT], [TEXT, CHAT]])
    ]
    prints = {open_documents(n, tokenizer_of(), cache_dir=tmp_path).fingerprint for n in names}
    assert len(prints) == 2


@pytest.mark.parametrize("loss_on", ["all", "assistant"])
def test_every_format_gives_the_same_tokens(tmp_path, loss_on):
    prints = {
        open_documents(
            str(write(tmp_path / name, DOCUMENTS)),
            marked_tokenizer(),
            loss_on=loss_on,
            cache_dir=tmp_path / "cache",
        ).fingerprint
        for name in ("d.jsonl", "e.jsonl.gz", "f.parquet", "g.json")
    }
    assert len(prints) == 1


def test_what_is_no_document_ends_it_and_leaves_nothing_half_done(tmp_path, encoded):
    path = write(tmp_path / "d.jsonl", [*DOCUMENTS, {"no": 1}])
    for _ in range(2):
        with pytest.raises(UsageError, match="d.jsonl: line 301 is no document"):
            open_documents(str(path), tokenizer_of(), cache_dir=tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.arrow"))
    assert encoded


def test_a_cache_that_cannot_be_written_is_told(tmp_path):
    path = write(tmp_path / "d.jsonl", [TEXT])
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(FailedError, match="cannot be kept in .*cache, .* folder in HF_HOME"):
        open_documents(str(path), tokenizer_of(), cache_dir=tmp_path / "cache")


def test_a_cache_that_is_damaged_is_told(tmp_path):
    path = write(tmp_path / "d.jsonl", DOCUMENTS)
    open_documents(str(path), tokenizer_of(), cache_dir=tmp_path / "cache")
    (arrow,) = (tmp_path / "cache").rglob("*.arrow")
    arrow.write_bytes(arrow.read_bytes()[:1000])
    with pytest.raises(FailedError, match="cannot be kept"):
        open_documents(str(path), tokenizer_of(), cache_dir=tmp_path / "cache")

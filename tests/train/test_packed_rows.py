"""Tokenized documents to rows: what a row holds, and that none is lost or counted twice."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dejax.errors import UsageError
from tests.train.document_cases import tokenized
from train.packed_rows import PackedRows, pad_rows, split_documents
from train.rows import stack_rows

lengths = st.lists(st.integers(0, 20), min_size=1, max_size=12).filter(lambda all_: sum(all_) > 1)


def test_one_document_in_sixteen_is_held_out():
    trained, held = split_documents(50)
    assert held.tolist() == [15, 31, 47]
    assert sorted([*trained, *held]) == list(range(50)) and np.all(np.diff(trained) > 0)


def test_rows_hold_the_documents_one_after_the_other():
    documents = tokenized([[5, 6, 7], [8, 9], [], [10, 11, 12, 13]])
    rows = PackedRows(documents, range(4), seq_len=4)
    assert len(rows) == 2
    batch = stack_rows([rows[0], rows[1]])
    assert batch["tokens"].tolist() == [[5, 6, 7, 8], [9, 10, 11, 12]]
    assert batch["targets"].tolist() == [[6, 7, 8, 9], [10, 11, 12, 13]]
    assert batch["segment_ids"].tolist() == [[1, 1, 1, 2], [1, 2, 2, 2]]
    assert batch["positions"].tolist() == [[0, 1, 2, 0], [0, 0, 1, 2]]
    assert batch["mask"].tolist() == [[1, 1, 0, 1], [0, 1, 1, 1]]
    with pytest.raises(IndexError):
        rows[2]


def test_what_does_not_count_is_context_alone():
    counts = [[False, False, True], [False, False], [True, True, False, True]]
    documents = tokenized([[5, 6, 7], [8, 9], [10, 11, 12, 13]], counts)
    rows, every = (
        PackedRows(each, range(3), seq_len=4)
        for each in (documents, tokenized([[5, 6, 7], [8, 9], [10, 11, 12, 13]]))
    )
    batch, plain = (stack_rows([each[0], each[1]]) for each in (rows, every))
    assert batch.pop("mask").tolist() == [[0, 1, 0, 0], [0, 1, 0, 1]]
    del plain["mask"]
    for key, array in plain.items():
        np.testing.assert_array_equal(batch[key], array)


@given(lengths, st.integers(1, 9), st.randoms(use_true_random=False))
def test_every_token_that_counts_is_a_target_once(lengths, seq_len, random):
    ends = np.cumsum(lengths)
    ids = [list(range(end - n, end)) for n, end in zip(lengths, ends, strict=True)]
    counts = [[random.random() < 0.5 for _ in each] for each in ids]
    order = random.sample(range(len(ids)), len(ids))
    rows = PackedRows(tokenized(ids, counts), order, seq_len=seq_len)
    batch = stack_rows([rows[index] for index in range(len(rows))])
    targets = batch["targets"][batch["mask"] > 0].tolist()
    expected = [i for n in order for i, c in zip(ids[n][1:], counts[n][1:], strict=True) if c]
    assert targets == expected
    # The rows joined are the documents joined, without the last token.
    real = batch["segment_ids"] > 0
    joined = [i for n in order for i in ids[n]]
    shown = batch["tokens"][real].tolist()
    assert shown == joined[: len(shown)] and len(joined) - len(shown) <= 1
    document = np.repeat(range(len(lengths)), lengths)
    for row in range(len(batch["tokens"])):
        tokens = batch["tokens"][row][real[row]]
        segments, positions = (batch[key][row][real[row]] for key in ("segment_ids", "positions"))
        assert segments[0] == 1 and positions[0] == 0
        # A segment is a document, and positions count from 0 in each.
        new = document[tokens[1:]] != document[tokens[:-1]]
        np.testing.assert_array_equal(np.diff(segments), new)
        np.testing.assert_array_equal(positions[1:], np.where(new, 0, positions[:-1] + 1))
    assert not batch["mask"][~real].any()


def test_only_the_documents_of_a_row_are_read():
    documents, read = tokenized([[i] * 8 for i in range(100)]), []

    class Watched(type(documents)):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    documents.__class__ = Watched
    rows = PackedRows(documents, range(100), seq_len=16)
    assert read == []
    rows[3]
    assert read == [6, 7, 8]


def test_the_last_batch_is_filled_with_rows_that_count_nothing():
    rows = PackedRows(tokenized([list(range(21))]), [0], seq_len=4)
    batches = list(rows.batches(2))
    assert [batch["tokens"].shape for batch in batches] == [(2, 4)] * 3
    assert batches[-1]["mask"][1].sum() == batches[-1]["segment_ids"][1].sum() == 0
    assert len(list(rows.batches(2, most=3))) == 2
    assert pad_rows(stack_rows([rows[0]]), 3)["mask"].sum() == 4


def test_no_text_is_refused():
    with pytest.raises(UsageError, match="no tokens to predict"):
        PackedRows(tokenized([[], [3]]), [0, 1], seq_len=4)

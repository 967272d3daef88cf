"""The trigram baseline: a distribution in every context, the counts, and bits per byte."""

import json

import numpy as np
import pytest

from dejax.errors import UsageError
from train import trigram
from train.data import TokenArrays
from train.text import KINDS
from train.trigram import bits_per_byte, count_orders, fit_trigram

V = 7


def arrays_of(documents: list[list[int]], kinds: list[str]) -> TokenArrays:
    return TokenArrays(
        tokens=np.array(sum(documents, []), np.uint16),
        offsets=np.cumsum([0, *map(len, documents)], dtype=np.int64),
        kinds=np.array([KINDS.index(k) for k in kinds], np.int8),
        chat=np.zeros(len(documents), bool),
    )


@pytest.fixture(scope="module")
def arrays() -> TokenArrays:
    rng = np.random.default_rng(0)
    # Token 6 never occurs: it has its share of the uniform distribution all the same.
    documents = [rng.choice(6, 30, p=[0.4, 0.2, 0.2, 0.1, 0.05, 0.05]).tolist() for _ in range(40)]
    return arrays_of(documents, ["code", "sotu"] * 20)


def test_probabilities_sum_to_one_in_every_context(arrays):
    model = fit_trigram(arrays, vocab_size=V)
    first, second, token = (x.ravel() for x in np.indices((V, V, V)))
    p = model.probabilities(first, second, token)
    assert (p > 0).all()
    np.testing.assert_allclose(p.reshape(V * V, V).sum(1), 1.0, atol=1e-12)


def test_against_the_formula_written_out():
    arrays = arrays_of([[1, 2, 3, 1, 2, 3, 1, 2, 4], [2, 2, 3]], ["code", "code"])
    model = trigram.Trigram(count_orders(trigram._grams(arrays)[0]), (0.5, 0.6, 0.7), V)
    # Trigrams: 0|1 2, 1 2 3 twice, 2 3 1 twice, 3 1 2 twice, 1 2 4, 0|2 2, 2 2 3.
    # Distinct bigrams behind a left neighbour: 12 (two: 0, 3), 23 (1, 2), 31 (2), 24 (1), 22 (0).
    unigram = {2: 2, 3: 1, 1: 1, 4: 1}  # distinct left neighbours; 5 bigram types in all

    def p1(w):
        return (max(unigram.get(w, 0) - 0.5, 0) + 0.5 * 4 / V) / 5

    def p2(w):  # after 2: 23 has two left neighbours, 24 one, 22 one
        return (max({3: 2, 4: 1, 2: 1}.get(w, 0) - 0.6, 0) + 0.6 * 3 * p1(w)) / 4

    def p3(w):  # after 1 2: 3 twice, 4 once
        return (max({3: 2, 4: 1}.get(w, 0) - 0.7, 0) + 0.7 * 2 * p2(w)) / 3

    tokens = np.arange(V)
    got = model.probabilities(np.full(V, 1), np.full(V, 2), tokens)
    np.testing.assert_allclose(got, [p3(w) for w in tokens], rtol=1e-12)
    unseen = model.probabilities(np.full(V, 5), np.full(V, 2), tokens)  # backs off to 2 alone
    np.testing.assert_allclose(unseen, [p2(w) for w in tokens], rtol=1e-12)


def test_bits_per_byte_by_kind(arrays):
    model = fit_trigram(arrays, vocab_size=V)
    lengths = np.array([0, 1, 2, 3, 4, 5, 6])
    result = bits_per_byte(model, arrays, lengths)
    assert set(result) == {"code", "sotu", "all"}
    predicted = arrays.tokens.reshape(40, 30)[:, 1:]
    assert result["all"]["tokens"] == 40 * 29
    assert result["sotu"]["bytes"] == lengths[predicted[1::2]].sum()
    bits = [result[k]["bits_per_byte"] * result[k]["bytes"] for k in ("code", "sotu", "all")]
    assert bits[0] + bits[1] == pytest.approx(bits[2], rel=1e-3)


def test_it_learns():
    pattern = arrays_of([[1, 2, 3, 4] * 8 for _ in range(40)], ["code"] * 40)
    model = fit_trigram(pattern, vocab_size=V)
    assert model.probabilities(np.array([1]), np.array([2]), np.array([3]))[0] > 0.99


def test_errors(arrays):
    with pytest.raises(UsageError, match="vocabulary"):
        fit_trigram(arrays, vocab_size=1 << 21)
    with pytest.raises(UsageError, match="at least 2 documents"):
        fit_trigram(arrays_of([[1, 2]], ["code"]), vocab_size=V)


def test_program_writes_its_table(arrays, tmp_path, monkeypatch):
    monkeypatch.setattr(trigram, "load_tokenizer", lambda folder: range(V))
    monkeypatch.setattr(trigram, "token_lengths", lambda tokenizer: np.ones(V, np.int64))
    monkeypatch.setattr(trigram, "load_tokens", lambda folder: arrays)
    trigram.main([str(tmp_path)])
    table = json.loads((tmp_path / "trigram.json").read_text())
    assert set(table["code"]) == {"bits_per_byte", "tokens", "bytes"}
    assert [p.name for p in tmp_path.iterdir()] == ["trigram.json"]

"""Documents, the split, the token arrays, rows and batches addressed by the step."""

import gzip
import json

import numpy as np
import pytest

from dejax.errors import UsageError
from train import data, text
from train.data import Phase, RowSource, TokenArrays, heldout_rows, make_source, make_stream
from train.text import KINDS, Document
from train.tokenizer import load_tokenizer, token_lengths

WORDS = "river stone lamp orbit quiet seven maple copper winter signal garden letter".split()
T = 16


def words(seed: int, n: int) -> str:
    return " ".join(np.random.default_rng(seed).choice(WORDS, n))


def write_jsonl(path, rows):
    raw = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A tiny prepared data folder: four kinds, a leaked evaluation prompt among the T0 rows."""
    folder = tmp_path_factory.mktemp("data")
    leaked = words(999, 30)
    maths = [{"text": f"Question: {words(i, 9)} {i}?\nAnswer: {i}\nThe answer is {i}"}
             for i in range(30)]  # fmt: skip
    prose = [{"text": f"{words(100 + i, 60).capitalize()}."} for i in range(20)]
    t0 = [{"template": "t", "prompt": words(200 + i, 20), "completion": "maple<|endoftext|>"}
          for i in range(30)]  # fmt: skip
    t0.append({"template": "t", "prompt": f"Before. {leaked}", "completion": "leak"})
    prompts = [
        {"id": "a", "category": "chat", "prompt": words(300, 8), "reference": "quiet"},
        {"id": "b", "category": "chat", "prompt": words(301, 8)},
        {"id": "c", "category": "math", "prompt": words(302, 8), "reference": "1"},
        {"id": "d", "category": "code", "prompt": words(303, 8), "reference": "def f():\r\n\tpass"},
    ]
    paths = [
        write_jsonl(folder / "gsm8k_train.jsonl.gz", maths),
        write_jsonl(folder / "sotu.jsonl", prose),
        write_jsonl(folder / "t0_subset.jsonl.gz", t0),
        write_jsonl(folder / "train.jsonl", prompts),
    ]
    dev = write_jsonl(folder / "dev.jsonl", [{"prompt": leaked}])
    out = folder / "out"
    metas = data.prepare(paths, out, exclude=[dev], vocab_size=300)
    return out, metas, leaked


def decoded(out, split):
    tokenizer, arrays = load_tokenizer(out / "tokenizer"), data.load_tokens(out / split)
    bounds = zip(arrays.offsets[:-1], arrays.offsets[1:], strict=True)
    return [tokenizer.decode(arrays.tokens[a:b]) for a, b in bounds]


# --- documents -------------------------------------------------------------------------------


def test_rows_become_typed_documents():
    (chat,) = text.documents_of_row({"text": "Question: 1+1?\nAnswer: It is 2."}, "gsm8k")
    assert (chat.prompt, chat.text) == ("1+1?", "It is 2.")
    (t0,) = text.documents_of_row({"prompt": "Say x\n", "completion": " x<|endoftext|>"}, "t0")
    assert (t0.prompt, t0.text) == ("Say x", "x")
    chapters = text.documents_of_row({"text": "CHAPTER 1. A\n\nb\nCHAPTER 2. C\n\nd"}, "novel")
    assert [c.text for c in chapters] == ["CHAPTER 1. A\n\nb", "CHAPTER 2. C\n\nd"]
    assert text.documents_of_row({"category": "chat", "prompt": "no reference"}, "prompts") == []


def test_functions_are_cut_out_under_their_docstring():
    source = (
        "import os\n\nclass A:\n    def area(self, side, *, scale=1):\n"
        '        """Return the area of a square.\n\n        More."""\n'
        "        total = side * side\n        return total * scale\n\n"
        "    def short(self): pass\n"
    )
    plain = Document("code", "o", source)
    (cut,) = text.cut_functions(plain)
    assert cut.prompt == (
        "Write a Python function `area(self, side, *, scale=1)`: Return the area of a square."
    )
    assert cut.text.startswith("def area(") and cut.text.endswith("return total * scale")
    assert (cut.kind, cut.origin) == ("code", "o")
    assert text.cut_functions(Document("code", "o", "print 'no syntax of ours'")) == []


def test_summaries_are_lead_sentences():
    section = "This is the lead sentence of a section, long enough. " + "More follows here. " * 40
    (cut,) = text.cut_summaries(Document("sqlite", "o", section))
    assert cut.text == "This is the lead sentence of a section, long enough."
    assert cut.prompt.startswith("Summarize: This is the lead")
    assert text.lead_sentence("no capital, no sentence") == ""


def test_split_is_deterministic_and_keeps_origins_together():
    documents = [Document("code", f"{i // 2:03}", f"{i}") for i in range(100)]
    train, heldout = text.split_heldout(documents)
    assert (train, heldout) == text.split_heldout(documents)
    assert len(heldout) == 8  # four origins of two documents
    assert not {d.origin for d in train} & {d.origin for d in heldout}
    single, nothing = text.split_heldout(documents[:1])
    assert (len(single), len(nothing)) == (1, 0)


def test_overlaps_are_dropped_but_templates_are_not():
    shared, template = words(1, 14), words(2, 14)
    leak = Document("t0", "a", "answer", f"tell {shared} now")
    long = Document("novel", "b", f"{shared} {words(3, 2000)}")  # a quotation in a long text
    framed = [Document("t0", f"c{i}", f"{i}", f"{template} {words(50 + i, 5)}") for i in range(9)]
    others = [f"{shared} {template}"]
    kept, dropped = text.drop_overlaps([leak, long, *framed], others, common=8)
    assert dropped == [leak] and kept == [long, *framed]
    # Punctuation and case hide nothing, order does.
    kept, dropped = text.drop_overlaps([leak], [shared.upper().replace(" ", ", ")])
    assert dropped == [leak]
    assert text.drop_overlaps([leak], [" ".join(reversed(shared.split()))])[1] == []
    assert text.drop_overlaps([leak], []) == ([leak], [])


def test_passages_are_not_asked_about_again_and_again():
    passage = words(4, 80)
    rows = [Document("t0", f"{i}", "yes", f"{passage} question {i}") for i in range(20)]
    other = [Document("t0", "x", "no", words(5, 80)), Document("novel", "y", passage)]
    kept, dropped = text.cap_repeats([*rows, *other], times=4)
    assert len(kept) == 4 + 2 and len(dropped) == 16
    assert kept[-2:] == other


def test_errors_name_the_file(tmp_path):
    with pytest.raises(UsageError, match="kind of"):
        text.kind_of("unheard.jsonl")
    with pytest.raises(UsageError, match="no such file"):
        list(text.read_rows(tmp_path / "sotu.jsonl", cache_dir=tmp_path))
    (tmp_path / "sotu.csv").write_text("x")
    with pytest.raises(UsageError, match="neither"):
        list(text.read_rows(tmp_path / "sotu.csv", cache_dir=tmp_path))
    with pytest.raises(UsageError, match="no token arrays"):
        data.load_tokens(tmp_path)


def test_parquet_is_read(tmp_path):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"text": ["one", "two"]})
    pyarrow.parquet.write_table(table, tmp_path / "novel.parquet")
    rows = list(text.read_rows(tmp_path / "novel.parquet", cache_dir=tmp_path / "cache"))
    assert [row["text"] for row in rows] == ["one", "two"]


# --- arrays on disk --------------------------------------------------------------------------


def test_prepared_arrays(prepared):
    out, metas, leaked = prepared
    train, heldout = decoded(out, "train"), decoded(out, "heldout")
    assert metas["train"]["dropped_excluded"] == 1
    assert not [t for t in train + heldout if leaked in t]
    assert not set(train) & set(heldout)
    assert metas["heldout"]["counts"]["gsm8k"]["documents"] == 4
    assert all(t.endswith(("<|endoftext|>", "<|im_end|>\n")) for t in train)
    assert any(t.endswith("assistant\ndef f():\n    pass<|im_end|>\n") for t in train + heldout)
    lengths = token_lengths(load_tokenizer(out / "tokenizer"))
    arrays = data.load_tokens(out / "train")
    assert arrays.tokens.dtype == np.uint16
    assert (np.diff(arrays.kinds) >= 0).all()
    total = sum(c["bytes"] for c in metas["train"]["counts"].values())
    assert lengths[arrays.tokens].sum() == total
    assert not [p for p in out.iterdir() if p.name.endswith(".tmp")]


def test_preparing_again_gives_the_same(prepared, tmp_path):
    out, metas, _ = prepared
    names = ("gsm8k_train.jsonl.gz", "sotu.jsonl", "t0_subset.jsonl.gz", "train.jsonl")
    paths = [out.parent / n for n in names]
    data.prepare(paths, tmp_path, exclude=[out.parent / "dev.jsonl"], vocab_size=300)
    for split in ("train", "heldout"):
        assert decoded(tmp_path, split) == decoded(out, split)
    tokenizers = [(f / "tokenizer" / "tokenizer.json").read_bytes() for f in (out, tmp_path)]
    assert tokenizers[0] == tokenizers[1]


def test_long_exchanges_are_left_out(prepared, monkeypatch):
    monkeypatch.setattr(data, "MAX_CHAT_TOKENS", 40)
    documents = [
        Document("t0", "a", "x", words(1, 100)),
        Document("t0", "b", "x", "short"),
        Document("novel", "c", words(1, 100)),
    ]
    arrays = data.tokenize(documents, load_tokenizer(prepared[0] / "tokenizer"))
    assert arrays.too_long == 1 and arrays.chat.tolist() == [True, False]


# --- rows and batches ------------------------------------------------------------------------


def test_rows_hold_every_token_once_as_a_target():
    lengths = [5, 40, 3, 9]
    tokens = np.arange(100, 100 + sum(lengths), dtype=np.uint16)
    arrays = TokenArrays(
        tokens, np.cumsum([0, *lengths]), np.full(4, KINDS.index("code")), np.zeros(4, bool)
    )
    source = RowSource(arrays, "code", T)
    rows = [source[i] for i in range(len(source))]
    assert len(rows) == -(-(57 - 1) // T)
    targets = np.concatenate([r["targets"][r["mask"] > 0] for r in rows])
    firsts = np.cumsum([0, *lengths[:-1]]) + 100  # the first token of a document is no target
    assert targets.tolist() == [t for t in tokens.tolist() if t not in firsts]
    row = rows[0]
    assert row["segment_ids"].tolist() == [1] * 5 + [2] * 11
    assert row["positions"].tolist() == [*range(5), *range(11)]
    assert row["mask"].tolist() == [1, 1, 1, 1, 0, *[1] * 11]
    assert rows[1]["positions"].tolist() == list(range(T))  # the document goes on, from 0
    assert (rows[-1]["segment_ids"] == 0).sum() == len(rows) * T - 57
    assert rows[-1]["mask"][-1] == 0
    with pytest.raises(IndexError):
        source[len(source)]
    with pytest.raises(UsageError, match="no document of kind"):
        RowSource(arrays, "novel", T)


def test_a_batch_depends_on_its_step_alone(prepared):
    phases = [Phase(0, T, 8), Phase(50, 4 * T, 2)]
    stream = make_stream(prepared[0], phases, seed=3)
    far = stream.batch_at(10_000)
    resumed = make_stream(prepared[0], phases, seed=3)
    for step in (7, 0, 49, 50, 51):
        one, other = stream.batch_at(step), resumed.batch_at(step)
        assert all((one[k] == other[k]).all() for k in one)
    assert far["tokens"].shape == (2, 4 * T)
    batch = stream.batch_at(0)
    assert {k: v.shape for k, v in batch.items()} == dict.fromkeys(batch, (8, T))
    assert {k: v.dtype for k, v in batch.items()} == {
        **dict.fromkeys(("tokens", "targets", "segment_ids", "positions"), np.int32),
        "mask": np.float32,
    }
    assert (batch["tokens"][:, 1:] == batch["targets"][:, :-1]).all()
    other_seed = make_stream(prepared[0], phases, seed=4).batch_at(0)
    assert (batch["tokens"] != other_seed["tokens"]).any()


def test_kinds_are_mixed_by_weight(prepared):
    out, _, _ = prepared
    weights = {"sotu": 0.75, "t0": 0.25}
    stream = make_stream(out, [Phase(0, T, 8)], seed=0, weights=weights)
    kinds = make_source(out, T)
    sotu = {kinds["sotu"][i]["tokens"].tobytes() for i in range(len(kinds["sotu"]))}
    for step in range(3):
        rows = stream.batch_at(step)["tokens"]
        assert sum(row.tobytes() in sotu for row in rows) == 6


def test_every_row_is_seen_before_any_comes_twice(prepared):
    source = make_source(prepared[0], T)["sotu"]
    batches = data.mix_sources({"sotu": source}, {"sotu": 1.0}, seed=0)
    seen = [batches[i]["tokens"].tobytes() for i in range(2 * len(source))]
    first, second = seen[: len(source)], seen[len(source) :]
    assert sorted(first) == sorted(second) and first != second


def test_heldout_rows_cover_the_split(prepared):
    out, metas, _ = prepared
    predicted: dict[str, int] = {}
    for kind, row in heldout_rows(out, T):
        predicted[kind] = predicted.get(kind, 0) + int(row["mask"].sum())
    counts = metas["heldout"]["counts"]
    assert predicted == {k: c["tokens"] - c["documents"] for k, c in counts.items()}
    assert {kind for kind, _ in heldout_rows(out, T, most=1)} == set(counts)


def test_stream_errors(prepared):
    out, _, _ = prepared
    for phases in ([], [Phase(5, T, 1)], [Phase(0, T, 1), Phase(0, T, 2)]):
        with pytest.raises(UsageError, match="phases start at"):
            make_stream(out, phases, seed=0)
    with pytest.raises(UsageError, match="seq_len"):
        make_stream(out, [Phase(0, 0, 1)], seed=0)
    with pytest.raises(UsageError, match="nothing to draw"):
        make_stream(out, [Phase(0, T, 1)], seed=0, weights={"code": 1.0})
    with pytest.raises(UsageError, match="at least 0"):
        make_stream(out, [Phase(0, T, 1)], seed=0).batch_at(-1)
    with pytest.raises(UsageError, match="batch_size is 0, expected at least 1"):
        make_stream(out, [Phase(0, T, 0)], seed=0)
    with pytest.raises(UsageError, match="of a batch of 2 rows"):
        make_stream(out, [Phase(0, T, 2)], seed=0).batch_at(0, range(1, 3))

"""The rows of a distillation: the batch of a step, on any number of hosts, and what is refused."""

import threading

import numpy as np
import pytest

from dejax.errors import UsageError
from tests.train.document_cases import CHAT, GENERATION, TEXT, marked_tokenizer, write
from tests.train.small_model import VOCAB, tokenizer_of, write_documents
from train import data as token_arrays
from train.documents import check_data, open_data, read_ahead

SHAPE = {"vocab_size": VOCAB, "seq_len": 16, "batch_size": 8}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_documents(tmp_path_factory.mktemp("documents") / "d.jsonl")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """A folder as `python -m train.data` writes it."""
    folder = tmp_path_factory.mktemp("tokens")
    texts = [[f"document {i} {'the draft path ' * (i % 7 + 1)}"] for i in range(60)]
    lines = [{"prompt": f"Say {i}", "completion": text} for i, (text,) in enumerate(texts)]
    source = write(folder / "t0.jsonl", lines)
    token_arrays.prepare([source], folder / "out", vocab_size=270)
    return folder / "out"


@pytest.fixture(params=["documents", "tokens"])
def name(request):
    return str(request.getfixturevalue("path" if request.param == "documents" else "tokens"))


def opened(name, **changed):
    options = SHAPE | {"seed": 3} | changed
    return open_data(str(name), tokenizer_of(), **(options | {"vocab_size": 300}))


def equal(one, other):
    assert one.keys() == other.keys()
    for key in one:
        assert one[key].dtype == other[key].dtype
        np.testing.assert_array_equal(one[key], other[key])


def test_a_batch_is_a_function_of_data_seed_and_step(name):
    data, again = opened(name), opened(name)
    batch = data.batch_at(11)
    assert {key: value.shape for key, value in batch.items()} == dict.fromkeys(batch, (8, 16))
    dtypes = {key: value.dtype for key, value in batch.items()}
    assert dtypes.pop("mask") == np.float32 and set(dtypes.values()) == {np.dtype(np.int32)}
    assert set(dtypes) == {"tokens", "targets", "segment_ids", "positions"}
    for step in (11, 0, 3, 1000):  # in any order, whatever was asked for before
        equal(again.batch_at(step), data.batch_at(step))
    assert (opened(name, seed=4).batch_at(11)["tokens"] != batch["tokens"]).any()


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_the_hosts_rows_joined_are_the_batch(name, hosts):
    data, each = opened(name), 8 // hosts
    for step in (0, 5, 77):
        parts = [
            opened(name).batch_at(step, range(host * each, (host + 1) * each))
            for host in range(hosts)
        ]
        equal(
            {key: np.concatenate([p[key] for p in parts]) for key in parts[0]}, data.batch_at(step)
        )


def test_rows_outside_of_the_batch_are_refused(name):
    for rows in (range(4, 9), range(-1, 2), range(3, 3)):
        with pytest.raises(UsageError, match="of a batch of 8 rows"):
            opened(name).batch_at(0, rows)


def test_each_pass_is_all_rows_in_a_new_order(tmp_path):
    ids = np.random.default_rng(0).integers(0, VOCAB, (40, 30)).tolist()
    rows = [{"prompt_tokens": each[:9], "tokens": each[9:]} for each in ids]
    data = opened(write(tmp_path / "d.jsonl", rows), batch_size=1)
    seen = [data.batch_at(step)["tokens"].tobytes() for step in range(3 * 72)]
    passes = [seen[start : start + 72] for start in (0, 72, 144)]
    assert len(set(seen)) == 72 == -(-(38 * 30 - 1) // 16)  # two documents are held out
    assert all(set(one) == set(seen) for one in passes)
    assert passes[0] != passes[1] != passes[2] != passes[0]


def test_what_is_held_out_is_not_trained_on(path):
    data = opened(path, batch_size=1)
    held = np.concatenate([batch["tokens"] for batch in data.held_out])
    text = tokenizer_of().decode(held.ravel())
    assert "document 15:" in text and "document 31:" in text and "document 14:" not in text
    trained = tokenizer_of().decode(
        np.concatenate([data.batch_at(step)["tokens"] for step in range(200)]).ravel()
    )
    assert "document 15:" not in trained and "document 14:" in trained


def test_the_fingerprint_is_of_content_order_length_and_seed(tmp_path, path, tokens):
    prints = [
        opened(path).fingerprint,
        opened(path, seed=4).fingerprint,
        opened(path, seq_len=8).fingerprint,
        opened(tokens).fingerprint,
        opened(tokens, seed=4).fingerprint,
        opened(write_documents(tmp_path / "more.jsonl", count=41)).fingerprint,
    ]
    assert len(set(prints)) == len(prints)
    copy = tmp_path / "elsewhere.jsonl"
    copy.write_bytes(path.read_bytes())
    assert opened(copy).fingerprint == prints[0]
    # Where the hosts share a batch out does not matter, nor how large it is.
    assert opened(path, batch_size=4).fingerprint == prints[0]


def test_little_text_leaves_nothing_to_hold_out(tmp_path):
    data = opened(write(tmp_path / "d.jsonl", [TEXT]))
    assert data.held_out == ()
    batch = data.batch_at(0)
    assert batch["mask"].sum() == 8 * batch["mask"][0].sum() > 0


# --- which tokens count ----------------------------------------------------------------------


def test_what_the_assistant_says_is_the_mask(tmp_path):
    path = str(write(tmp_path / "d.jsonl", [CHAT, TEXT] * 20))
    data = open_data(path, marked_tokenizer(), loss_on="assistant", **SHAPE)
    batch = data.batch_at(0)
    counted = batch["targets"][batch["mask"] > 0].tolist()
    assert set(counted) == set(tokenizer_of().encode("So.<|im_end|>", add_special_tokens=False))
    everything = open_data(path, marked_tokenizer(), **SHAPE).batch_at(0)
    np.testing.assert_array_equal(everything["tokens"], batch["tokens"])
    assert everything["mask"].sum() > 2 * batch["mask"].sum()


@pytest.mark.parametrize(
    ("documents", "template", "message"),
    [
        ([TEXT] * 3, None, "none of its 18 tokens counts: .*; set loss_on=all, or give chats"),
        (
            [CHAT],
            "{% if 0 %}{% generation %}{% endgeneration %}{% endif %}a",
            "none of its 1 tokens",
        ),
        (
            [CHAT],
            "{% generation %}a b{% endgeneration %}",
            "every one of its 3 tokens counts: .*all",
        ),
    ],
)
def test_a_mask_that_tells_nothing_apart_is_refused(tmp_path, documents, template, message):
    path = str(write(tmp_path / "d.jsonl", documents))
    tokenizer = marked_tokenizer() if template is None else marked_tokenizer(template)
    with pytest.raises(UsageError, match=message):
        open_data(path, tokenizer, loss_on="assistant", **SHAPE)


def test_token_arrays_have_no_turns(tokens):
    with pytest.raises(UsageError, match="token arrays have no turns; set loss_on=all"):
        opened(tokens, loss_on="assistant")


# --- what does not fit -----------------------------------------------------------------------


def test_tokens_beyond_the_vocabulary_are_refused(tmp_path, path, tokens):
    for name in (path, tokens):
        with pytest.raises(UsageError, match="has token .* the target's vocabulary has 64 tokens"):
            open_data(str(name), tokenizer_of(), **(SHAPE | {"vocab_size": 64}))
    name = write(tmp_path / "g.json", [GENERATION | {"tokens": [VOCAB]}])
    with pytest.raises(UsageError, match=f"has token {VOCAB}, and .* has {VOCAB} tokens"):
        open_data(str(name), None, **SHAPE)
    open_data(str(name), None, **(SHAPE | {"vocab_size": VOCAB + 1}))


def test_data_is_looked_for_before_anything_is_loaded(tmp_path, path, tokens):
    for name in (path, tokens, path.parent, "demo", "hub:any/thing"):
        check_data(str(name))
    with pytest.raises(UsageError, match="does not exist; expected documents"):
        check_data(str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match="holds no .jsonl"):
        check_data(str(tmp_path))


# --- reading ahead ---------------------------------------------------------------------------


def test_reading_ahead_keeps_order_and_is_bounded():
    made, here = [], threading.get_ident()

    def get(step):
        assert threading.get_ident() != here
        made.append(step)
        return step * step

    ahead = read_ahead(get, range(3, 20), ahead=2)
    assert next(ahead) == 9
    assert set(made) <= {3, 4, 5}
    assert list(ahead) == [n * n for n in range(4, 20)]
    assert made == list(range(3, 20))


def test_an_error_surfaces_at_its_step_and_the_thread_ends():
    def get(step):
        if step == 2:
            raise UsageError("no such row")
        return step

    seen = []
    with pytest.raises(UsageError, match="no such row"):
        for value in read_ahead(get, range(9)):
            seen.append(value)
    assert seen == [0, 1]
    left = read_ahead(lambda step: step, range(10**9))
    assert next(left) == 0
    left.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("data")]

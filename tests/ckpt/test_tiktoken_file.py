"""Tiktoken files: the ids that tiktoken gives, refusals in one line, and no code that is run."""

import base64
import random

import pytest

from dejax.ckpt.tiktoken_file import TIKTOKEN_FILE, merges_of
from dejax.errors import UsageError
from dejax.target import load_tokenizer
from tests.ckpt.tiktoken_cases import SPECIAL, add_tiktoken, encode, ranks, size
from tests.infer.gguf_cases import documents, prompts

LETTERS = [
    *(" ", "\n", "\r\n", "\t", "'s", "'LL", "'ve", "a", "B", "cc", "Ab", "é", "e\u0301", "ß"),
    *("\u01c4", "\u01c5", "\u02b0", "1", "23", "½", "\u2167", "\u0663", "你", "好", "\u3005"),
    *("\u3007", "ー", "の", "한", "!", "/", "_", "—", "😀", "\u200b", "\x85", "\u3000", "-"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return add_tiktoken(tmp_path_factory.mktemp("tiktoken"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


def test_ids_are_those_of_tiktoken(tokenizer):
    rng = random.Random(0)
    odd = ["".join(rng.choices(LETTERS, k=rng.randint(1, 20))) for _ in range(1000)]
    texts = [*odd, *prompts(), *documents(100), "getUserName iPhone HTTPServer's", "a" * 1000]
    for text in texts:
        assert tokenizer.encode(text) == encode(text), text
        assert tokenizer.decode(encode(text)) == text


def test_special_tokens_and_template_are_of_the_configuration(tokenizer, folder):
    first = len(ranks())
    assert len(tokenizer) == size()
    for place, name in (SPECIAL | {7: f"<|reserved_token_{first + 7}|>"}).items():
        assert tokenizer.encode(f"Hi{name}there") == [
            *encode("Hi"),
            first + place,
            *encode("there"),
        ]
    assert tokenizer.bos_token_id == first and tokenizer.eos_token_id == first + 1
    assert tokenizer.pad_token_id == first + 255 and tokenizer.unk_token_id == first + 254
    text = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    assert text == "<|im_user|>user<|im_middle|>x<|im_end|>"
    assert not (folder / "was-run").exists()


def test_a_template_in_a_file_of_its_own_comes_first(tmp_path):
    add_tiktoken(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!")
    turns = [{"role": "user", "content": "x"}]
    assert load_tokenizer(tmp_path).apply_chat_template(turns, tokenize=False) == "x!"


def test_ranks_that_lower_ones_do_not_arrive_at_are_merged_all_the_same():
    known = {b"a": 0, b"b": 1, b"abb": 2, b"bb": 3}
    assert list(merges_of(known)) == [(b"a", b"bb"), (b"b", b"b")]
    known = {b"a": 0, b"b": 1, b"ab": 2, b"ba": 3, b"aba": 4}
    assert list(merges_of(known)) == [(b"a", b"b"), (b"b", b"a"), (b"ab", b"a")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"!!! 256", "line 1: b'!!! 256'; expected a token in base64 and its rank"),
        (b"YWI=", "line 1: b'YWI='; expected a token in base64 and its rank"),
        (b"YWI= x", "expected a token in base64 and its rank"),
        (b"YQ== 256", "line 99: the token b'a' is empty or there twice"),
        (b"YWI= 300", "the ranks of 257 tokens are not 0 to 256"),
        (None, "1 of 256 bytes have no token"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(line, message, tmp_path):
    add_tiktoken(tmp_path)
    count = 256 if line else 255
    lines = [base64.b64encode(bytes([byte])) + b" %d" % byte for byte in range(count)]
    (tmp_path / TIKTOKEN_FILE).write_bytes(b"\n".join([*([line] if line else []), *lines]))
    with pytest.raises(UsageError) as refused:
        load_tokenizer(tmp_path)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def added(name, *, id=None):
    """A configuration that names one id behind the file's, by default the first."""
    first = len(ranks()) if id is None else id
    return dict(added_tokens_decoder={str(first): {"content": name.format(first + 1)}})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(tokenizer_class="QWenTokenizer"), "how a QWenTokenizer splits text is in code"),
        (dict(added_tokens_decoder=[1]), "added_tokens_decoder is no table of id -> token"),
        (dict(added_tokens_decoder={"7": {"content": "x"}}), "added_tokens_decoder has id 7"),
        (added("x", id=10**11), "added_tokens_decoder has id 100000000000; expected ids below"),
        (added("a"), "'a', of id [0-9]+, is empty or the name of another token"),
        (added(""), "'', of id [0-9]+, is empty or the name of another token"),
        (added("<|reserved_token_{}|>"), "is empty or the name of another token"),
    ],
)
def test_another_kind_of_tokenizer_is_refused(changes, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        load_tokenizer(add_tiktoken(tmp_path, **changes))


def test_no_tokenizers_code_is_run_or_asked_about(tmp_path, monkeypatch):
    add_tiktoken(tmp_path)
    (tmp_path / TIKTOKEN_FILE).unlink()
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question was asked"))
    with pytest.raises(UsageError, match="custom code") as refused:
        load_tokenizer(tmp_path)
    assert "\n" not in str(refused.value) and not (tmp_path / "was-run").exists()


def test_without_a_configuration_the_file_alone_is_refused(tmp_path):
    add_tiktoken(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(UsageError, match=r"tokenizer_config.json: no such file"):
        load_tokenizer(tmp_path)

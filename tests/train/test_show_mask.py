"""`dejax distill --show-mask`: tokens and what counts, on a terminal and in a pipe."""

import io
import json

import pytest

from dejax.errors import UsageError
from tests.train.document_cases import CHAT, GENERATION, TEXT, marked_tokenizer, write
from tests.train.small_model import VOCAB, write_model
from train import distill as program
from train.show_mask import show_mask


def show(path, most=9, json=None, tokenizer=None):
    tokenizer = marked_tokenizer() if tokenizer is None else tokenizer
    show_mask(str(path), tokenizer, most=most, loss_on="assistant", text_column="text", json=json)


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "d.jsonl", [CHAT, GENERATION, TEXT])


def test_a_pipe_gets_a_line_a_token(path, tmp_path, capsys):
    show(path, most=2, json=tmp_path / "shown.json")
    head, *lines = capsys.readouterr().out.splitlines()
    tokenizer = marked_tokenizer()
    ids = tokenizer.encode("So.<|im_end|>", add_special_tokens=False)
    assert head == f"document 1: {len(ids)} of {lines.index('')} tokens count"
    marked = [line.split(maxsplit=2) for line in lines[: lines.index("")]]
    assert [int(token) for mark, token, _ in marked if mark == "+"] == ids
    assert marked[0][0] == "-" and marked[0][2] == "'<|im_start|>'"
    assert "document 2: 2 of 4 tokens count" in lines
    assert lines[-1].startswith("in all: 3 documents, ") and "document 3" not in "".join(lines)
    first, second = json.loads((tmp_path / "shown.json").read_text())["documents"]
    assert second["tokens"] == [5, 6, 7, 8] and second["counts"] == [False, False, True, True]
    assert "".join(first["texts"]).endswith("So.<|im_end|>\n")


def test_a_terminal_gets_the_text_in_colours(path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stdout", terminal)
    show(path, most=1)
    text = terminal.getvalue()
    assert "\x1b[" in text and "\u23ce" in text
    # Black on green, and nothing but what counts.
    green = [piece.split("m", 1) for piece in text.split("\x1b[")[1:]]
    said = "".join(piece for style, piece in green if style in ("30;42", "30;102"))
    assert said == "So.<|im_end|>"


def test_a_mask_of_nothing_is_shown(tmp_path, capsys):
    show(write(tmp_path / "d.jsonl", [TEXT]))
    assert "document 1: 0 of 6 tokens count" in capsys.readouterr().out


def test_the_first_token_of_a_document_is_no_target(tmp_path, capsys):
    show(write(tmp_path / "d.jsonl", [GENERATION | {"prompt_tokens": []}]))
    assert "document 1: 1 of 2 tokens count" in capsys.readouterr().out


def test_tokens_beyond_the_vocabulary_are_refused(tmp_path, capsys):
    path = write(tmp_path / "d.jsonl", [GENERATION | {"tokens": [7, 999999]}])
    options = dict(most=1, loss_on="all", text_column="text", json=None)
    told = "has token 999999, and the target's vocabulary has {} tokens"
    for size in (VOCAB, 1024):
        sizes = {} if size == VOCAB else {"vocab_size": size}
        with pytest.raises(UsageError, match=told.format(size)):
            show_mask(str(path), marked_tokenizer(), **options, **sizes)
    show_mask(str(path), None, **options, vocab_size=10**6)  # as far as it reaches
    assert "document 1: 3 of 4 tokens count" in capsys.readouterr().out


def test_token_arrays_have_nothing_to_show(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "meta.json").touch()
    with pytest.raises(UsageError, match="holds token arrays, of which every token counts"):
        show(tmp_path)


def test_the_program_shows_without_weights_and_stops(tmp_path, path, capsys):
    model = write_model(tmp_path / "model")
    (model / "model.safetensors").unlink()
    argv = ["distill_tiny", "--set", f"target={model}", f"data={path}", "--show-mask", "1"]
    assert program.main([*argv, "--out", str(tmp_path / "out")]) == 0
    assert "document 1: 26 of 27 tokens count" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()
    with pytest.raises(UsageError, match="line 1: loss_on is assistant, and .* does not mark"):
        program.main([argv[0], "--set", "loss_on=assistant", *argv[2:]])

"""Documents from files, folders, patterns and the hub: what is read, and what is refused."""

import gzip
import json
import os

import datasets
import pytest
from datasets.exceptions import DatasetNotFoundError
from pyarrow import parquet

from dejax.errors import FailedError, UsageError
from tests.train.document_cases import CHAT, GENERATION, PAIR, TEXT, TURNS, filled, write
from train.document_files import as_document, find_files, open_source


def read(name, **options):
    return list(open_source(str(name), **options).documents())


def contents(documents):
    return [(d.text, d.messages, d.token_ids) for d in documents]


@pytest.mark.parametrize("name", ["d.jsonl", "d.jsonl.gz", "d.json", "d.parquet", "no-suffix"])
def test_every_format_gives_the_same_documents(tmp_path, name):
    found = read(write(tmp_path / name, [CHAT, TEXT, PAIR, GENERATION]))
    assert contents(found) == [
        (None, tuple(TURNS), None),
        ("plain", None, None),
        (None, tuple(TURNS), None),
        (None, None, ([5, 6], [7, 8])),
    ]


def test_a_list_and_one_line_of_generations_are_read_too(tmp_path):
    expected = [(None, None, ([5, 6], [7, 8]))] * 2
    for value in ([GENERATION] * 2, {"generations": [GENERATION] * 2}):
        for indent in (None, 1):
            (tmp_path / "g").write_text(json.dumps(value, indent=indent))
            assert contents(read(tmp_path / "g")) == expected


def test_other_separators_do_not_end_a_line(tmp_path):
    (tmp_path / "d").write_bytes(b'\xef\xbb\xbf{"text": "a\xe2\x80\xa8b"}\r\n\n  {"text": "c"}\r\n')
    assert [d.text for d in read(tmp_path / "d")] == ["a\u2028b", "c"]


def test_prompt_and_completion_may_be_turns():
    document = as_document({"prompt": TURNS[:1], "completion": TURNS[1:], "extra": 1}, "x")
    assert document.messages == tuple(TURNS)


def test_turns_keep_what_the_template_may_read_and_lose_what_is_null(tmp_path):
    turns = [TURNS[0] | {"name": "Ann"}, TURNS[1]]
    (document,) = read(write(tmp_path / "d.parquet", [{"messages": turns}]))
    assert document.messages == tuple(turns)


def test_a_folder_and_a_pattern_are_their_files_in_order(tmp_path):
    (tmp_path / "b").mkdir()
    write(tmp_path / "b" / "1.parquet", [{"text": "three"}])
    write(tmp_path / "a.jsonl", [{"text": "one"}])
    write(tmp_path / "b" / "0.jsonl.gz", [{"text": "two"}])
    (tmp_path / "notes.txt").write_text("no document")
    (tmp_path / ".hidden.jsonl").write_text("no document")
    assert [d.text for d in read(tmp_path)] == ["one", "two", "three"]
    assert [d.text for d in read(f"{tmp_path}/b/*.jsonl*")] == ["two"]
    assert [d.text for d in read(f"{tmp_path}/**/*.jsonl")] == ["one"]


def test_a_file_whose_name_looks_like_a_pattern_is_a_file(tmp_path):
    assert read(write(tmp_path / "d[1].jsonl", [TEXT]))[0].text == "plain"


def test_the_key_changes_with_the_file(tmp_path):
    path = write(tmp_path / "d.jsonl", [TEXT])
    key = open_source(str(path)).key
    assert open_source(str(path)).key == key
    assert open_source(str(path), text_column="kind").key != key
    write(path, [TEXT, TEXT])
    longer = open_source(str(path)).key
    os.utime(path, ns=(0, 0))
    assert len({key, longer, open_source(str(path)).key}) == 3


def test_another_column_of_text(tmp_path):
    path = write(tmp_path / "d.parquet", [{"content": "here", "text": "not this"}])
    assert [d.text for d in read(path, text_column="content")] == ["here"]
    with pytest.raises(UsageError, match="has the columns content, text; expected 'body', which"):
        read(path, text_column="body")


def test_the_documents_that_come_with_dejax_are_documents():
    assert sum(d.messages is not None for d in read("demo")) > 1000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "d.jsonl: holds no documents; expected at least one"),
        (b"[]", "no documents"),
        (b"{\n", "line 1 is not JSON"),
        (b'[{"text": "a"},\n{"text"', "line 1 is not JSON"),
        (b'{"text": "a"}\n{"text": ', "line 2 is not JSON"),
        (b"\xff\xfe", r"line 1 is not UTF-8 \(byte 0xff\); convert the file to UTF-8"),
        (b'{"text": "a"}\n\n{"text": "caf\xe9"}\n', r"line 3 is not UTF-8 \(byte 0xe9\); convert"),
        (b'[\n{"text": "a"},\n{"text": "caf\xe9"}]', r"line 3 is not UTF-8 \(byte 0xe9\); convert"),
        (b'{"text": "a"}\n\n3', "line 3 is no document; expected an object with text; messages"),
        (b'{"tex": 1, "b": 2}', "line 1 is no document: has the columns tex, b; expected text;"),
        (b'{"text": null}', r"line 1 is no document: has the columns \(none\)"),
        (b'{"text": 1}', "line 1 is no document: text is 1; expected a string"),
        (b'{"text": "\\ud800"}', "line 1: text holds half a surrogate pair"),
        (b'{"prompt": "a"}', "has the columns prompt; expected text;"),
        (b'{"prompt": "a", "completion": 3}', "completion is 3; expected a string"),
        (b'{"messages": []}', r"messages is \[\]; expected a list of turns"),
        (b'{"messages": ["a"]}', "a turn of messages is 'a'; expected role and content"),
        (b'{"messages": [{"role": "user"}]}', "content of a turn of messages is None"),
        (b'{"prompt_tokens": [1], "tokens": [-1]}', r"tokens is \[-1\]; expected a list of token"),
        (b'{"generations": [{"tokens": [1]}]}', "document 1 is no document: has the columns token"),
    ],
)
def test_what_is_no_document_is_told_with_its_place(tmp_path, content, message):
    (tmp_path / "d.jsonl").write_bytes(content)
    with pytest.raises(UsageError, match=message) as raised:
        read(tmp_path / "d.jsonl")
    assert str(raised.value).startswith(str(tmp_path)) and "\n" not in str(raised.value)


def test_parquet_without_the_columns_is_told_its_own(tmp_path):
    path = write(tmp_path / "d.parquet", [{"body": "a", "id": 1}])
    with pytest.raises(UsageError, match="d.parquet: has the columns body, id; expected text;"):
        read(path)
    path = write(tmp_path / "e.parquet", [{"text": "a"}, {"text": None}])
    with pytest.raises(UsageError, match="row 2 is no document"):
        read(path)


def test_parquet_without_rows_is_told_to_have_none(tmp_path):
    table = parquet.read_table(write(tmp_path / "d.parquet", [TEXT]))
    parquet.write_table(table.slice(0, 0), tmp_path / "d.parquet")
    with pytest.raises(UsageError) as raised:
        read(tmp_path / "d.parquet")
    assert str(raised.value).endswith("d.parquet: holds no documents; expected at least one")


def test_what_is_not_there_or_damaged(tmp_path):
    with pytest.raises(UsageError, match="nowhere.jsonl does not exist; expected documents"):
        find_files(str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(UsageError, match="no file has such a name"):
        find_files(f"{tmp_path}/*.jsonl")
    with pytest.raises(UsageError, match="holds no .jsonl, .jsonl.gz"):
        find_files(str(tmp_path))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="is a pipe or a device; expected a file"):
        find_files(str(tmp_path / "pipe"))
    whole = write(tmp_path / "d.jsonl.gz", [TEXT]).read_bytes()
    for damaged in (whole[:-4], whole[:14] + b"\xff\xff" + whole[16:]):
        (tmp_path / "d.jsonl.gz").write_bytes(damaged)
        with pytest.raises(UsageError, match="d.jsonl.gz cannot be read"):
            read(tmp_path / "d.jsonl.gz")
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(b"\xff"))
    with pytest.raises(UsageError, match="d.jsonl.gz: line 1 is not UTF-8"):
        read(tmp_path / "d.jsonl.gz")
    whole = write(tmp_path / "d.parquet", [TEXT]).read_bytes()
    (tmp_path / "d.parquet").write_bytes(whole[:-20])
    with pytest.raises(UsageError, match="d.parquet cannot be read as Parquet"):
        read(tmp_path / "d.parquet")


# --- the hub ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("hub:a/b", ("a/b", None, "train")),
        ("hub:a/b:test", ("a/b", None, "test")),
        ("hub:a/b:small:test", ("a/b", "small", "test")),
    ],
)
def test_the_hub_is_asked_through_datasets(monkeypatch, tmp_path, name, asked):
    calls = []

    def load_dataset(path, config, *, split, cache_dir):
        calls.append((path, config, split))
        assert cache_dir == str(tmp_path)
        return datasets.Dataset.from_list(filled([CHAT, TEXT]))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    found = read(name, cache_dir=tmp_path)
    assert calls == [asked]
    assert contents(found) == [(None, tuple(TURNS), None), ("plain", None, None)]
    assert found[0].where == f"{name}: row 1"


@pytest.mark.parametrize(
    ("failure", "kind", "message"),
    [
        (
            ConnectionError("no network\nmore"),
            FailedError,
            "cannot be fetched .ConnectionError",
        ),
        (DatasetNotFoundError("unknown"), UsageError, "cannot be fetched .DatasetNotFoundError"),
        (ValueError('Unknown split "x"'), UsageError, "check the name, the split and the network"),
    ],
)
def test_what_cannot_be_fetched_is_one_line(monkeypatch, failure, kind, message):
    def load_dataset(*_, **__):
        raise failure

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(kind, match=message) as raised:
        open_source("hub:a/b")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["hub:", "hub:a:", "hub:a:b:c:d"])
def test_what_is_no_name_of_the_hub(name):
    with pytest.raises(UsageError, match="expected hub:NAME, hub:NAME:SPLIT or hub:NAME:CONFIG"):
        open_source(name)


def test_an_empty_split_of_the_hub_is_told(monkeypatch):
    rows = datasets.Dataset.from_list([TEXT]).select([])
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
    with pytest.raises(UsageError, match="^hub:a: holds no documents; expected at least one$"):
        read("hub:a")


def test_the_hubs_columns_are_told(monkeypatch):
    rows = datasets.Dataset.from_list([{"body": "a"}])
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
    with pytest.raises(UsageError, match="hub:a: has the columns body; expected text;"):
        open_source("hub:a")

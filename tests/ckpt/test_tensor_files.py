"""Safetensors by byte ranges: what the library writes is read, what is damaged is refused."""

import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dejax.ckpt.tensor_files import (
    TensorEntry,
    copy_tensors,
    equal_tensors,
    list_tensors,
    read_json,
    read_tensor,
    write_whole,
)
from dejax.errors import FailedError, UsageError

RNG = np.random.default_rng(0)
TENSORS = {
    "b": RNG.standard_normal((3, 5)).astype(ml_dtypes.bfloat16),
    "a": RNG.standard_normal((2, 3, 4), np.float32),
    "scalar": np.array(3.0, np.float32),
    "empty": np.zeros((0, 4), np.float16),
    "wide": RNG.standard_normal(7),
}


@pytest.fixture
def folder(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


@pytest.fixture
def entries(folder):
    return list_tensors(folder)[0]


def write(path, header, data=b""):
    """A safetensors file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def entry_of(shape=(2,), offsets=(0, 8), dtype="F32"):
    return {"x": {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}}


def test_every_tensor_is_read(folder, entries):
    assert list_tensors(folder)[1] == [] and entries.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        read = read_tensor(entries[name])
        assert read.dtype == tensor.dtype and entries[name].nbytes == tensor.nbytes
        np.testing.assert_array_equal(read, tensor)
    np.testing.assert_array_equal(read_tensor(entries["a"].row(1)), TENSORS["a"][1])


def test_a_copy_is_what_the_library_reads(folder, entries, tmp_path):
    seen = []
    path = tmp_path / "copy.safetensors"
    copy_tensors(path, entries, seen.append)
    copied = load_file(path)
    assert copied.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert copied[name].dtype == tensor.dtype and copied[name].tobytes() == tensor.tobytes()
    assert sum(seen) == sum(tensor.nbytes for tensor in TENSORS.values())
    # Laid out as the library does it, so that the same tensors are the same file.
    assert path.read_bytes() == (folder / "model.safetensors").read_bytes()


def test_a_failed_write_leaves_what_was_there(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(RuntimeError), write_whole(path) as unfinished:
        unfinished.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    with write_whole(path) as unfinished:
        unfinished.write_text("new")
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_equality_is_of_values(folder, monkeypatch, tmp_path):
    monkeypatch.setattr("dejax.ckpt.tensor_files._CHUNK", 4)
    base = np.arange(10, dtype=np.float32)
    other = base.copy()
    other[-1] += 1
    save_file(
        {
            "base": base,
            "same": base.copy(),
            "short": base.astype(ml_dtypes.bfloat16),
            "other": other,
            "shape": base.reshape(2, 5),
        },
        tmp_path / "model.safetensors",
    )
    entries, _ = list_tensors(tmp_path)
    equal = {name: equal_tensors(entries["base"], entry) for name, entry in entries.items()}
    assert equal == {"base": True, "same": True, "short": True, "other": False, "shape": False}


@pytest.mark.parametrize("cut", [0, 5, 8, 100, -1])
def test_a_file_cut_short(folder, cut):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(UsageError, match="model.safetensors: .*(cut short|not a readable)"):
        list_tensors(folder)


def test_a_file_appended_to(folder):
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"more")
    with pytest.raises(UsageError, match="cut short, or appended to"):
        list_tensors(folder)


@pytest.mark.parametrize(
    "header, message",
    [
        (b"\xff\xfe", "not a readable safetensors file"),
        (b"[]", "not a safetensors file"),
        ({"x": 3}, "the header entry of x is malformed"),
        ({"x": {"dtype": "F32", "shape": [2]}}, "the header entry of x is malformed"),
        (entry_of(shape=(-2,)), "the header entry of x is malformed"),
        (entry_of(shape=("2",)), "the header entry of x is malformed"),
        (entry_of(shape=(True, 2)), "the header entry of x is malformed"),
        (entry_of(offsets=(-8, 0)), "the header entry of x is malformed"),
        (entry_of(dtype=["F32"]), "the header entry of x is malformed"),
        (entry_of(shape=(3,)), "x has 8 bytes, not those of F32"),
        (entry_of(shape=(2**40, 2**40)), "x has 8 bytes, not those of F32"),
        (entry_of(offsets=(4, 12)), "x starts at 4 of the data, expected 0"),
        (entry_of() | {"y": entry_of()["x"]}, "y starts at 0 of the data, expected 8"),
    ],
)
def test_a_malformed_header(tmp_path, header, message):
    write(tmp_path / "model.safetensors", header, b"\0" * 8)
    with pytest.raises(UsageError, match=message):
        list_tensors(tmp_path)


def test_dtypes_that_are_no_weights_are_listed(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"x": np.zeros(3), "n": np.zeros(3, np.int64)}, file)
    assert list_tensors(tmp_path)[1] == ["n: dtype I64, expected BF16, F16, F32, F64"]


# Shards.


@pytest.fixture
def shards(tmp_path):
    save_file({"a": np.zeros(2), "b": np.zeros(3)}, tmp_path / "one.safetensors")
    save_file({"c": np.zeros(4)}, tmp_path / "two.safetensors")
    return set_index(tmp_path, a="one.safetensors", b="one.safetensors", c="two.safetensors")


def set_index(folder, **weight_map):
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)
    return folder


def test_shards(shards):
    entries, problems = list_tensors(shards)
    assert problems == [] and entries.keys() == {"a", "b", "c"}
    assert entries["c"].file == shards / "two.safetensors"


def test_missing_shards_are_named(shards):
    """Neph0s/CoSER 3: an index that lists shards which do not exist."""
    set_index(shards, a="one.safetensors", b="one.safetensors", c="three.safetensors", d="4")
    with pytest.raises(UsageError, match="shards listed but missing: 4, three.safetensors"):
        list_tensors(shards)


def test_shards_that_contradict_the_index(shards):
    save_file({"a": np.zeros(2), "c": np.zeros(4), "e": np.zeros(1)}, shards / "two.safetensors")
    set_index(
        shards, a="one.safetensors", b="two.safetensors", c="two.safetensors", d="one.safetensors"
    )
    assert sorted(list_tensors(shards)[1]) == [
        "a: in both one.safetensors and two.safetensors",
        "b: in one.safetensors, but the index lists it in two.safetensors",
        "d: in the index, but in no shard",
        "e: in two.safetensors, but the index lists it in nowhere",
    ]


@pytest.mark.parametrize("content", ["{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}'])
def test_a_malformed_index(shards, content):
    (shards / "model.safetensors.index.json").write_text(content)
    with pytest.raises(UsageError, match="expected an object weight_map"):
        list_tensors(shards)


@pytest.mark.parametrize("name", ["", "../one.safetensors", "/one.safetensors"])
def test_shards_lie_in_the_folder(shards, name):
    set_index(shards, a=name)
    with pytest.raises(UsageError, match="expected an object weight_map"):
        list_tensors(shards)


def test_a_single_file_beside_an_index_that_ignores_it(shards):
    save_file({"a": np.zeros(2)}, shards / "model.safetensors")
    with pytest.raises(UsageError, match="remove the stale one"):
        list_tensors(shards)
    set_index(shards, a="model.safetensors")
    assert list_tensors(shards)[0].keys() == {"a"}


def test_no_weights(tmp_path):
    with pytest.raises(UsageError, match="no weights; expected model.safetensors or") as caught:
        list_tensors(tmp_path)
    assert "pickled" not in str(caught.value)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth"])
def test_nothing_is_unpickled(tmp_path, name):
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'touch owned'\ntR.")
    with pytest.raises(UsageError, match=f"safetensors are needed; {name} is not read"):
        list_tensors(tmp_path)


# Single tensors and JSON.


def test_a_file_that_changes_while_it_is_read(folder, entries):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(FailedError, match="has become shorter"):
        read_tensor(entries["wide"])
    file.unlink()
    with pytest.raises(FailedError, match="cannot be read"):
        read_tensor(entries["wide"])


def test_json_objects(tmp_path):
    file = tmp_path / "config.json"
    with pytest.raises(UsageError, match="no such file"):
        read_json(file)
    file.write_text('{"a": 1}')
    assert read_json(file) == {"a": 1}
    for content in (b"{nope", b"\xff", b"[" * 100_000, b""):
        file.write_bytes(content)
        with pytest.raises(UsageError, match="config.json: not readable as JSON"):
            read_json(file)
    file.write_text("[1]")
    with pytest.raises(UsageError, match="expected a JSON object, found list"):
        read_json(file)
    with pytest.raises(UsageError, match="not readable as JSON"):
        read_json(tmp_path)


def test_entries_know_their_size():
    entry = TensorEntry(Path("any"), 10, (3, 4, 5), np.dtype(np.float16))
    assert (entry.size, entry.nbytes) == (60, 120)
    row = entry.row(2)
    assert (row.start, row.shape) == (10 + 2 * 40, (4, 5))

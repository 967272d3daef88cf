"""The expert store: what is written is read back, and nothing half-written looks whole."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from dejax.ckpt.expert_codec import PLAIN
from dejax.ckpt.expert_store import ExpertReadError, ExpertStore, ExpertStoreWriter
from dejax.errors import FailedError, UsageError

LAYERS, EXPERTS, SHAPE = (1, 2, 5), 4, (3, 8, 16)
PLAN = {
    "layers": LAYERS,
    "num_experts": EXPERTS,
    "shape": SHAPE,
    "dtype": "bfloat16",
    "identity": "deepseek-tiny 0123abcd",
}
PAIRS = [(layer, expert) for layer in LAYERS for expert in range(EXPERTS)]


def record(layer, expert, dtype="bfloat16"):
    """Another array for every pair."""
    values = np.random.default_rng([layer, expert]).standard_normal(SHAPE)
    return values.astype(PLAIN[dtype])


def write_all(writer):
    for layer, expert in PAIRS:
        writer.write(layer, expert, record(layer, expert))
    return writer.finish()


def assert_whole(store):
    assert store.pairs == tuple(PAIRS)
    for layer, expert in PAIRS:
        np.testing.assert_array_equal(store.read(layer, expert), record(layer, expert))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "experts"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    path = tmp_path_factory.mktemp("finished") / "experts"
    write_all(ExpertStoreWriter(path, **PLAN))
    return path


@pytest.fixture
def store(folder, finished):
    """A whole store in `folder`, which the test may damage."""
    shutil.copytree(finished, folder)
    return ExpertStore.open(folder)


@pytest.mark.parametrize("dtype", sorted(PLAIN))
@pytest.mark.parametrize("in_memory", [False, True])
def test_round_trip(folder, dtype, in_memory):
    writer = ExpertStoreWriter(None if in_memory else folder, **(PLAN | {"dtype": dtype}))
    for layer, expert in PAIRS:
        writer.write(layer, expert, record(layer, expert, dtype))
    stores = [writer.finish()]
    if not in_memory:
        stores.append(ExpertStore.open(folder))
    for store in stores:
        assert store.numbers == PLAIN[dtype] and store.shape == SHAPE
        assert store.layers == LAYERS and store.num_experts == EXPERTS
        assert store.identity == PLAN["identity"]
        assert store.bytes_per_expert == 3 * 8 * 16 * PLAIN[dtype].itemsize
        for layer, expert in PAIRS:
            read = store.read(layer, expert)
            assert read.dtype == PLAIN[dtype] and not read.flags.writeable
            np.testing.assert_array_equal(read, record(layer, expert, dtype))


def test_a_record_is_stored_in_c_order(folder):
    writer = ExpertStoreWriter(folder, **PLAN)
    for layer, expert in PAIRS:
        writer.write(layer, expert, np.asfortranarray(record(layer, expert)))
    store = writer.finish()
    assert_whole(store)
    with open(store.locate(2, 3), "rb") as file:
        assert file.read() == record(2, 3).tobytes()


def test_stores_in_memory_are_apart():
    one, two = (ExpertStoreWriter(None, **PLAN) for _ in range(2))
    whole = write_all(one)
    assert two.done == frozenset()
    with pytest.raises(UsageError, match="12 of 12 records"):
        two.finish()
    two.write(1, 0, record(1, 3))
    assert_whole(whole)


def test_finish_needs_every_record(folder):
    writer = ExpertStoreWriter(folder, **PLAN)
    for layer, expert in PAIRS[:-1]:
        writer.write(layer, expert, record(layer, expert))
    with pytest.raises(UsageError, match=r"1 of 12 records .* \(5, 3\)"):
        writer.finish()
    with pytest.raises(UsageError, match="unfinished"):
        ExpertStore.open(folder)
    writer.write(5, 3, record(5, 3))
    assert_whole(writer.finish())


@pytest.mark.parametrize("written", range(len(PAIRS) + 1))
def test_continues_after_a_stop_between_records(folder, written):
    with ExpertStoreWriter(folder, **PLAN) as writer:
        for layer, expert in PAIRS[:written]:
            writer.write(layer, expert, record(layer, expert))
    with pytest.raises(UsageError):
        ExpertStore.open(folder)
    writer = ExpertStoreWriter(folder, **PLAN)
    assert writer.done == frozenset(PAIRS[:written])
    for layer, expert in set(PAIRS) - writer.done:
        writer.write(layer, expert, record(layer, expert))
    assert_whole(writer.finish())
    assert not (folder / "journal.jsonl").exists()


def test_continues_after_a_stop_within_a_journal_line(folder):
    with ExpertStoreWriter(folder, **PLAN) as writer:
        for layer, expert in PAIRS[:3]:
            writer.write(layer, expert, record(layer, expert))
    journal = (folder / "journal.jsonl").read_bytes()
    last = journal.rstrip(b"\n").rindex(b"\n") + 1
    for cut in range(last, len(journal)):
        (folder / "journal.jsonl").write_bytes(journal[:cut])
        with ExpertStoreWriter(folder, **PLAN) as writer:
            assert writer.done == frozenset(PAIRS[:2])
            writer.write(*PAIRS[2], record(*PAIRS[2]))
        assert (folder / "journal.jsonl").read_bytes() == journal
    assert_whole(write_all(ExpertStoreWriter(folder, **PLAN)))


def test_a_record_that_went_missing_is_written_again(folder):
    with ExpertStoreWriter(folder, **PLAN) as writer:
        for layer, expert in PAIRS[:3]:
            writer.write(layer, expert, record(layer, expert))
    (folder / "layer_00001" / "expert_00001").unlink()
    (folder / "layer_00001" / "expert_00002").write_bytes(b"cut short")
    writer = ExpertStoreWriter(folder, **PLAN)
    assert writer.done == {(1, 0)}
    assert_whole(write_all(writer))


@pytest.mark.parametrize("stop", ["journal", "manifest", "after the manifest"])
def test_continues_after_a_stop_around_a_rename(folder, monkeypatch, stop):
    real = os.replace

    def replace(source, target):
        name = pathlib.Path(target).name
        if stop == "after the manifest" and "manifest" in name:
            real(source, target)
        if stop.split()[-1] in name:
            raise InterruptedError("stopped")
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        with pytest.raises(InterruptedError):
            write_all(ExpertStoreWriter(folder, **PLAN))
    if stop == "after the manifest":
        assert_whole(ExpertStore.open(folder))
    else:
        with pytest.raises(UsageError):
            ExpertStore.open(folder)
    writer = ExpertStoreWriter(folder, **PLAN)
    assert writer.done == (frozenset() if stop == "journal" else frozenset(PAIRS))
    assert_whole(write_all(writer))
    assert sorted(path.name for path in folder.iterdir() if path.is_file()) == ["manifest.json"]


WRITE_FOREVER = """
import sys
import numpy as np
from dejax.ckpt.expert_store import ExpertStoreWriter
writer = ExpertStoreWriter(sys.argv[1], layers=[0], num_experts=100000, shape=[3, 8, 16],
                           dtype="float32", identity="killed")
for expert in range(100000):
    writer.write(0, expert, np.full([3, 8, 16], expert, np.float32))
"""


def test_continues_after_a_kill(folder):
    child = subprocess.Popen([sys.executable, "-c", WRITE_FOREVER, str(folder)])
    give_up = threading.Timer(60, child.kill)
    give_up.start()
    journal = folder / "journal.jsonl"
    while child.poll() is None and not (journal.exists() and journal.stat().st_size > 500):
        time.sleep(0.005)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    give_up.cancel()

    plan = {"layers": [0], "shape": [3, 8, 16], "dtype": "float32", "identity": "killed"}
    with ExpertStoreWriter(folder, num_experts=100000, **plan) as writer:
        done = writer.done
    assert len(done) > 10
    for _, expert in done:
        data = (folder / "layer_00000" / f"expert_{expert:05d}").read_bytes()
        np.testing.assert_array_equal(np.frombuffer(data, np.float32), np.float32(expert))


def test_a_finished_store_stays_as_it_is(folder, store):
    writer = ExpertStoreWriter(folder, **PLAN)
    assert writer.done == frozenset(PAIRS)
    before = (folder / "manifest.json").stat().st_mtime_ns
    assert_whole(write_all(writer))
    assert (folder / "manifest.json").stat().st_mtime_ns == before


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("identity", "another target"),
        ("dtype", "float32"),
        ("shape", (3, 8, 8)),
        ("num_experts", 8),
        ("layers", (1, 2, 6)),
    ],
)
def test_another_target_is_refused_with_both_named(folder, finished, whole, field, value):
    if whole:
        shutil.copytree(finished, folder)
    else:
        ExpertStoreWriter(folder, **PLAN).close()
    with pytest.raises(UsageError) as error:
        ExpertStoreWriter(folder, **(PLAN | {field: value}))
    assert repr(PLAN[field]) in str(error.value) and repr(value) in str(error.value)


def test_other_content_for_a_written_record_is_refused(folder):
    writer = ExpertStoreWriter(folder, **PLAN)
    writer.write(1, 0, record(1, 0))
    writer.write(1, 0, record(1, 0))
    with pytest.raises(UsageError, match="expert_00000 has other content"):
        writer.write(1, 0, record(1, 1))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layers": ()}, "layers"),
        ({"layers": (2, 1)}, "ascending"),
        ({"layers": (-1, 1)}, "layers"),
        ({"num_experts": 0}, "experts"),
        ({"shape": (2, 8, 16)}, r"\[3, F, D\]"),
        ({"shape": (3, 8)}, r"\[3, F, D\]"),
        ({"shape": (3, 0, 16)}, r"\[3, F, D\]"),
        ({"dtype": "int3"}, "bfloat16 or float32 or float64 or fp8"),
    ],
)
def test_a_malformed_plan_is_refused(change, says):
    with pytest.raises(UsageError, match=says):
        ExpertStoreWriter(None, **(PLAN | change))


def test_a_record_off_the_plan_is_refused():
    writer = ExpertStoreWriter(None, **PLAN)
    with pytest.raises(UsageError, match="float32.*expected bfloat16"):
        writer.write(1, 0, record(1, 0, "float32"))
    with pytest.raises(UsageError, match=r"\[3, 4, 16\], expected bfloat16 \[3, 8, 16\]"):
        writer.write(1, 0, record(1, 0)[:, :4])
    with pytest.raises(UsageError, match=r"\(3, 0\)"):
        writer.write(3, 0, record(3, 0))
    with pytest.raises(UsageError, match=r"\(1, 4\)"):
        writer.write(1, 4, record(1, 4))


def test_a_folder_with_other_things_is_refused(folder):
    folder.mkdir()
    (folder / "precious.txt").write_text("x")
    with pytest.raises(UsageError, match=r"precious\.txt"):
        ExpertStoreWriter(folder, **PLAN)
    with pytest.raises(UsageError, match="is a file"):
        ExpertStoreWriter(folder / "precious.txt", **PLAN)
    with pytest.raises(UsageError, match="not an expert store"):
        ExpertStore.open(folder)
    with pytest.raises(UsageError, match="is not a folder"):
        ExpertStore.open(folder / "nowhere")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_truncated_manifest_is_refused(folder, store, share):
    text = (folder / "manifest.json").read_bytes()
    (folder / "manifest.json").write_bytes(text[: int(len(text) * share)])
    with pytest.raises(UsageError, match=r"manifest\.json is damaged"):
        ExpertStore.open(folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("schema", "something-else"),
        ("version", 2),
        ("version", True),
        ("checksum", "sha256"),
        ("dtype", "int3"),
        ("layers", None),
        ("shape", [3, 8]),
        ("identity", ...),
        ("records", {"1": [1, 2, 3, 4]}),
        ("records", ...),
    ],
)
def test_a_strange_manifest_is_refused(folder, store, field, value):
    fields = json.loads((folder / "manifest.json").read_text())
    fields[field] = value
    if value is ...:
        del fields[field]
    (folder / "manifest.json").write_text(json.dumps(fields))
    with pytest.raises(UsageError, match=r"manifest\.json"):
        ExpertStore.open(folder)


def test_open_misses_a_record_or_its_end(folder, store):
    file = folder / "layer_00002" / "expert_00001"
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    with pytest.raises(UsageError, match="expert_00001 has 767 bytes, expected 768"):
        ExpertStore.open(folder)
    file.unlink()
    with pytest.raises(UsageError, match="expert_00001 is missing"):
        ExpertStore.open(folder)


def flip(data):
    return data[:100] + bytes([data[100] ^ 1]) + data[101:]


@pytest.mark.parametrize(
    ("damage", "says"),
    [(flip, "checksum"), (lambda data: data[:-1], "767 bytes"), (lambda data: b"", "0 bytes")],
)
def test_damage_is_reported_with_layer_expert_and_file(folder, store, damage, says):
    file = folder / "layer_00002" / "expert_00001"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ExpertReadError, match=says) as error:
        store.read(2, 1)
    assert isinstance(error.value, FailedError)
    assert (error.value.layer, error.value.expert) == (2, 1)
    assert error.value.file == str(file)
    for part in ("layer 2", "expert 1", str(file)):
        assert part in str(error.value)
    np.testing.assert_array_equal(store.read(2, 2), record(2, 2))


def test_the_file_of_another_expert_is_not_taken_for_it(folder, store):
    (folder / "layer_00002" / "expert_00001").write_bytes(record(2, 2).tobytes())
    with pytest.raises(ExpertReadError, match="checksum"):
        store.read(2, 1)


def test_a_removed_record_is_reported(folder, store):
    (folder / "layer_00002" / "expert_00001").unlink()
    with pytest.raises(ExpertReadError, match="0 bytes, expected 768"):
        store.read(2, 1)


def test_no_such_expert(store):
    with pytest.raises(UsageError, match=r"\(3, 0\)"):
        store.read(3, 0)


def test_verify_all(folder, store):
    seen = []
    store.verify_all(lambda done, total: seen.append((done, total)))
    assert seen == [(count, 12) for count in range(1, 13)]
    file = folder / "layer_00005" / "expert_00003"
    file.write_bytes(flip(file.read_bytes()))
    with pytest.raises(ExpertReadError, match="layer 5, expert 3"):
        store.verify_all()


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "int8"},
        {"shape": [3, 16, 8]},
        {"num_experts": 2},
        {"layers": [1]},
        {"shape": [3, 8, float("inf")]},
    ],
)
def test_how_records_are_read_is_checked_too(tmp_path, change):
    """What leaves the size of a record alone would else give other numbers, silently."""
    with ExpertStoreWriter(
        tmp_path, layers=[1, 2], num_experts=3, shape=(3, 8, 16), dtype="fp8", identity="x"
    ) as writer:
        for layer, expert in np.ndindex(2, 3):
            writer.write(layer + 1, expert, np.ones((3, 8, 16), np.float32))
        writer.finish()
    manifest = tmp_path / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | change))
    with pytest.raises(UsageError, match=r"manifest\.json is damaged"):
        ExpertStore.open(tmp_path)


def test_a_path_may_go_up(tmp_path):
    (tmp_path / "a").mkdir()
    path = tmp_path / "a" / ".." / "store"
    with ExpertStoreWriter(
        path, layers=[0], num_experts=1, shape=(3, 2, 2), dtype="float32", identity="x"
    ) as writer:
        writer.write(0, 0, np.ones((3, 2, 2), np.float32))
        writer.finish()
    assert ExpertStore.open(path).read(0, 0).sum() == 12

"""`dejax convert`: the same target from a store, whatever stops the conversion on its way."""

import json
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from safetensors.numpy import load_file

import infer.convert as program
from dejax.ckpt.expert_store import ExpertReadError, ExpertStore, ExpertStoreWriter
from dejax.cli import main
from dejax.errors import UsageError
from dejax.target import load_target
from infer.convert import convert
from tests.families.random_folder import edit_tensors, raw_config, write_folder

TOKENS = np.random.default_rng(0).integers(0, 256, (2, 9))
EXPERTS = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_folder(tmp_path_factory.mktemp("convert") / "small")
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    (folder / "README.md").write_text("not needed to run")
    return folder


@pytest.fixture(scope="module")
def logits(folder):
    return load_target(folder)(TOKENS)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def complaint(capsys, *argv, status=2) -> str:
    capsys.readouterr()
    assert main(["convert", *map(str, argv)]) == status
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("dejax: error: ")
    return error


def test_the_same_target_bit_for_bit(folder, out, logits):
    done = convert(folder, out)
    assert (done.experts, done.already_there, done.dtype) == (EXPERTS, 0, "float32")
    target = load_target(out)
    assert target.store is not None and target.routed is None
    assert target.identity == done.identity == load_target(folder).identity
    np.testing.assert_array_equal(target(TOKENS), logits)
    names = {path.name for path in out.iterdir()}
    assert names == {"experts", "model.safetensors", "config.json", "generation_config.json"}
    assert (out / "config.json").read_bytes() == (folder / "config.json").read_bytes()


def test_resident_weights_keep_names_and_bytes(folder, out):
    convert(folder, out)
    before, after = (load_file(path / "model.safetensors") for path in (folder, out))
    assert after.keys() == {key for key in before if ".mlp.experts." not in key}
    for key, tensor in after.items():
        assert tensor.tobytes() == before[key].tobytes() and tensor.dtype == before[key].dtype


@pytest.mark.parametrize(
    "stored, asked, written",
    [
        ("bfloat16", None, "bfloat16"),
        ("bfloat16", "f32", "float32"),
        ("float16", None, "float32"),
        ("float32", "bf16", "bfloat16"),
    ],
)
def test_precision_of_the_experts(tmp_path, out, stored, asked, written):
    folder = write_folder(tmp_path / "m", dtype=stored)
    assert convert(folder, out, experts=asked).dtype == written
    target, before = load_target(out), load_target(folder)
    assert target.store is not None and target.store.encoding == written
    rounded = np.asarray(before.layer_experts(2)).astype(written)
    np.testing.assert_array_equal(target.layer_experts(2), rounded)
    if np.dtype(written).itemsize >= np.dtype(stored).itemsize:  # nothing was lost
        np.testing.assert_array_equal(target(TOKENS), before(TOKENS))


def test_bounded_memory(folder, out, monkeypatch):
    """One record is written before the next is read."""
    events = []
    read, write = program.read_layer_experts, ExpertStoreWriter.write

    def reading(*args, **kwargs):
        for expert, record in read(*args, **kwargs):
            events.append("read")
            yield expert, record

    def writing(self, *args):
        events.append("write")
        write(self, *args)

    monkeypatch.setattr(program, "read_layer_experts", reading)
    monkeypatch.setattr(ExpertStoreWriter, "write", writing)
    convert(folder, out)
    assert events == ["read", "write"] * EXPERTS


# Stops.


class Stop(BaseException):
    """What a kill is to the code that it hits."""


def stop_at(monkeypatch, owner, name, call):
    """Makes the `call`-th call of a function stop the program, once it has done its work."""
    function, seen = getattr(owner, name), []

    def stopping(*args, **kwargs):
        result = function(*args, **kwargs)
        seen.append(result)
        if len(seen) == call:
            raise Stop
        return result

    monkeypatch.setattr(owner, name, stopping)


STOPS = {
    "before the first expert": (ExpertStoreWriter, "__enter__", 1),
    "after the first expert": (ExpertStoreWriter, "write", 1),
    "among the experts": (ExpertStoreWriter, "write", 9),
    "after the last expert": (ExpertStoreWriter, "write", EXPERTS),
    "when the store is whole": (ExpertStoreWriter, "finish", 1),
    "after the other weights": (program, "copy_tensors", 1),
    "before the configuration": (program, "_verify", 1),
}


@pytest.mark.parametrize("moment", STOPS)
def test_a_stopped_conversion_is_refused_and_continued(
    folder, out, logits, monkeypatch, capsys, moment
):
    stop_at(monkeypatch, *STOPS[moment])
    with pytest.raises(Stop):
        convert(folder, out)
    monkeypatch.undo()
    with pytest.raises(UsageError, match="the conversion is unfinished; run the same `dejax conv"):
        load_target(out)
    done = convert(folder, out)
    count = {"before the first expert": 0, "after the first expert": 1, "among the experts": 9}
    assert done.already_there == count.get(moment, EXPERTS)
    assert "continuing" in capsys.readouterr().err or not done.already_there
    np.testing.assert_array_equal(load_target(out)(TOKENS), logits)


def test_a_killed_process_is_continued(folder, out, logits):
    code = (
        "import time; from dejax.ckpt.expert_store import ExpertStoreWriter as W\n"
        "write = W.write\n"
        "def slow(*a): write(*a); time.sleep(0.05)\n"
        "W.write = slow\n"
        "from dejax.cli import main; import sys; sys.exit(main(sys.argv[1:]))"
    )
    argv = ["convert", str(folder), "--out", str(out)]
    with subprocess.Popen(
        [sys.executable, "-c", code, *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        while len(list(out.glob("experts/layer_*/expert_*"))) < 5 and process.poll() is None:
            time.sleep(0.005)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    assert not (out / "config.json").exists()
    assert 0 < convert(folder, out).already_there < EXPERTS
    np.testing.assert_array_equal(load_target(out)(TOKENS), logits)


def test_a_finished_conversion_is_checked_again(folder, out, logits):
    convert(folder, out)
    assert convert(folder, out).already_there == EXPERTS
    np.testing.assert_array_equal(load_target(out)(TOKENS), logits)


# Refusals.


def test_another_target_does_not_continue_it(folder, out, tmp_path, capsys, monkeypatch):
    stop_at(monkeypatch, ExpertStoreWriter, "write", 9)
    with pytest.raises(Stop):
        convert(folder, out)
    monkeypatch.undo()
    router = write_folder(tmp_path / "router", seed=1)
    assert "has identity" in complaint(capsys, router, "--out", out)
    assert "has dtype" in complaint(capsys, folder, "--out", out, "--experts", "bf16")
    # Routers and configuration the same, experts not: fine-tuning often leaves routers frozen.
    tuned = shutil.copytree(folder, tmp_path / "tuned")
    key = "model.layers.1.mlp.experts.3.up_proj.weight"
    edit_tensors(tuned, lambda tensors: tensors.update({key: tensors[key] + 1}))
    assert "expert_00003 has other content already" in complaint(capsys, tuned, "--out", out)
    assert convert(folder, out).already_there == 9


def test_a_folder_that_is_something_else(folder, out, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert "is a file" in complaint(capsys, folder, "--out", tmp_path / "file")
    copy = shutil.copytree(folder, tmp_path / "copy")
    before = sorted(copy.rglob("*"))
    assert "holds README.md but no conversion" in complaint(capsys, folder, "--out", copy)
    assert "inside the model's own folder" in complaint(capsys, copy, "--out", copy)
    assert "inside the model's own folder" in complaint(capsys, copy, "--out", copy / "experts")
    assert "is a folder above the model's own" in complaint(capsys, copy, "--out", tmp_path)
    assert sorted(copy.rglob("*")) == before
    convert(folder, tmp_path / "converted")
    before = sorted(tmp_path.rglob("*"))
    for inside in ("new", "a/b", "experts", "experts/layer_00001"):
        line = complaint(capsys, folder, "--out", tmp_path / "converted" / inside)
        assert f"is inside {tmp_path / 'converted'}, which is converted" in line
    nested = shutil.copytree(folder, tmp_path / "converted" / "source")
    line = complaint(capsys, nested, "--out", tmp_path / "converted")
    assert "is a folder above the model's own" in line
    shutil.rmtree(nested)
    assert sorted(tmp_path.rglob("*")) == before
    out.mkdir()
    (out / "experts").mkdir()
    (out / "config.json").write_text("{}")
    assert "holds config.json but no conversion" in complaint(capsys, folder, "--out", out)
    (out / "config.json").unlink()
    (out / "experts" / "mine").touch()
    assert "holds mine but no store" in complaint(capsys, folder, "--out", out)


def test_a_converted_folder_is_not_converted_again(folder, out, tmp_path, capsys):
    convert(folder, out)
    assert "is converted already" in complaint(capsys, out, "--out", tmp_path / "again")


def test_a_model_without_experts(tmp_path, out, capsys):
    folder = write_folder(tmp_path / "dense", raw_config(first_k_dense_replace=3))
    assert "has no MoE layers" in complaint(capsys, folder, "--out", out)
    assert not out.exists()


def test_a_full_disk_is_told_before_it_begins(folder, out, capsys, monkeypatch):
    usage = shutil.disk_usage(folder)._replace(free=800_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    error = complaint(capsys, folder, "--out", out, status=1)
    assert "are to be written, but only 781 KiB are free" in error and not out.exists()


def test_what_is_written_already_needs_no_room(folder, out, monkeypatch):
    stop_at(monkeypatch, ExpertStoreWriter, "write", EXPERTS)
    with pytest.raises(Stop):
        convert(folder, out)
    monkeypatch.undo()
    usage = shutil.disk_usage(folder)._replace(free=800_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert convert(folder, out).already_there == EXPERTS


def test_a_disk_that_fails_midway_is_told(folder, out, capsys, monkeypatch):
    write = ExpertStoreWriter.write

    def full(self, layer, expert, record):
        if expert == 5:
            raise ValueError("RESOURCE_EXHAUSTED: No space left on device")  # as tensorstore says
        write(self, layer, expert, record)

    monkeypatch.setattr(ExpertStoreWriter, "write", full)
    error = complaint(capsys, folder, "--out", out, status=1)
    assert "layer 1, expert 5: cannot be written (RESOURCE_EXHAUSTED: No space" in error
    monkeypatch.undo()
    assert convert(folder, out).already_there == 5


# Damage.


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_a_flipped_byte_is_refused_when_it_is_used(folder, out):
    convert(folder, out)
    flip(out / "experts" / "layer_00002" / "expert_00005")
    with pytest.raises(ExpertReadError, match="layer 2, expert 5: checksum .*run the same `dejax"):
        load_target(out)(TOKENS)


def test_the_same_conversion_mends_what_is_damaged(folder, out, logits, capsys):
    convert(folder, out, experts="f32")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    records = out / "experts" / "layer_00002"
    flip(records / "expert_00005")
    (records / "expert_00001").write_bytes(b"cut short")
    (records / "expert_00002").unlink()
    shutil.rmtree(out / "experts" / "layer_00001")
    flip(out / "model.safetensors")
    (out / "config.json").unlink()
    assert main(["convert", str(folder), "--out", str(out), "--experts", "f32"]) == 0
    mended = 3 + EXPERTS // 2
    assert f"were there already, {mended} of them damaged and mended" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    assert convert(folder, out).mended == 0
    np.testing.assert_array_equal(load_target(out)(TOKENS), logits)


def test_a_truncated_record_names_the_command_that_mends_it(folder, out):
    convert(folder, out)
    (out / "experts" / "layer_00002" / "expert_00001").write_bytes(b"cut short")
    with pytest.raises(UsageError, match="expert_00001 has 9 bytes, expected .* run the same `dej"):
        load_target(out)


def test_what_does_not_read_back_is_not_declared_whole(folder, out, capsys, monkeypatch):
    finish = ExpertStoreWriter.finish

    def damaged(self):
        flip(out / "experts" / "layer_00001" / "expert_00000")
        return finish(self)

    monkeypatch.setattr(ExpertStoreWriter, "finish", damaged)
    assert "layer 1, expert 0: checksum" in complaint(capsys, folder, "--out", out, status=1)
    assert not (out / "config.json").exists()
    monkeypatch.undo()
    shutil.rmtree(out)
    copy = program.copy_tensors

    def damaged_copy(path, *args):
        copy(path, *args)
        flip(path)

    monkeypatch.setattr(program, "copy_tensors", damaged_copy)
    assert "is not as it was written" in complaint(capsys, folder, "--out", out, status=1)
    assert not (out / "config.json").exists()


def test_a_converted_folder_of_mixed_parts_is_refused(folder, out, tmp_path):
    convert(folder, out)
    other = write_folder(tmp_path / "other", seed=1)
    convert(other, tmp_path / "converted")
    shutil.rmtree(out / "experts")
    shutil.copytree(tmp_path / "converted" / "experts", out / "experts")
    with pytest.raises(UsageError, match="the expert store is of target"):
        load_target(out)


# The program.


def test_output(folder, out, capsys):
    assert main(["convert", str(folder), "--out", str(out)]) == 0
    stdout, stderr = capsys.readouterr()
    assert f"{out}: converted and checked" in stdout and "16 as float32, 384 KiB" in stdout
    for line in ("experts: 0/0 MB", "other weights: 1/1 MB", "check: 0/0 MB"):
        assert line in stderr
    assert main(["convert", str(folder), "--out", str(out), "--json", "-"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert done["experts"] == done["already_there"] == EXPERTS and done["out"] == str(out)
    assert done["expert_bytes"] == EXPERTS * 3 * 32 * 64 * 4
    assert done["resident_bytes"] == 128_032 * 4


def test_a_store_is_a_store(folder, out):
    convert(folder, out, experts="bf16")
    store = ExpertStore.open(out / "experts")
    assert store.layers == (1, 2) and store.shape == (3, 32, 64)
    assert store.encoding == "bfloat16"
    store.verify_all()

"""Checkpoints: strict both ways, every fault listed at once, both layouts, written as read."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from dejax.ckpt import hf_weights
from dejax.ckpt.hf_weights import (
    checkpoint_tensors,
    plan_checkpoint,
    read_layer_experts,
    read_resident,
    write_checkpoint,
)
from dejax.errors import UsageError
from dejax.target import load_config, load_target
from tests.families.random_folder import edit_tensors, raw_config, write_folder

EXPERT = "model.layers.2.mlp.experts.5.{}_proj.weight"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "model")


def plan(folder, **kwargs):
    return plan_checkpoint(folder, load_config(folder), **kwargs)


def problems(folder) -> list[str]:
    with pytest.raises(UsageError) as caught:
        plan(folder)
    text = str(caught.value)
    assert text.startswith(f"{folder}: ") and "\n" not in text
    return text.split("bad tensors: ")[1].split("; ")


def shard(folder, names):
    """Moves the tensors `names` to a second file, with an index."""
    tensors = load_file(folder / "model.safetensors")
    second = {name: tensors.pop(name) for name in names}
    files = {"model-1.safetensors": tensors, "model-2.safetensors": second}
    (folder / "model.safetensors").unlink()
    for file, content in files.items():
        save_file(content, folder / file)
    weight_map = {name: file for file, content in files.items() for name in content}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_every_fault_is_listed_at_once(folder):
    """NVIDIA-NeMo/Megatron-Bridge 4706: an expert that is not there is never left random."""

    def spoil(tensors):
        del tensors[EXPERT.format("up")], tensors["model.norm.weight"]
        tensors["model.layers.9.mlp.gate.weight"] = np.zeros((8, 64), np.float32)
        tensors[EXPERT.format("down")] = np.zeros((32, 64), np.float32)
        tensors[EMBEDDING] = np.zeros((255, 64), np.float32)

    shard(edit_tensors(folder, spoil), [HEAD])
    second = folder / "model-2.safetensors"
    gate = "model.layers.1.mlp.gate.weight"
    save_file(load_file(second) | {gate: np.zeros((8, 64), np.float32)}, second)
    assert problems(folder) == [
        f"{EMBEDDING}: shape [255, 64], expected [256, 64]",
        f"{gate}: in both model-1.safetensors and model-2.safetensors",
        f"{EXPERT.format('down')}: shape [32, 64], expected [64, 32]",
        f"{EXPERT.format('up')}: missing",
        "model.layers.9.mlp.gate.weight: unknown",
        "model.norm.weight: missing",
    ]


def test_many_faults_are_counted(folder):
    shard(folder, [HEAD])
    save_file({HEAD: np.zeros((256, 64), np.float32)}, folder / "model-1.safetensors")
    listed = problems(folder)
    assert len(listed) == 4 and listed[-1].startswith("and ") and listed[-1].endswith(" more")


@pytest.mark.parametrize(
    "dtype, message",
    [
        ("I64", "dtype I64, expected BF16, F16, F32, F64"),
        ("F8_E4M3", "FP8 [64], expected a matrix"),
        ("U8", "bytes, expected numbers"),
    ],
)
def test_dtypes_that_are_no_weights(folder, dtype, message):
    file = folder / "model.safetensors"
    stored = {"I64": np.int64, "F8_E4M3": ml_dtypes.float8_e4m3fn, "U8": np.uint8}[dtype]
    tensors = load_file(file)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(stored)
    save_file(tensors, file)
    assert problems(folder) == [f"model.norm.weight: {message}"]


def test_empty_tensors_hold_nothing(folder):
    """The reference writes such for shared experts of width 0."""
    zero = np.zeros((0, 64), np.float32)
    edit_tensors(folder, lambda tensors: tensors.update({"model.extra.weight": zero}))
    assert plan(folder).resident


# The head (vllm-project/vllm 51665, mlx-lm 1298: flag and file disagree).


def test_an_untied_model_needs_its_head(folder):
    edit_tensors(folder, lambda tensors: tensors.pop(HEAD))
    assert problems(folder) == [f"{HEAD}: missing"]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_tied_model_may_hold_the_embedding_twice(tmp_path, dtype):
    folder = write_folder(tmp_path / "model", raw_config(tie_word_embeddings=True))
    edit_tensors(folder, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].astype(dtype)}))
    assert load_target(folder).model.head is None
    assert HEAD not in plan(folder).resident_entries()


@pytest.mark.parametrize("shape", [(256, 64), (250, 64)])
def test_a_tied_model_with_another_head_is_refused(tmp_path, shape):
    folder = write_folder(tmp_path / "model", raw_config(tie_word_embeddings=True))
    edit_tensors(folder, lambda tensors: tensors.update({HEAD: np.zeros(shape, np.float32)}))
    (only,) = problems(folder)
    assert only.startswith(f"{HEAD}: differs from {EMBEDDING}, but tie_word_embeddings is true")


# Layouts of the experts.


def fuse(tensors, layer):
    """The fused form: gate rows first."""
    prefix = f"model.layers.{layer}.mlp.experts."
    parts = {
        name: np.stack([tensors.pop(f"{prefix}{e}.{name}_proj.weight") for e in range(8)])
        for name in ("gate", "up", "down")
    }
    tensors[prefix + "gate_up_proj"] = np.concatenate([parts["gate"], parts["up"]], axis=1)
    tensors[prefix + "down_proj"] = parts["down"]


def experts(folder, layer, **kwargs):
    return [record for _, record in read_layer_experts(plan(folder), layer, **kwargs)]


@pytest.mark.parametrize("layers", [(1, 2), (2,)])
def test_both_layouts_are_read(folder, layers):
    """vllm-project/vllm 36997; ktransformers 2148: told by the names, layer by layer."""
    before = {layer: experts(folder, layer) for layer in (1, 2)}
    edit_tensors(folder, lambda tensors: [fuse(tensors, layer) for layer in layers])
    for layer, records in before.items():
        np.testing.assert_array_equal(experts(folder, layer), records)


def test_half_a_fused_layer_is_incomplete(folder):
    edit_tensors(folder, lambda tensors: fuse(tensors, 1))
    edit_tensors(folder, lambda tensors: tensors.pop("model.layers.1.mlp.experts.down_proj"))
    assert problems(folder) == ["model.layers.1.mlp.experts.down_proj: missing"]


def test_both_layouts_in_one_layer_are_one_too_many(folder):
    both = load_file(folder / "model.safetensors")
    edit_tensors(folder, lambda tensors: fuse(tensors, 1))
    edit_tensors(folder, lambda tensors: tensors.update(both))
    assert problems(folder)[-1] == "and 21 more"  # of 24 unknown ones


def test_a_record_is_gate_up_and_the_transposed_down(folder):
    tensors = load_file(folder / "model.safetensors")
    record = experts(folder, 2)[5]
    assert record.shape == (3, 32, 64)
    np.testing.assert_array_equal(record[0], tensors[EXPERT.format("gate")])
    np.testing.assert_array_equal(record[1], tensors[EXPERT.format("up")])
    np.testing.assert_array_equal(record[2], tensors[EXPERT.format("down")].T)


def test_experts_of_several_dtypes_are_held_by_what_holds_all(folder):
    def mix(tensors):
        tensors[EXPERT.format("up")] = tensors[EXPERT.format("up")].astype(np.float16)
        for key, value in tensors.items():
            if ".experts." in key and value.dtype == np.float32:
                tensors[key] = value.astype(ml_dtypes.bfloat16)

    edit_tensors(folder, mix)
    assert plan(folder).expert_dtype == np.float32
    stored = load_file(folder / "model.safetensors")[EXPERT.format("up")]
    assert experts(folder, 2)[5].dtype == np.float32
    np.testing.assert_array_equal(experts(folder, 2)[5][1], stored.astype(np.float32))
    assert experts(folder, 2, dtype=np.dtype(np.float64))[0].dtype == np.float64


# Reading and writing.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_are_held_in_the_dtype_asked_for(folder, dtype):
    model = read_resident(plan(folder), dtype)
    tensors = load_file(folder / "model.safetensors")
    held = np.asarray(model.embedding[...])
    np.testing.assert_array_equal(held, tensors[EMBEDDING].astype(held.dtype))
    kept = {leaf.dtype.name for leaf in jax.tree.leaves(nnx.split(model)[1])}
    assert kept == {dtype, "float32"}  # the router is never short
    assert model.layers[1].router is not None
    router = np.asarray(model.layers[1].router.weight[...])
    np.testing.assert_array_equal(router, tensors["model.layers.1.mlp.gate.weight"])


def test_what_was_read_is_written_back(folder, tmp_path):
    target = load_target(folder)
    raw = json.loads((folder / "config.json").read_text())
    again = tmp_path / "again"
    write_checkpoint(again, raw, target.model, target.routed, dtype=np.float32)
    for name in ("model.safetensors", "config.json"):
        assert (again / name).read_bytes() == (folder / name).read_bytes()
    tensors = checkpoint_tensors(target.config, target.model, target.routed)
    assert tensors.keys() == load_file(folder / "model.safetensors").keys()


def test_a_checkpoint_is_never_overwritten(folder):
    target = load_target(folder)
    with pytest.raises(UsageError, match="exists already"):
        write_checkpoint(folder, {}, target.model, target.routed, dtype=np.float32)


def test_a_stopped_write_leaves_no_checkpoint(folder, tmp_path, monkeypatch):
    target = load_target(folder)
    raw = json.loads((folder / "config.json").read_text())

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    out = tmp_path / "out"
    monkeypatch.setattr(hf_weights, "save_file", stop)
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(out, raw, target.model, target.routed, dtype=np.float32)
    assert not out.exists()
    monkeypatch.undo()
    write_checkpoint(out, raw, target.model, target.routed, dtype="bfloat16")
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert load_file(out / "model.safetensors")[EMBEDDING].dtype == ml_dtypes.bfloat16


def test_resident_weights_alone(folder):
    with pytest.raises(UsageError, match="48 bad tensors"):
        plan(folder, resident_only=True)
    edit_tensors(folder, lambda t: [t.pop(key) for key in [*t] if ".mlp.experts." in key])
    assert plan(folder, resident_only=True).experts == {}

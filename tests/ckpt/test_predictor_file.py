"""A predictor's file: read as it was written, and refused where it does not belong."""

import dataclasses
import struct

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dejax.ckpt.draft_state import draft_identity, load_draft, save_draft
from dejax.ckpt.predictor_file import FILE, SCHEMA, load_predictor, save_predictor
from dejax.draft.predictor import ExpertPredictor, initial_predictor
from dejax.errors import FailedError, UsageError
from tests.infer.random_target import draft_of, random_target

TARGET = random_target("shared", dtype=np.float32)
DRAFT = draft_of(TARGET)


def predictor_of(target=TARGET, draft=DRAFT, *, rank=6, seed=3):
    params = initial_predictor(target.config, rank=rank, seed=seed)
    return ExpertPredictor(
        params=jax.tree.map(jax.numpy.asarray, params),
        layers=target.config.moe_layers,
        target=target.identity,
        draft=draft_identity(draft),
        training={"steps": 7},
    )


@pytest.fixture
def saved(tmp_path):
    return save_predictor(tmp_path / FILE, predictor_of())


@pytest.mark.parametrize("place", ["file", "folder"])
def test_what_is_written_is_read(saved, place):
    wanted = predictor_of()
    found = load_predictor(saved if place == "file" else saved.parent, TARGET, DRAFT)
    for name, array in wanted.params.items():
        np.testing.assert_array_equal(found.params[name], array)
    assert (found.layers, found.training) == (wanted.layers, wanted.training)
    assert (found.target, found.draft) == (wanted.target, wanted.draft)
    assert (found.rank, found.size) == (6, sum(a.size for a in wanted.params.values()))


def refused(path, message, *, target=TARGET, draft=DRAFT):
    with pytest.raises(UsageError) as error:
        load_predictor(path, target, draft)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_another_target_or_draft_is_refused(saved):
    other = dataclasses.replace(TARGET, identity="another")
    refused(saved, f"for target {TARGET.identity}, not for random (another)", target=other)
    trained = draft_of(TARGET, seed=1)
    told = f"with draft experts {draft_identity(DRAFT)}, and the draft here is "
    refused(saved, told + draft_identity(trained), draft=trained)
    refused(saved, told + "none", draft=None)


def test_a_draft_is_known_again_when_read_back(tmp_path):
    folder = save_draft(tmp_path / "draft", DRAFT, TARGET.config)
    assert draft_identity(load_draft(folder, TARGET)) == draft_identity(DRAFT)
    wider = draft_of(TARGET, width=16)
    assert draft_identity(wider) != draft_identity(DRAFT)


def test_a_damaged_file_is_refused(saved):
    whole = saved.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    for cut in (0, 5, 8 + length // 2, 8 + length, len(whole) - 1):
        saved.write_bytes(whole[:cut])
        refused(saved, f"{saved}: not a readable safetensors file")


def test_what_is_no_predictor_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    refused(path, "does not exist; expected what `python -m train.predictor` wrote")
    refused(tmp_path, f"{tmp_path / FILE} does not exist")
    path.write_bytes(b"no tensors at all")
    refused(path, "not a readable safetensors file")
    save_file({"state": np.zeros((2, 2), np.float32)}, path)
    refused(path, "is no predictor of experts")
    adapter = save_draft(tmp_path / "draft", DRAFT, TARGET.config) / "adapter.safetensors"
    refused(adapter, "is no predictor of experts")
    told = {"schema": SCHEMA, "target": TARGET.identity, "draft": draft_identity(DRAFT)}
    save_file(load_file(adapter), path, metadata=told | {"layers": "[1", "training": "{}"})
    refused(path, "its metadata is damaged")
    save_file(load_file(adapter), path, metadata=told | {"schema": "dejax-predictor/9"})
    refused(path, "schema 'dejax-predictor/9'; this version reads dejax-predictor/1")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("heads"), "1 bad tensors: heads: missing"),
        (lambda t: t.update(more=np.zeros(3, np.float32)), "more: unknown"),
        (lambda t: t.update(parent=np.zeros(5, np.float32)), "parent: shape [5], expected [2]"),
        (lambda t: t.update(offset=np.zeros((), np.float32)), "offset: shape [], expected [1]"),
        (lambda t: t.update(bias=np.full((2, 8), np.nan, np.float32)), "bias: not finite"),
        (lambda t: t.update(bias=np.zeros((2, 8), np.int32)), "bias: dtype int32"),
    ],
)
def test_bad_tensors_are_listed(saved, change, message):
    predictor = predictor_of()
    tensors = {name: np.array(a) for name, a in predictor.params.items()}
    change(tensors)
    told = dict(schema=SCHEMA, target=predictor.target, draft=predictor.draft)
    save_file(tensors, saved, metadata=told | {"layers": "[1, 2]", "training": "{}"})
    refused(saved, message)


def test_a_place_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(FailedError, match="cannot be written"):
        save_predictor(tmp_path / "file" / FILE, predictor_of())

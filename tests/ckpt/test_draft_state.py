"""Adapter folders: round trip, strictness, binding to a target, whole or not at all."""

import json
import os
from dataclasses import replace
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

import dejax
from dejax.ckpt import draft_state
from dejax.ckpt.draft_state import (
    CONFIG_FILE,
    HEAD_FILE,
    WEIGHTS_FILE,
    load_draft,
    resolve_draft,
    save_draft,
)
from dejax.config import DraftConfig
from dejax.draft.expert import random_draft
from dejax.errors import FailedError, UsageError
from tests.infer.head_cases import random_head
from tests.infer.random_target import SHAPES

CONFIG = SHAPES["groups"]
TARGET = SimpleNamespace(config=CONFIG, identity="0123abcd", name="toy")


@pytest.fixture
def draft():
    return random_draft(CONFIG, DraftConfig(width=5, top_r=2), seed=3, identity="0123abcd")


@pytest.fixture
def folder(tmp_path, draft):
    return save_draft(tmp_path / "adapter", draft, CONFIG)


def edit_config(folder, edit):
    path = folder / CONFIG_FILE
    config = json.loads(path.read_text())
    edit(config)
    path.write_text(json.dumps(config))


def edit_tensors(folder, edit):
    tensors = load_file(folder / WEIGHTS_FILE)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS_FILE)


def test_round_trip(folder, draft):
    for again in (load_draft(folder), load_draft(str(folder), TARGET), dejax.load_draft(folder)):
        assert again.config == draft.config and again.identity == draft.identity
        assert again.training == {"init": 3}
        assert sorted(again.experts) == sorted(draft.experts) == [2, 3]
        for layer in (2, 3):
            for name, value in draft.layer_params(layer).items():
                loaded = again.layer_params(layer)[name]
                np.testing.assert_array_equal(loaded, value)
                assert loaded.dtype == jnp.float32


def test_names_and_shapes_on_disk(folder, draft):
    tensors = load_file(folder / WEIGHTS_FILE)
    prefix = "layers.{}.draft_expert."
    parts = ("gate_proj.weight", "up_proj.weight", "down_proj.weight", "gamma")
    assert set(tensors) == {prefix.format(layer) + part for layer in (2, 3) for part in parts}
    shapes = [tensors[prefix.format(2) + part].shape for part in parts]
    assert shapes == [(5, 32), (5, 32), (32, 5), ()]
    down = draft.layer_params(3)["weights"][2]
    np.testing.assert_array_equal(tensors["layers.3.draft_expert.down_proj.weight"], down.T)
    config = json.loads((folder / CONFIG_FILE).read_text())
    assert config["schema"] == 1
    assert config["target"]["identity"] == "0123abcd"
    assert config["target"]["family"] == "deepseek_v2"
    assert config["target"]["moe_layers"] == [2, 3]
    assert config["draft"] == {"width": 5, "top_r": 2}


def test_plain_gates_have_a_schema_that_older_versions_refuse(draft, tmp_path):
    plain = replace(draft, config=replace(draft.config, gates="plain"))
    save_draft(tmp_path / "plain", plain, CONFIG)
    config = json.loads((tmp_path / "plain" / CONFIG_FILE).read_text())
    assert config["schema"] == 2  # older versions read 1 alone
    assert config["draft"]["gates"] == "plain"
    assert load_draft(tmp_path / "plain").config == plain.config
    save_draft(tmp_path / "plain", draft, CONFIG)
    assert json.loads((tmp_path / "plain" / CONFIG_FILE).read_text())["schema"] == 1


def test_another_target_is_refused_with_both_identities(folder):
    other = SimpleNamespace(config=CONFIG, identity="ffff0000", name="other")
    with pytest.raises(UsageError, match=r"target 0123abcd, not for other \(ffff0000\)"):
        load_draft(folder, other)


def test_more_routed_experts_than_the_target_chooses_are_refused(folder):
    edit_config(folder, lambda c: c["draft"].update(top_r=CONFIG.moe.top_k + 1))
    with pytest.raises(UsageError, match=f"expected at most {CONFIG.moe.top_k}, the experts"):
        load_draft(folder, TARGET)


def test_every_bad_tensor_is_listed(folder):
    def edit(tensors):
        del tensors["layers.2.draft_expert.gamma"]
        tensors["layers.2.draft_expert.up_proj.weight"] = np.zeros((4, 32), np.float32)
        tensors["layers.3.draft_expert.gamma"] = np.array(np.nan, np.float32)
        tensors["layers.3.draft_expert.gate_proj.weight"] = np.zeros((5, 32), np.int32)
        tensors["layers.9.draft_expert.gamma"] = np.ones((), np.float32)

    edit_tensors(folder, edit)
    with pytest.raises(UsageError) as caught:
        load_draft(folder)
    message = str(caught.value)
    assert "5 bad tensors" in message and "\n" not in message
    for problem in (
        "layers.2.draft_expert.gamma: missing",
        "layers.2.draft_expert.up_proj.weight: shape [4, 32], expected [5, 32]",
        "layers.3.draft_expert.gamma: not finite",
        "layers.3.draft_expert.gate_proj.weight: dtype int32, expected floats",
        "layers.9.draft_expert.gamma: unknown",
    ):
        assert problem in message


def test_short_floats_are_widened(folder, draft):
    edit_tensors(folder, lambda t: t.update({k: v.astype(np.float16) for k, v in t.items()}))
    weights = load_draft(folder).layer_params(2)["weights"]
    assert weights.dtype == jnp.float32
    np.testing.assert_allclose(weights, draft.layer_params(2)["weights"], atol=1e-3)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c: c.update(schema=3), "schema 3; this version reads 1 and 2"),
        (lambda c: c.pop("schema"), "schema None"),
        (lambda c: c.update(schema=True), "schema True; this version reads 1 and 2"),
        (lambda c: c.pop("target"), "target.identity is None; expected str"),
        (lambda c: c["draft"].update(width="5"), "draft.width is '5'; expected int"),
        (lambda c: c["draft"].update(top_r=True), "draft.top_r is True; expected int"),
        (lambda c: c["target"].update(moe_layers=[]), r"moe_layers is \[\]; expected layer"),
        (lambda c: c["draft"].update(gates="raw"), "gates is 'raw'; expected full or plain"),
        (lambda c: c["draft"].update(width=0), r"shape \[5, 32\], expected \[0, 32\]"),
        (lambda c: c["target"].update(width=31), r"shape \[5, 32\], expected \[5, 31\]"),
    ],
)
def test_bad_configurations_are_refused(folder, edit, message):
    edit_config(folder, edit)
    with pytest.raises(UsageError, match=message):
        load_draft(folder)


def test_missing_and_malformed_folders(folder, tmp_path):
    with pytest.raises(UsageError, match="does not exist; expected an adapter folder"):
        load_draft(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="is not a folder"):
        load_draft(folder / CONFIG_FILE)
    with pytest.raises(UsageError, match="no adapter_config.json; expected an adapter folder$"):
        load_draft(tmp_path)
    save_draft(tmp_path / "run" / "draft", load_draft(folder), CONFIG)
    with pytest.raises(UsageError, match=r"did you mean .*run/draft\?"):
        load_draft(tmp_path / "run")
    data = (folder / WEIGHTS_FILE).read_bytes()
    (folder / WEIGHTS_FILE).write_bytes(data[:-8])
    with pytest.raises(UsageError, match="not a readable safetensors file"):
        load_draft(folder)
    (folder / WEIGHTS_FILE).unlink()
    with pytest.raises(UsageError, match="no adapter.safetensors"):
        load_draft(folder)
    (folder / CONFIG_FILE).write_text("{")
    with pytest.raises(UsageError, match="not readable as JSON"):
        load_draft(folder)


def test_saving_replaces_an_adapter_and_nothing_else(folder, draft, tmp_path):
    newer = random_draft(CONFIG, DraftConfig(width=7), seed=4, identity="0123abcd")
    save_draft(folder, newer, CONFIG)
    assert load_draft(folder).config.width == 7
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("all my work")
    with pytest.raises(UsageError, match="choose another folder"):
        save_draft(tmp_path / "full", draft, CONFIG)
    with pytest.raises(UsageError, match="choose another folder"):
        save_draft(tmp_path / "full" / "thesis.txt", draft, CONFIG)
    (tmp_path / "empty").mkdir()
    save_draft(tmp_path / "empty", draft, CONFIG)
    assert sorted(os.listdir(tmp_path)) == ["adapter", "empty", "full"]


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), SafetensorError("No space left on device")]
)
def test_a_failed_save_leaves_the_old_adapter(error, folder, draft, monkeypatch):
    def fails(*args, **kwargs):
        raise error

    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.setattr(draft_state, "save_file", fails)
    with pytest.raises(FailedError, match="cannot be written: No space left"):
        save_draft(folder, draft, CONFIG)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert os.listdir(folder.parent) == ["adapter"]


def test_resolving_names(folder):
    assert resolve_draft(str(folder), TARGET).config.width == 5
    first, second = resolve_draft("init", TARGET), resolve_draft("init:0", TARGET)
    assert first.config.width == CONFIG.moe.expert_width and first.identity == "0123abcd"
    for layer in (2, 3):
        np.testing.assert_array_equal(
            first.layer_params(layer)["weights"], second.layer_params(layer)["weights"]
        )
    other = resolve_draft("init:7", TARGET).layer_params(2)["weights"]
    assert not np.array_equal(first.layer_params(2)["weights"], other)
    for spec in ("init:", "init:x", "init:-1", "init:1.5"):
        with pytest.raises(UsageError, match="is no seed"):
            resolve_draft(spec, TARGET)


def test_an_adapter_of_another_kind_is_not_replaced(tmp_path, draft):
    """Other libraries call their file adapter_config.json too."""
    folder = tmp_path / "peft"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    with pytest.raises(UsageError, match="choose another folder"):
        save_draft(folder, draft, CONFIG)
    assert (folder / "adapter_model.safetensors").read_bytes() == b"weights"
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(UsageError, match="choose another folder"):
        save_draft(folder, draft, CONFIG)


@pytest.mark.parametrize("spec", ["init:x", "init:-1", "init:4294967296", "init:" + "9" * 30])
def test_seeds_of_untrained_drafts_are_checked(spec):
    with pytest.raises(UsageError, match="is no seed"):
        resolve_draft(spec, TARGET)


# The confidence head.


@pytest.fixture
def with_head(draft):
    return replace(draft, head=random_head(CONFIG.width, positions=4))


def test_a_head_survives_the_round_trip_beside_an_adapter_that_stays_as_it_was(
    with_head, folder, tmp_path
):
    headed = save_draft(tmp_path / "headed", with_head, CONFIG)
    again = load_draft(headed, TARGET)
    for name, array in with_head.head.arrays().items():
        np.testing.assert_array_equal(again.head.arrays()[name], array)
    for name in (WEIGHTS_FILE, CONFIG_FILE):  # what older versions read
        assert (headed / name).read_bytes() == (folder / name).read_bytes()
    assert load_draft(folder).head is None and not (folder / HEAD_FILE).exists()
    save_draft(headed, load_draft(folder), CONFIG)  # replaced, head and all
    assert sorted(os.listdir(headed)) == [WEIGHTS_FILE, CONFIG_FILE]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("confidence_head.law"), "confidence_head.law: missing"),
        (lambda t: t.pop("confidence_head.biases"), "confidence_head.biases: missing"),
        (
            lambda t: t.update({"confidence_head.hidden": np.zeros((2, 5), np.float32)}),
            r"confidence_head.hidden: shape \[2, 5\], expected \[2, 32\]",
        ),
        (
            lambda t: t.update({"confidence_head.temperatures": np.ones((2, 3), np.float32)}),
            r"temperatures: shape \[2, 3\], expected \[2, 4\]",
        ),
        (lambda t: t["confidence_head.law"].fill(np.inf), "confidence_head.law: not finite"),
        (lambda t: t["confidence_head.temperatures"].fill(0), "temperatures must be above 0"),
        (lambda t: t.update({"extra": np.zeros(1, np.float32)}), "extra: unknown"),
    ],
)
def test_a_bad_head_is_refused(with_head, tmp_path, edit, message):
    place = save_draft(tmp_path / "headed", with_head, CONFIG)
    tensors = load_file(place / HEAD_FILE)
    edit(tensors)
    save_file(tensors, place / HEAD_FILE)
    with pytest.raises(UsageError, match=message):
        load_draft(place)

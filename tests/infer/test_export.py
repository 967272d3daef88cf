"""`dejax export`: adapters checked, rewritten, and refused in one line."""

import json
from dataclasses import replace

import numpy as np
import pytest

from dejax.ckpt.draft_state import load_draft, resolve_draft, save_draft
from dejax.errors import UsageError
from dejax.target import load_target
from infer.export import main
from tests.families.random_folder import raw_config, write_folder
from tests.infer.head_cases import random_head


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("export") / "model", raw_config())


def test_an_exported_adapter_is_the_same_draft(model, tmp_path, capsys):
    target = load_target(model)
    draft = resolve_draft("init:5", target)
    save_draft(tmp_path / "draft", draft, target.config)
    for spec, out in ((str(tmp_path / "draft"), "copy"), ("init:5", "fresh")):
        argv = [str(model), "--draft", spec, "--format", "safetensors", "--out"]
        assert main([*argv, str(tmp_path / out)]) == 0
        again = load_draft(tmp_path / out, target)
        for layer in target.config.moe_layers:
            for name, value in draft.layer_params(layer).items():
                np.testing.assert_array_equal(again.layer_params(layer)[name], value)
    assert main([*argv, str(tmp_path / "fresh"), "--json", str(tmp_path / "done.json")]) == 0
    done = json.loads((tmp_path / "done.json").read_text())
    assert done["out"] == str(tmp_path / "fresh") and done["target"] == target.identity
    assert done["tensors"] == 4 * done["layers"] == len(draft.experts) * 4
    assert done["bytes"] > 4 * done["layers"] * 3 * done["width"]
    shown = capsys.readouterr().out
    assert "layers  width  tensors  size" in shown.replace("   ", "  ")
    assert str(2 * 4) in shown


def test_a_confidence_head_goes_along_or_stays_behind_with_a_line(model, tmp_path, capsys):
    target = load_target(model)
    draft = resolve_draft("init:5", target)
    head = random_head(target.config.width)
    draft = replace(draft, head=head, raw=resolve_draft("init:6", target).experts)
    save_draft(tmp_path / "draft", draft, target.config)
    argv = [str(model), "--draft", str(tmp_path / "draft"), "--out"]
    for out, options in (("own", []), ("torch", ["--format", "torch"])):
        assert main([*argv, str(tmp_path / out), *options]) == 0
        found = load_draft(tmp_path / out, target)
        np.testing.assert_array_equal(found.head.hidden, head.hidden)
    assert "stays behind" not in capsys.readouterr().err
    assert main([*argv, str(tmp_path / "raw"), "--weights", "raw"]) == 0
    assert load_draft(tmp_path / "raw", target).head is None
    told = capsys.readouterr().err
    assert "confidence head stays behind (fitted to the average)" in told
    file = str(tmp_path / "draft.gguf")
    assert main([*argv, file, "--format", "gguf", "--as", "adapter"]) == 0
    told = capsys.readouterr().err
    assert told.count("stays behind") == 1 and "--format gguf has no place" in told
    assert load_draft(file, target).head is None


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--draft", "init", "--format", "torhc"], "did you mean 'torch'"),
        (["--draft", "init", "--format", "safetensor"], "did you mean 'safetensors'"),
        ([], "--draft is missing"),
        (["--draft", "init", "--as", "adapter"], "--as is for --format gguf"),
        (["--draft", "nowhere"], "nowhere does not exist"),
    ],
)
def test_what_cannot_be_exported_is_refused(model, tmp_path, argv, message):
    with pytest.raises(UsageError, match=message):
        main([str(model), *argv, "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_an_adapter_of_another_target_is_refused(model, tmp_path):
    other = write_folder(tmp_path / "other", raw_config(), seed=1)
    target = load_target(model)
    save_draft(tmp_path / "draft", resolve_draft("init", target), target.config)
    with pytest.raises(UsageError, match=f"trained for target {target.identity}, not for other"):
        main([str(other), "--draft", str(tmp_path / "draft"), "--out", str(tmp_path / "out")])

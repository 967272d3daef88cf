"""The cost of a step: what is measured is there, and depth does not change the program."""

import json
from dataclasses import replace

import pytest

from dejax.config import DraftConfig
from dejax.errors import UsageError
from dejax.sharding import make_mesh
from dejax.target import load_config
from tests.infer.random_target import SHAPES
from tests.train.dense_model import write_dense
from tests.train.small_model import write_model
from train import step_cost as program
from train.distill_config import DistillConfig


@pytest.mark.slow
def test_depth_does_not_change_the_program():
    config = DistillConfig(draft=DraftConfig(width=8), seq_len=16, batch_size=2)
    shallow, deep = (
        program.compile_seconds(replace(SHAPES["shared"], num_layers=n), config, make_mesh())
        for n in (4, 24)
    )
    assert shallow["lines"] == deep["lines"] > 100
    assert (shallow["layers"], deep["layers"]) == (4, 24)


@pytest.mark.slow
def test_the_program_measures_each_part(tmp_path, capsys):
    folder, result = write_model(tmp_path / "model"), tmp_path / "cost.json"
    argv = ["--model", str(folder), "--layers", "2", "--tokens", "64", "--seq-len", "32"]
    assert program.main([*argv, "--repeats", "2", "--json", str(result)]) == 0
    found = json.loads(result.read_text())
    assert list(found["seconds"]) == [
        "target",
        "step",
        "target without head",
        "both streams without head",
        "both streams and losses",
    ]
    assert min(found["seconds"].values()) > 0
    assert found["ratio"] == found["seconds"]["step"] / found["seconds"]["target"]
    assert 2 < found["floor"] < 4 and found["ratio_to_floor"] == found["ratio"] / found["floor"]
    shown = capsys.readouterr().out
    assert "cost of a step" in shown and "compilation" in shown


def test_too_few_layers_are_refused():
    model = load_config(program.SHAPE)
    assert (model.num_layers, model.moe.num_experts) == (27, 64)
    with pytest.raises(UsageError, match="--layers is 1; expected at least 2: the first 1 layers"):
        program.cut(model, 1)


def test_what_cannot_be_measured_is_refused_before_anything_is_compiled(tmp_path, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("compiled")

    monkeypatch.setattr(program, "compile_seconds", never)
    dense, moe = write_dense(tmp_path / "dense"), write_model(tmp_path / "moe")

    def refused(*argv):
        with pytest.raises(UsageError) as raised:
            program.main([*argv, "--json", str(tmp_path / "cost.json")])
        return str(raised.value)

    told = "--model is a dense llama; expected a mixture of experts"
    assert refused("--model", str(dense)) == told
    assert refused("--model", str(dense), "--layers", "99") == told
    context = load_config(moe).context
    told = f"--seq-len is 65536; expected at most the model's context, {context}"
    assert refused("--model", str(moe), "--tokens", "65536", "--seq-len", "65536") == told
    told = "--tokens is 100; expected a multiple of --seq-len, 64"
    assert refused("--model", str(moe), "--tokens", "100", "--seq-len", "64") == told


def test_depths_reach_a_model_that_begins_with_many_dense_layers(monkeypatch, tmp_path):
    shape = SHAPES["shared"]
    late = replace(shape, num_layers=7, experts=replace(shape.moe, dense_layers=(0, 1, 2, 3, 4)))
    depths = []

    def compiled(model, config, mesh):
        depths.append(model.num_layers)
        return {}

    monkeypatch.setattr(program, "load_config", lambda folder: late)
    monkeypatch.setattr(program, "compile_seconds", compiled)
    monkeypatch.setattr(program, "step_cost", lambda *args, **kwargs: {})
    monkeypatch.setattr(program, "_show", lambda result: None)
    argv = ["--layers", "6", "--tokens", "32", "--seq-len", "16"]
    assert program.main([*argv, "--json", str(tmp_path / "cost.json")]) == 0
    assert depths == [6, 24]

"""The cost of a step: what is measured is there, and depth does not change the program."""

import json
from dataclasses import replace

import pytest

from dejax.config import DraftConfig
from dejax.errors import UsageError
from dejax.sharding import make_mesh
from dejax.target import load_config
from tests.infer.random_target import SHAPES
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
    with pytest.raises(UsageError, match="the first 1 layers have no routed experts"):
        program.cut(model, 1)

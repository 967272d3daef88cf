"""Config files whose values are not as annotated: one line each, with field and expectation."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest

from train.config_files import INSTALLED, load_config
from train.config_types import wrong_types
from train.distill_config import DistillConfig
from train.losses import LossWeights

IMPORTS = """
from dejax.config import DraftConfig
from dejax.sharding import MeshConfig
from train.data import Phase
from train.distill_config import DistillConfig
from train.heal_config import HealConfig
from train.loop import LoopConfig
from train.losses import LossWeights
from train.optimizer import OptimizerConfig
from train.pretrain import PretrainConfig
"""


PROGRAM = """
import json, sys
from train.config_files import load_config

def line(path):
    try:
        return f"taken: {load_config(path)}"
    except ValueError as error:
        return str(error)

print(json.dumps({path: line(path) for path in sys.argv[1:]}))
"""


@pytest.fixture(scope="module")
def refusals(tmp_path_factory) -> dict[str, str]:
    """The line for each config file that returns one of `SOURCES`, without the file's name.

    Of another process: in this one the checks of the tests refuse such values first.
    """
    folder = tmp_path_factory.mktemp("configs")
    paths = {source: folder / f"c{i}.py" for i, source in enumerate(SOURCES)}
    for source, path in paths.items():
        path.write_text(f"{IMPORTS}\ndef get_config():\n    return {source}\n")
    command = [sys.executable, "-c", PROGRAM, *map(str, paths.values())]
    env = os.environ | {"PYTHONPATH": str(INSTALLED.parent)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    lines = json.loads(done.stdout)
    assert all(line.startswith(f"{path}: ") for path, line in lines.items())
    assert all(line.count("\n") == 0 for line in lines.values())
    return {source: lines[str(path)].removeprefix(f"{path}: ") for source, path in paths.items()}


WRONG = [
    ("DistillConfig(target=None)", "target is None; expected a string"),
    ("DistillConfig(loop=None)", "loop is None; expected LoopConfig(...)"),
    ("DistillConfig(seq_len=2.5)", "seq_len is 2.5; expected a whole number"),
    ("DistillConfig(seq_len=True)", "seq_len is True; expected a whole number"),
    ("DistillConfig(ema=False)", "ema is False; expected a number"),
    ("DistillConfig(split_draft=1)", "split_draft is 1; expected True or False"),
    ("DistillConfig(kv='foo')", "kv is 'foo'; expected 'draft' or 'mixed'"),
    ("DistillConfig(remat=None)", "remat is None; expected 'none', "),
    ("DistillConfig(draft=3)", "draft is 3; expected DraftConfig(...) or None"),
    ("DistillConfig(draft=DraftConfig(8.5))", "draft.width is 8.5; expected a whole number"),
    ("DistillConfig(loop=LoopConfig(2.5))", "loop.steps is 2.5; expected a whole number"),
    (
        "DistillConfig(losses=LossWeights(temperature=float('nan')))",
        "losses.temperature is nan; expected a number",
    ),
    (
        "HealConfig('a', 'b', trained='all')",
        "trained is 'all'; expected a tuple, each 'routers', 'down', 'norms' or 'all'",
    ),
    ("HealConfig('a', 'b', trained=('all', 'x'))", "trained[1] is 'x'; expected 'routers', "),
    ("HealConfig(1, 'b')", "target is 1; expected a string"),
    (
        "PretrainConfig({}, (Phase(0, 8, '1'),), OptimizerConfig(), LoopConfig(1))",
        "phases[0].batch_size is '1'; expected a whole number",
    ),
    (
        "PretrainConfig([], (), OptimizerConfig(), LoopConfig(1))",
        "model is []; expected a dict",
    ),
    (
        "PretrainConfig({}, (), OptimizerConfig(), LoopConfig(1), start=3)",
        "start is 3; expected a string or None",
    ),
]


@pytest.mark.parametrize(("source", "message"), WRONG)
def test_a_value_of_the_wrong_type_is_told_with_its_field(refusals, source, message):
    assert refusals[source].startswith(message)


FALLEN = [
    ("DistillConfig(batch_size='8')", "DistillConfig: batch_size is '8'; expected a whole num"),
    ("DistillConfig(cpu_devices='2')", "DistillConfig: cpu_devices is '2'; expected a whole"),
    ("DistillConfig(losses_from=3)", "DistillConfig: losses_from is 3; expected LossWeights("),
    ("HealConfig('a', 'b', loop=None)", "HealConfig: loop is None; expected LoopConfig(...)"),
    ("DistillConfig(loop=LoopConfig('9'))", "LoopConfig: steps is '9'; expected a whole num"),
    ("DistillConfig(mesh=MeshConfig('2'))", "MeshConfig: data is '2'; expected a whole numb"),
    ("DistillConfig(losses=LossWeights(token=None))", "LossWeights: token is None; expected a"),
]


@pytest.mark.parametrize(("source", "message"), FALLEN)
def test_so_is_one_over_which_the_configs_own_checks_fall(refusals, source, message):
    assert refusals[source].startswith(f"line 13: {message}")


MANY = "DistillConfig(kv='a', dtype='b', remat='c', objective='d')"
LONG = "DistillConfig(seed=1, target=list(range(999)))"
SOURCES = [MANY, LONG, *(source for source, _ in (*WRONG, *FALLEN))]


def test_of_many_problems_the_first_are_told(refusals):
    text = refusals[MANY]
    assert text.count("; expected ") == 3 and text.endswith("; and 1 more")


def test_a_long_value_is_cut(refusals):
    assert len(refusals[LONG]) < 100


def test_what_is_as_annotated_is_well():
    assert wrong_types(DistillConfig()) == ""
    weights = LossWeights()
    assert wrong_types(DistillConfig(losses=weights, losses_from=weights)) == ""


def test_a_whole_number_may_stand_for_a_float():
    @dataclass(frozen=True)
    class Rates:
        rate: float = 1
        pair: tuple[float, float | None] = (1, None)

    assert wrong_types(Rates()) == ""
    assert wrong_types(Rates(pair=(1, True))) == "pair[1] is True; expected a number or None"
    assert wrong_types(Rates(pair=(1, 2, 3))) == "pair is (1, 2, 3); expected a tuple of 2"


@pytest.mark.parametrize("name", sorted(path.stem for path in INSTALLED.glob("[!_]*.py")))
def test_the_configs_that_come_with_dejax_are_as_annotated(name):
    assert wrong_types(load_config(name)) == ""

"""Config files: found, run, changed by `--set`, and refused in one line."""

import json
from pathlib import Path

import pytest

from dejax.config import DraftConfig
from dejax.errors import UsageError
from train import config_files
from train.config_files import load_config, to_json
from train.losses import LossWeights

CONFIG = '''
"""An experiment."""
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

@dataclass(frozen=True)
class Optimizer:
    rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float | None = None

    def __post_init__(self):
        if self.rate > 1 and self.clip is None:
            raise ValueError("a rate above 1 needs clip")

@dataclass(frozen=True)
class Sized:
    width: int
    depth: int = 1

@dataclass(frozen=True)
class Config:
    steps: int = 100
    name: str = "tiny"
    resume: bool = False
    kind: Literal["mla", "gqa"] = "mla"
    every: Literal[1, 2] = 1
    layers: tuple[int, ...] = (1, 2)
    out: Path = Path("runs")
    warmup: int | str = "auto"
    spare: Optimizer | None = None
    sized: Sized | None = None
    table: dict[str, int] = field(default_factory=dict)
    optimizer: Optimizer = Optimizer()

def get_config():
    return Config()
'''


@pytest.fixture
def path(tmp_path) -> str:
    (tmp_path / "experiment.py").write_text(CONFIG)
    return str(tmp_path / "experiment.py")


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("steps=7", 7),
        ("name=a=b", "a=b"),
        ("resume=true", True),
        ("resume=False", False),
        ("kind=gqa", "gqa"),
        ("every=2", 2),
        ("layers=3", (3,)),
        ("layers=(3, 4,)", (3, 4)),
        ("layers=[]", ()),
        ("layers=", ()),
        ("out=a/b", Path("a/b")),
        ("warmup=12", 12),
        ("warmup=auto", "auto"),
        ("spare=none", None),
        ("optimizer.rate=3e-4", 3e-4),
        ("optimizer.betas=0.8,0.9", (0.8, 0.9)),
        ("optimizer.clip=1", 1.0),
        ("optimizer.clip=None", None),
        ("spare.rate=0.5", 0.5),
        ("spare.betas=0.8,0.9", (0.8, 0.9)),
        ("sized.width=3", 3),
    ],
)
def test_overrides_by_type(path, override, value):
    config = load_config(path, [override])
    for name in override.split("=")[0].split("."):
        config = getattr(config, name)
    assert config == value and type(config) is type(value)


def test_no_override_changes_nothing(path):
    config = load_config(path)
    assert (config.steps, config.optimizer.betas) == (100, (0.9, 0.95))


def test_overrides_are_checked_together_and_the_last_counts(path):
    config = load_config(path, ["optimizer.rate=2", "steps=1", "optimizer.clip=1", "steps=2"])
    assert (config.optimizer.rate, config.optimizer.clip, config.steps) == (2.0, 1.0, 2)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["stps=1"], "--set stps: no such key; did you mean 'steps'? (known: steps, name,"),
        (["optimizer.rte=1"], "--set optimizer.rte: no such key; did you mean 'rate'? (known: rat"),
        (["steps"], "--set steps: expected KEY=VALUE"),
        (["=3"], "--set =3: expected KEY=VALUE"),
        (["steps=1.5"], "--set steps=1.5: '1.5' is not a whole number"),
        (["optimizer.rate=fast"], "--set optimizer.rate=fast: 'fast' is not a number"),
        (["optimizer.clip=x"], "--set optimizer.clip=x: 'x' is not a number (or none)"),
        (["optimizer.betas=1"], "expected 2 values with commas between, got 1"),
        (["layers=1,x"], "--set layers=1,x: 'x' is not a whole number"),
        (["resume=maybe"], "--set resume=maybe: 'maybe' is not true or false"),
        (["kind=mlp"], "--set kind=mlp: 'mlp' is not one of mla, gqa; did you mean 'mla'?"),
        (["optimizer=1"], "--set optimizer=1: is a group; set one of its keys: rate, betas, clip"),
        (["steps.x=1"], "--set steps.x: steps is 100, no group"),
        (
            ["spare=1"],
            "spare=1: is a group; set one of its keys: rate, betas, clip (or none)",
        ),
        (["spare.rte=1"], "--set spare.rte: no such key; did you mean 'rate'?"),
        (["spare.rate=2"], "--set spare.rate=2: a rate above 1 needs clip"),
        (
            ["sized.depth=2"],
            "--set sized.depth: sized is None, and a new one needs sized.width; set that too",
        ),
        (["optimizer.rate=1", "optimizer=1"], "parts of optimizer have been set already"),
        (["optimizer=1", "optimizer.rate=1"], "optimizer has been set as a whole already"),
        (["table=1"], "cannot be given as text; edit the config file"),
        (["optimizer.rate=2"], "--set optimizer.rate=2: a rate above 1 needs clip"),
    ],
)
def test_bad_overrides_are_one_line(path, overrides, message):
    with pytest.raises(UsageError) as raised:
        load_config(path, overrides)
    assert message in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["draft.width=8", "loop.steps=3", "cpu_devices=0"], "cpu_devices=0: cpu_devices is 0; e"),
        (["ema=1", "ramp_steps=3"], "ema=1: ema is 1.0; expected from 0 to below 1"),
        (["ema=0.5", "ramp_steps=-1"], "ramp_steps=-1: ramp_steps is -1; expected 0 or more"),
        (
            ["optimizer.b1=0.5", "optimizer.decay_steps=-1"],
            "optimizer.decay_steps=-1: optimizer.decay_steps is -1; expected 0 or more",
        ),
        (
            ["losses_from.temperature=2", "seed=2"],
            "losses_from.temperature=2: losses_from: has another temperature than losses",
        ),
    ],
)
def test_only_the_setting_at_fault_is_told(settings, message):
    with pytest.raises(UsageError) as raised:
        load_config("distill_tiny", settings)
    assert str(raised.value).startswith(f"--set {message}")
    with pytest.raises(UsageError, match="^--set temperature=0: temperature is 0.0; expected > 0$"):
        load_config("heal_smol", ["temperature=0", "balance_weight=1"])


def test_a_group_that_is_none_starts_from_its_defaults():
    settings = ["losses_from.residual=0", "ramp_steps=2", "draft.width=8"]
    config = load_config("distill_tiny", settings)
    assert config.losses_from == LossWeights(residual=0.0)
    assert config.draft == DraftConfig(width=8)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = (", ": line 1: not Python: "),
        ("x = 1\0", "experiment.py: not Python: source code string cannot contain null bytes"),
        ("\nimport no_such_module", ": line 2: ModuleNotFoundError: No module named 'no_such_mod"),
        ("x = 1", ": defines no get_config(); expected a function"),
        ("def get_config():\n    return 1", ": get_config() returned int; expected a frozen datac"),
        ("def get_config():\n    return {}['a']", ": line 2: KeyError: 'a'"),
        (CONFIG + "\n\ndef get_config():\n    return Optimizer(rate=2)", "a rate above 1 needs cl"),
        (CONFIG.replace("(frozen=True)", ""), "mutable default"),
    ],
)
def test_bad_files_are_one_line(tmp_path, source, message):
    path = tmp_path / "experiment.py"
    path.write_text(source)
    with pytest.raises(UsageError) as raised:
        load_config(str(path))
    assert str(raised.value).startswith(str(path)) and message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_name_stands_for_an_installed_config(tmp_path, monkeypatch):
    monkeypatch.setattr(config_files, "INSTALLED", tmp_path)
    monkeypatch.chdir(tmp_path.parent)
    (tmp_path / "__init__.py").touch()
    (tmp_path / "distill_tiny.py").write_text(CONFIG)
    for name in ("distill_tiny", "distill_tiny.py", "configs/distill_tiny.py"):
        assert load_config(name).steps == 100
    with pytest.raises(UsageError, match="none of dejax's; did you mean 'distill_tiny'"):
        load_config("configs/distil_tiny.py")
    with pytest.raises(UsageError, match="none of dejax's; dejax comes with: distill_tiny"):
        load_config("elsewhere/xyz")


def test_to_json_is_plain(path):
    plain = to_json(load_config(path, ["spare=none"]))
    assert json.loads(json.dumps(plain)) == plain
    assert plain["optimizer"] == {"rate": 1e-3, "betas": [0.9, 0.95], "clip": None}
    assert (plain["out"], plain["layers"]) == ("runs", [1, 2])


@pytest.mark.parametrize(
    "setting",
    [
        *("optimizer.learning_rate=nan", "optimizer.b1=1", "optimizer.b2=-1", "loop.steps=-1"),
        *("optimizer.final_fraction=-1", "optimizer.weight_decay=-1", "optimizer.clip_norm=0"),
        *("losses.token=inf", "losses.temperature=1e309", "seed=-1", "seed=4294967296"),
        *("cpu_devices=0", "cpu_devices=100000", "batch_size=2147483647", "loop.steps=1e3"),
    ],
)
def test_extremes_of_a_run_are_refused_with_their_name(setting):
    with pytest.raises(UsageError) as raised:
        load_config("distill_tiny", [setting])
    assert setting.split("=")[0] in str(raised.value)

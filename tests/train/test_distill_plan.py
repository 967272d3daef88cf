"""Plans of full-size runs, without a weight: the configs, operations, and memory as compiled."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from dejax import families
from dejax.ckpt.tensor_files import read_json
from dejax.config import DraftConfig, ModelConfig
from dejax.errors import UsageError
from dejax.sharding import abstract_mesh
from train import distill_plan
from train.config_files import INSTALLED, load_config
from train.distill_config import check_shape
from train.distill_plan import abstract_step, device_bytes, estimate_step_bytes
from train.flops import active_weights, step_flops

PUBLISHED = Path(__file__).parent.parent / "families" / "published"
CONFIGS = {
    "distill_deepseek_v2_lite": "DeepSeek-V2-Lite",
    "distill_moonlight": "Moonlight-16B-A3B",
    "distill_qwen3_30b": "Qwen3-30B-A3B",
    "distill_qwen3_235b": "Qwen3-235B-A22B",
    "distill_gpt_oss_20b": "gpt-oss-20b",
}


def published(name: str) -> ModelConfig:
    return families.model_config(read_json(PUBLISHED / f"{name}.json"))


def test_every_config_for_a_release_is_here():
    files = {file.stem for file in INSTALLED.glob("distill_*.py")}
    assert files - {"distill_tiny", "distill_smol"} == set(CONFIGS)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_the_full_size_step_traces_on_its_mesh(name):
    """The step of a release, on a mesh of devices that are not here, and its memory as stated."""
    config, model = load_config(name), published(CONFIGS[name])
    assert config.target == CONFIGS[name]
    mesh = abstract_mesh(config.mesh)
    check_shape(config, model, mesh)
    _, step, arguments = abstract_step(model, config, mesh)
    with jax.sharding.use_abstract_mesh(mesh):
        state, metrics = jax.eval_shape(step, *arguments)
    given = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), arguments[1])
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state) == given
    assert {"loss", "kl", "token", "residual", "router", "grad_norm"} <= set(metrics)
    held = sum(device_bytes(part) for part in arguments[:3])
    total = held + estimate_step_bytes(model, config, mesh)
    stated = re.search(r"Memory: +about ([\d.]+) GiB", (INSTALLED / f"{name}.py").read_text())
    assert stated and float(stated[1]) == pytest.approx(total / 2**30, abs=0.06)


def test_a_mesh_that_does_not_divide_is_refused():
    config = load_config("distill_qwen3_30b", ["mesh.expert=3", "mesh.tensor=5", "batch_size=24"])
    message = "vocabulary 151936 over fsdp x expert x tensor = 60, attention heads 32 over tensor"
    with pytest.raises(UsageError, match=message):
        check_shape(config, published("Qwen3-30B-A3B"), abstract_mesh(config.mesh))


def test_operations_are_those_of_the_active_weights():
    model, draft = published("Qwen3-30B-A3B"), DraftConfig(width=768)
    assert active_weights(model, 8) == pytest.approx(3.04e9, rel=0.005)
    flops = step_flops(model, draft, seq_len=1)
    assert flops.target == pytest.approx(6.08e9, rel=0.005)
    # Forward, and backward to activations: top-1 and the draft expert, both as wide as an expert.
    trained = 48 * 3 * 768 * 2048
    student = active_weights(model, 8) - 7 * trained + trained
    assert flops.draft == pytest.approx(4 * student, rel=1e-3) and flops.trained == 2 * trained
    longer = step_flops(model, draft, seq_len=4097)
    assert longer.draft - flops.draft == pytest.approx(3 * (longer.target - flops.target))


def test_a_plan_without_room_is_refused(monkeypatch):
    plan = dict(target_bytes=6 * 2**30, state_bytes=2**30, batch_bytes=1, step_bytes=2**30)
    monkeypatch.setattr(distill_plan, "device_memory", lambda: 9 * 2**30)
    distill_plan.check_memory(plan)
    monkeypatch.setattr(distill_plan, "device_memory", lambda: 7 * 2**30)
    message = "takes 8 GiB of each device, which has 7 GiB; split the target over more devices"
    with pytest.raises(UsageError, match=message):
        distill_plan.check_memory(plan)


_COMPILE = """
import json, sys
from pathlib import Path
import jax
jax.config.update("jax_num_cpu_devices", 8)
from dejax import families
from dejax.ckpt.tensor_files import read_json
from dejax.sharding import MeshConfig, make_mesh
from train.distill_config import DistillConfig
from train.distill_plan import PER_DEVICE, estimate_step_bytes, plan_distillation

model = families.model_config(read_json(Path(sys.argv[1])) | {"num_hidden_layers": 3})
found = []
for seq_len, axes in json.loads(sys.argv[2]):
    mesh = MeshConfig(**axes)
    config = DistillConfig(seq_len=seq_len, batch_size=8, remat="layer", mesh=mesh)
    plan = plan_distillation(model, config, make_mesh(mesh))
    formula = estimate_step_bytes(model, config, make_mesh(mesh))
    found.append([sum(plan[part] for part in PER_DEVICE), plan["step_bytes"], formula])
print(json.dumps(found))
"""


@pytest.mark.slow
def test_the_peak_is_within_a_tenth_of_the_formula():
    """Of the compiled step, on three meshes of eight devices, with DeepSeek-V2-Lite's layers."""
    cases = [
        (512, dict(data=1, fsdp=4, expert=2)),
        (1024, dict(data=2, fsdp=2, expert=2)),
        (1024, dict(data=8)),
    ]
    file = PUBLISHED / "DeepSeek-V2-Lite.json"
    command = [sys.executable, "-c", _COMPILE, str(file), json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for peak, step, formula in json.loads(done.stdout.splitlines()[-1]):
        assert peak - step + formula == pytest.approx(peak, rel=0.1)

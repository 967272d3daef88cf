"""What lies on disk: both layouts of the experts, shards, bfloat16, and the way back."""

import jax
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors import safe_open

from dejax.ckpt.hf_weights import resident_keys, write_checkpoint
from dejax.ckpt.tensor_files import read_json
from dejax.target import load_target
from tests.families import reference
from tests.families.configurations import CONFIGS, DEEPSEEK_V2, FIRST, MOE_CONFIGS
from tests.families.parity import TOKENS, assert_same
from tests.families.random_folder import raw_config, write_folder


def arrays(target):
    """Every weight of a target, in one order."""
    return jax.tree.leaves((nnx.split(target.model)[1], target.routed))


def assert_same_bits(one, other):
    for a, b in zip(arrays(one), arrays(other), strict=True):
        np.testing.assert_array_equal(a, b, strict=True)


OTHERS = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in (*FIRST.values(), "mixtral-window", "gpt-oss-clamped")
    if name not in DEEPSEEK_V2
]


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.float32, id="float32"),
        pytest.param(torch.bfloat16, id="bfloat16", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize("fused", [False, True], ids=["single", "fused"])
@pytest.mark.parametrize("name", ["full", *OTHERS])
def test_disk_forms(case, tmp_path, name, dtype, sharded, fused):
    """Both layouts of the experts, one file or many, float32 or bfloat16: the same bits.

    vllm-project/vllm 36997, ktransformers 2148, Megatron-Bridge 4706: either layout may come in one
    file, and none of its experts may stay random.
    """
    this = case(name)
    model = this.model if dtype == torch.float32 else reference.load(this.folder, dtype)
    form = dict(max_shard_size="60KB") if sharded else {}
    folder = reference.save(model, tmp_path / "m", save_original_format=not fused, **form)
    assert len(list(folder.glob("*.safetensors"))) > 3 * sharded
    assert_layout(folder, name, fused)
    if dtype == torch.float32:
        assert_same_bits(load_target(folder), this.target)
    else:
        # Rounding while reading is the same as having been rounded when written.
        rounded = load_target(folder, "bfloat16")
        if name in MOE_CONFIGS and not routers_are_float32(folder):
            return assert_same_when_rounded(rounded, load_target(this.folder, "bfloat16"))
        assert_same_bits(rounded, load_target(this.folder, "bfloat16"))


def stored(folder) -> dict[str, torch.Tensor]:
    """Every tensor of a folder, from whichever file."""
    tensors = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            tensors |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    return tensors


def assert_layout(folder, name, fused):
    """The folder has the layout that the test is about."""
    single = {key for key in stored(folder) if ".experts.0." in key}
    has_single_form = CONFIGS[name]["model_type"] not in ("gpt_oss", "llama", "qwen3")
    assert bool(single) == (has_single_form and not fused)


def routers_are_float32(folder) -> bool:
    routers = {key: t for key, t in stored(folder).items() if key.endswith("gate.weight")}
    return bool(routers) and all(t.dtype == torch.float32 for t in routers.values())


def assert_same_when_rounded(one, other):
    """Equal but for routers, which one folder holds in bfloat16 and the other in float32."""
    for a, b in zip(arrays(one), arrays(other), strict=True):
        np.testing.assert_array_equal(a, np.asarray(b).astype("bfloat16").astype(b.dtype))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full", "v3", "gpt-oss", "olmoe"])
def test_a_bfloat16_folder_computes_what_the_reference_does(case, tmp_path, name):
    folder = reference.save(reference.load(case(name).folder, torch.bfloat16), tmp_path / "m")
    assert_same(load_target(folder)(TOKENS), reference.logits(reference.load(folder), TOKENS))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "name", [n if n in DEEPSEEK_V2 else pytest.param(n, marks=pytest.mark.slow) for n in CONFIGS]
)
def test_tensors_go_back_byte_for_byte(case, tmp_path, name, dtype):
    """Read and written again, a folder has the bytes that the reference wrote.

    huggingface/transformers 42580: selection biases are float32 in either.
    """
    this = case(name)
    model = this.model if dtype == "float32" else reference.load(this.folder, torch.bfloat16)
    folder = reference.save(model, tmp_path / "m")
    target = load_target(folder, dtype)
    raw = read_json(folder / "config.json")
    write_checkpoint(tmp_path / "again", raw, target.model, target.routed, dtype=dtype)
    expected, written = stored(folder), stored(tmp_path / "again")
    assert expected.keys() == written.keys()
    biases = {key for key, path in resident_keys(target.config).items() if "selection" in path}
    for key, tensor in written.items():
        kept = torch.float32 if key in biases else getattr(torch, dtype)
        assert tensor.dtype == kept, key
        # The reference keeps some routers in float32, releases have them as everything else.
        assert expected[key].dtype == kept or key.endswith("mlp.gate.weight"), key
        a, b = (t.contiguous().view(torch.uint8) for t in (tensor, expected[key].to(kept)))
        assert torch.equal(a, b), key
    assert biases == {key for key in written if key.endswith("e_score_correction_bias")}
    assert read_json(tmp_path / "again" / "config.json") | {"dtype": 0} == raw | {"dtype": 0}


@pytest.mark.parametrize("name", ["gpt-oss", "mixtral", "qwen3"])
def test_our_own_files_are_read_and_written_alike(tmp_path, name):
    """An array that is a transposed view must not be written as its memory lies."""
    folder = write_folder(tmp_path / "m", raw_config(name))
    target, raw = load_target(folder), read_json(folder / "config.json")
    write_checkpoint(tmp_path / "again", raw, target.model, target.routed, dtype="float32")
    assert_same_bits(load_target(tmp_path / "again"), target)
    file = "model.safetensors"
    assert (tmp_path / "again" / file).read_bytes() == (folder / file).read_bytes()


def test_a_released_router_in_bfloat16_is_widened(case, tmp_path):
    """Releases hold in bfloat16 what the reference's class writes in float32."""
    this = case("full")
    target = load_target(this.folder, "bfloat16")
    raw = read_json(this.folder / "config.json")
    write_checkpoint(tmp_path / "m", raw, target.model, target.routed, dtype="bfloat16")
    assert_same_when_rounded(load_target(tmp_path / "m", "bfloat16"), target)

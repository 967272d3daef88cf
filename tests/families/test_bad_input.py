"""Folders that no family takes: one line each that says what is wrong."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dejax import families
from dejax.ckpt.hf_weights import plan_checkpoint
from dejax.errors import UsageError
from dejax.target import load_config
from tests.families.configurations import CONFIGS, FIRST, yarn
from tests.families.random_folder import edit_tensors, raw_config, write_folder

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def refusal(raw: dict) -> str:
    """The one line that refuses a `config.json`."""
    with pytest.raises(UsageError) as caught:
        families.model_config(raw)
    text = str(caught.value)
    assert text.startswith(("config.json: ", "attention: ", "experts: ", "rope: ", "model: "))
    assert "\n" not in text
    return text


def folder_refusal(folder) -> str:
    """The one line that refuses a folder, before a weight is read."""
    with pytest.raises(UsageError) as caught:
        plan_checkpoint(folder, load_config(folder))
    text = str(caught.value)
    assert text.startswith(str(folder)) and "\n" not in text
    return text


def edit_config(folder, **values):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return folder


# --- config.json ------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["bert", "qwen3_next", "deepseek", ""])
def test_an_unsupported_family_names_the_supported_ones(model_type):
    text = refusal(raw_config("qwen3-moe", model_type=model_type))
    assert repr(model_type) in text
    assert all(family in text for family in families.FAMILIES)


@pytest.mark.parametrize("family", FIRST)
def test_quantised_weights_are_not_taken_for_plain_ones(family):
    foreign = "fp8" if family == "gpt_oss" else "mxfp4"  # what another family is released in
    for method in ("unheard-of", foreign):
        raw = raw_config(FIRST[family], quantization_config={"quant_method": method})
        assert "quantization" in refusal(raw)


@pytest.mark.parametrize("family", FIRST)
@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_an_unknown_rotation(family, key):
    raw = {k: v for k, v in raw_config(FIRST[family]).items() if k != "rope_parameters"}
    text = refusal(raw | {key: dict(rope_type="longrope", factor=4.0)})
    assert "longrope" in text and "yarn" in text


def test_two_rotations_that_disagree():
    scaling = yarn(truncate=True, rope_theta=150000.0)
    assert "disagree" in refusal(raw_config("gpt-oss", rope_scaling=scaling))


def test_gpt_oss_without_a_rotation():
    """Its reference then falls back to the settings of the release, which no file means."""
    raw = {k: v for k, v in raw_config("gpt-oss").items() if k != "rope_parameters"}
    assert "rope_scaling is missing" in refusal(raw)


OTHER_COUNTS = {
    "lite": "num_local_experts",
    "v3": "num_experts",
    "qwen3-moe": "num_local_experts",
    "olmoe": "num_local_experts",
    "mixtral": "num_experts",
    "gpt-oss": "num_experts",
    "glm4-moe": "num_local_experts",
}


@pytest.mark.parametrize("name", OTHER_COUNTS)
def test_two_numbers_of_experts(name):
    other = OTHER_COUNTS[name]
    assert "disagree" in refusal(raw_config(name, **{other: 16}))
    count = families.model_config(CONFIGS[name]).moe.num_experts
    same = families.model_config(raw_config(name, **{other: count}))
    assert same == families.model_config(CONFIGS[name])


@pytest.mark.parametrize("name", ["gpt-oss", "qwen3-window"])
@pytest.mark.parametrize(
    "kinds", [["full_attention"] * 3, ["full_attention"] * 5, ["chunked_attention"] * 4, [1] * 4]
)
def test_attention_types_that_do_not_fit_the_layers(name, kinds):
    text = refusal(raw_config(name, layer_types=kinds))
    assert "layer_types" in text and "expected 4" in text


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen3-moe", dict(num_key_value_heads=3), "multiple"),
        ("qwen3-moe", dict(mlp_only_layers=["0"]), "list of integers"),
        ("qwen3-moe", dict(mlp_only_layers=3), "list of integers"),
        ("qwen3-moe", dict(num_experts_per_tok=9), "9 per token out of 8"),
        ("olmoe", dict(clip_qkv=-1.0), "clip"),
        ("mixtral-window", dict(sliding_window=-4), "window"),
        ("v3", dict(n_group=8), "two experts a group"),
        ("v3", dict(topk_group=1), "in the kept groups"),
        ("v3", dict(scoring_func="softmax"), "scoring_func"),
        ("glm4-moe", dict(hidden_act="gelu"), "hidden_act"),
        ("gpt-oss", dict(swiglu_limit=0.0), "limit"),
        ("llama", dict(hidden_size=True), "hidden_size is True"),
    ],
)
def test_settings_that_cannot_be(name, changes, message):
    assert message in refusal(raw_config(name, **changes))


@pytest.mark.parametrize("name", ["qwen3-moe", "v3", "glm4-moe"])
def test_a_default_that_no_release_has_must_be_said(name):
    raw = {k: v for k, v in raw_config(name).items() if k != "norm_topk_prob"}
    assert "norm_topk_prob is missing" in refusal(raw)


# --- config and weights -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Makes a fresh random folder of a configuration."""

    def make(name, **overrides):
        return write_folder(tmp_path_factory.mktemp("bad") / "m", raw_config(name, **overrides))

    return make


DISAGREE = {
    "v3": dict(n_routed_experts=16),
    "qwen3-moe": dict(moe_intermediate_size=48),
    "olmoe": dict(num_experts=4, num_experts_per_tok=2),
    "mixtral": dict(hidden_size=32),
    "gpt-oss": dict(num_local_experts=4),
    "glm4-moe": dict(use_qk_norm=False),
    "llama": dict(intermediate_size=64),
    "qwen3": dict(head_dim=16),
}


COUNTS = {"v3": (8, 16), "olmoe": (8, 4), "gpt-oss": (8, 4)}
"""Experts in the files and in the other configuration, where those differ."""


@pytest.mark.parametrize("name", DISAGREE)
def test_a_config_of_another_model(folder_of, name):
    folder = edit_config(folder_of(name), **DISAGREE[name])
    text = folder_refusal(folder).removeprefix(f"{folder}: ")
    assert "bad tensors" in text and len(text) < 400
    assert ("experts, config.json says" in text) == (name in COUNTS)
    if name in COUNTS:
        have, says = COUNTS[name]
        assert text.startswith(f"the files have {have} experts, config.json says {says}; ")


def test_a_missing_part_of_fused_experts(folder_of):
    """NVIDIA-NeMo/Megatron-Bridge 4706: experts are never left random."""
    key = "model.layers.2.mlp.experts.down_proj_bias"
    folder = edit_tensors(folder_of("gpt-oss"), lambda tensors: tensors.pop(key))
    assert folder_refusal(folder).endswith(f"1 bad tensors: {key}: missing")


def test_experts_the_other_way_round(folder_of):
    """NVIDIA-NeMo/Megatron-Bridge 3743: seen wherever a shape can tell."""
    key = "model.layers.0.mlp.experts.gate_up_proj"

    def turn(tensors):
        tensors[key] = np.ascontiguousarray(tensors[key].swapaxes(1, 2))

    text = folder_refusal(edit_tensors(folder_of("gpt-oss"), turn))
    assert text.endswith(f"{key}: shape [8, 128, 64], expected [8, 64, 128]")


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3-moe-sparse"])
def test_a_tied_model_with_another_head(folder_of, name):
    """vllm-project/vllm 51665, mlx-lm 1298: flag and file disagree, and neither is trusted."""

    def give(tensors, factor):
        tensors[HEAD] = factor * tensors[EMBEDDING]

    folder = edit_tensors(folder_of(name), lambda tensors: give(tensors, 2))
    assert f"{HEAD}: differs from {EMBEDDING}" in folder_refusal(folder)
    plan_checkpoint(edit_tensors(folder, lambda t: give(t, 1)), load_config(folder))
    edit_config(folder, tie_word_embeddings=False)
    edit_tensors(folder, lambda tensors: tensors.pop(HEAD))
    assert f"{HEAD}: missing" in folder_refusal(folder)


def test_prediction_layers_are_left_out_by_name(folder_of):
    """Only what follows the last layer, and only in families that have such layers."""
    extra = {f"model.layers.{i}.eh_proj.weight": np.ones((2, 2), np.float32) for i in (3, 4)}
    for name in ("v3", "glm4-moe"):
        folder = edit_tensors(folder_of(name), lambda tensors: tensors.update(extra))
        assert plan_checkpoint(folder, load_config(folder)).resident
    far = {"model.layers.99.eh_proj.weight": np.ones((2, 2), np.float32)}
    assert "unknown" in folder_refusal(edit_tensors(folder, lambda t: t.update(far)))
    other = edit_tensors(folder_of("olmoe"), lambda tensors: tensors.update(extra))
    assert "2 bad tensors" in folder_refusal(other)


# --- shards -----------------------------------------------------------------------------------


@pytest.fixture
def sharded(folder_of):
    """A folder in two shards with an index, and the tensors of the second."""
    folder = folder_of("gpt-oss")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    second = {name: tensors.pop(name) for name in sorted(tensors)[:5]}
    for number, content in enumerate((tensors, second), start=1):
        save_file(content, folder / f"model-{number}.safetensors")
    names = {name: f"model-{1 + (name in second)}.safetensors" for name in tensors | second}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    plan_checkpoint(folder, load_config(folder))  # nothing is wrong yet
    return folder, second


def test_a_shard_of_another_checkpoint(sharded):
    folder, second = sharded
    first = load_file(folder / "model-1.safetensors")
    name = next(iter(second))
    save_file(first | {name: second[name]}, folder / "model-1.safetensors")
    assert f"{name}: in both model-1.safetensors and model-2.safetensors" in folder_refusal(folder)


def test_a_listed_shard_that_is_missing(sharded):
    """Neph0s/CoSER 3, mlx-vlm 1827."""
    folder, _ = sharded
    (folder / "model-2.safetensors").unlink()
    assert "shards listed but missing: model-2.safetensors" in folder_refusal(folder)


def test_a_shard_without_a_listed_tensor(sharded):
    folder, second = sharded
    name = next(iter(second))
    save_file({k: v for k, v in second.items() if k != name}, folder / "model-2.safetensors")
    assert f"{name}: in the index, but in no shard" in folder_refusal(folder)

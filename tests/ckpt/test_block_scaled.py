"""FP8 and MXFP4 checkpoints against the definitions of their formats, number by number."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from dejax import families
from dejax.block_scaled import from_fp8, from_mxfp4, tiles
from dejax.ckpt import hf_weights
from dejax.ckpt.expert_store import ExpertStore
from dejax.errors import UsageError
from dejax.families import gpt_oss
from dejax.target import load_target
from infer.convert import convert

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
V3 = dict(
    model_type="deepseek_v3",
    vocab_size=32,
    hidden_size=160,  # tiles of 128 and 32
    intermediate_size=136,
    moe_intermediate_size=130,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=64,
    first_k_dense_replace=1,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
    norm_topk_prob=True,
    routed_scaling_factor=1.0,
    kv_lora_rank=128,
    q_lora_rank=None,
    qk_rope_head_dim=8,
    qk_nope_head_dim=16,
    v_head_dim=16,
)
GPT_OSS = dict(
    model_type="gpt_oss",
    vocab_size=32,
    hidden_size=64,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    max_position_embeddings=64,
    num_local_experts=4,
    num_experts_per_tok=2,
    sliding_window=8,
    rope_scaling=dict(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=16, truncate=False
    ),
    rope_theta=150000,
)
QUANTISED = dict(quant_method="fp8", fmt="e4m3", weight_block_size=[128, 128])


def write(folder, raw, tensors):
    """A Hugging Face folder of these tensors."""
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def resident(config, rng):
    """Random resident weights, by checkpoint key."""
    _, state = hf_weights.abstract_model(config)
    shapes = {path: leaf.shape for path, leaf in hf_weights.array_paths(state).items()}
    keys = hf_weights.resident_keys(config)
    return {key: rng.standard_normal(shapes[path], np.float32) for key, path in keys.items()}


@pytest.fixture(scope="module")
def fp8(tmp_path_factory):
    """A DeepSeek-V3 folder whose linear maps are FP8, and every number it stands for."""
    rng, config = np.random.default_rng(0), families.model_config(V3)
    found = resident(config, rng)
    f, d = config.moe.expert_width, config.width
    for layer in config.moe_layers:
        for expert in range(config.moe.num_experts):
            keys = families.family_of(config.family).expert_keys(expert)
            for key, shape in zip(keys, ((f, d), (f, d), (d, f)), strict=True):
                found[f"model.layers.{layer}.{key}"] = rng.standard_normal(shape, np.float32)
    stored, meant = {}, {}
    for key, array in found.items():
        if array.ndim < 2 or any(part in key for part in ("embed", "head", "mlp.gate.")):
            stored[key] = meant[key] = array
            continue
        scales = np.exp(rng.standard_normal(tiles(array.shape))).astype(np.float32)
        codes = array.astype(FP8)
        stored |= {key: codes, f"{key}_scale_inv": scales}
        rows, columns = np.indices(array.shape)
        meant[key] = codes.astype(np.float32) * scales[rows // 128, columns // 128]
    folder = tmp_path_factory.mktemp("fp8")
    return write(folder, V3 | {"quantization_config": QUANTISED}, stored), meant, stored


def test_fp8_weights_are_codes_times_their_tiles_scale(fp8):
    folder, meant, _ = fp8
    target = load_target(folder)
    tensors = hf_weights.checkpoint_tensors(target.config, target.model, target.routed)
    assert set(tensors) == set(meant)
    for key, expected in meant.items():
        np.testing.assert_array_equal(tensors[key], expected, err_msg=key)


def test_fp8_checkpoints_convert_without_loss(fp8, tmp_path, monkeypatch):
    monkeypatch.setattr("dejax.ckpt.tensor_files._CHUNK", 1000)
    folder, _, _ = fp8
    convert(folder, tmp_path / "out")
    assert ExpertStore.open(tmp_path / "out" / "experts").encoding == "float32"
    ours, converted = load_target(folder), load_target(tmp_path / "out")
    tokens = [[3, 1, 4, 1, 5]]
    np.testing.assert_array_equal(ours(tokens), converted(tokens))
    assert ours.identity == converted.identity


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda t, k: t.pop(f"{k}_scale_inv"), "_scale_inv: missing"),
        (lambda t, k: t.update({f"{k}_scale_inv": np.ones((1, 1), np.float32)}), "shape"),
        (lambda t, k: t.update({k: t[k].view(np.uint8)}), "bytes, expected numbers"),
    ],
)
def test_an_fp8_checkpoint_with_faults_is_refused(fp8, tmp_path, spoil, message):
    folder, _, stored = fp8
    tensors = dict(stored)
    spoil(tensors, "model.layers.1.mlp.experts.0.gate_proj.weight")
    raw = json.loads((folder / "config.json").read_text())
    with pytest.raises(UsageError, match=message):
        load_target(write(tmp_path / "m", raw, tensors))


def test_a_ragged_last_tile():
    codes = np.ones((130, 300)).astype(FP8)
    scales = np.arange(6, dtype=np.float32).reshape(2, 3)
    numbers = from_fp8(codes, scales)
    assert numbers[127, 127] == 0 and numbers[127, 299] == 2 and numbers[129, 128] == 4


def test_mxfp4_blocks():
    """Every code at every place, low half first, scales from tiny to huge."""
    rng = np.random.default_rng(1)
    blocks = rng.integers(0, 256, (4, 3, 16), np.uint8)
    scales = rng.integers(60, 200, (4, 3), np.uint8)
    numbers = from_mxfp4(blocks, scales)
    for row, group, place in np.ndindex(4, 3, 32):
        byte = int(blocks[row, group, place // 2])
        code = byte >> 4 if place % 2 else byte & 15
        expected = (-1) ** (code >> 3) * FP4[code & 7] * 2.0 ** (int(scales[row, group]) - 127)
        assert numbers[row, group * 32 + place] == expected


@pytest.mark.slow
def test_an_mxfp4_checkpoint_is_its_dequantised_self(tmp_path):
    config, rng = families.model_config(GPT_OSS), np.random.default_rng(2)
    plain = resident(config, rng)
    packed = dict(plain)
    for layer in config.moe_layers:
        prefix, parts = f"model.layers.{layer}.mlp.experts.", []
        for key, shape in zip(gpt_oss.MXFP4.keys, gpt_oss.MXFP4.shapes(config), strict=True):
            if key.endswith("bias"):
                part = rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)
            else:
                low, high = (118, 126) if key.endswith("scales") else (0, 256)
                part = rng.integers(low, high, shape).astype(np.uint8)
            packed[f"model.layers.{layer}.{key}"] = part
            parts.append(part)
        for name, (blocks, scales, bias) in (("gate_up", parts[:3]), ("down", parts[3:])):
            whole = np.stack([from_mxfp4(b, s).T for b, s in zip(blocks, scales, strict=True)])
            plain[f"{prefix}{name}_proj"] = np.ascontiguousarray(whole)
            plain[f"{prefix}{name}_proj_bias"] = bias.astype(np.float32)
    quantised = GPT_OSS | {"quantization_config": {"quant_method": "mxfp4"}}
    folder = write(tmp_path / "packed", quantised, packed)
    targets = [load_target(write(tmp_path / "plain", GPT_OSS, plain)), load_target(folder)]
    for one, other in zip(*(jax.tree.leaves(t.routed) for t in targets), strict=True):
        np.testing.assert_array_equal(one, other)
    convert(folder, tmp_path / "out")
    assert ExpertStore.open(tmp_path / "out" / "experts").encoding == "bfloat16"
    tokens = [list(range(20))]
    np.testing.assert_array_equal(targets[0](tokens), load_target(tmp_path / "out")(tokens))

"""Random small checkpoints written by dejax itself, with nothing left at its default value."""

from pathlib import Path

import jax
import numpy as np
from flax import nnx
from safetensors.numpy import load_file, save_file

from dejax import families
from dejax.ckpt.hf_weights import abstract_model, write_checkpoint

COMMON = dict(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=96,
    moe_intermediate_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=128,
    first_k_dense_replace=1,
    n_routed_experts=8,
    num_experts_per_tok=3,
    n_shared_experts=2,
    kv_lora_rank=32,
    q_lora_rank=None,
    qk_rope_head_dim=8,
    qk_nope_head_dim=16,
    v_head_dim=16,
    eos_token_id=2,
)


def yarn(mscale: float, mscale_all_dim: float) -> dict:
    """YaRN settings that matter at 64 positions: extension by 4 from 32."""
    return dict(
        rope_type="yarn",
        rope_theta=1e4,
        factor=4.0,
        original_max_position_embeddings=32,
        beta_fast=32,
        beta_slow=1,
        mscale=mscale,
        mscale_all_dim=mscale_all_dim,
    )


CONFIGS = {
    "lite": dict(topk_method="greedy", rope_parameters=yarn(0.707, 0.707)),
    "full": dict(
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        q_lora_rank=24,
        routed_scaling_factor=16.0,
        rope_parameters=yarn(0.707, 0.707),
    ),
    "two-mscales-biases-tied": dict(
        topk_method="greedy",
        rope_parameters=yarn(1.0, 0.5),
        attention_bias=True,
        mlp_bias=True,
        q_lora_rank=24,
        tie_word_embeddings=True,
    ),
    "no-yarn-all-moe": dict(
        topk_method="greedy",
        first_k_dense_replace=0,
        rope_parameters=dict(rope_type="default", rope_theta=5e3),
    ),
}


def raw_config(name: str = "lite", **overrides) -> dict:
    """The content of `config.json` of a named configuration."""
    return {"model_type": "deepseek_v2"} | COMMON | CONFIGS[name] | overrides


def write_folder(folder: Path, raw: dict | None = None, *, dtype="float32", seed: int = 0) -> Path:
    """Writes a Hugging Face folder with random weights and returns it."""
    raw = raw_config() if raw is None else raw
    config = families.model_config(raw)
    rng = np.random.default_rng(seed)

    def fill(path, leaf):
        noise = rng.standard_normal(leaf.shape, np.float32)
        name = jax.tree_util.keystr(path)
        return 1 + 0.2 * noise if "norm" in name else 1.5 * noise * leaf.shape[-1] ** -0.5

    definition, state = abstract_model(config)
    params = jax.tree_util.tree_map_with_path(fill, nnx.to_pure_dict(state))
    shape = (config.moe.num_experts, 3, config.moe.expert_width, config.width)
    routed = {
        layer: rng.standard_normal(shape, np.float32) * config.width**-0.5
        for layer in config.moe_layers
    }
    write_checkpoint(folder, raw, nnx.merge(definition, params), routed, dtype=dtype)
    return folder


def edit_tensors(folder: Path, edit) -> Path:
    """Applies `edit` to the dictionary of a folder's tensors, in place."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder

"""Random small checkpoints written by `transformers`, with nothing left at its default value."""

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DeepseekV2Config

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


def random_model(name: str, seed: int = 0, **overrides):
    """A `transformers` model (eager, float32) of a named configuration, all weights re-randomised."""
    config = DeepseekV2Config(**(COMMON | CONFIGS[name] | overrides))
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    for key, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in key:
            parameter.data = 1 + 0.2 * noise
        elif key.endswith("bias"):
            parameter.data = 0.1 * noise
        elif key.endswith("mlp.gate.weight"):
            parameter.data = 0.5 * noise
        else:
            parameter.data = 1.5 * noise * parameter.shape[-1] ** -0.5
    return model


def save(model, folder: Path, **kwargs) -> Path:
    """Writes the model as a Hugging Face folder and returns it."""
    model.save_pretrained(folder, **kwargs)
    return folder


def reference_logits(model, tokens: np.ndarray) -> np.ndarray:
    """Logits [B, T, V] of whole sequences."""
    with torch.no_grad():
        return model(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()

"""Small configurations of every family; together they have each of its features on."""

from typing import Any

FEW = dict(
    vocab_size=256,
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=128,
    eos_token_id=2,
)
MLA = dict(
    num_key_value_heads=4,
    kv_lora_rank=32,
    q_lora_rank=None,
    qk_rope_head_dim=8,
    qk_nope_head_dim=16,
    v_head_dim=16,
)
GQA = dict(num_key_value_heads=2, head_dim=32)
MOE = dict(intermediate_size=96, moe_intermediate_size=32, num_experts_per_tok=3)
SHARED = dict(n_routed_experts=8, n_shared_experts=2, first_k_dense_replace=1)
# No prediction layers beyond the last: the reference's default is one, under two names.
SIGMOID = SHARED | dict(n_group=1, topk_group=1, norm_topk_prob=True, num_mtp_layers=0)
PLAIN = dict(rope_type="default", rope_theta=5e3)


def yarn(mscale: float | None = None, mscale_all_dim: float | None = None, **more: Any) -> dict:
    """YaRN settings that matter at 64 positions: extension by 4 from 32."""
    settings = dict(
        rope_type="yarn",
        rope_theta=1e4,
        factor=4.0,
        original_max_position_embeddings=32,
        beta_fast=32,
        beta_slow=1,
        mscale=mscale,
        mscale_all_dim=mscale_all_dim,
    )
    return {key: value for key, value in settings.items() if value is not None} | more


DEEPSEEK_V2 = {
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
        topk_method="greedy", first_k_dense_replace=0, rope_parameters=dict(PLAIN)
    ),
}
DEEPSEEK_V3 = {
    "v3": dict(
        q_lora_rank=24,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        rope_parameters=yarn(1.0, 1.0),
    ),
    "moonlight": dict(
        routed_scaling_factor=2.446,
        rms_norm_eps=1e-5,
        rope_parameters=dict(PLAIN, rope_theta=5e4),
    ),
    "v3-half-split": dict(
        q_lora_rank=24,
        n_group=2,
        topk_group=1,
        norm_topk_prob=False,
        routed_scaling_factor=2.5,
        first_k_dense_replace=0,
        attention_bias=True,
        rope_interleave=False,
        rope_parameters=yarn(1.0, 1.0),
    ),
}
QWEN3_MOE = {
    "qwen3-moe": dict(norm_topk_prob=True),
    "qwen3-moe-sparse": dict(
        num_hidden_layers=5,
        norm_topk_prob=False,
        decoder_sparse_step=2,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=16,
        tie_word_embeddings=True,
    ),
    "qwen3-moe-dense-between": dict(
        num_hidden_layers=4, norm_topk_prob=True, mlp_only_layers=[0, 2]
    ),
}
OLMOE = {
    "olmoe": dict(norm_topk_prob=False),
    "olmoe-clip": dict(
        num_key_value_heads=2, norm_topk_prob=True, clip_qkv=0.8, attention_bias=True
    ),
}
MIXTRAL = {
    "mixtral": dict(),
    "mixtral-window": dict(sliding_window=12, head_dim=24),
}
GPT_OSS = {
    # Experts as square as the releases': nothing but the format tells which way they lie.
    "gpt-oss": dict(rope_parameters=yarn(truncate=False, rope_theta=150000.0)),
    "gpt-oss-clamped": dict(
        num_hidden_layers=3,
        intermediate_size=48,
        swiglu_limit=1.0,
        swiglu_alpha=1.3,
        sliding_window=12,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        rope_parameters=yarn(truncate=True),
    ),
}
GLM4_MOE = {
    "glm4-moe": dict(
        GQA,
        n_shared_experts=1,
        routed_scaling_factor=1.5,
        use_qk_norm=True,
        attention_bias=True,
    ),
    "glm4-moe-groups": dict(
        num_key_value_heads=2,
        n_group=4,
        topk_group=2,
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
        first_k_dense_replace=0,
        rope_parameters=dict(PLAIN, partial_rotary_factor=0.25),
    ),
}
LLAMA = {
    "llama": dict(
        tie_word_embeddings=True,
        rope_parameters=dict(
            rope_type="llama3",
            rope_theta=1e4,
            factor=4.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "llama-biases": dict(num_key_value_heads=1, head_dim=24, attention_bias=True, mlp_bias=True),
}
QWEN3 = {
    "qwen3": dict(tie_word_embeddings=True),
    "qwen3-window": dict(
        num_hidden_layers=4,
        use_sliding_window=True,
        sliding_window=10,
        max_window_layers=2,
        attention_bias=True,
    ),
}

# By family: what its configurations have in common, and the configurations.
FAMILIES: dict[str, tuple[dict, dict[str, dict]]] = {
    "deepseek_v2": (MLA | MOE | SHARED, DEEPSEEK_V2),
    "deepseek_v3": (MLA | MOE | SIGMOID, DEEPSEEK_V3),
    "qwen3_moe": (GQA | MOE | dict(num_experts=8), QWEN3_MOE),
    "olmoe": (
        dict(num_key_value_heads=4, intermediate_size=32, num_experts=8, num_experts_per_tok=3),
        OLMOE,
    ),
    "mixtral": (
        dict(
            num_key_value_heads=2, intermediate_size=64, num_local_experts=4, num_experts_per_tok=2
        ),
        MIXTRAL,
    ),
    "gpt_oss": (
        GQA
        | dict(
            num_hidden_layers=4,
            intermediate_size=64,
            num_local_experts=8,
            num_experts_per_tok=3,
            sliding_window=8,
        ),
        GPT_OSS,
    ),
    "glm4_moe": (MOE | SIGMOID, GLM4_MOE),
    "llama": (dict(num_key_value_heads=2, intermediate_size=96), LLAMA),
    "qwen3": (GQA | dict(intermediate_size=96), QWEN3),
}
CONFIGS: dict[str, dict] = {
    name: {"model_type": family} | FEW | common | settings
    for family, (common, named) in FAMILIES.items()
    for name, settings in named.items()
}
FIRST = {family: next(iter(named)) for family, (_, named) in FAMILIES.items()}
"""By family: the name of its first configuration."""
MOE_CONFIGS = [name for name, raw in CONFIGS.items() if raw["model_type"] not in ("llama", "qwen3")]
"""Names of the configurations with routed experts."""


def raw_config(name: str = "lite", **overrides) -> dict:
    """The content of `config.json` of a named configuration."""
    return CONFIGS[name] | overrides

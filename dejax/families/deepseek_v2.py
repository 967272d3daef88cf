"""DeepSeek-V2 and V2-Lite (arXiv 2405.04434): MLA, softmax router, shared experts, YaRN.

The reference is the `transformers` class: rotary pairs are always interleaved, the inner norms of
MLA always use eps 1e-6, and `norm_topk_prob` is not read (releases have it false, so true is
refused).
"""

from typing import Any

from dejax.config import MLAConfig, ModelConfig, MoEConfig
from dejax.families.expert_forms import GATE_UP, expert_keys
from dejax.families.layer_keys import NORM_KEYS, Keys, linear_keys, mlp_keys
from dejax.families.raw_config import RawConfig, dimensions, number_of_experts

__all__ = ["FUSED", "MODEL_TYPE", "expert_keys", "layer_keys", "model_config"]

MODEL_TYPE = "deepseek_v2"
EXPERT_COUNT_KEYS = ("n_routed_experts", "num_local_experts", "num_experts")
FUSED = GATE_UP


def model_config(raw: dict[str, Any]) -> ModelConfig:
    """`config.json` of a DeepSeek-V2 checkpoint; UsageError for what is not honoured."""
    c = RawConfig(raw)
    c.quantisation("fp8")
    # Left out, they have the reference's own defaults (1536 and 2), which no file means by that.
    c.must_have("q_lora_rank", "n_shared_experts")
    c.must_be("norm_topk_prob", (False,), "this family does not renormalise its gates")
    c.must_be("scoring_func", ("softmax",), "sigmoid routing is another family")
    c.must_be("moe_layer_freq", (1,), "every layer after the leading dense ones is a MoE layer")
    c.must_be(
        "topk_method", ("greedy", "group_limited_greedy"), "the selection rules of this family"
    )
    grouped = raw.get("topk_method") == "group_limited_greedy"
    expert_width = c.integer("moe_intermediate_size")
    return ModelConfig(
        family=MODEL_TYPE,
        **dimensions(c, norm_eps=1e-6),
        mlp_bias=c.flag("mlp_bias", False),
        attention=mla_config(c, interleaved=True),
        experts=MoEConfig(
            num_experts=number_of_experts(c, *EXPERT_COUNT_KEYS),
            top_k=c.integer("num_experts_per_tok"),
            expert_width=expert_width,
            shared_width=expert_width * c.integer("n_shared_experts", 0),
            dense_layers=c.leading_dense(),
            scaling=c.number("routed_scaling_factor", 1.0),
            groups=c.integer("n_group", 1) if grouped else 1,
            groups_kept=c.integer("topk_group", 1) if grouped else 1,
        ),
    )


def layer_keys(config: ModelConfig, index: int) -> Keys:
    """Keys of a layer's resident weights."""
    return mla_keys(config) | NORM_KEYS | feed_forward_keys(config, index)


def mla_config(c: RawConfig, *, interleaved: bool) -> MLAConfig:
    """Latent attention as DeepSeek-V2 and its successors write it down."""
    heads = c.integer("num_attention_heads")
    c.must_be("num_key_value_heads", (heads,), "MLA has one key head per query head")
    return MLAConfig(
        heads=heads,
        query_rank=c.integer("q_lora_rank", None),
        kv_rank=c.integer("kv_lora_rank"),
        nope_dim=c.integer("qk_nope_head_dim"),
        value_dim=c.integer("v_head_dim"),
        rope=c.rope(c.integer("qk_rope_head_dim"), interleaved=interleaved),
        bias=c.flag("attention_bias", False),
    )


def mla_keys(config: ModelConfig) -> Keys:
    """Keys of a latent attention."""
    attention = config.attention
    assert isinstance(attention, MLAConfig)
    ours = ("self_attn", "attention")
    keys = linear_keys(*ours, ("kv_a_proj_with_mqa", "o_proj"), bias=attention.bias)
    keys |= linear_keys(*ours, ("kv_a_layernorm", "kv_b_proj"))
    if attention.query_rank is None:
        return keys | linear_keys(*ours, ("q_proj",))
    keys |= linear_keys(*ours, ("q_a_proj",), bias=attention.bias)
    return keys | linear_keys(*ours, ("q_a_layernorm", "q_b_proj"))


def feed_forward_keys(config: ModelConfig, index: int) -> Keys:
    """Keys of a dense feed-forward, or of router and shared experts."""
    if index not in config.moe_layers:
        return mlp_keys("mlp", "mlp", bias=config.mlp_bias)
    keys = {"mlp.gate.weight": "router.weight"}
    if config.moe.selection_bias:
        keys["mlp.gate.e_score_correction_bias"] = "router.selection_bias"
    if config.moe.shared_width:
        keys |= mlp_keys("mlp.shared_experts", "shared", bias=config.mlp_bias)
    return keys

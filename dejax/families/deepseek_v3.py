"""DeepSeek-V3 and V3.1 (arXiv 2412.19437), Moonlight: MLA, sigmoid router with a selection bias.

The bias counts in the selection alone, and is kept in float32. Layers beyond `num_hidden_layers`
predict several tokens ahead: they are no part of the target, and left out by name.
"""

from typing import Any

from dejax.config import ModelConfig, MoEConfig
from dejax.families.deepseek_v2 import EXPERT_COUNT_KEYS, feed_forward_keys, mla_config, mla_keys
from dejax.families.expert_forms import GATE_UP, expert_keys
from dejax.families.layer_keys import NORM_KEYS, Keys
from dejax.families.raw_config import RawConfig, dimensions, number_of_experts

__all__ = ["FUSED", "MODEL_TYPE", "expert_keys", "ignored", "layer_keys", "model_config"]

MODEL_TYPE = "deepseek_v3"
FUSED = GATE_UP
MOST_PREDICTION_LAYERS = 8
"""More than any release has (1)."""


def model_config(raw: dict[str, Any]) -> ModelConfig:
    """`config.json` of a DeepSeek-V3 or Moonlight checkpoint."""
    c = RawConfig(raw)
    c.quantisation("fp8")
    c.must_have("q_lora_rank", "n_shared_experts", "n_group", "topk_group", "norm_topk_prob")
    c.must_have("routed_scaling_factor", "first_k_dense_replace")
    return ModelConfig(
        family=MODEL_TYPE,
        **dimensions(c, norm_eps=1e-6),
        attention=mla_config(c, interleaved=c.flag("rope_interleave", True)),
        experts=sigmoid_experts(c),
    )


def sigmoid_experts(c: RawConfig) -> MoEConfig:
    """Experts and routing of DeepSeek-V3, and of the families that took them over."""
    c.must_be("scoring_func", ("sigmoid",), "softmax routing is another family")
    c.must_be("topk_method", ("noaux_tc",), "the selection rule of this family")
    c.must_be("moe_layer_freq", (1,), "every layer after the leading dense ones is a MoE layer")
    width = c.integer("moe_intermediate_size")
    return MoEConfig(
        num_experts=number_of_experts(c, *EXPERT_COUNT_KEYS),
        top_k=c.integer("num_experts_per_tok"),
        expert_width=width,
        shared_width=width * c.integer("n_shared_experts", 0),
        dense_layers=c.leading_dense(),
        scoring="sigmoid",
        selection_bias=True,
        normalised=c.flag("norm_topk_prob", True),
        scaling=c.number("routed_scaling_factor", 1.0),
        groups=c.integer("n_group", 1),
        groups_kept=c.integer("topk_group", 1),
        group_score="top2",
    )


def layer_keys(config: ModelConfig, index: int) -> Keys:
    """Keys of a layer's resident weights."""
    return mla_keys(config) | NORM_KEYS | feed_forward_keys(config, index)


def ignored(config: ModelConfig) -> tuple[str, ...]:
    """What keys of the multi-token prediction layers begin with."""
    return tuple(f"model.layers.{config.num_layers + i}." for i in range(MOST_PREDICTION_LAYERS))

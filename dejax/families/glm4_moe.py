"""GLM-4.5 (arXiv 2508.06471): grouped-query attention, half of a head rotated, sigmoid router."""

from typing import Any

from dejax.config import ModelConfig
from dejax.families.deepseek_v2 import feed_forward_keys
from dejax.families.deepseek_v3 import ignored, sigmoid_experts
from dejax.families.expert_forms import GATE_UP, expert_keys
from dejax.families.layer_keys import NORM_KEYS, Keys, gqa_keys
from dejax.families.raw_config import RawConfig, dimensions, gqa_config

__all__ = ["FUSED", "MODEL_TYPE", "expert_keys", "ignored", "layer_keys", "model_config"]

MODEL_TYPE = "glm4_moe"
FUSED = GATE_UP


def model_config(raw: dict[str, Any]) -> ModelConfig:
    """`config.json` of a GLM-4.5 checkpoint."""
    c = RawConfig(raw)
    c.quantisation("fp8")
    c.must_have("n_shared_experts", "norm_topk_prob", "first_k_dense_replace")
    return ModelConfig(
        family=MODEL_TYPE,
        **dimensions(c, norm_eps=1e-5),
        attention=gqa_config(
            c,
            partial=0.5,
            bias=c.flag("attention_bias", False),
            norm="head" if c.flag("use_qk_norm", False) else None,
        ),
        experts=sigmoid_experts(c),
    )


def layer_keys(config: ModelConfig, index: int) -> Keys:
    """Keys of a layer's resident weights."""
    return gqa_keys(config) | NORM_KEYS | feed_forward_keys(config, index)

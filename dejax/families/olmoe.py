"""OLMoE (arXiv 2409.02060): queries and keys normed over their whole width, no shared experts."""

from typing import Any

from dejax.config import ModelConfig, MoEConfig
from dejax.families.expert_forms import GATE_UP, expert_keys
from dejax.families.layer_keys import NORM_KEYS, Keys, gqa_keys
from dejax.families.raw_config import RawConfig, dimensions, gqa_config, number_of_experts

__all__ = ["FUSED", "MODEL_TYPE", "expert_keys", "layer_keys", "model_config"]

MODEL_TYPE = "olmoe"
FUSED = GATE_UP


def model_config(raw: dict[str, Any]) -> ModelConfig:
    """`config.json` of an OLMoE checkpoint; `intermediate_size` is an expert's width."""
    c = RawConfig(raw)
    c.quantisation("fp8")
    bias = c.flag("attention_bias", False)
    return ModelConfig(
        family=MODEL_TYPE,
        **dimensions(c, norm_eps=1e-5),
        attention=gqa_config(
            c, norm="whole", bias=bias, out_bias=bias, clip=c.number("clip_qkv", None)
        ),
        experts=MoEConfig(
            num_experts=number_of_experts(c, "num_experts", "num_local_experts"),
            top_k=c.integer("num_experts_per_tok"),
            expert_width=c.integer("intermediate_size"),
            normalised=c.flag("norm_topk_prob", False),
        ),
    )


def layer_keys(config: ModelConfig, index: int) -> Keys:
    """Keys of a layer's resident weights."""
    return gqa_keys(config) | NORM_KEYS | {"mlp.gate.weight": "router.weight"}

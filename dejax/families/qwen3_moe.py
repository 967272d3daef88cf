"""Qwen3-MoE (arXiv 2505.09388): grouped-query attention with normed heads, no shared experts."""

from typing import Any

from dejax.config import ModelConfig, MoEConfig
from dejax.families.expert_forms import GATE_UP, expert_keys
from dejax.families.layer_keys import NORM_KEYS, Keys, gqa_keys, mlp_keys
from dejax.families.raw_config import RawConfig, dimensions, gqa_config, number_of_experts

__all__ = ["FUSED", "MODEL_TYPE", "expert_keys", "layer_keys", "model_config"]

MODEL_TYPE = "qwen3_moe"
FUSED = GATE_UP


def model_config(raw: dict[str, Any]) -> ModelConfig:
    """`config.json` of a Qwen3-MoE checkpoint."""
    c = RawConfig(raw)
    c.quantisation("fp8")
    # The class's default (false) is not what releases are trained with (true).
    c.must_have("norm_topk_prob")
    bias, layers = c.flag("attention_bias", False), range(c.layers())
    step, dense = c.integer("decoder_sparse_step", 1), set(c.integers("mlp_only_layers"))
    window = c.integer("sliding_window", 4096) if c.flag("use_sliding_window", False) else None
    return ModelConfig(
        family=MODEL_TYPE,
        **dimensions(c, norm_eps=1e-6),
        attention=gqa_config(
            c,
            norm="head",
            bias=bias,
            out_bias=bias,
            window=window,
            windowed=tuple(layers) if window else (),
        ),
        experts=MoEConfig(
            num_experts=number_of_experts(c, "num_experts", "num_local_experts"),
            top_k=c.integer("num_experts_per_tok"),
            expert_width=c.integer("moe_intermediate_size"),
            dense_layers=tuple(i for i in layers if i in dense or (i + 1) % max(step, 1)),
            normalised=c.flag("norm_topk_prob", False),
        ),
    )


def layer_keys(config: ModelConfig, index: int) -> Keys:
    """Keys of a layer's resident weights."""
    moe = index in config.moe_layers
    rest = {"mlp.gate.weight": "router.weight"} if moe else mlp_keys("mlp", "mlp")
    return gqa_keys(config) | NORM_KEYS | rest

"""Llama 2 and 3, SmolLM2, dense: grouped-query attention and SwiGLU."""

from typing import Any

from dejax.config import ModelConfig
from dejax.families.layer_keys import NORM_KEYS, Keys, gqa_keys, mlp_keys
from dejax.families.raw_config import RawConfig, dimensions, gqa_config

MODEL_TYPE = "llama"


def model_config(raw: dict[str, Any]) -> ModelConfig:
    """`config.json` of a Llama checkpoint."""
    c = RawConfig(raw)
    c.quantisation("fp8")
    bias = c.flag("attention_bias", False)
    return ModelConfig(
        family=MODEL_TYPE,
        **dimensions(c, norm_eps=1e-6),
        mlp_bias=c.flag("mlp_bias", False),
        attention=gqa_config(c, bias=bias, out_bias=bias),
        experts=None,
    )


def layer_keys(config: ModelConfig, index: int) -> Keys:
    """Keys of a layer's weights."""
    return gqa_keys(config) | NORM_KEYS | mlp_keys("mlp", "mlp", bias=config.mlp_bias)

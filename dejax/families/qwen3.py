"""Qwen3, dense (arXiv 2505.09388): grouped-query attention with normed heads, SwiGLU."""

from typing import Any

from dejax.config import ModelConfig
from dejax.families.layer_keys import NORM_KEYS, Keys, gqa_keys, mlp_keys
from dejax.families.raw_config import RawConfig, dimensions, gqa_config

MODEL_TYPE = "qwen3"


def model_config(raw: dict[str, Any]) -> ModelConfig:
    """`config.json` of a dense Qwen3 checkpoint."""
    c = RawConfig(raw)
    c.quantisation("fp8")
    bias, layers = c.flag("attention_bias", False), range(c.layers())
    window = c.integer("sliding_window", 4096) if c.flag("use_sliding_window", False) else None
    first = c.integer("max_window_layers", 28)
    if "layer_types" in raw:
        windowed = c.windowed_layers()
    else:
        windowed = tuple(i for i in layers if i >= first and window is not None)
    attention = gqa_config(
        c,
        head_dim=128,
        norm="head",
        bias=bias,
        out_bias=bias,
        window=window,
        windowed=windowed,
    )
    return ModelConfig(
        family=MODEL_TYPE, **dimensions(c, norm_eps=1e-6), attention=attention, experts=None
    )


def layer_keys(config: ModelConfig, index: int) -> Keys:
    """Keys of a layer's weights."""
    return gqa_keys(config) | NORM_KEYS | mlp_keys("mlp", "mlp")

"""Checkpoint keys of the parts that families share."""

from collections.abc import Sequence

from dejax.config import GQAConfig, ModelConfig

Keys = dict[str, str]
"""Checkpoint key below a layer -> path of the array in `DecoderLayer`."""

NORM_KEYS: Keys = {
    "input_layernorm.weight": "input_norm.weight",
    "post_attention_layernorm.weight": "mlp_norm.weight",
}


def linear_keys(disk: str, ours: str, names: Sequence[str], *, bias: bool = False) -> Keys:
    """Keys of linear maps `names`, below `disk` in the checkpoint and `ours` in the layer."""
    kinds = ("weight", "bias") if bias else ("weight",)
    return {f"{disk}.{name}.{kind}": f"{ours}.{name}.{kind}" for name in names for kind in kinds}


def mlp_keys(disk: str, ours: str, *, bias: bool = False) -> Keys:
    """Keys of a SwiGLU: the dense feed-forward or the shared experts."""
    return linear_keys(disk, ours, ("gate_proj", "up_proj", "down_proj"), bias=bias)


def gqa_keys(config: ModelConfig) -> Keys:
    """Keys of a grouped-query attention."""
    attention = config.attention
    assert isinstance(attention, GQAConfig)
    ours = ("self_attn", "attention")
    keys = linear_keys(*ours, ("q_proj", "k_proj", "v_proj"), bias=attention.bias)
    keys |= linear_keys(*ours, ("o_proj",), bias=attention.out_bias)
    if attention.norm is not None:
        keys |= linear_keys(*ours, ("q_norm", "k_norm"))
    if attention.sinks:
        keys["self_attn.sinks"] = "attention.sinks"
    return keys

"""Mixtral (arXiv 2401.04088): few wide experts, gates renormalised over the chosen ones."""

from typing import Any

from dejax.config import ModelConfig, MoEConfig
from dejax.families.expert_forms import GATE_UP
from dejax.families.layer_keys import NORM_KEYS, Keys, gqa_keys
from dejax.families.raw_config import RawConfig, dimensions, gqa_config, number_of_experts

MODEL_TYPE = "mixtral"
FUSED = GATE_UP
ALIASES = {"mlp.gate.weight": "block_sparse_moe.gate.weight"}
"""Key of the fused form -> key of the released form."""


def model_config(raw: dict[str, Any]) -> ModelConfig:
    """`config.json` of a Mixtral checkpoint; `intermediate_size` is an expert's width."""
    c = RawConfig(raw)
    c.quantisation("fp8")
    window, layers = c.integer("sliding_window", None), range(c.layers())
    return ModelConfig(
        family=MODEL_TYPE,
        **dimensions(c, norm_eps=1e-5),
        attention=gqa_config(c, theta=1e6, window=window, windowed=tuple(layers) if window else ()),
        experts=MoEConfig(
            num_experts=number_of_experts(c, "num_local_experts", "num_experts"),
            top_k=c.integer("num_experts_per_tok"),
            expert_width=c.integer("intermediate_size"),
            normalised=True,
        ),
    )


def layer_keys(config: ModelConfig, index: int) -> Keys:
    """Keys of a layer's resident weights."""
    router = {"block_sparse_moe.gate.weight": "router.weight"}
    return gqa_keys(config) | NORM_KEYS | router


def expert_keys(expert: int) -> tuple[str, str, str]:
    """Keys of one routed expert below its layer: gate, up and down projection."""
    prefix = f"block_sparse_moe.experts.{expert}"
    return f"{prefix}.w1.weight", f"{prefix}.w3.weight", f"{prefix}.w2.weight"

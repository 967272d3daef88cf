"""gpt-oss (arXiv 2508.10925): attention sinks, alternating windows, clamped SwiGLU with biases.

Experts lie on disk input-major, gate and up interleaved. The releases are square, so that nothing
but the format tells the orientation.
"""

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from dejax.block_scaled import MX_BLOCK, from_mxfp4
from dejax.config import ClampedSwiGLU, ModelConfig, MoEConfig
from dejax.families.expert_forms import FusedExperts
from dejax.families.layer_keys import NORM_KEYS, Keys, gqa_keys
from dejax.families.raw_config import RawConfig, dimensions, gqa_config, number_of_experts

MODEL_TYPE = "gpt_oss"


def model_config(raw: dict[str, Any]) -> ModelConfig:
    """`config.json` of a gpt-oss checkpoint; `intermediate_size` is an expert's width."""
    c = RawConfig(raw)
    c.quantisation("mxfp4")
    if not (raw.get("rope_parameters") or raw.get("rope_scaling")):
        c.refuse("rope_scaling is missing; expected it (the family's models extend their context)")
    bias, layers = c.flag("attention_bias", True), range(c.layers())
    # Left out, it has the reference's default.
    window = c.integer("sliding_window", None) if "sliding_window" in raw else 128
    windowed = c.windowed_layers() if raw.get("layer_types") is not None else tuple(layers[::2])
    return ModelConfig(
        family=MODEL_TYPE,
        **dimensions(c, norm_eps=1e-5),
        attention=gqa_config(
            c,
            head_dim=64,
            theta=150000.0,
            bias=bias,
            out_bias=bias,
            sinks=True,
            window=window,
            windowed=windowed,
        ),
        experts=MoEConfig(
            num_experts=number_of_experts(c, "num_local_experts", "num_experts"),
            top_k=c.integer("num_experts_per_tok", c.integer("experts_per_token", 4)),
            expert_width=c.integer("intermediate_size"),
            scoring="softmax_chosen",
            router_bias=True,
            expert_bias=True,
            activation=ClampedSwiGLU(
                alpha=c.number("swiglu_alpha", 1.702), limit=c.number("swiglu_limit", 7.0)
            ),
        ),
    )


def layer_keys(config: ModelConfig, index: int) -> Keys:
    """Keys of a layer's resident weights."""
    router = {f"mlp.router.{kind}": f"router.{kind}" for kind in ("weight", "bias")}
    return gqa_keys(config) | NORM_KEYS | router


def _shapes(config: ModelConfig) -> tuple[tuple[int, ...], ...]:
    e, f, d = config.moe.num_experts, config.moe.expert_width, config.width
    return (e, d, 2 * f), (e, 2 * f), (e, f, d), (e, d)


def _pack(rows: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    gate_up, gate_up_bias, down, down_bias = rows
    width, model = down.shape
    record = np.zeros((3, width + 1, model + 1), gate_up.dtype if dtype is None else dtype)
    for part in range(2):
        record[part, :width, :model] = gate_up[:, part::2].T
        record[part, :width, model] = gate_up_bias[part::2]
    record[2, :width, :model] = down
    record[2, width, :model] = down_bias
    return record


def _unpack(record: np.ndarray) -> tuple[np.ndarray, ...]:
    gate_up = np.stack([record[0, :-1], record[1, :-1]], axis=1).reshape(-1, record.shape[2])
    return gate_up[:, :-1].T, gate_up[:, -1], record[2, :-1, :-1], record[2, -1, :-1]


def _mxfp4_shapes(config: ModelConfig) -> tuple[tuple[int, ...], ...]:
    e, f, d = config.moe.num_experts, config.moe.expert_width, config.width
    gate_up, down = (e, 2 * f, d // MX_BLOCK), (e, d, f // MX_BLOCK)
    return (*gate_up, MX_BLOCK // 2), gate_up, (e, 2 * f), (*down, MX_BLOCK // 2), down, (e, d)


def _pack_mxfp4(rows: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    """As `_pack`: blocks lie output-major, the other way round than plain tensors."""
    gate_up, down = from_mxfp4(*rows[:2]).T, from_mxfp4(*rows[3:5]).T
    return _pack((gate_up, rows[2], down, rows[5]), dtype)


FUSED = FusedExperts(
    keys=(
        "mlp.experts.gate_up_proj",
        "mlp.experts.gate_up_proj_bias",
        "mlp.experts.down_proj",
        "mlp.experts.down_proj_bias",
    ),
    shapes=_shapes,
    pack=_pack,
    unpack=_unpack,
)
MXFP4 = FusedExperts(
    keys=(
        "mlp.experts.gate_up_proj_blocks",
        "mlp.experts.gate_up_proj_scales",
        "mlp.experts.gate_up_proj_bias",
        "mlp.experts.down_proj_blocks",
        "mlp.experts.down_proj_scales",
        "mlp.experts.down_proj_bias",
    ),
    shapes=_mxfp4_shapes,
    pack=_pack_mxfp4,
    numbers=np.dtype(ml_dtypes.bfloat16),
)
OTHER_FORMS = (MXFP4,)
"""What the releases are stored in."""

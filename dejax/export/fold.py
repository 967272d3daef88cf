"""The draft path as an ordinary model: draft experts folded into the shared experts."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from dejax.config import ModelConfig
from dejax.draft.expert import Draft
from dejax.errors import UsageError

Neurons = Mapping[int, np.ndarray]
"""Layer -> neurons [3, F', D] that join its shared experts (gate, up, transposed down)."""


def fold(config: ModelConfig, draft: Draft) -> tuple[ModelConfig, Neurons]:
    """The draft path as an ordinary model: its configuration, and what joins the shared experts.

    gamma is multiplied into the down projection; neurons that compute nothing fill the width up
    to a multiple of a routed expert's, as the format wants it.

    Raises:
      UsageError: routing to fewer experts would change their gates, or there is nothing to join.
    """
    moe = config.moe
    if not moe.shared_width:
        raise UsageError(
            f"no draft model: {config.family} has no shared experts, which draft experts would join"
        )
    if (moe.normalised or moe.selection_bias) and not draft.plain:
        raise UsageError(
            f"no draft model: {config.family} derives an expert's gate from all chosen ones, or "
            "chooses by another number, so that a model with fewer experts has other gates; with "
            "draft.gates=plain in distillation there is one"
        )
    if draft.config.top_r == 0:
        raise UsageError("no draft model: without a routed expert (top_r 0) there is no such model")
    kept = min(draft.config.top_r, moe.top_k)
    width = -(-draft.config.width // moe.expert_width) * moe.expert_width
    sizes: Any = dict(top_k=kept, shared_width=moe.shared_width + width)
    experts = dataclasses.replace(moe, **sizes, normalised=False)
    if kept == 1 and moe.group_score == "max":  # the best group holds the best expert
        experts = dataclasses.replace(experts, groups=1, groups_kept=1)
    neurons = {}
    for layer in config.moe_layers:
        params = jax.device_get(draft.layer_params(layer))
        record = np.zeros((3, width, config.width), np.float32)
        record[:, : draft.config.width] = params["weights"]
        record[2] *= np.float32(params["gamma"])
        neurons[layer] = record
    return dataclasses.replace(config, experts=experts), neurons


def joined(stem: str, array: np.ndarray, neurons: np.ndarray) -> np.ndarray:
    """A projection of the shared experts with `neurons` [3, F', D] behind its own, in float32.

    `stem` is its path in `Transformer`, such as `shared.gate_proj`.
    """
    gate, up, down = neurons
    added = {"shared.gate_proj": gate, "shared.up_proj": up, "shared.down_proj": down.T}[stem]
    axis = int(stem.endswith("down_proj"))
    return np.concatenate([array.astype(np.float32), added], axis=axis)

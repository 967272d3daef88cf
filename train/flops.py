"""Floating-point operations of a distillation step, counted from the configuration.

Two for each weight that a token meets in a matrix product. The compiler's own count is no use: it
counts the body of a scan once.
"""

import math
from dataclasses import dataclass
from typing import Any

from dejax.ckpt.hf_weights import abstract_model, array_paths
from dejax.config import DraftConfig, MLAConfig, ModelConfig

_BF16_PEAK = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}
_BF16_PEAK |= {"TPU v4": 275e12, "TPU v5 lite": 197e12, "TPU v5p": 459e12, "TPU v6 lite": 918e12}
"""Dense bfloat16 operations a second, by what a device's kind contains (the makers' data)."""


@dataclass(frozen=True)
class StepFlops:
    """Operations for one token of a step.

    Attributes:
      target: the target's forward pass; draft: the draft network's, forward, and backward to its
      activations; trained: gradients of the trained weights.
    """

    target: float
    draft: float
    trained: float

    @property
    def total(self) -> float:
        """All of a step."""
        return self.target + self.draft + self.trained


def active_weights(config: ModelConfig, experts: int) -> int:
    """Weights that a token meets in products, head included, with so many routed experts a layer.

    The embedding is a look-up and counts only where it is the head too.
    """
    paths = array_paths(abstract_model(config)[1])
    resident = sum(math.prod(leaf.shape) for leaf in paths.values() if len(leaf.shape) > 1)
    if not config.tied:
        resident -= config.vocab_size * config.width
    return resident + len(config.moe_layers) * experts * config.expert_params


def attention_flops(config: ModelConfig, seq_len: int) -> float:
    """Operations of a token's scores and weighted values, over all layers and whole rows."""
    attention = config.attention
    if isinstance(attention, MLAConfig):
        dims = attention.nope_dim + attention.rope.dim + attention.value_dim
    else:
        dims = 2 * attention.head_dim
    return 2.0 * config.num_layers * attention.heads * dims * seq_len


def step_flops(config: ModelConfig, draft: DraftConfig, seq_len: int) -> StepFlops:
    """Operations a token of a step: 2 A_T, 4 A_S and 2 P, and three times a pass's attention."""
    trained = len(config.moe_layers) * 3 * draft.width * config.width
    attention = attention_flops(config, seq_len)
    student = active_weights(config, draft.top_r) + trained
    return StepFlops(
        target=2.0 * active_weights(config, config.moe.top_k) + attention,
        draft=4.0 * student + 3 * attention,
        trained=2.0 * trained,
    )


def peak_flops(device: Any) -> float | None:
    """The device's bfloat16 operations a second, where they are known."""
    kind = device.device_kind
    return next((peak for name, peak in _BF16_PEAK.items() if name in kind), None)

"""The forms in which routed experts lie on disk, and their way to a record and back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dejax.config import ModelConfig


def pack_expert(gate: np.ndarray, up: np.ndarray, down: np.ndarray, *, dtype=None) -> np.ndarray:
    """One expert record [3, F, D] from gate and up [F, D] and down [D, F], in `dtype` if given."""
    record = np.empty((3, *gate.shape), gate.dtype if dtype is None else dtype)
    for part, matrix in zip(record, (gate, up, down.T), strict=True):
        part[...] = matrix
    return record


@dataclass(frozen=True)
class FusedExperts:
    """How a layer's experts lie in a few tensors, with the expert as their first dimension.

    Attributes:
      keys: of the tensors, below the layer.
      shapes: their shapes, in the order of `keys`.
      pack: one expert's rows of them, and a dtype -> its record.
      unpack: a record -> its rows; the inverse of `pack`. None where the form is only read.
      numbers: what holds every number exactly, where the tensors are packed bytes.
    """

    keys: tuple[str, ...]
    shapes: Callable[[ModelConfig], tuple[tuple[int, ...], ...]]
    pack: Callable[[Sequence[np.ndarray], Any], np.ndarray]
    unpack: Callable[[np.ndarray], tuple[np.ndarray, ...]] | None = None
    numbers: np.dtype | None = None


def _gate_up_shapes(config: ModelConfig) -> tuple[tuple[int, ...], ...]:
    e, f, d = config.moe.num_experts, config.moe.expert_width, config.width
    return (e, 2 * f, d), (e, d, f)


def _pack_gate_up(rows: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    gate, up = np.split(rows[0], 2)
    return pack_expert(gate, up, rows[1], dtype=dtype)


GATE_UP = FusedExperts(
    keys=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    shapes=_gate_up_shapes,
    pack=_pack_gate_up,
    unpack=lambda record: (np.concatenate([record[0], record[1]]), record[2].T),
)
"""[E, 2F, D], gate rows first, and [E, D, F]: what `transformers` holds in memory."""


def expert_keys(expert: int) -> tuple[str, str, str]:
    """Keys of one routed expert below its layer: gate, up and down projection ([out, in] each)."""
    prefix = f"mlp.experts.{expert}"
    return f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight", f"{prefix}.down_proj.weight"

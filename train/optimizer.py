"""Optimizers from optax, and the warm-up / constant / decay schedule.

The constant middle of the schedule does not depend on the number of steps: a run can be cut short
or prolonged by decaying from any of its checkpoints.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import optax
from optax.contrib import MuonDimensionNumbers, muon

from dejax.errors import UsageError


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, or Muon for matrices with AdamW for the rest (arXiv 2502.16982's update scale)."""

    kind: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 1e-3
    warmup_steps: int = 20
    decay_steps: int = 100
    final_fraction: float = 0.05
    b1: float = 0.9
    b2: float = 0.95
    weight_decay: float = 0.0
    clip_norm: float = 1.0

    def __post_init__(self):
        for name in ("learning_rate", "clip_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise UsageError(f"optimizer.{name} is {getattr(self, name)}; expected > 0")
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                value = getattr(self, name)
                raise UsageError(f"optimizer.{name} is {value}; expected from 0 to below 1")
        if not 0 <= self.final_fraction <= 1:
            raise UsageError(
                f"optimizer.final_fraction is {self.final_fraction}; expected from 0 to 1"
            )
        if not 0 <= self.weight_decay < math.inf:
            raise UsageError(f"optimizer.weight_decay is {self.weight_decay}; expected 0 or more")
        for name in ("warmup_steps", "decay_steps"):
            if getattr(self, name) < 0:
                value = getattr(self, name)
                raise UsageError(f"optimizer.{name} is {value}; expected 0 or more")


def schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Linear warm-up, constant, then linear decay over the last `decay_steps` of `steps`."""
    peak = config.learning_rate
    decay = min(config.decay_steps, steps)
    return optax.join_schedules(
        [
            optax.linear_schedule(peak / max(config.warmup_steps, 1), peak, config.warmup_steps),
            optax.linear_schedule(peak, peak * config.final_fraction, decay),
        ],
        [steps - decay],
    )


def _muon_dimensions(params: Any) -> Any:
    """Muon for weight matrices [.., out, in]; AdamW for embedding, head, router, norms and biases.

    An expert [3, F, D] is orthogonalised as one [3 F, D] matrix: all its rows live in model space.
    """
    matrix = MuonDimensionNumbers(reduction_axis=-1, output_axis=-2)
    expert = MuonDimensionNumbers(reduction_axis=-1, output_axis=(-3, -2))

    def label(path, leaf):
        name = jax.tree_util.keystr(path)
        adam = leaf.ndim < 2 or "norm" in name or "bias" in name or "router" in name
        adam = adam or "embedding" in name or "head" in name
        return None if adam else expert if "routed" in name else matrix

    return jax.tree_util.tree_map_with_path(label, params)


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """The optax chain for `steps` steps: clipping by global norm, then the configured update."""
    rate = schedule(config, steps)
    if config.kind == "adamw":
        update = optax.adamw(rate, b1=config.b1, b2=config.b2, weight_decay=config.weight_decay)
    else:
        update = muon(
            rate,
            weight_decay=config.weight_decay,
            adam_b1=config.b1,
            adam_b2=config.b2,
            consistent_rms=0.2,
            muon_weight_dimension_numbers=_muon_dimensions,
        )
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), update)

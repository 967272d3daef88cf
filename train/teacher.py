"""A target laid out for training: what distillation and evaluation run over whole sequences."""

from dataclasses import dataclass
from typing import Any

from dejax.config import ModelConfig
from dejax.target import Target
from train.stacked import StackedDef, StackedParams, stack_target


@dataclass(frozen=True, eq=False)
class Teacher:
    """A frozen target with its layers stacked.

    Attributes:
      definition, params: as `stack_target` gives them; dtype: of the activations; identity, name:
      the target's.
    """

    definition: StackedDef
    params: StackedParams
    dtype: Any
    identity: str
    name: str

    @property
    def config(self) -> ModelConfig:
        """The target's configuration."""
        return self.definition.config


def as_teacher(target: Target | Teacher) -> Teacher:
    """`target` laid out for training: arrays are copied, experts read if they lie in a store."""
    if isinstance(target, Teacher):
        return target
    routed = {layer: target.layer_experts(layer) for layer in target.config.moe_layers}
    definition, params = stack_target(target.model, routed)
    return Teacher(definition, params, target.compute_dtype, target.identity, target.name)

"""Model families: for each, how a `config.json` becomes a `ModelConfig`, and its checkpoint's keys.

A family is one file, listed here, with `MODEL_TYPE`, `model_config` and `layer_keys`. A MoE also
has `FUSED`, the form in which a layer's experts lie in a few tensors, and `expert_keys` if they
come one by one as well. `ALIASES` are other names of a layer's keys; `ignored` says what those keys
begin with that are no part of the target.
"""

import importlib
from types import ModuleType
from typing import Any

from dejax.config import ModelConfig
from dejax.errors import UsageError
from dejax.families.raw_config import RawConfig

FAMILIES = (
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "gpt_oss",
    "llama",
    "mixtral",
    "olmoe",
    "qwen3",
    "qwen3_moe",
)


def family_of(model_type: str) -> ModuleType:
    """The family module for a `model_type`; UsageError names the supported ones."""
    if model_type not in FAMILIES:
        raise UsageError(
            f"config.json: model_type {model_type!r} is not supported; "
            f"supported: {', '.join(FAMILIES)}"
        )
    return importlib.import_module(f"dejax.families.{model_type}")


def model_config(raw: dict[str, Any]) -> ModelConfig:
    """The `ModelConfig` of a parsed `config.json`; UsageError for what cannot be honoured."""
    return family_of(RawConfig(raw).text("model_type")).model_config(raw)

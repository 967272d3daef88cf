"""Model families: for each, how a `config.json` becomes a `ModelConfig`, and its checkpoint's keys.

A family is one file with `MODEL_TYPE`, `model_config`, `layer_keys`, `expert_keys` and
`FUSED_KEYS`, listed here.
"""

import importlib
from types import ModuleType
from typing import Any

from dejax.config import ModelConfig
from dejax.errors import UsageError
from dejax.families.raw_config import RawConfig

FAMILIES = ("deepseek_v2",)


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

"""Draft experts in a GGUF file, as `dejax export --format gguf --as adapter` writes them."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from dejax.ckpt.gguf_weights import GGUFTensors
from dejax.errors import UsageError

ADAPTER_TYPE = "draft-expert"

_TARGET = ("identity", "family", "layers", "width", "num_experts", "top_k", "expert_width")
_NAME = re.compile(r"blk\.(\d+)\.ffn(?:_(gate|up|down))?_draft\.(?:weight|scale)")


def read_gguf_adapter(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What an adapter folder says in its configuration file, and its tensors in float32.

    Quantised tensors are dequantised: these are the draft experts as a quantised file has them.

    Raises:
      UsageError: it is no GGUF file, or not one of draft experts.
    """
    file = GGUFTensors(path)
    if file.value("adapter.type") != ADAPTER_TYPE:
        raise UsageError(
            f"{path}: no draft experts; expected a file of dejax export --format gguf --as adapter"
        )
    target = {key: file.value(f"dejax.target.{key}") for key in _TARGET}
    layers = file.value("dejax.target.moe_layers")
    draft = {key: file.value(f"dejax.draft.{key}") for key in ("width", "top_r")}
    try:
        training = dict(json.loads(file.value("dejax.draft.training", "{}")))
    except (TypeError, ValueError):
        raise UsageError(f"{path}: dejax.draft.training is no JSON object") from None
    config = {
        "target": target | {"moe_layers": layers},
        "draft": draft | {"gates": file.value("dejax.draft.gates", "full")},
        "training": training,
    }
    tensors = {}
    for name in file.tensors:
        found, array = _NAME.fullmatch(name), file.numbers(name)
        if found is None:
            tensors[name] = array
            continue
        layer, kind = found.groups()
        part = "gamma" if kind is None else f"{kind}_proj.weight"
        tensors[f"layers.{layer}.draft_expert.{part}"] = array if kind else _scalar(array)
    return config, tensors


def _scalar(array: np.ndarray) -> np.ndarray:
    """GGUF has no scalars; another shape is left as it is, for the check of shapes to tell."""
    return array.reshape(()) if array.size == 1 else array

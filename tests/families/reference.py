"""Random small checkpoints written by `transformers`, and what it computes of them."""

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DeepseekV2Config
from transformers.utils import logging

from tests.families.random_folder import COMMON, CONFIGS

logging.disable_progress_bar()
logging.set_verbosity_error()
EAGER = dict(attn_implementation="eager", experts_implementation="eager")


def random_model(name: str, seed: int = 0, **overrides):
    """A `transformers` model (eager, float32) of a named configuration, all weights randomised."""
    config = DeepseekV2Config(**(COMMON | CONFIGS[name] | overrides))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **EAGER).eval()
    generator = torch.Generator().manual_seed(seed)
    for key, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in key:
            parameter.data = 1 + 0.2 * noise
        elif key.endswith("bias"):
            parameter.data = 0.1 * noise
        elif key.endswith("mlp.gate.weight"):
            parameter.data = 0.5 * noise
        else:
            parameter.data = 1.5 * noise * max(parameter.shape[-1], 1) ** -0.5
    return model


def save(model, folder: Path, **kwargs) -> Path:
    """Writes the model as a Hugging Face folder and returns it."""
    model.save_pretrained(folder, **kwargs)
    return folder


def load(folder: Path):
    """A saved model through the reference's own loader, in float32; nothing may be missing."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, **EAGER
    )
    assert not any(info.values()), info
    return model.eval()


def in_bfloat16(model):
    """A copy of the model rounded to bfloat16; the router stays float32, as the class keeps it."""
    rounded = type(model)(model.config)
    rounded.load_state_dict(model.state_dict())
    rounded = rounded.to(torch.bfloat16)
    for layer, exact in zip(rounded.model.layers, model.model.layers, strict=True):
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.weight.data = exact.mlp.gate.weight.data.clone()
    return rounded


def logits(model, tokens: np.ndarray) -> np.ndarray:
    """Logits [B, T, V] of whole sequences."""
    return run(model, tokens)[0]


def run(model, tokens: np.ndarray) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """Logits [B, T, V], and the experts [B, T, K] of each MoE layer in ascending order."""
    ids: dict[int, np.ndarray] = {}
    hooks = []
    for index, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "gate"):

            def keep(module, inputs, output, index=index):
                ids[index] = np.sort(output[-1].numpy(), -1).reshape(*tokens.shape, -1)

            hooks.append(layer.mlp.gate.register_forward_hook(keep))
    with torch.no_grad():
        out = model(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()
    for hook in hooks:
        hook.remove()
    return out, ids

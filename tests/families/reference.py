"""Random small checkpoints written by `transformers`, and what it computes of them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from tests.families.configurations import raw_config

logging.disable_progress_bar()
logging.set_verbosity_error()
EAGER = dict(attn_implementation="eager", experts_implementation="eager")


def random_model(name: str, seed: int = 0, **overrides):
    """A `transformers` model (eager, float32) of a named configuration, all weights randomised."""
    raw = raw_config(name, **overrides)
    family = raw.pop("model_type")
    config = AutoConfig.for_model(family, **raw)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **EAGER).eval()
    generator = torch.Generator().manual_seed(seed)
    for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" in key:
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        if "norm" in key:
            tensor.data = 1 + 0.2 * noise
        elif "correction_bias" in key:
            tensor.data = 0.3 * noise
        elif key.endswith("sinks"):
            tensor.data = noise
        elif key.endswith("bias"):
            tensor.data = 0.1 * noise
        elif key.endswith(("mlp.gate.weight", "mlp.router.weight")):
            tensor.data = 0.5 * noise
        else:
            input_major = family == "gpt_oss" and ".experts." in key
            fan_in = tensor.shape[-2 if input_major else -1]
            tensor.data = 1.5 * noise * max(fan_in, 1) ** -0.5
    return model


def save(model, folder: Path, **kwargs) -> Path:
    """Writes the model as a Hugging Face folder and returns it."""
    model.save_pretrained(folder, **kwargs)
    return folder


def load(folder: Path, dtype=torch.float32):
    """A saved model through the reference's own loader; nothing may be missing.

    In bfloat16 it keeps what its class wants in float32: selection biases, and some routers.
    """
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, output_loading_info=True, **EAGER
    )
    assert not any(info.values()), info
    return model.eval()


def logits(model, tokens: np.ndarray) -> np.ndarray:
    """Logits [B, T, V] of whole sequences."""
    return run(model, tokens)[0]


def run(model, tokens: np.ndarray) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """Logits [B, T, V], and the experts [B, T, K] of each MoE layer in ascending order."""
    ids: dict[int, np.ndarray] = {}
    hooks = []
    for index, gate in gates(model):

        def keep(module, inputs, output, index=index):
            ids[index] = np.sort(output[-1].numpy(), -1).reshape(*tokens.shape, -1)

        hooks.append(gate.register_forward_hook(keep))
    with torch.no_grad():
        out = model(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()
    for hook in hooks:
        hook.remove()
    return out, ids


def gates(model) -> Iterator[tuple[int, torch.nn.Module]]:
    """(layer, router) of every MoE layer."""
    for index, layer in enumerate(model.model.layers):
        gate = getattr(layer.mlp, "gate", None) or getattr(layer.mlp, "router", None)
        if gate is not None:
            yield index, gate


def set_gates(model, rule: Callable) -> None:
    """Replaces the routing rule: (gate module, logits) -> weights, ids."""

    def forward(self, hidden):
        logits = hidden.reshape(-1, self.hidden_dim) @ self.weight.T
        bias = getattr(self, "bias", None)
        logits = logits if bias is None else logits + bias
        return logits, *rule(self, logits)

    for _, gate in gates(model):
        gate.forward = forward.__get__(gate)

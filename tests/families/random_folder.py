"""Random small checkpoints written by dejax itself, with nothing left at its default value."""

from pathlib import Path

import jax
import numpy as np
from flax import nnx
from safetensors.numpy import load_file, save_file

from dejax import families
from dejax.ckpt.hf_weights import abstract_model, write_checkpoint
from tests.families.configurations import raw_config


def write_folder(folder: Path, raw: dict | None = None, *, dtype="float32", seed: int = 0) -> Path:
    """Writes a Hugging Face folder with random weights and returns it."""
    raw = raw_config() if raw is None else raw
    config = families.model_config(raw)
    rng = np.random.default_rng(seed)

    def fill(path, leaf):
        noise = rng.standard_normal(leaf.shape, np.float32)
        name = jax.tree_util.keystr(path)
        return 1 + 0.2 * noise if "norm" in name else 1.5 * noise * leaf.shape[-1] ** -0.5

    definition, state = abstract_model(config)
    params = jax.tree_util.tree_map_with_path(fill, nnx.to_pure_dict(state))

    def stack():
        shape = (config.moe.num_experts, *config.expert_shape)
        return rng.standard_normal(shape, np.float32) * config.width**-0.5

    routed = {layer: stack() for layer in config.moe_layers}
    write_checkpoint(folder, raw, nnx.merge(definition, params), routed, dtype=dtype)
    return folder


def edit_tensors(folder: Path, edit) -> Path:
    """Applies `edit` to the dictionary of a folder's tensors, in place."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder

"""A small random dense model and a MoE made of it; and healing on several devices."""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dejax import families
from dejax.sharding import MeshConfig, make_mesh, on_host, place_rows
from dejax.target import load_target
from tests.train.dense_model import write_dense
from tests.train.rows import random_batch
from train.heal import load_pair
from train.heal_config import HealConfig, check_models
from train.heal_step import loss_fn, whole_load
from train.model_folder import write_model_folder
from train.upcycle_layers import RoutedLayer
from train.upcycle_target import Layout, assemble, raw_config
from train.update import gradients

LAYOUT = Layout(shared=64, experts=4, width=32, top_k=2, first_dense=1)


def write_moe(dense: Path, folder: Path, *, seed: int = 0) -> Path:
    """A dense model's neurons as experts in the order that they have, with random routers."""
    target, rng = load_target(dense), np.random.default_rng(seed)
    raw = raw_config(target.config, LAYOUT)
    config, routed = families.model_config(raw), {}
    for layer in config.moe_layers:
        down = np.asarray(target.model.layers[layer].mlp.down_proj.weight[...])
        routed[layer] = RoutedLayer(
            order=np.arange(down.shape[1]),
            router=rng.normal(size=(LAYOUT.experts, config.width)).astype(np.float32),
            selection_bias=rng.uniform(0, 0.3, LAYOUT.experts).astype(np.float32),
            down=down,
        )
    model, stacks = assemble(target.model, config, routed, jnp.float32)
    write_model_folder(folder, raw, model, stacks, dtype=jnp.float32, source=dense)
    return folder


# --- several devices ---------------------------------------------------------------------------

ROWS, LENGTH = 8, 24
MESHES = {
    "rows, weights and experts": (MeshConfig(data=2, fsdp=2, expert=2), 1),
    "weights, experts and neurons": (MeshConfig(data=1, fsdp=2, expert=2, tensor=2), 1),
    "in parts": (MeshConfig(data=2, fsdp=2, expert=1, tensor=2), 2),
}


def _gradient(folder: Path, axes: MeshConfig, accumulate: int) -> tuple[Any, Any]:
    """Gradient and metrics of a batch whose rows count differently many tokens."""
    count = axes.data * axes.fsdp * axes.expert * axes.tensor
    config = HealConfig(
        target=str(folder / "moe"),
        dense=str(folder / "dense"),
        trained=("all",),
        seq_len=LENGTH,
        batch_size=ROWS,
        accumulate=accumulate,
    )
    mesh = make_mesh(axes, jax.devices()[:count])
    check_models(config, mesh)
    pair = load_pair(config, mesh)
    batch = random_batch(pair.models.moe.config, rows=ROWS, length=LENGTH)
    batch = jax.tree.map(np.array, batch)
    for row in range(ROWS):
        batch["mask"][row, LENGTH - row :] = 0
    options = dict(models=pair.models, dtype=pair.dtype)
    loss = partial(loss_fn, balance_weight=2.0, **options)

    @jax.jit
    def found(trained, constants, batch):
        load = None
        if accumulate > 1:
            load = whole_load(trained, batch, constants, accumulate=accumulate, **options)
        return gradients(loss, trained, batch, load, constants, accumulate=accumulate)

    with jax.set_mesh(mesh):
        return on_host(found(pair.start, pair.constants, place_rows(batch, mesh, ROWS)))


def differences() -> dict[str, dict[str, float]]:
    """On each mesh, the largest relative differences to one device: of gradients, of metrics."""
    results = {}
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent)
        write_moe(write_dense(folder / "dense"), folder / "moe")
        expected, wanted = _gradient(folder, MeshConfig(data=1), 1)
        for name, (axes, accumulate) in MESHES.items():
            grads, metrics = _gradient(folder, axes, accumulate)
            pairs = zip(*map(jax.tree.leaves, (grads, expected)), strict=True)
            results[name] = {
                "gradient": max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs),
                "metrics": max(abs(float(metrics[k] / wanted[k]) - 1) for k in wanted),
            }
    return results

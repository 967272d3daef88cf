"""Distillation of other families than the embedded target's: every kind of attention and expert."""

import numpy as np
import pytest

from dejax.config import DraftConfig
from dejax.target import load_target
from tests.families.random_folder import raw_config, write_folder
from tests.train.rows import random_batch
from train.closed_form import InitConfig
from train.distill import DistillConfig, distill
from train.loop import LoopConfig
from train.optimizer import OptimizerConfig

CONFIG = DistillConfig(
    draft=DraftConfig(width=8),
    init=InitConfig(fit="zero", tokens=128),
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=1, decay_steps=4),
    loop=LoopConfig(steps=6, log_every=1, save_every=6),
    seq_len=32,
    batch_size=2,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "v3",  # latent attention, sigmoid router, groups, shared experts
        "qwen3-moe-sparse",  # dense layers between MoE layers, windows, tied head
        "olmoe-clip",  # norms over whole queries and keys, clipping
        "gpt-oss",  # sinks, alternating windows, experts with biases
        "glm4-moe",  # part of a head rotated
        "mixtral-window",  # few wide experts, a window in every layer
    ],
)
def test_the_loss_falls(tmp_path, name):
    target = load_target(write_folder(tmp_path / "m", raw_config(name)))
    batch = random_batch(target.config, rows=2, length=32)
    draft, log = distill(target, lambda step, rows: batch, CONFIG)
    losses = [row["loss"] for row in log]
    assert np.isfinite(losses).all() and losses[-1] < 0.98 * losses[0]
    assert sorted(draft.experts) == list(target.config.moe_layers)
    assert all(expert.weights.shape == (3, 8, 64) for expert in draft.experts.values())

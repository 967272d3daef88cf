"""Distillations that `test_resume` stops and goes on with, each in a process of its own."""

import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dejax.config import DraftConfig
from dejax.sharding import MeshConfig, make_mesh, on_host
from tests.infer.random_target import random_target
from tests.train.rows import random_batch
from train import loop
from train.closed_form import InitConfig
from train.distill import DistillConfig, distill
from train.loop import LoopConfig
from train.optimizer import OptimizerConfig
from train.teacher import as_teacher

STEPS, ROWS, LENGTH = 6, 8, 16


def digest(tree: Any) -> str:
    """Of the bytes of all arrays."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(on_host(tree)):
        found.update(np.ascontiguousarray(leaf).tobytes())
    return found.hexdigest()


def train(workdir: str, axes: str, split: str) -> dict[str, Any]:
    """A distillation of `STEPS` steps with an average, continued if `workdir` has checkpoints.

    Returns the losses and the batches of its steps, and the states that it saved and loaded.
    """
    target = random_target("shared", dtype=jnp.float32)
    mesh = MeshConfig(**json.loads(axes))
    config = DistillConfig(
        draft=DraftConfig(width=8),
        init=InitConfig(fit="zero", tokens=64),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2, decay_steps=4),
        loop=LoopConfig(steps=STEPS, log_every=1, save_every=2, keep=STEPS),
        seq_len=LENGTH,
        batch_size=ROWS,
        ema=0.9,
        mesh=mesh,
        split_draft=bool(int(split)),
    )
    batches, states = {}, {}

    class Recorded(loop.Saver):
        def newest(self, state):
            step, loaded = super().newest(state)
            states[f"loaded {step}"] = digest(loaded)
            return step, loaded

        def save(self, step, state):
            states[f"saved {step}"] = digest(state)
            super().save(step, state)

    def batch_at(step, rows):
        batch = jax.tree.map(
            np.array, random_batch(target.config, rows=ROWS, length=LENGTH, seed=step)
        )
        batches[step + 1] = digest(batch)
        return {key: a[rows.start : rows.stop] for key, a in batch.items()}

    loop.Saver = Recorded
    _, log = distill(as_teacher(target, make_mesh(mesh)), batch_at, config, workdir=Path(workdir))
    losses = {str(row["step"]): row["loss"] for row in log}
    batches = {step: batches[int(step)] for step in losses}
    return {"losses": losses, "batches": batches, "states": states}


def toy_run_killed_while_saving(workdir: str, step: str, before: str) -> None:
    """A toy run that kills itself while it saves a step.

    `before` is where: at the making of its folder, or when all is there but its final name.
    """
    from orbax.checkpoint._src.path import atomicity

    from tests.train.toy_run import toy_run

    def die(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    class Dying(loop.Saver):
        def save(self, at, state):
            if at == int(step):
                self._orbax.wait()  # the one before is whole
                for kind in vars(atomicity).values():
                    if isinstance(kind, type) and before in vars(kind):
                        setattr(kind, before, die)
            super().save(at, state)

    loop.Saver = Dying
    toy_run(Path(workdir))

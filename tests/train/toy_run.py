"""A run of the training loop that learns a vector: everything of a run but a model."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from train.gradient_step import DistillState
from train.loop import LoopConfig, run
from train.optimizer import OptimizerConfig, make_optimizer

STEPS, SIZE, EMA = 8, 1024, 0.9
OPTIMIZER = make_optimizer(OptimizerConfig(learning_rate=0.1, warmup_steps=4, decay_steps=4), STEPS)
LOOP = LoopConfig(steps=STEPS, log_every=1, save_every=2, keep=STEPS)


def batch_at(step: int) -> dict[str, np.ndarray]:
    """The rows of a step, from 0."""
    rng = np.random.default_rng(step)
    return {"tokens": rng.standard_normal((4, SIZE)).astype(np.float32)}


def initial_state() -> DistillState:
    """What every run starts from."""
    draft = {"weights": jnp.ones(SIZE)}
    average = {"weights": jnp.ones(SIZE)}
    return DistillState(draft=draft, opt_state=OPTIMIZER.init(draft), average=average)


@partial(jax.jit, donate_argnums=0)
def step_fn(state: DistillState, batch: Any) -> tuple[DistillState, dict[str, jax.Array]]:
    """A step of least squares, with an average of what is trained."""

    def loss(draft):
        wanted = jnp.arange(SIZE) / SIZE
        return jnp.mean(jnp.square(batch["tokens"] * (draft["weights"] - wanted)))

    value, grads = jax.value_and_grad(loss)(state.draft)
    updates, opt_state = OPTIMIZER.update(grads, state.opt_state, state.draft)
    draft: Any = optax.apply_updates(state.draft, updates)
    average: Any = optax.incremental_update(draft, state.average, 1 - EMA)
    return DistillState(draft=draft, opt_state=opt_state, average=average), {
        "loss": value,
        "kl": 2 * value,
    }


def toy_run(workdir: Path | None, **changes: Any) -> tuple[DistillState, list[dict[str, Any]]]:
    """The whole run, or its rest if `workdir` has checkpoints."""
    options: dict[str, Any] = dict(step_fn=step_fn, batch_at=batch_at, config=LOOP, label="toy")
    return run(initial_state(), workdir=workdir, resume=True, **(options | changes))

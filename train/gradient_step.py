"""One step of draft experts: gradients, maybe over smaller batches in turn, and what they change.

The objective is `train.distill_step.loss_fn`; only draft parameters and optimizer change
(DraftExpert, arXiv 2607.24434, section 4).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from dejax.model import Params
from dejax.pytree import pytree
from train.distill_step import loss_fn
from train.losses import TERMS
from train.stacked import StackedParams
from train.update import Batch, gradients, update


@pytree(frozen=True)
class DistillState:
    """What a checkpoint holds: draft parameters and optimizer state, nothing of the target.

    Attributes:
      draft: {"weights": [L, 3, F, D], "gamma": [L]}; opt_state: optax's, for these two alone;
      average: exponential moving average of `draft`, or None.
    """

    draft: Params
    opt_state: Any
    average: Params | None = None


def make_step(
    optimizer: optax.GradientTransformation,
    *,
    accumulate: int = 1,
    ema: float = 0.0,
    **loss_options: Any,
) -> Callable[..., tuple[DistillState, dict[str, Array]]]:
    """The jitted step (target, state, batch, loss weights) -> (state, metrics); state is donated.

    It runs on the mesh that is entered around it, and its state stays where it lies. The target is
    an argument, not a constant of the compiled program. `loss_options` are those of `loss_fn`.
    """

    @partial(jax.jit, donate_argnums=1)
    def step(params: StackedParams, state: DistillState, batch: Batch, weights: Array):
        def loss(draft, batch):
            return loss_fn(draft, params, batch, weights, **loss_options)

        draft, opt_state, metrics = update(
            optimizer, loss, state.draft, state.opt_state, batch, accumulate=accumulate
        )
        average: Any = state.average
        if average is not None:
            average = optax.incremental_update(draft, average, 1 - ema)
        return DistillState(draft=draft, opt_state=opt_state, average=average), metrics

    return step


def make_term_norms(*, accumulate: int = 1, **loss_options: Any) -> Callable[..., dict[str, Array]]:
    """The jitted (target, draft, batch) -> gradient norm of each of the four losses by itself.

    The four are made one after another, each as a step makes its gradient, in as little memory.
    """

    @jax.jit
    def norms(params: StackedParams, draft: Params, batch: Batch):
        def norm(weights):
            def loss(draft, batch):
                return loss_fn(draft, params, batch, weights, **loss_options)

            return optax.tree.norm(gradients(loss, draft, batch, accumulate=accumulate)[0])

        values = jax.lax.map(norm, jnp.eye(4))
        return {f"grad_norm_{name}": values[i] for i, name in enumerate(TERMS)}

    return norms

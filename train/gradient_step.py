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
from dejax.sharding import split_rows
from train.distill_step import Batch, loss_fn
from train.losses import TERMS
from train.stacked import StackedParams


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


def _micro_batches(batch: Batch, count: int) -> Batch:
    """A batch as `count` smaller ones [count, B / count, T], each with rows of every device."""

    def split(a):
        return jnp.moveaxis(a.reshape(-1, count, *a.shape[1:]), 1, 0)

    return jax.tree.map(split, batch)


def gradients(
    loss: Callable[..., Any], trained: Params, batch: Batch, *args: Any, accumulate: int = 1
) -> tuple[Any, dict[str, Array]]:
    """Gradient and metrics of `loss(trained, batch, *args)` over a batch.

    With `accumulate`, over so many smaller batches in turn, each weighted by the tokens it counts.
    """
    grad = jax.value_and_grad(loss, has_aux=True)
    if accumulate == 1:
        (_, metrics), grads = grad(trained, batch, *args)
        return grads, metrics
    total = jnp.maximum(batch["mask"].sum(), 1)

    def step(sums, part):
        (_, metrics), grads = grad(trained, jax.tree.map(split_rows, part), *args)
        share = part["mask"].sum() / total
        return jax.tree.map(lambda a, b: a + share * b, sums, (grads, metrics)), None

    parts = _micro_batches(batch, accumulate)
    first = jax.tree.map(lambda a: a[0], parts)
    shapes = jax.eval_shape(lambda part: grad(trained, part, *args), first)
    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), (shapes[1], shapes[0][1]))
    return jax.lax.scan(step, zero, parts)[0]


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

        grads, metrics = gradients(loss, state.draft, batch, accumulate=accumulate)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.draft)
        metrics["grad_norm"] = optax.tree.norm(grads)
        draft: Any = optax.apply_updates(state.draft, updates)
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

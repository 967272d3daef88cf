"""A step of an optimizer: the gradient of a batch, in one piece or several, and what it changes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from dejax.model import Params
from dejax.sharding import split_rows

Batch = dict[str, Any]
"""Packed rows, on the host or the device: the keys and shapes of `train.rows.Batch`."""


def micro_batches(batch: Batch, count: int) -> Batch:
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

    parts = micro_batches(batch, accumulate)
    first = jax.tree.map(lambda a: a[0], parts)
    shapes = jax.eval_shape(lambda part: grad(trained, part, *args), first)
    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), (shapes[1], shapes[0][1]))
    return jax.lax.scan(step, zero, parts)[0]


def update(
    optimizer: optax.GradientTransformation,
    loss: Callable[..., Any],
    trained: Params,
    opt_state: Any,
    batch: Batch,
    *args: Any,
    accumulate: int = 1,
) -> tuple[Any, Any, dict[str, Array]]:
    """What is trained and the optimizer's state after a step, and the metrics of `gradients`."""
    grads, metrics = gradients(loss, trained, batch, *args, accumulate=accumulate)
    updates, opt_state = optimizer.update(grads, opt_state, trained)
    metrics["grad_norm"] = optax.tree.norm(grads)
    return optax.apply_updates(trained, updates), opt_state, metrics

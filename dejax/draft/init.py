"""What draft experts start from: neurons copied from the routed experts that they stand in for.

Averaging experts is no start, since their neurons are not aligned. The gate and up rows of the
neurons that carry most of the missing output are copied; the down rows are zero, or fitted in
closed form by the caller. Gate, up and down are never zero together: nothing would have a gradient.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dejax.errors import UsageError
from dejax.nn.experts import Expert
from dejax.nn.router import Routing


def neuron_outputs(weights: Expert, h: Float[Array, "*rows D"]) -> Float[Array, "*rows F"]:
    """Activations of an expert's neurons, before the down projection."""
    gate, up = weights[0].astype(h.dtype), weights[1].astype(h.dtype)
    return jax.nn.silu(h @ gate.T) * (h @ up.T)


def neuron_importance(
    h: Float[Array, "N D"],
    chosen: Routing,
    stack: Float[Array, "E 3 F D"],
    mask: Float[Array, " N"],
) -> Float[Array, "E F"]:
    """Sum over rows of gate * |activation| * |down row|, for every neuron of every routed expert.

    `chosen` names the experts that count ([N, K] ids and gates). Every expert sees every row, one
    expert at a time: meant for some thousand rows.
    """

    def one(_, piece):
        index, weights = piece
        gate = jnp.sum(jnp.where(chosen.ids == index, chosen.gates, 0), axis=-1) * mask
        lengths = jnp.linalg.norm(weights[2].astype(h.dtype), axis=-1)
        return None, (gate.astype(h.dtype) @ jnp.abs(neuron_outputs(weights, h))) * lengths

    return jax.lax.scan(one, None, (jnp.arange(stack.shape[0]), stack))[1]


def most_important(importance: Float[np.ndarray, "E F"], count: int) -> Int[np.ndarray, " count"]:
    """Flat indices (expert * F + neuron) of the `count` largest entries, ties to the lower index.

    Raises:
      UsageError: the experts have fewer neurons in all.
    """
    flat = importance.reshape(-1)
    if count > flat.size:
        raise UsageError(
            f"draft: a width of {count} is more than the {flat.size} neurons of a layer's routed "
            "experts; choose a smaller width, or start from random weights"
        )
    return np.argsort(-flat, kind="stable")[:count]


def copy_neurons(
    stack: Float[Array, "E 3 F D"], neurons: Int[np.ndarray, " count"]
) -> Float[Array, "3 count D"]:
    """A draft expert with gate and up rows of these neurons, in float32 at least; down is zero."""
    wide = jnp.promote_types(stack.dtype, jnp.float32)
    expert, neuron = np.divmod(neurons, stack.shape[2])
    rows = stack[expert, :, neuron].astype(wide)
    return jnp.stack([rows[:, 0], rows[:, 1], jnp.zeros_like(rows[:, 0])])

"""What draft experts start from: neurons copied from the routed experts that they stand in for.

Averaging experts is no start, since their neurons are not aligned. The gate and up rows of the
neurons that carry most of the missing output are copied; the down rows are zero, or fitted in
closed form by the caller. Gate, up and down are never zero together: nothing would have a gradient.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dejax.config import ClampedSwiGLU
from dejax.errors import UsageError
from dejax.nn.experts import has_bias, inner_outputs
from dejax.nn.router import Routing


def neuron_importance(
    h: Float[Array, "N D"],
    chosen: Routing,
    stack: Float[Array, "E 3 _F _D"],
    mask: Float[Array, " N"],
    activation: ClampedSwiGLU | None = None,
) -> Float[Array, "E F"]:
    """Sum over rows of gate * |activation| * |down row|, for every neuron of every routed expert.

    `chosen` names the experts that count ([N, K] ids and gates). Every expert sees every row, one
    expert at a time: meant for some thousand rows.
    """

    def one(_, piece):
        index, weights = piece
        gate = jnp.sum(jnp.where(chosen.ids == index, chosen.gates, 0), axis=-1) * mask
        neurons = jnp.abs(inner_outputs(h, weights, activation))
        lengths = jnp.linalg.norm(weights[2].astype(h.dtype), axis=-1)[: neurons.shape[-1]]
        return None, (gate.astype(h.dtype) @ neurons) * lengths

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
    stack: Float[Array, "E 3 _F _D"], neurons: Int[Array, " count"], width: int
) -> Float[Array, "3 count D"]:
    """A draft expert with gate and up rows of these neurons, in float32 at least; down is zero.

    `width` is the model's. Draft experts have no biases: those of the neurons are left out.
    """
    wide = jnp.promote_types(stack.dtype, jnp.float32)
    expert, neuron = jnp.divmod(neurons, stack.shape[2] - has_bias(stack, width))
    rows = stack[expert, :, neuron, :width].astype(wide)
    return jnp.stack([rows[:, 0], rows[:, 1], jnp.zeros_like(rows[:, 0])])

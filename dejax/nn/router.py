"""The router of a MoE layer: scores over the routed experts, selection, and gates.

Scores are computed in at least float32 whatever the dtype of weights and activations: a shorter
router picks other experts. Ties go to the lower expert id.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dejax.config import MoEConfig
from dejax.pytree import pytree


@pytree(frozen=True)
class Routing:
    """What the router decided for each row, by descending gate (column 0 is the top-1 expert).

    Attributes:
      ids: [*rows, K] chosen experts; gates: [*rows, K] their weights after the family's full rule;
      scores: [*rows, E] the router's law over all experts (adds up to 1), for losses and
        statistics.
    """

    ids: Int[Array, "*rows K"]
    gates: Float[Array, "*rows K"]
    scores: Float[Array, "*rows E"]


class Router(nnx.Module):
    """Linear router with the selection rules of the families (`MoEConfig`).

    Attributes:
      weight: [E, D]; bias: [E] on the logits, or None; selection_bias: [E], or None.
    """

    def __init__(self, config: MoEConfig, width: int, *, dtype=jnp.float32, rngs: nnx.Rngs):
        self.config = config
        init = jax.random.normal(rngs.params(), (config.num_experts, width), dtype)
        self.weight = nnx.Param(init * jnp.asarray(width**-0.5, dtype))
        zeros = jnp.zeros(config.num_experts, dtype)
        self.bias = nnx.Param(zeros) if config.router_bias else None
        self.selection_bias = nnx.Param(zeros) if config.selection_bias else None

    def __call__(self, h: Float[Array, "*rows D"], *, plain: bool = False) -> Routing:
        """The routing of rows; `plain`: by descending choice, with gates not divided by their sum.

        It chooses the same experts.
        """
        config = self.config
        wide = jnp.promote_types(h.dtype, jnp.float32)
        # "highest": accelerators would else round the operands of a float32 product.
        weight = self.weight[...].astype(wide)
        logits = jnp.matmul(h.astype(wide), weight.T, precision="highest")
        if self.bias is not None:
            logits = logits + self.bias[...].astype(wide)
        sigmoid = config.scoring == "sigmoid"
        scores = jax.nn.sigmoid(logits) if sigmoid else jax.nn.softmax(logits, axis=-1)
        choice = scores
        if self.selection_bias is not None:
            choice = scores + self.selection_bias[...].astype(wide)
        if config.groups > 1:
            choice = _keep_best_groups(choice, config)
        _, ids = jax.lax.top_k(choice, config.top_k)
        ids, gates = self._gates(ids, scores, logits, plain)
        law = scores / scores.sum(axis=-1, keepdims=True) if sigmoid else scores
        return Routing(ids=ids, gates=gates, scores=law)

    def _gates(self, ids, scores, logits, plain: bool):
        """Gates of the chosen experts, by descending gate (`plain`: as they were chosen)."""
        config = self.config
        if config.scoring == "softmax_chosen":
            gates = jax.nn.softmax(jnp.take_along_axis(logits, ids, -1), axis=-1)
        else:
            gates = jnp.take_along_axis(scores, ids, -1)
        if self.selection_bias is not None and not plain:  # chosen by another number than the gate
            order = jnp.argsort(-gates, axis=-1, stable=True)
            ids, gates = jnp.take_along_axis(ids, order, -1), jnp.take_along_axis(gates, order, -1)
        if config.normalised and not plain:
            gates = gates / (gates.sum(axis=-1, keepdims=True) + 1e-20)
        return ids, gates * config.scaling


def _keep_best_groups(choice: Float[Array, "*rows E"], config: MoEConfig):
    """Puts out of reach what lies outside the best groups.

    A group's score is its largest (arXiv 2405.04434) or the sum of its two largest (arXiv
    2412.19437).
    """
    grouped = choice.reshape(*choice.shape[:-1], config.groups, -1)
    if config.group_score == "max":
        group = grouped.max(axis=-1)
    else:
        group = jax.lax.top_k(grouped, 2)[0].sum(axis=-1)
    _, best = jax.lax.top_k(group, config.groups_kept)
    keep = jax.nn.one_hot(best, config.groups, dtype=bool).any(axis=-2)
    return jnp.where(keep[..., None], grouped, -jnp.inf).reshape(choice.shape)

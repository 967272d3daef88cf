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
      scores: [*rows, E] the router's law over all experts (softmax), for losses and statistics.
    """

    ids: Int[Array, "*rows K"]
    gates: Float[Array, "*rows K"]
    scores: Float[Array, "*rows E"]


class Router(nnx.Module):
    """Linear router `weight` [E, D] with greedy or group-limited selection (DeepSeek-V2)."""

    def __init__(self, config: MoEConfig, width: int, *, dtype=jnp.float32, rngs: nnx.Rngs):
        self.config = config
        init = jax.random.normal(rngs.params(), (config.num_experts, width), dtype)
        self.weight = nnx.Param(init * jnp.asarray(width**-0.5, dtype))

    def __call__(self, h: Float[Array, "*rows D"]) -> Routing:
        config = self.config
        wide = jnp.promote_types(h.dtype, jnp.float32)
        # "highest": accelerators would else round the operands of a float32 product.
        weight = self.weight[...].astype(wide)
        logits = jnp.matmul(h.astype(wide), weight.T, precision="highest")
        scores = jax.nn.softmax(logits, axis=-1)
        choice = scores
        if config.groups > 1:
            choice = _keep_best_groups(scores, config.groups, config.groups_kept)
        gates, ids = jax.lax.top_k(choice, config.top_k)
        return Routing(ids=ids, gates=gates * config.scaling, scores=scores)


def _keep_best_groups(scores: Float[Array, "*rows E"], groups: int, kept: int):
    """Zeroes the scores outside the `kept` groups with the largest maximum (arXiv 2405.04434)."""
    grouped = scores.reshape(*scores.shape[:-1], groups, -1)
    _, best = jax.lax.top_k(grouped.max(axis=-1), kept)
    keep = jax.nn.one_hot(best, groups, dtype=bool).any(axis=-2)
    return jnp.where(keep[..., None], grouped, 0).reshape(scores.shape)

"""A small trained predictor of the experts that a drafted token will need (EcoSpec).

A node of a draft tree through which no draft pass was run has no router's word on its experts. This
predicts them from what is known when the node is drafted: the draft's state at its parent, and the
token itself. Of EcoSpec only the abstract was at hand, which asks for a lightweight predictor; this
one is ours:

    z = silu(A h / |h| + B e / |e| + c),   logits_l = H_l z + b_l + kappa_l 1[e in the parent's row]

with h the residual stream that leaves the draft path's last layer at the parent, e the token's
embedding (|.| is the root of the mean square), and the parent's row as the draft's routers chose
it. The top-k of each layer are the prediction.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dejax.config import ModelConfig
from dejax.model import Params

PARENT_WEIGHT = 2.0
"""What kappa starts from: an expert that the parent uses is likelier by this log odds."""


@dataclass(frozen=True, eq=False)
class ExpertPredictor:
    """A trained predictor, bound to the target and the draft experts that it was trained with.

    Attributes:
      params: `state` and `token` [N, D], `offset` [N], `heads` [L, E, N], `bias` [L, E], `parent`
        [L], where N is the rank and L counts MoE layers.
      layers: the decoder's own index of each of them.
      target, draft: identities (`dejax.ckpt.draft_state.draft_identity`).
      training: what is known of its training (JSON values).
    """

    params: Params
    layers: tuple[int, ...]
    target: str
    draft: str
    training: Mapping[str, Any]

    @property
    def rank(self) -> int:
        """Numbers that state and token are brought down to."""
        return self.params["offset"].shape[0]

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.params))


def predictor_shapes(config: ModelConfig, rank: int) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter for a target."""
    layers, experts, width = len(config.moe_layers), config.moe.num_experts, config.width
    return {
        "state": (rank, width),
        "token": (rank, width),
        "offset": (rank,),
        "heads": (layers, experts, rank),
        "bias": (layers, experts),
        "parent": (layers,),
    }


def initial_predictor(config: ModelConfig, *, rank: int, seed: int) -> dict[str, np.ndarray]:
    """Parameters to train from: every expert as likely as another, but for the parent's."""
    generator = np.random.default_rng(seed)
    params = {
        name: np.zeros(shape, np.float32) for name, shape in predictor_shapes(config, rank).items()
    }
    for name in ("state", "token", "heads"):
        shape = params[name].shape
        params[name] = generator.standard_normal(shape, np.float32) * shape[-1] ** -0.5
    top_k, experts = config.moe.top_k, config.moe.num_experts
    params["bias"] += np.log(top_k / max(experts - top_k, 1))
    params["parent"] += PARENT_WEIGHT
    return params


def expert_logits(
    params: Params,
    state: Float[Array, "*rows D"],
    token: Float[Array, "*rows D"],
    parent: Int[Array, "*rows L K"],
) -> Float[Array, "*rows L E"]:
    """Log odds that the row of a token needs each expert.

    Args:
      state: the draft's residual stream after its last layer, at the parent; token: the embedding;
        parent: the experts that the draft's routers chose at the parent, -1 for none.
    """
    bias = params["bias"]
    z = _unit(state) @ params["state"].T + _unit(token) @ params["token"].T + params["offset"]
    logits = jnp.einsum("...n,len->...le", jax.nn.silu(z), params["heads"]) + bias
    kept = jax.nn.one_hot(parent, bias.shape[-1], dtype=logits.dtype).sum(axis=-2)
    return logits + params["parent"][:, None] * kept


def _unit(x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
    """Rows scaled to a mean square of 1: embeddings and streams differ much in length."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-12)

"""The draft path of a MoE layer: shared experts + the top-r routed experts + the draft expert.

The same decoder runs it: only the middle function of a layer differs from the full MoE. Training
uses `draft_experts`; decoding gathers the top-r experts itself and adds `draft_output`.
"""

from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Float

from dejax.config import ClampedSwiGLU
from dejax.draft.expert import draft_output
from dejax.model import ExpertsFn, Params
from dejax.nn.experts import experts_of_tokens
from dejax.nn.router import Routing
from dejax.sharding import over_experts


def top_r(routing: Routing, r: int) -> Routing:
    """The r experts with the largest gates, gates unchanged (not renormalised)."""
    return Routing(ids=routing.ids[..., :r], gates=routing.gates[..., :r], scores=routing.scores)


def below_r(routing: Routing, r: int) -> Routing:
    """The chosen experts that `top_r` leaves out: what a draft expert stands in for."""
    return Routing(ids=routing.ids[..., r:], gates=routing.gates[..., r:], scores=routing.scores)


def routed_output(
    h: Float[Array, "B T D"],
    chosen: Routing,
    stack: Float[Array, "E 3 _F _D"],
    *,
    block: int,
    activation: ClampedSwiGLU | None = None,
) -> Float[Array, "B T D"]:
    """Weighted sum of the experts in `chosen` over whole sequences; zero where it names none.

    `block` is the rows of an expert's block in the grouped product; `activation` the experts'.
    """
    if chosen.ids.shape[-1] == 0:
        return jnp.zeros_like(h)
    experts = partial(experts_of_tokens, block=block, activation=activation)
    return over_experts(experts, h, chosen.ids, chosen.gates, stack)


def routed_parts(
    h: Float[Array, "B T D"],
    routing: Routing,
    stack: Float[Array, "E 3 _F _D"],
    *,
    r: int,
    block: int,
    activation: ClampedSwiGLU | None = None,
) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"]]:
    """`routed_output` of `top_r` and of `below_r`, every expert's output computed once."""
    rank = jnp.arange(routing.ids.shape[-1])
    gates = jnp.stack([jnp.where(part, routing.gates, 0) for part in (rank < r, rank >= r)])
    experts = partial(experts_of_tokens, block=block, activation=activation)
    kept, missing = over_experts(experts, h, routing.ids, gates, stack)
    return kept, missing


def draft_experts(
    stack: Float[Array, "E 3 _F _D"],
    params: Params | None,
    *,
    r: int,
    block: int,
    activation: ClampedSwiGLU | None = None,
) -> ExpertsFn:
    """The draft path's expert function over whole sequences, for `dejax.model.layer_full`.

    `params` are a draft expert's arrays; None leaves it out (shared + top-r alone). The index of
    the top expert is constant; its gate and the hidden state carry gradients.
    """

    def experts(h: Float[Array, "B T D"], routing: Routing) -> Float[Array, "B T D"]:
        y = routed_output(h, top_r(routing, r), stack, block=block, activation=activation)
        return y if params is None else y + draft_output(params, h)

    return experts

"""Draft experts: one small resident SwiGLU expert and one scalar per MoE layer.

DraftExpert (arXiv 2607.24434), section 4: y_draft = shared(h) + g_1 E_1(h) + gamma E_draft(h),
where E_1 is the target's own top-1 expert with the gate that the full routing rule gives it.
Everything but `DraftParam` stays frozen.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from dejax.config import DraftConfig, ModelConfig
from dejax.draft.confidence import ConfidenceHead
from dejax.model import Params
from dejax.nn.experts import expert_output


class DraftParam(nnx.Param):
    """A trainable parameter of a drafter; nothing else of the model is trained."""


class DraftExpert(nnx.Module):
    """One layer's draft expert.

    Attributes:
      weights: [3, F, D], gate, up and transposed down projection, as a routed expert's record.
      gamma: [], scale of its output.
    """

    def __init__(self, weights: Float[Array, "3 F D"], gamma: Float[Array, ""]):
        self.weights = DraftParam(weights)
        self.gamma = DraftParam(gamma)

    def __call__(self, h: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        return self.gamma[...].astype(h.dtype) * expert_output(h, self.weights[...])


@dataclass(frozen=True, eq=False)
class Draft:
    """Draft experts of a target, by decoder layer.

    Attributes:
      config: width and routed experts kept beside the draft expert.
      experts: layer index (dense layers counted) -> its draft expert.
      identity: the identity of the target they were trained for.
      training: what is known of their training (JSON values).
      raw: where `experts` are an average over training, those of the last step; None otherwise.
      head: what estimates whether their tokens are accepted, fitted to `experts`; None: nothing.
    """

    config: DraftConfig
    experts: Mapping[int, DraftExpert]
    identity: str
    training: Mapping[str, Any]
    raw: Mapping[int, DraftExpert] | None = None
    head: ConfidenceHead | None = None

    @property
    def plain(self) -> bool:
        """Whether the draft path has plain gates (`DraftConfig`)."""
        return self.config.gates == "plain"

    def layer_params(self, layer: int) -> Params:
        """Plain arrays of one layer: {"weights": [3, F, D], "gamma": []}."""
        expert = self.experts[layer]
        return {"weights": expert.weights[...], "gamma": expert.gamma[...]}

    def stacked_params(self) -> Params:
        """Plain arrays of all layers, for a scan: {"weights": [L, 3, F, D], "gamma": [L]}."""
        layers = [self.layer_params(layer) for layer in sorted(self.experts)]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)


def draft_of_params(
    params: Params,
    *,
    layers: tuple[int, ...],
    top_r: int,
    gates: Literal["full", "plain"] = "full",
    identity: str,
    training: Mapping[str, Any],
) -> Draft:
    """The draft experts of stacked arrays: the inverse of `Draft.stacked_params`."""
    experts = {
        layer: DraftExpert(params["weights"][i], params["gamma"][i])
        for i, layer in enumerate(layers)
    }
    config = DraftConfig(width=params["weights"].shape[2], top_r=top_r, gates=gates)
    return Draft(config=config, experts=experts, identity=identity, training=training)


def draft_output(params: Params, h: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
    """gamma E_draft(h) from plain arrays.

    {"constant": [D]} in place of an expert's arrays gives that vector for every row: the baseline
    that an expert must beat.
    """
    if "constant" in params:
        return jnp.broadcast_to(params["constant"].astype(h.dtype), h.shape)
    return params["gamma"].astype(h.dtype) * expert_output(h, params["weights"])


def random_draft(config: ModelConfig, draft: DraftConfig, *, seed: int, identity: str) -> Draft:
    """Untrained draft experts (`--draft init:SEED`): random weights with a small output."""
    keys = jax.random.split(jax.random.key(seed), len(config.moe_layers))
    shape = (3, draft.width, config.width)
    experts = {
        layer: DraftExpert(jax.random.normal(key, shape) * config.width**-0.5, jnp.ones(()))
        for layer, key in zip(config.moe_layers, keys, strict=True)
    }
    return Draft(config=draft, experts=experts, identity=identity, training={"init": seed})

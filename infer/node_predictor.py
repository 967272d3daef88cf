"""What a trained predictor says of a draft tree's nodes, while decoding.

One jitted step for all nodes of a tree, padded to the most that it grows, so that nothing compiles
after `warm_up`. Copies, all explicit: states, tokens and the parents' experts go in with one
`device_put`, the predicted experts come out.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dejax.draft.predictor import ExpertPredictor, expert_logits
from dejax.model import Params
from dejax.shapes import Pair
from dejax.spec.expert_use import ExpertGrid, Flat
from dejax.target import Target


@cache
def _step(top_k: int) -> Any:
    """The jitted prediction: flat numbers of the top-k experts of every layer, [N, L K]."""

    @jax.jit
    def predict(
        params: Params,
        embedding: Float[Array, "V D"],
        state: Float[Array, "N D"],
        tokens: Int[Array, " N"],
        parent: Int[Array, "N L K"],
    ) -> Int[Array, "N A"]:
        logits = expert_logits(params, state, embedding[tokens].astype(state.dtype), parent)
        ids = jax.lax.top_k(logits, top_k)[1]
        first = jnp.arange(ids.shape[1], dtype=ids.dtype)[:, None] * logits.shape[-1]
        return (ids + first).reshape(len(ids), -1)

    return predict


class NodePredictor:
    """Predicts the experts of drafted tokens from their parents' states, and from themselves."""

    def __init__(self, target: Target, predictor: ExpertPredictor):
        config = target.config
        self.grid = ExpertGrid(config.moe_layers, config.moe.num_experts, config.moe.top_k)
        self.width, self._dtype = config.width, np.dtype(target.compute_dtype)
        self._given = jax.device_put(predictor.params), target.model.embedding[...]
        self._step = _step(config.moe.top_k)

    def __call__(
        self,
        states: Sequence[Float[np.ndarray, " D"]],
        tokens: Sequence[int],
        parents: Sequence[frozenset[Pair]],
        *,
        size: int,
    ) -> list[Flat]:
        """The experts of each token's row, as `ExpertGrid` numbers them.

        Args:
          states: of the draft at each token's parent (`PassResult.hidden`); parents: what the
            draft's routers chose there; size: tokens that the step is padded to.
        """
        inputs = jax.device_put(self.inputs(states, tokens, parents, size))
        return list(jax.device_get(self.step(inputs))[: len(tokens)])

    def warm_up(self, size: int) -> None:
        """Compiles the step of so many tokens."""
        jax.block_until_ready(self.step(jax.device_put(self.inputs([], [], [], size))))

    def step(self, inputs: tuple[Array, Array, Array]) -> Int[Array, "N A"]:
        """The prediction on the device, of `inputs` there."""
        return self._step(*self._given, *inputs)

    def inputs(
        self, states: Any, tokens: Any, parents: Sequence[frozenset[Pair]], size: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What `step` takes, on the host: states, tokens and parents' experts, padded."""
        grid = self.grid
        state = np.zeros((size, self.width), self._dtype)
        padded = np.zeros(size, np.int32)
        chosen = np.full((size, len(grid.layers), grid.top_k), -1, np.int32)
        if len(tokens):
            state[: len(tokens)], padded[: len(tokens)] = states, tokens
        known = {routes: self._by_layer(routes) for routes in set(parents)}
        for row, routes in enumerate(parents):
            chosen[row] = known[routes]
        return state, padded, chosen

    def _by_layer(self, routes: frozenset[Pair]) -> Int[np.ndarray, "L K"]:
        grid = self.grid
        flat = np.sort(grid.flat(routes)).reshape(len(grid.layers), grid.top_k)
        return flat - grid.experts * np.arange(len(grid.layers), dtype=np.int32)[:, None]

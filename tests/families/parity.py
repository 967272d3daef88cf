"""A configuration computed twice, by `transformers` and by us, and what counts as equal."""

from functools import cached_property, partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
from flax import nnx

import dejax.target
from dejax.draft.path import routed_output
from dejax.model import layer_full
from dejax.target import Target, load_target
from tests.families import reference

TOLERANCE = 2e-4
TOKENS = np.random.default_rng(0).integers(0, 256, (2, 64))
"""Longer than any window."""


class Case:
    """Their model, its folder, and our target; of both, the logits and experts of `TOKENS`.

    What is computed of them is computed once, when it is first asked for.
    """

    def __init__(self, name: str, folder: Path):
        self.model = reference.random_model(name)
        self.folder = reference.save(self.model, folder)

    @cached_property
    def target(self) -> Target:
        return load_target(self.folder)

    @cached_property
    def _theirs(self):
        return reference.run(self.model, TOKENS)

    @cached_property
    def _ours(self):
        return run(self.target, TOKENS)

    @property
    def logits(self) -> np.ndarray:
        """Theirs; `ids` are the experts of each MoE layer in ascending order."""
        return self._theirs[0]

    @property
    def ids(self) -> dict[int, np.ndarray]:
        return self._theirs[1]

    @property
    def ours(self) -> np.ndarray:
        """Our logits; `our_ids` are our experts."""
        return self._ours[0]

    @property
    def our_ids(self) -> dict[int, np.ndarray]:
        return self._ours[1]


def run(target: Target, tokens: np.ndarray) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """As `reference.run`, of ours: the target's own call, its layers tapped."""
    ids: list[Any] = []

    def layer(*args):
        x, chosen = _tapped_layer(*args)
        ids.append(chosen)
        return x

    with mock.patch.object(dejax.target, "_whole_layer", layer):
        logits = np.asarray(target(tokens))
    return logits, {i: np.sort(a, axis=-1) for i, a in enumerate(ids) if a is not None}


@partial(jax.jit, static_argnums=(0, 1))
def _tapped_layer(definition, activation, params, stack, x, positions, mask):
    layer = nnx.merge(definition, params)
    experts = partial(routed_output, stack=stack, block=16, activation=activation)
    x, tap = layer_full(layer, x, positions=positions, mask=mask, experts=experts)
    return x, None if tap is None else tap.routing.ids


def assert_same(ours, expected):
    """Logits within the tolerance, and the same best token everywhere."""
    assert np.abs(np.asarray(ours) - expected).max() <= TOLERANCE
    np.testing.assert_array_equal(np.asarray(ours).argmax(-1), expected.argmax(-1))


def assert_same_experts(ours: dict[int, np.ndarray], expected: dict[int, np.ndarray]):
    """The same chosen experts of every row, layer by layer."""
    assert ours.keys() == expected.keys()
    for layer, ids in expected.items():
        np.testing.assert_array_equal(ours[layer], ids, err_msg=f"layer {layer}")


def difference(one, other) -> float:
    """Largest absolute difference."""
    return float(np.abs(np.asarray(one) - np.asarray(other)).max())

"""Modules with random weights made in NumPy, which needs no compilation."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

Module = TypeVar("Module", bound=nnx.Module)


def filled(make: Callable[[nnx.Rngs], Module], *, seed: int = 0) -> Module:
    """The module that `make` describes: matrices of unit gain, vectors around 1."""
    definition, shapes = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    rng = np.random.default_rng(seed)

    def fill(leaf):
        noise = rng.standard_normal(leaf.shape, np.float32) * leaf.shape[-1] ** -0.5
        return jnp.asarray((noise if len(leaf.shape) == 2 else 1 + noise).astype(leaf.dtype))

    return nnx.merge(definition, jax.tree.map(fill, shapes))


@nnx.jit
def apply(module, x):
    """`module(x)`, compiled once a definition and shape."""
    return module(x)

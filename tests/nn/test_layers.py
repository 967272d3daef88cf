"""Linear maps, norms and SwiGLU, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dejax.nn.layers import Linear, RMSNorm, SwiGLU


def test_linear_keeps_the_checkpoints_layout():
    layer = Linear(3, 5, bias=True, rngs=nnx.Rngs(0))
    layer.bias = nnx.Param(jnp.arange(5.0))
    x = jax.random.normal(jax.random.key(0), (2, 4, 3))
    assert layer.weight[...].shape == (5, 3)
    expected = np.asarray(x) @ np.asarray(layer.weight[...]).T + np.arange(5.0)
    np.testing.assert_allclose(layer(x), expected, atol=1e-6)
    assert Linear(3, 5, rngs=nnx.Rngs(0)).bias is None


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_norm(eps):
    norm = RMSNorm(4, eps=eps)
    norm.weight = nnx.Param(jnp.array([1.0, 2.0, -1.0, 0.5]))
    x = np.array([[1.0, -2.0, 3.0, 0.1], [1e-3, 0, 0, 1e-3]])
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * np.array([1, 2, -1, 0.5])
    np.testing.assert_allclose(norm(jnp.asarray(x, jnp.float32)), expected, rtol=1e-5)


def test_the_norm_of_short_activations_is_taken_in_float32():
    x = jnp.full((1, 4), 3e30, jnp.bfloat16)  # the squares overflow, in bfloat16 and in float32
    small = jnp.asarray([[1.0, 1 + 2**-7, 1.0, 1.0]], jnp.bfloat16)
    assert RMSNorm(4, eps=1e-6)(small).dtype == jnp.bfloat16
    wide = RMSNorm(4, eps=1e-6)(small.astype(jnp.float32))
    np.testing.assert_array_equal(RMSNorm(4, eps=1e-6)(small), wide.astype(jnp.bfloat16))
    assert not np.isnan(np.asarray(RMSNorm(4, eps=1e-6)(x), np.float32)).any()


def test_swiglu():
    mlp = SwiGLU(3, 6, rngs=nnx.Rngs(0))
    x = np.asarray(jax.random.normal(jax.random.key(0), (5, 3)))
    gate, up = (np.asarray(p.weight[...]) for p in (mlp.gate_proj, mlp.up_proj))
    inner = x @ gate.T
    expected = (inner / (1 + np.exp(-inner)) * (x @ up.T)) @ np.asarray(mlp.down_proj.weight[...]).T
    np.testing.assert_allclose(mlp(jnp.asarray(x)), expected, atol=1e-5)


def test_short_weights_are_widened_where_they_are_used():
    layer = Linear(64, 8, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (2, 64))
    expected = np.asarray(x) @ np.asarray(layer.weight[...].astype(jnp.float32)).T
    assert layer(x).dtype == jnp.float32
    np.testing.assert_allclose(layer(x), expected, atol=1e-5)

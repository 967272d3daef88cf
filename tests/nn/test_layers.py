"""Linear maps, norms and SwiGLU, against NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from dejax.nn.layers import Linear, RMSNorm, SwiGLU
from tests.nn.filled import apply, filled


def normal(*shape):
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def test_linear_keeps_the_checkpoints_layout():
    layer = filled(lambda rngs: Linear(3, 5, bias=True, rngs=rngs))
    x = normal(2, 4, 3)
    assert layer.weight[...].shape == (5, 3) and layer.bias is not None
    expected = x @ np.asarray(layer.weight[...]).T + np.asarray(layer.bias[...])
    np.testing.assert_allclose(apply(layer, x), expected, atol=1e-6)
    assert filled(lambda rngs: Linear(3, 5, rngs=rngs)).bias is None


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_norm(eps):
    norm = filled(lambda rngs: RMSNorm(4, eps=eps))
    x = np.array([[1.0, -2.0, 3.0, 0.1], [1e-3, 0, 0, 1e-3]], np.float32)
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * np.asarray(norm.weight[...])
    np.testing.assert_allclose(apply(norm, x), expected, rtol=1e-5)


def test_the_norm_of_short_activations_is_taken_in_float32():
    norm = filled(lambda rngs: RMSNorm(64, eps=1e-6))
    norm.weight[...] = jnp.asarray(np.ones(64), jnp.float32)
    short = jnp.asarray(normal(5, 64), jnp.bfloat16)
    ours = apply(norm, short)
    assert ours.dtype == jnp.bfloat16
    wide = np.asarray(short, np.float32)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
    np.testing.assert_array_equal(ours, expected.astype(ours.dtype))


def test_swiglu():
    mlp = filled(lambda rngs: SwiGLU(3, 6, rngs=rngs))
    x = normal(5, 3)
    gate, up = (np.asarray(p.weight[...]) for p in (mlp.gate_proj, mlp.up_proj))
    inner = x @ gate.T
    expected = (inner / (1 + np.exp(-inner)) * (x @ up.T)) @ np.asarray(mlp.down_proj.weight[...]).T
    np.testing.assert_allclose(apply(mlp, x), expected, atol=1e-5)


def test_short_weights_are_widened_where_they_are_used():
    layer = filled(lambda rngs: Linear(64, 8, dtype=jnp.bfloat16, rngs=rngs))
    x = normal(2, 64)
    expected = x @ np.asarray(layer.weight[...], np.float32).T
    assert layer.weight[...].dtype == jnp.bfloat16 and apply(layer, x).dtype == jnp.float32
    np.testing.assert_allclose(apply(layer, x), expected, atol=1e-5)

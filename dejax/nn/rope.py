"""Rotary position embeddings, with YaRN and DeepSeek's magnitude factors.

The inverse frequencies are constants of the configuration (numpy, float64 until applied); tables
for the rows of a pass are made inside jit from their positions.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dejax.config import RopeConfig, YarnConfig


def magnitude(factor: float, scale: float) -> float:
    """YaRN's magnitude m(scale) = 0.1 * scale * ln(factor) + 1 (1 when not extending)."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _yarn_inverse_frequencies(config: RopeConfig, yarn: YarnConfig) -> np.ndarray:
    """Blend of extrapolated (fast) and interpolated (slow) frequencies, arXiv 2309.00071."""

    def correction_dim(rotations: float) -> float:
        wavelength = yarn.original_context / (rotations * 2 * math.pi)
        return config.dim * math.log(wavelength) / (2 * math.log(config.theta))

    low, high = correction_dim(yarn.beta_fast), correction_dim(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dim - 1)
    high = high + 0.001 if low == high else high  # the reference's guard against a division by zero
    ramp = np.clip((np.arange(config.dim // 2) - low) / (high - low), 0, 1)
    plain = config.theta ** (-np.arange(0, config.dim, 2) / config.dim)
    return plain / yarn.factor * ramp + plain * (1 - ramp)


def inverse_frequencies(config: RopeConfig) -> np.ndarray:
    """Angle per position for each rotated pair: float64 [dim / 2]."""
    if config.yarn is not None:
        return _yarn_inverse_frequencies(config, config.yarn)
    return config.theta ** (-np.arange(0, config.dim, 2) / config.dim)


def table_scale(config: RopeConfig) -> float:
    """Factor on cos and sin: m(mscale) / m(mscale_all_dim), or the configured attention factor."""
    yarn = config.yarn
    if yarn is None:
        return 1.0
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    if yarn.mscale and yarn.mscale_all_dim:
        return magnitude(yarn.factor, yarn.mscale) / magnitude(yarn.factor, yarn.mscale_all_dim)
    return magnitude(yarn.factor, 1.0)


def softmax_scale_factor(config: RopeConfig) -> float:
    """Factor on the softmax scale: m(mscale_all_dim)^2 (DeepSeek only; 1 without YaRN)."""
    if config.yarn is None or not config.yarn.mscale_all_dim:
        return 1.0
    return magnitude(config.yarn.factor, config.yarn.mscale_all_dim) ** 2


def rotate(
    x: Float[Array, "*rows dim"], positions: Int[Array, "*positions"], config: RopeConfig
) -> Float[Array, "*rows dim"]:
    """Rotates the last dimension of `x`; `positions` has its leading shape (1 where broadcast).

    Angles are taken in the compute dtype of `x`, at least float32.
    """
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    angles = positions[..., None].astype(dtype) * inverse_frequencies(config).astype(dtype)
    scale = jnp.asarray(table_scale(config), dtype)
    cos, sin = jnp.cos(angles) * scale, jnp.sin(angles) * scale
    if config.interleaved:
        a, b = x[..., 0::2].astype(dtype), x[..., 1::2].astype(dtype)
        out = jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(x.shape)
    else:
        a, b = jnp.split(x.astype(dtype), 2, axis=-1)
        out = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return out.astype(x.dtype)

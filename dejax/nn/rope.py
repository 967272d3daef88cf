"""Rotary position embeddings, with YaRN (DeepSeek's magnitude factors) and Llama 3's scaling.

The inverse frequencies are constants of the configuration (numpy, float64 until applied); tables
for the rows of a pass are made inside jit from their positions.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dejax.config import Llama3Config, RopeConfig, YarnConfig


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
    plain = _plain_inverse_frequencies(config)
    return plain / yarn.factor * ramp + plain * (1 - ramp)


def _plain_inverse_frequencies(config: RopeConfig) -> np.ndarray:
    return config.theta ** (-np.arange(0, config.dim, 2) / config.dim)


def _llama3_inverse_frequencies(config: RopeConfig, llama3: Llama3Config) -> np.ndarray:
    """Wavelengths beyond the original context divided, short ones kept, a ramp between."""
    plain = _plain_inverse_frequencies(config)
    turns = llama3.original_context * plain / (2 * math.pi)
    low, high = llama3.low_freq_factor, llama3.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return plain / llama3.factor * (1 - kept) + plain * kept


def inverse_frequencies(config: RopeConfig) -> np.ndarray:
    """Angle per position for each rotated pair: float64 [dim / 2]."""
    if config.yarn is not None:
        return _yarn_inverse_frequencies(config, config.yarn)
    if config.llama3 is not None:
        return _llama3_inverse_frequencies(config, config.llama3)
    if config.divisors is not None:
        return _plain_inverse_frequencies(config) / np.array(config.divisors)
    return _plain_inverse_frequencies(config)


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
    """Rotates the first `config.dim` entries of the last dimension of `x`, the rest is kept.

    `positions` has the leading shape of `x` (1 where broadcast). Angles are taken in the compute
    dtype of `x`, at least float32.
    """
    if x.shape[-1] > config.dim:
        turned = rotate(x[..., : config.dim], positions, config)
        return jnp.concatenate([turned, x[..., config.dim :]], axis=-1)
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

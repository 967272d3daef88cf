"""Rotation by position, and YaRN's frequencies and magnitudes, against the formulas in NumPy."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax.config import RopeConfig, YarnConfig
from dejax.nn.rope import inverse_frequencies, magnitude, rotate, softmax_scale_factor, table_scale

turn = jax.jit(rotate, static_argnums=2)
PLAIN = RopeConfig(dim=8, theta=1e4, interleaved=True)
V2 = YarnConfig(factor=40.0, original_context=4096, mscale=0.707, mscale_all_dim=0.707)
PUBLISHED = RopeConfig(dim=64, theta=1e4, interleaved=True, yarn=V2)


def with_yarn(**settings) -> RopeConfig:
    return dataclasses.replace(PUBLISHED, yarn=dataclasses.replace(V2, **settings))


@pytest.mark.parametrize("interleaved", [True, False])
def test_a_pair_turns_by_its_angle(interleaved):
    """The pair i of a row at position p is multiplied by exp(i p theta^(-2i/dim))."""
    config = dataclasses.replace(PLAIN, interleaved=interleaved)
    rng = np.random.default_rng(0)
    x, positions = rng.standard_normal((5, 3, 8)), np.array([0, 1, 7, 100, 163839])
    ours = turn(jnp.asarray(x, jnp.float32), jnp.asarray(positions)[:, None], config)
    split = (x[..., 0::2], x[..., 1::2]) if interleaved else np.split(x, 2, axis=-1)
    angles = positions[:, None, None] * 1e4 ** (-np.arange(0, 8, 2) / 8)
    turned = (split[0] + 1j * split[1]) * np.exp(1j * angles)
    parts = [turned.real, turned.imag]
    expected = np.stack(parts, -1).reshape(x.shape) if interleaved else np.concatenate(parts, -1)
    # An angle of 1e5 has an error of 1e-2 in float32, in the reference too.
    np.testing.assert_allclose(ours[:4], expected[:4], atol=2e-5)
    np.testing.assert_allclose(ours[4], expected[4], atol=5e-2)


def test_the_two_layouts_are_one_rotation():
    """huggingface/transformers 39687: permuting q and k together changes no product."""
    half = dataclasses.replace(PLAIN, interleaved=False)
    q, k = np.random.default_rng(0).standard_normal((2, 6, 8), np.float32)
    positions, order = np.arange(6), [0, 2, 4, 6, 1, 3, 5, 7]
    one = turn(q, positions, PLAIN) @ turn(k, positions, PLAIN).T
    other = turn(q[:, order], positions, half) @ turn(k[:, order], positions, half).T
    np.testing.assert_allclose(one, other, atol=1e-5)
    mixed = turn(q, positions, half) @ turn(k, positions, half).T
    assert jnp.abs(one - mixed).max() > 0.1


def test_products_depend_on_the_distance_alone():
    q, k = np.random.default_rng(0).standard_normal((2, 1, 64), np.float32)
    products = [
        (turn(q, jnp.array([p + 5]), PUBLISHED) @ turn(k, jnp.array([p]), PUBLISHED).T).item()
        for p in (0, 3, 1000)
    ]
    assert max(products) - min(products) < 1e-3


def test_yarn_keeps_the_fast_and_stretches_the_slow():
    """Between the two, the blend of the published model: pairs 10 to 23 of 32."""
    plain = 1e4 ** (-np.arange(0, 64, 2) / 64)
    ratio = inverse_frequencies(PUBLISHED) / plain
    np.testing.assert_allclose(ratio[:11], 1)
    np.testing.assert_allclose(ratio[23:], 1 / 40)
    ramp = (np.arange(11, 23) - 10) / 13
    np.testing.assert_allclose(ratio[11:23], ramp / 40 + 1 - ramp)


def test_the_range_is_rounded_unless_told_not_to():
    def bound(rotations):
        return 64 * math.log(4096 / (rotations * 2 * math.pi)) / (2 * math.log(1e4))

    low, high = bound(32), bound(1)
    assert (math.floor(low), math.ceil(high)) == (10, 23) and low != 10 and high != 23
    ratio = inverse_frequencies(with_yarn(truncate=False)) / 1e4 ** (-np.arange(0, 64, 2) / 64)
    ramp = np.clip((np.arange(32) - low) / (high - low), 0, 1)
    np.testing.assert_allclose(ratio, ramp / 40 + 1 - ramp)


def test_an_empty_range_is_a_step():
    config = with_yarn(beta_fast=1.0, beta_slow=1.0, truncate=False)
    assert np.isfinite(inverse_frequencies(config)).all()


def test_magnitudes_of_the_published_model():
    """huggingface/transformers 47435: 0.114721 against a base of 0.0721688."""
    assert table_scale(PUBLISHED) == 1.0
    factor = softmax_scale_factor(PUBLISHED)
    assert factor == pytest.approx(1.58963, abs=1e-5)
    assert (128 + 64) ** -0.5 * factor == pytest.approx(0.114721, abs=1e-6)
    third = with_yarn(mscale=1.0, mscale_all_dim=1.0)  # V3's
    assert softmax_scale_factor(third) == pytest.approx(1.87385, abs=1e-5)


def test_which_magnitude_goes_where():
    """NVIDIA/Megatron-LM 1429: the softmax has mscale_all_dim, the tables the ratio of the two."""
    config = with_yarn(mscale=1.0, mscale_all_dim=0.5)
    one, half = magnitude(40.0, 1.0), magnitude(40.0, 0.5)
    assert table_scale(config) == one / half and softmax_scale_factor(config) == half**2
    for settings in (dict(mscale=0.0), dict(mscale_all_dim=0.0)):
        assert table_scale(with_yarn(**settings)) == one  # as the reference: both or neither
    assert softmax_scale_factor(with_yarn(mscale_all_dim=0.0)) == 1.0
    assert table_scale(with_yarn(attention_factor=0.7)) == 0.7


def test_without_yarn_nothing_is_scaled():
    assert table_scale(PLAIN) == softmax_scale_factor(PLAIN) == 1.0
    assert magnitude(1.0, 0.7) == magnitude(0.5, 0.7) == 1.0


def test_angles_are_as_wide_as_the_activations():
    x = jnp.ones((1, 8), jnp.bfloat16)
    assert turn(x, jnp.array([3]), PLAIN).dtype == jnp.bfloat16
    with jax.enable_x64(True):
        wide = turn(jnp.ones((1, 8), jnp.float64), jnp.array([100_000]), PLAIN)
        angles = 100_000 * 1e4 ** (-np.arange(0, 8, 2) / 8)
        np.testing.assert_allclose(wide[0, 0::2], np.cos(angles) - np.sin(angles), atol=1e-9)

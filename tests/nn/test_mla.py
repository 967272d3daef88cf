"""Latent attention: the two forms agree, the cache keeps latents, masks are exact."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dejax.config import MLAConfig, RopeConfig, YarnConfig
from dejax.nn.mla import MLA, init_latent_cache
from tests.nn.filled import filled

YARN = YarnConfig(factor=4.0, original_context=8, mscale=1.0, mscale_all_dim=0.5)
CONFIG = MLAConfig(
    heads=3,
    query_rank=6,
    kv_rank=10,
    nope_dim=4,
    value_dim=5,
    rope=RopeConfig(dim=4, theta=100.0, interleaved=True, yarn=YARN),
    bias=True,
)
WIDTH, LENGTH, SLOTS = 12, 9, 16


@pytest.fixture(scope="module")
def layer():
    return filled(lambda rngs: MLA(CONFIG, WIDTH, rngs=rngs))


@pytest.fixture(scope="module")
def x():
    return jnp.asarray(np.random.default_rng(2).standard_normal((LENGTH, WIDTH), np.float32))


@nnx.jit
def whole(layer, x):
    positions = jnp.arange(len(x))[None]
    mask = jnp.tril(jnp.ones((1, len(x), len(x)), bool))
    return layer.full(x[None], positions=positions, mask=mask)[0]


@nnx.jit
def cached(layer, x, cache, start):
    rows = start + jnp.arange(len(x))
    mask = jnp.arange(SLOTS)[None] <= rows[:, None]
    return layer.cached(x, cache, start=jnp.asarray(start), positions=rows, mask=mask)


def test_rows_over_a_cache_are_the_whole_sequence(layer, x):
    cache = init_latent_cache(CONFIG, SLOTS, jnp.float32)
    first, cache = cached(layer, x[:5], cache, 0)
    second, cache = cached(layer, x[5:], cache, 5)
    ours = jnp.concatenate([first, second])
    np.testing.assert_allclose(ours, whole(layer, x), atol=1e-5)


def test_a_cache_holds_latents_and_one_rotated_key(layer, x):
    cache = init_latent_cache(CONFIG, SLOTS, jnp.float32)
    assert cache.latent.shape == (SLOTS, 10) and cache.rope_key.shape == (SLOTS, 4)
    _, cache = cached(layer, x, cache, 0)
    latent = np.asarray(cache.latent[:LENGTH]) / np.asarray(layer.kv_a_layernorm.weight[...])
    np.testing.assert_allclose(np.mean(latent**2, -1), 1, rtol=1e-3)  # normed before it is kept
    assert not np.any(cache.latent[LENGTH:]) and not np.any(cache.rope_key[LENGTH:])


def test_what_a_row_may_not_see_changes_nothing(layer, x):
    """Bit for bit: the slots beyond the mask may hold anything finite."""
    clean = init_latent_cache(CONFIG, SLOTS, jnp.float32)
    dirty = jax.tree.map(lambda a: a.at[6:].set(1e30), clean)
    for start, rows in ((0, x[:5]), (5, x[5:6])):
        one, clean = cached(layer, rows, clean, start)
        other, dirty = cached(layer, rows, dirty, start)
        np.testing.assert_array_equal(one, other)


def test_a_later_row_does_not_reach_back(layer, x):
    changed = whole(layer, x.at[-1].set(7.0))
    np.testing.assert_array_equal(changed[:-1], whole(layer, x)[:-1])


def test_the_softmax_scale_has_yarns_factor(layer):
    """huggingface/transformers 47435."""
    assert layer.scale == pytest.approx(8**-0.5 * (0.1 * 0.5 * np.log(4) + 1) ** 2)


def test_inner_norms_have_their_own_eps(layer):
    """huggingface/transformers 44346."""
    assert layer.kv_a_layernorm.eps == layer.q_a_layernorm.eps == 1e-6


def test_a_short_cache_is_widened_for_the_products(layer, x):
    cache = init_latent_cache(CONFIG, SLOTS, jnp.bfloat16)
    y, cache = cached(layer, x, cache, 0)
    assert y.dtype == jnp.float32 and cache.latent.dtype == jnp.bfloat16
    np.testing.assert_allclose(y, whole(layer, x), atol=0.2)

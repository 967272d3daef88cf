"""Quantised experts: error bounds, sizes, one value wherever a record is decoded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dejax.ckpt.expert_codec import (
    ENCODINGS,
    GROUP,
    PLAIN,
    QUANTISED,
    Packing,
    decode,
    encode,
    record_bytes,
    unpack,
)

REACH = {"int8": 127, "int4": 7, "fp8": 448}


def record(shape, seed, spread=2.0):
    """Weights over many magnitudes, a row of zeros among them."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape) * np.exp(spread * rng.standard_normal(shape))
    values[0, 0] = 0
    return values.astype(np.float32)


def bound(encoding, values):
    """The documented bound on the error of each element."""
    padding = -values.shape[-1] % GROUP
    groups = np.pad(np.abs(values), [(0, 0), (0, 0), (0, padding)]).reshape(-1, GROUP)
    scale = 1.008 * np.repeat(groups.max(axis=1), GROUP) / REACH[encoding]
    scale = scale.reshape(*values.shape[:-1], -1)[..., : values.shape[-1]]
    return np.maximum(np.abs(values) / 16, scale / 1024) if encoding == "fp8" else scale / 2


@pytest.mark.parametrize("encoding", QUANTISED)
@settings(max_examples=20, deadline=None)
@given(
    width=st.integers(1, 5),
    columns=st.integers(1, 70),
    seed=st.integers(0, 99),
    spread=st.sampled_from([0.0, 1.0, 4.0]),
)
def test_no_element_is_further_off_than_its_bound(encoding, width, columns, seed, spread):
    values = record((3, width, columns), seed, spread)
    stored = encode(encoding, values)
    assert stored.nbytes == record_bytes(encoding, values.shape)
    error = np.abs(decode(encoding, stored, values.shape).astype(np.float64) - values)
    assert (error <= bound(encoding, values)).all()


@pytest.mark.parametrize("encoding", QUANTISED)
@pytest.mark.parametrize("columns", [64, 65])
def test_the_device_decodes_the_same_numbers(encoding, columns):
    values = record((3, 4, columns), 1)
    stored = encode(encoding, values)
    packing = Packing(encoding, values.shape)
    ours = jax.jit(lambda data: unpack(packing, data, jnp.float32))(stored)
    np.testing.assert_array_equal(ours, decode(encoding, stored, values.shape))


def test_sizes_beside_bfloat16():
    shape = (3, 64, 256)
    sizes = [record_bytes(name, shape) / record_bytes("bfloat16", shape) for name in ENCODINGS]
    assert dict(zip(ENCODINGS, sizes, strict=True)) == {
        "bfloat16": 1,
        "float32": 2,
        "float64": 4,
        "fp8": 34 / 64,
        "int8": 34 / 64,
        "int4": 18 / 64,
    }


@pytest.mark.parametrize("encoding", PLAIN)
def test_plain_encodings_keep_every_bit(encoding):
    values = record((3, 2, 7), 0).astype(PLAIN[encoding])
    stored = np.frombuffer(encode(encoding, values).tobytes(), np.uint8)
    np.testing.assert_array_equal(decode(encoding, stored, values.shape), values)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused(wrong):
    values = record((3, 2, 40), 0)
    values[1, 1, 3] = wrong
    with pytest.raises(ValueError, match="not finite"):
        encode("int8", values)


def test_the_largest_float32_is_within_reach():
    values = record((3, 2, 40), 0)
    values[1, 1, 3] = 3.4e38
    assert np.isfinite(decode("int8", encode("int8", values), values.shape)).all()

"""How an expert's numbers become a record's bytes: plain, or quantised in groups of 32.

Quantisation is weight-only. A record [3, F, D] is cut into groups of 32 neighbours along D (the
last one filled up with zeros); a group has one bfloat16 scale s, chosen so that its largest
magnitude m is in reach, and 32 codes q. The value is s * q in float32. On a finite x, with m the
largest magnitude of its group:

| encoding | bytes a group | codes | |x - s q| is at most |
|---|---|---|---|
| int8 | 34 | -127 .. 127 | s / 2, with s <= 1.008 m / 127 |
| int4 | 18 | -7 .. 7 | s / 2, with s <= 1.008 m / 7 |
| fp8 | 34 | float8 e4m3 | max(|x| / 16, s / 1024), with s <= 1.008 m / 448 |

A record is all codes, group by group, then all scales. Both directions are functions of the bytes
alone, so that an expert is the same wherever it is decoded.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float, Shaped, UInt8

PLAIN: dict[str, np.dtype] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
"""Encodings that hold the numbers as they are."""
QUANTISED = ("fp8", "int8", "int4")
ENCODINGS = (*PLAIN, *QUANTISED)
OPTIONS = {
    "bf16": "bfloat16",
    "f32": "float32",
    "fp8": "fp8",
    "int8": "int8",
    "int4": "int4",
}
"""Encodings by the short names that a user types."""
GROUP = 32

_BFLOAT16, _FP8 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
_LARGEST = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}
_CODE_BYTES = {"int8": 32, "int4": 16, "fp8": 32}


def record_bytes(encoding: str, shape: tuple[int, ...]) -> int:
    """Bytes of a record of this shape."""
    if encoding in PLAIN:
        return math.prod(shape) * PLAIN[encoding].itemsize
    return _groups(shape) * (_CODE_BYTES[encoding] + _BFLOAT16.itemsize)


def _groups(shape: tuple[int, ...]) -> int:
    return math.prod(shape[:-1]) * -(-shape[-1] // GROUP)


def encode(encoding: str, record: Float[np.ndarray, "3 F D"]) -> Shaped[np.ndarray, "..."]:
    """A record's numbers as what the store keeps: in a plain dtype, or flat bytes.

    Raises:
      ValueError: a number is not finite, or too large for a scale.
    """
    if encoding in PLAIN:
        return record.astype(PLAIN[encoding], copy=False)
    wide = np.asarray(record, np.float32)
    if not np.isfinite(wide).all():
        raise ValueError("a weight is not finite")
    padding = -wide.shape[-1] % GROUP
    wide = np.pad(wide, [(0, 0)] * (wide.ndim - 1) + [(0, padding)]).reshape(-1, GROUP)
    scales = _scales(np.abs(wide).max(axis=1), _LARGEST[encoding])
    ratio = wide / np.where(scales > 0, scales, 1).astype(np.float32)[:, None]
    if encoding == "fp8":
        codes = ratio.astype(_FP8).view(np.uint8)
    else:
        codes = np.rint(ratio).astype(np.int8).view(np.uint8)
    if encoding == "int4":  # two neighbours a byte, the first in the low half
        codes = (codes[:, 0::2] & 0x0F) | (codes[:, 1::2] << 4)
    return np.concatenate([codes.reshape(-1), scales.view(np.uint8)])


def _scales(largest: Float[np.ndarray, " N"], reach: float) -> Shaped[np.ndarray, " N"]:
    """The smallest bfloat16 scales with which `reach` codes reach `largest`."""
    wanted = (largest.astype(np.float64) / reach).astype(np.float32)
    scales = wanted.astype(_BFLOAT16)
    short = scales.astype(np.float64) * reach < largest
    bits = scales.view(np.uint16) + short.astype(np.uint16)  # the next larger bfloat16
    scales = bits.view(_BFLOAT16)
    if not np.isfinite(scales.astype(np.float32)).all():
        raise ValueError("a weight is too large for a bfloat16 scale")
    return scales


def decode(
    encoding: str, data: Shaped[np.ndarray, "..."], shape: tuple[int, ...]
) -> Shaped[np.ndarray, "3 F D"]:
    """The record of what `encode` gave: in its own dtype if plain, else in float32."""
    if encoding in PLAIN:
        return data.view(PLAIN[encoding]).reshape(shape)
    codes, scales = _split(encoding, data.reshape(-1), shape)
    if encoding == "int4":
        low, high = (codes << 4).view(np.int8) >> 4, codes.view(np.int8) >> 4
        values = np.stack([low, high], axis=-1).reshape(-1, GROUP).astype(np.float32)
    else:
        kind = _FP8 if encoding == "fp8" else np.dtype(np.int8)
        values = codes.view(kind).astype(np.float32)
    values *= scales.view(_BFLOAT16).astype(np.float32)[:, None]
    return values.reshape(*shape[:-1], -1)[..., : shape[-1]]


def _split(encoding: str, data: Any, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Codes [groups, bytes] and the bytes of the scales."""
    groups = _groups(shape)
    last = groups * _CODE_BYTES[encoding]
    return data[:last].reshape(groups, -1), data[last:]


class Packing(NamedTuple):
    """What it takes to decode quantised records of one store."""

    encoding: str
    shape: tuple[int, ...]


def unpack(packing: Packing, data: UInt8[Array, " bytes"], dtype: Any) -> Float[Array, "3 F D"]:
    """`decode` of a quantised record inside jit, bit for bit, then as `dtype`."""
    encoding, shape = packing
    codes, scales = _split(encoding, data, shape)
    scales = jax.lax.bitcast_convert_type(scales.reshape(-1, 2), jnp.bfloat16)
    if encoding == "int4":
        signed = jax.lax.bitcast_convert_type(codes, jnp.int8)
        values = jnp.stack([(signed << 4) >> 4, signed >> 4], axis=-1).reshape(-1, GROUP)
    else:
        kind = jnp.float8_e4m3fn if encoding == "fp8" else jnp.int8
        values = jax.lax.bitcast_convert_type(codes, kind)
    values = values.astype(jnp.float32) * scales.astype(jnp.float32)[:, None]
    return values.reshape(*shape[:-1], -1)[..., : shape[-1]].astype(dtype)

"""Quantised weights as releases hold them: FP8 tiles (DeepSeek-V3), MXFP4 blocks (gpt-oss)."""

import ml_dtypes
import numpy as np
from jaxtyping import Float, Shaped, UInt8

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
TILE = 128
"""Rows and columns that share an FP8 scale; the last tile of a dimension may be smaller."""
MX_BLOCK = 32
"""Neighbours that share an MXFP4 scale."""

_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_FP4 = np.concatenate([_FP4, -_FP4])  # by code: sign, two bits of exponent, one of mantissa


def tiles(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of an FP8 matrix."""
    return tuple(-(-n // TILE) for n in shape)


def from_fp8(
    codes: Shaped[np.ndarray, "R C"], scales: Float[np.ndarray, "tr tc"]
) -> Float[np.ndarray, "R C"]:
    """Codes times the scale of their tile, in float32."""
    numbers = codes.astype(np.float32)
    for row, along in enumerate(scales.astype(np.float32)):
        part = numbers[row * TILE : (row + 1) * TILE]
        part *= np.repeat(along, TILE)[: part.shape[1]]
    return numbers


def from_mxfp4(
    blocks: UInt8[np.ndarray, "R G 16"], scales: UInt8[np.ndarray, "R G"]
) -> Float[np.ndarray, "R C"]:
    """Blocks of 32 e2m1 numbers, the lower half of a byte first, times 2^(scale - 127)."""
    values = np.stack([_FP4[blocks & 0x0F], _FP4[blocks >> 4]], axis=-1)
    numbers = values.reshape(*blocks.shape[:2], MX_BLOCK)
    exponents = scales.astype(np.int32)[..., None] - 127
    return np.ldexp(numbers, exponents).reshape(blocks.shape[0], -1)

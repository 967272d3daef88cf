"""Writing a GGUF file in pieces: header and metadata first, then each piece at its own place.

The places follow from the shapes, so that the experts of a stacked tensor can be written as they
are read, one at a time. A file takes its name when it is whole.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from dejax.ckpt.tensor_files import write_whole
from dejax.errors import FailedError, UsageError

KINDS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7, "BF16": 32, "MXFP4": 38}
"""How tensors can be stored -> llama.cpp's number of a file most of whose tensors are."""
BLOCK = 32
"""Numbers of a row that share a scale where a kind has scales."""

_PLAIN = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_BLOCK_BYTES = {"Q4_0": 18, "Q8_0": 34, "MXFP4": 17}
_CHUNK = 1 << 22  # numbers encoded at a time

Value = bool | int | float | str | list[str] | list[int] | list[float]
"""A metadata value: whole numbers are stored as uint32 (int32 in lists), others as float32."""


@dataclass(frozen=True)
class TensorPlan:
    """A tensor of the file: its name, its shape (row-major, as in numpy) and a key of `KINDS`."""

    name: str
    shape: tuple[int, ...]
    kind: str

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return encoded_bytes(self.shape, self.kind)


@dataclass(frozen=True)
class Piece:
    """Numbers of a tensor: all of it, or `tensor[index]`."""

    name: str
    array: np.ndarray
    index: int = 0


def gguf_package(where: object) -> Any:
    """The package `gguf`, loaded when it is asked for.

    Raises:
      UsageError: it is not installed; `where` begins the message.
    """
    try:
        import gguf
    except ImportError:
        raise UsageError(f"{where}: GGUF files need the gguf package; pip install gguf") from None
    return gguf


def encoded_bytes(shape: Sequence[int], kind: str) -> int:
    """Bytes of an array of this shape, stored as `kind`."""
    size = math.prod(shape)
    return size * _PLAIN[kind].itemsize if kind in _PLAIN else size // BLOCK * _BLOCK_BYTES[kind]


def write_gguf(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Value],
    tensors: Sequence[TensorPlan],
    pieces: Iterable[Piece],
    advance: Callable[[int], None] | None = None,
) -> None:
    """Writes a file, whole or not at all, with one piece in memory at a time.

    Args:
      pieces: in any order; together they are all tensors.
      advance: called with the number of bytes after each part of a piece.

    Raises:
      FailedError: it cannot be written, or float16 does not hold a number.
    """
    gguf = gguf_package(path)
    try:
        with write_whole(path) as unfinished:
            starts = _write_head(gguf, unfinished, architecture, metadata, tensors)
            plans = {plan.name: plan for plan in tensors}
            missing = sum(plan.nbytes for plan in tensors)
            with unfinished.open("r+b") as file:
                file.truncate(starts[""])
                for piece in pieces:
                    kind = plans[piece.name].kind
                    size = encoded_bytes(piece.array.shape, kind)
                    file.seek(starts[piece.name] + piece.index * size)
                    for data in _encoded(gguf, piece, kind):
                        file.write(data)
                        missing -= len(data)
                        if advance is not None:
                            advance(len(data))
            assert missing == 0, f"{missing} bytes of the tensors are missing"
    except OSError as error:
        raise FailedError(f"{path}: cannot be written: {error.strerror or error}") from error


def _write_head(
    gguf: Any,
    path: Path,
    architecture: str,
    metadata: Mapping[str, Value],
    tensors: Sequence[TensorPlan],
) -> dict[str, int]:
    """Writes all but the numbers. Name -> first byte of a tensor; "" -> size of the file."""
    writer = gguf.GGUFWriter(None, architecture)
    for key, value in metadata.items():
        writer.add_key_value(key, value, _value_type(gguf, value))
    for plan in tensors:
        kind = gguf.GGMLQuantizationType[plan.kind]
        # float32: of bytes the writer would compute the shape from the encoding.
        writer.add_tensor_info(plan.name, plan.shape, np.dtype(np.float32), plan.nbytes, kind)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()

    def padded(size: int) -> int:
        return -(-size // writer.data_alignment) * writer.data_alignment

    end, starts = padded(path.stat().st_size), {}
    for plan in tensors:
        starts[plan.name] = end
        end += padded(plan.nbytes)
    return starts | {"": end}


def _value_type(gguf: Any, value: Value) -> Any:
    kinds = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING", list: "ARRAY"}
    return gguf.GGUFValueType[kinds[type(value)]]


def _encoded(gguf: Any, piece: Piece, kind: str):
    """The bytes of a piece, some rows at a time."""
    rows = piece.array.reshape(-1, piece.array.shape[-1])
    count = max(1, _CHUNK // rows.shape[1])
    for first in range(0, len(rows), count):
        part = rows[first : first + count]
        if kind not in _PLAIN:
            part = np.ascontiguousarray(part, np.float32)
            yield gguf.quants.quantize(part, gguf.GGMLQuantizationType[kind]).tobytes()
            continue
        with np.errstate(over="ignore"):
            stored = part.astype(_PLAIN[kind])
        if kind == "F16" and not np.isfinite(stored).all():
            raise FailedError(f"{piece.name} has numbers that float16 does not hold; use bf16")
        yield stored.tobytes()

"""Safetensors files by byte ranges: where each tensor lies, and reading and writing parts of them.

The bottom of `hf_weights`: it knows files and headers, not models. Nothing is unpickled, and no
file is ever held whole, so that a checkpoint may be larger than memory.
"""

import contextlib
import json
import math
import os
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from dejax.block_scaled import FP8, TILE, from_fp8
from dejax.errors import FailedError, UsageError

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": FP8,
    "U8": np.dtype(np.uint8),
}
"""What a tensor may be stored as, by the name in a safetensors header."""
PLAIN_DTYPES = "BF16, F16, F32, F64"
"""Those of them that need nothing else to be numbers, for messages."""
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

_MOST_LISTED, _FIRST = 6, 3  # bad tensors: so many are listed whole, of more the first

_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_CHUNK = 1 << 22  # elements read at a time


def bad_tensors(problems: Collection[str]) -> str:
    """`2 bad tensors: A: missing; B: unknown`; of many the first few."""
    listed = sorted(problems)
    more = ""
    if len(listed) > _MOST_LISTED:
        more = f"; and {len(listed) - _FIRST} more"
        listed = listed[:_FIRST]
    return f"{len(problems)} bad tensors: {'; '.join(listed)}{more}"


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: file, first byte in it, shape and dtype.

    `scale` is the entry of an FP8 matrix's scales: together they are its numbers.
    """

    file: Path
    start: int
    shape: tuple[int, ...]
    dtype: np.dtype
    scale: "TensorEntry | None" = None

    @property
    def numbers(self) -> np.dtype:
        """Dtype of the numbers that reading gives."""
        return self.dtype if self.scale is None else np.dtype(np.float32)

    @property
    def piece(self) -> int:
        """Elements that are read at a time; whole tiles where they share a scale."""
        return _CHUNK if self.scale is None else TILE * self.shape[1]

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return self.size * self.dtype.itemsize

    def row(self, index: int) -> "TensorEntry":
        """The entry of `tensor[index]`, which can then be read without the other rows."""
        whole = replace(self, shape=self.shape[1:])
        return replace(whole, start=self.start + index * whole.nbytes)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; UsageError when it is missing or is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(
            f"{path}: no such file; expected a model folder with {path.name}"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def list_tensors(folder: Path) -> tuple[dict[str, TensorEntry], list[str]]:
    """All tensors of a folder (one file, or shards with an index), and what is wrong with them.

    The problems are tensors in two files, in another file than the index says, or of a dtype that
    is no weight's: the caller reports them together with its own.

    Raises:
      UsageError: there are no safetensors, the index is malformed, or a file is missing or damaged.
    """
    weight_map, files = _weight_files(folder)
    entries: dict[str, TensorEntry] = {}
    problems = []
    for file in files:
        for name, dtype, shape, start in _header(file):
            if name in entries:
                problems.append(f"{name}: in both {entries[name].file.name} and {file.name}")
            elif weight_map is not None and weight_map.get(name) != file.name:
                listed = weight_map.get(name, "nowhere")
                problems.append(f"{name}: in {file.name}, but the index lists it in {listed}")
            if dtype not in DTYPES:
                problems.append(f"{name}: dtype {dtype}, expected {PLAIN_DTYPES}")
            entries[name] = TensorEntry(file, start, shape, DTYPES.get(dtype, np.dtype(np.float32)))
    if weight_map is not None:
        problems += [
            f"{name}: in the index, but in no shard" for name in weight_map.keys() - entries
        ]
    return entries, problems


def _weight_files(folder: Path) -> tuple[dict[str, str] | None, list[Path]]:
    """The index's map from tensor to file name (None for a single file), and the files to read."""
    index, single = folder / INDEX_FILE, folder / SINGLE_FILE
    if not index.exists():
        if single.is_file():
            return None, [single]
        expected = f"expected {SINGLE_FILE} or {INDEX_FILE} with its shards"
        pickled = sorted(file.name for pattern in _PICKLED for file in folder.glob(pattern))
        if pickled:
            expected += f" (safetensors are needed; {pickled[0]} is not read, since it is pickled)"
        raise UsageError(f"{folder}: no weights; {expected}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(map(_is_file_name, weight_map.values())):
        raise UsageError(f"{index}: expected an object weight_map from tensor to file name")
    names = set(weight_map.values())
    if missing := sorted(name for name in names if not (folder / name).is_file()):
        raise UsageError(f"{index}: shards listed but missing: {', '.join(missing)}")
    if single.exists() and SINGLE_FILE not in names:
        raise UsageError(f"{folder}: {SINGLE_FILE} is not in {INDEX_FILE}; remove the stale one")
    return weight_map, [folder / name for name in sorted(names)]


def _is_file_name(value: Any) -> bool:
    return isinstance(value, str) and value != "" and Path(value).name == value


def _header(path: Path) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
    """Name, dtype name, shape and first byte of every tensor of one safetensors file.

    The byte ranges must follow each other and fill the file, as the format demands: a file cut
    short, or with anything appended, is refused.
    """
    size, base, header = _read_header(path)
    ranges = []
    for name, info in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape = info["dtype"], tuple(info["shape"])
            start, end = info["data_offsets"]
        except (TypeError, KeyError, ValueError):
            raise UsageError(f"{path}: the header entry of {name} is malformed") from None
        whole = all(type(n) is int and n >= 0 for n in (*shape, start, end))
        if not whole or not isinstance(dtype, str):
            raise UsageError(f"{path}: the header entry of {name} is malformed")
        count = int(np.prod(shape, dtype=object))
        if dtype in DTYPES and end - start != count * DTYPES[dtype].itemsize:
            found = f"{end - start} bytes"
            raise UsageError(f"{path}: {name} has {found}, not those of {dtype} {list(shape)}")
        ranges.append((start, end, name))
        yield name, dtype, shape, base + start
    filled = 0
    for start, end, name in sorted(ranges):
        if start != filled or end < start:
            raise UsageError(f"{path}: {name} starts at {start} of the data, expected {filled}")
        filled = end
    if base + filled != size:
        raise UsageError(
            f"{path}: {size} bytes, expected {base + filled}: cut short, or appended to"
        )


def _read_header(path: Path) -> tuple[int, int, dict[str, Any]]:
    """Size of a safetensors file, where its data begins, and its parsed header."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length)) if length <= size - 8 else None
    except (OSError, struct.error, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not a readable safetensors file ({error})") from None
    if not isinstance(header, dict):
        raise UsageError(f"{path}: not a safetensors file, or cut short in its header")
    return size, 8 + length, header


def read_tensor(entry: TensorEntry) -> np.ndarray:
    """One tensor's numbers, read from its byte range.

    Raises:
      FailedError: the file no longer holds it.
    """
    return _read_numbers(entry, 0, entry.size).reshape(entry.shape)


def _read_numbers(entry: TensorEntry, first: int, count: int) -> np.ndarray:
    """`count` numbers of a tensor from the `first` on, flat; `first` begins a row of tiles."""
    flat = _read_flat(entry, first, count)
    if entry.scale is None:
        return flat
    rows = flat.reshape(-1, entry.shape[1])
    scales = read_tensor(entry.scale)[first // entry.shape[1] // TILE :]
    return from_fp8(rows, scales[: -(-len(rows) // TILE)]).reshape(-1)


def _read_flat(entry: TensorEntry, first: int, count: int) -> np.ndarray:
    """`count` elements of a tensor from the `first` on, flat."""
    offset = entry.start + first * entry.dtype.itemsize
    try:
        flat = np.fromfile(entry.file, dtype=entry.dtype, count=count, offset=offset)
    except OSError as error:
        raise FailedError(f"{entry.file}: cannot be read: {error.strerror}") from error
    if flat.size != count:
        raise FailedError(f"{entry.file}: has become shorter while it was read; run it again")
    return flat


def _chunks(entry: TensorEntry, piece: int) -> Iterator[np.ndarray]:
    for first in range(0, entry.size, piece):
        yield _read_numbers(entry, first, min(piece, entry.size - first))


def equal_tensors(one: TensorEntry, other: TensorEntry) -> bool:
    """Whether two stored tensors have the same shape and values (the same bytes, in one dtype)."""
    if one.shape != other.shape:
        return False
    piece = other.piece if one.scale is None else one.piece
    for a, b in zip(_chunks(one, piece), _chunks(other, piece), strict=True):
        if a.dtype != b.dtype:
            a, b = a.astype(np.float64), b.astype(np.float64)
        if a.tobytes() != b.tobytes():
            return False
    return True


def copy_tensors(
    path: Path, entries: Mapping[str, TensorEntry], advance: Callable[[int], None] | None = None
) -> None:
    """Writes a safetensors file with the numbers of `entries`, whole or not at all.

    FP8 matrices become float32, which holds codes times scales exactly.
    `advance` is called with the number of bytes after each piece; memory stays bounded by a piece.
    """
    parts = {name: (entry.numbers, entry.shape) for name, entry in entries.items()}
    write_tensors(path, parts, lambda name: _chunks(entries[name], entries[name].piece), advance)


def write_tensors(
    path: Path,
    tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
    pieces: Callable[[str], Iterable[np.ndarray]],
    advance: Callable[[int], None] | None = None,
) -> None:
    """Writes a safetensors file, whole or not at all, a piece in memory at a time.

    Args:
      tensors: name -> dtype and shape.
      pieces: name -> its numbers of that dtype, in order, in one array or several.
      advance: called with the number of bytes after each piece.
    """
    # The order of the reference writer: no tensor is misaligned, whatever the shapes.
    names = sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, name))
    spelled = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        dtype, shape = tensors[name]
        start, end = end, end + math.prod(shape) * dtype.itemsize
        entry = {"dtype": spelled[dtype], "shape": list(shape), "data_offsets": [start, end]}
        header[name] = entry
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with write_whole(path) as unfinished, unfinished.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            for piece in pieces(name):
                file.write(piece.tobytes())
                if advance is not None:
                    advance(piece.nbytes)
        assert file.tell() == 8 + len(text) + end, "the pieces are not the tensors"


@contextlib.contextmanager
def write_whole(path: Path) -> Iterator[Path]:
    """A path to write to in the place of `path`, which it takes when the block ends well.

    Whatever stops the program or the machine, `path` is as it was or whole.
    """
    unfinished = path.with_name(f"{path.name}.partial")
    try:
        yield unfinished
        _sync(unfinished)
        unfinished.replace(path)
        _sync(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

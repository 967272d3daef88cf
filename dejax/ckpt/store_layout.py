"""How an expert store lies in its folder: what it holds, where each record is, and what says so.

`expert_store` writes and reads the records; the picture of the folder is there.
"""

import dataclasses
import json
import os
import pathlib
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorstore as ts

from dejax.ckpt import expert_codec
from dejax.errors import UsageError
from dejax.shapes import Pair

SCHEMA = "dejax-expert-store"
VERSION = 1
CHECKSUM = "crc32"

MANIFEST = "manifest.json"
JOURNAL = "journal.jsonl"
TEMPORARY = ".tmp"
AGAIN = "remove the folder and convert the model again"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a store holds, known before the first record is written."""

    layers: tuple[int, ...]
    num_experts: int
    shape: tuple[int, ...]
    dtype: str
    identity: str

    def __post_init__(self) -> None:
        layers = list(self.layers)
        if layers != sorted(set(layers)) or min(layers, default=0) < 0:
            raise UsageError(f"expert store: layers {layers}, expected ascending indices >= 0")
        if self.num_experts < 1:
            raise UsageError(f"expert store: {self.num_experts} experts a layer, expected >= 1")
        if len(self.shape) != 3 or self.shape[0] != 3 or min(self.shape) < 1:
            raise UsageError(f"expert store: shape {list(self.shape)}, expected [3, F, D]")
        if self.dtype not in expert_codec.ENCODINGS:
            known = " or ".join(expert_codec.ENCODINGS)
            raise UsageError(f"expert store: dtype {self.dtype!r}, expected {known}")

    @property
    def record_bytes(self) -> int:
        """Bytes of one record, as it is encoded."""
        return expert_codec.record_bytes(self.dtype, self.shape)

    @property
    def numbers(self) -> np.dtype:
        """What the numbers of a record are before they are encoded, and once decoded."""
        return expert_codec.PLAIN.get(self.dtype, np.dtype(np.float32))

    def pairs(self) -> Iterator[Pair]:
        """Every layer-expert, by layer, then expert."""
        return ((layer, expert) for layer in self.layers for expert in range(self.num_experts))

    def to_json(self) -> dict[str, Any]:
        """What `parse_plan` reads."""
        head = {"schema": SCHEMA, "version": VERSION, "checksum": CHECKSUM}
        return head | dataclasses.asdict(self) | {"plan_checksum": self.checksum()}

    def checksum(self) -> int:
        """Of how records are to be read: their own checksums tell nothing of that."""
        told = [list(self.layers), self.num_experts, list(self.shape), self.dtype]
        return zlib.crc32(json.dumps(told).encode())


def absolute(path: str | os.PathLike[str]) -> pathlib.Path:
    """Without `..`, which tensorstore refuses and `pathlib` keeps."""
    return pathlib.Path(os.path.abspath(path))


def open_kvstore(root: pathlib.Path) -> ts.KvStore:
    """Where records are written, by their keys."""
    return ts.KvStore.open({"driver": "file", "path": f"{root}/"}).result()


def key_of(pair: Pair) -> str:
    """The name of a record below the store's root."""
    return f"layer_{pair[0]:05d}/expert_{pair[1]:05d}"


def file_of(root: pathlib.Path | None, pair: Pair) -> pathlib.Path:
    """A record's file; in memory, a name for messages."""
    return pathlib.Path("memory:" if root is None else root) / key_of(pair)


def size_of(file: pathlib.Path) -> int | None:
    """Bytes of a file, None if it cannot be had."""
    try:
        return file.stat().st_size
    except OSError:
        return None


def parse_plan(text: bytes, file: pathlib.Path) -> tuple[Plan, dict[str, Any]]:
    """Reads a manifest, or the first line of a journal: the plan, and all fields."""
    try:
        fields = json.loads(text)
        form = (fields["schema"], fields["version"], fields["checksum"])
        # To Python, true is 1.
        if form != (SCHEMA, VERSION, CHECKSUM) or isinstance(fields["version"], bool):
            raise ValueError(f"{form}, this dejax reads {(SCHEMA, VERSION, CHECKSUM)}")
        plan = Plan(
            layers=tuple(map(int, fields["layers"])),
            num_experts=int(fields["num_experts"]),
            shape=tuple(map(int, fields["shape"])),
            dtype=str(fields["dtype"]),
            identity=str(fields["identity"]),
        )
        if int(fields["plan_checksum"]) != plan.checksum():
            raise ValueError("layers, num_experts, shape or dtype are not as they were written")
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        why = f"no {error}" if isinstance(error, KeyError) else error
        raise UsageError(f"{file} is damaged or not an expert store's: {why}; {AGAIN}") from error
    return plan, fields


def read_manifest(manifest: pathlib.Path) -> tuple[Plan, dict[Pair, int]]:
    """The plan of a whole store, and the checksum of every record."""
    plan, fields = parse_plan(manifest.read_bytes(), manifest)
    try:
        return plan, {p: int(fields["records"][str(p[0])][p[1]]) for p in plan.pairs()}
    except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"{manifest}: not every record has a checksum; {AGAIN}") from error


def write_atomically(file: pathlib.Path, data: bytes) -> None:
    """Leaves `file` as it was or whole, even if the machine stops in between."""
    temporary = file.with_name(file.name + TEMPORARY)
    with temporary.open("wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())
    os.replace(temporary, file)
    sync_folder(file.parent)


def sync_folder(folder: pathlib.Path) -> None:
    """Has the names of a folder on disk, even if the machine stops now."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""The bottom tier of residency: routed experts on disk (or in memory), one record a layer-expert.

A record is one array `[3, F, D]` as `expert_codec` encodes it; a manifest holds the shape, the
encoding, the identity of the target and a checksum for every record. A conversion writes a store
once; the residency reads single experts from it while decoding, which is how the experts live
outside accelerator memory in DraftExpert (arXiv 2607.24434).

    DIR/manifest.json              written last: a folder without it is not a store
    DIR/journal.jsonl              only while writing: the plan, then one line a finished record
    DIR/layer_00003/expert_00017   bytes of expert 17 of decoder layer 3

A record file appears whole or not at all (tensorstore writes, syncs and renames it), and its
journal line follows it, so a writer killed at any moment is continued by opening it again. Records
are read straight from their files into the reader's memory: through tensorstore it takes two to
three times as long from the page cache, for a copy.
"""

import dataclasses
import json
import os
import pathlib
import zlib
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from jaxtyping import Shaped, UInt8

from dejax.buffers import ALIGNMENT, BufferPool
from dejax.ckpt import expert_codec, page_cache
from dejax.ckpt.store_layout import (
    AGAIN,
    JOURNAL,
    MANIFEST,
    TEMPORARY,
    Plan,
    absolute,
    file_of,
    key_of,
    open_kvstore,
    parse_plan,
    read_manifest,
    size_of,
    sync_folder,
    write_atomically,
)
from dejax.config import ModelConfig
from dejax.errors import FailedError, UsageError
from dejax.shapes import Pair

_MEND = "run the same `dejax convert` again, which mends it"


class ExpertReadError(FailedError):
    """An expert could not be read as it was written; names `layer`, `expert` and `file`."""

    def __init__(self, layer: int, expert: int, file: str, reason: str) -> None:
        super().__init__(f"layer {layer}, expert {expert}: {reason} (file {file})")
        self.layer = layer
        self.expert = expert
        self.file = file
        self.reason = reason


class ExpertStoreWriter:
    """Writes a store record by record; opening the same folder again continues or mends it.

    Attributes:
        done: the pairs already written, which need not be written again.
        mended: how many of them were damaged or gone, and have been.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        *,
        layers: Sequence[int],
        num_experts: int,
        shape: Sequence[int],
        dtype: str,
        identity: str,
    ) -> None:
        """Starts or continues a store in folder `path`; None keeps the records in memory.

        `shape` is [3, F, D], `dtype` one of `expert_codec.ENCODINGS`, `identity` whatever names the
        target.

        Raises:
            UsageError: the plan is malformed, the folder holds something else, or it holds a
                store (whole or begun) of another target, shape or dtype.
        """
        if not layers:
            raise UsageError("expert store: no layers; a dense target has no experts to store")
        sizes = tuple(map(int, layers)), int(num_experts), tuple(map(int, shape))
        self._plan = Plan(*sizes, dtype, identity)
        self._root = None if path is None else absolute(path)
        self._checksums: dict[Pair, int] = {}
        self._journal = None
        self.mended = 0
        if self._root is not None:
            self._resume(self._root)
        self._kvstore = None if self._root is None else open_kvstore(self._root)
        self._memory: dict[Pair, np.ndarray] = {}
        self._buffers = BufferPool()
        self._pairs = frozenset(self._plan.pairs())

    @property
    def done(self) -> frozenset[Pair]:
        return frozenset(self._checksums)

    def write(self, layer: int, expert: int, record: Shaped[np.ndarray, "3 F D"]) -> None:
        """Writes one record; one that is there already, byte for byte, is skipped.

        Raises:
            UsageError: no such pair in the plan, another shape or dtype, or other content than a
                record of this pair that is already in the store.
        """
        pair, plan = (int(layer), int(expert)), self._plan
        if pair not in self._pairs:
            raise UsageError(f"(layer, expert) {pair} is not among the planned records")
        found = f"(layer, expert) {pair}: {record.dtype.name} {list(record.shape)}"
        if record.shape != plan.shape or record.dtype != plan.numbers:
            raise UsageError(f"{found}, expected {plan.numbers.name} {list(plan.shape)}")
        try:
            data = expert_codec.encode(plan.dtype, record)
        except ValueError as error:
            raise UsageError(f"{found}: {error}; it cannot be stored as {plan.dtype}") from error
        data = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        checksum = zlib.crc32(data.data)
        if pair in self._checksums:
            if self._checksums[pair] != checksum:
                file = file_of(self._root, pair)
                raise UsageError(f"{file} has other content already; remove the store first")
            if self._is_intact(pair, data):
                return
            self.mended += 1
        if self._kvstore is None:
            self._memory[pair] = self._kept(data)
        else:
            self._kvstore.write(key_of(pair), data.tobytes()).result()
        if self._journal is not None:
            self._journal.write(json.dumps([*pair, checksum]).encode() + b"\n")
            self._journal.flush()
        self._checksums[pair] = checksum

    def finish(self) -> "ExpertStore":
        """Declares the store whole and opens it.

        Raises:
            UsageError: records are missing.
        """
        if missing := self._pairs - self.done:
            raise UsageError(
                f"expert store: {len(missing)} of {len(self._pairs)} records are not written, "
                f"the first (layer, expert) is {min(missing)}; write them, then finish"
            )
        self.close()
        if self._root is None:
            return ExpertStore(None, self._plan, self._checksums, self._memory)
        for layer in self._plan.layers:
            sync_folder(self._root / f"layer_{layer:05d}")
        if not (self._root / MANIFEST).exists():
            records = {
                str(layer): [self._checksums[layer, e] for e in range(self._plan.num_experts)]
                for layer in self._plan.layers
            }
            text = json.dumps(self._plan.to_json() | {"records": records})
            write_atomically(self._root / MANIFEST, text.encode())
        (self._root / JOURNAL).unlink(missing_ok=True)
        return ExpertStore.open(self._root)

    def close(self) -> None:
        """Closes the journal; what is written stays, and another writer can continue."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def __enter__(self) -> "ExpertStoreWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _kept(self, data: UInt8[np.ndarray, " bytes"]) -> UInt8[np.ndarray, " bytes"]:
        """What a store in memory holds: the caller's own, if nobody writes to it, else a copy."""
        if not data.flags.writeable and data.ctypes.data % ALIGNMENT == 0:
            return data
        kept = self._buffers.take(data.shape, np.uint8)
        kept[:] = data
        kept.flags.writeable = False
        return kept

    def _is_intact(self, pair: Pair, data: np.ndarray) -> bool:
        """Whether a record is there with these bytes."""
        if self._root is None:
            return np.array_equal(self._memory[pair], data)
        try:
            return file_of(self._root, pair).read_bytes() == data.tobytes()
        except OSError:
            return False

    def _resume(self, root: pathlib.Path) -> None:
        if root.exists() and not root.is_dir():
            raise UsageError(f"{root} is a file; give a folder for the expert store")
        root.mkdir(parents=True, exist_ok=True)
        manifest, journal = root / MANIFEST, root / JOURNAL
        if manifest.exists():
            plan, self._checksums = read_manifest(manifest)
            self._check_same_plan(plan, manifest)
            return
        if not journal.exists():
            strangers = {entry.name for entry in root.iterdir()} - {JOURNAL + TEMPORARY}
            if strangers:
                raise UsageError(f"{root} holds {min(strangers)} but no store; give a new folder")
            write_atomically(journal, json.dumps(self._plan.to_json()).encode() + b"\n")
        self._read_journal(root, journal)
        self._journal = journal.open("ab")

    def _read_journal(self, root: pathlib.Path, journal: pathlib.Path) -> None:
        """Takes over the records of an earlier writer; cuts off what it did not finish saying."""
        lines = journal.read_bytes().split(b"\n")
        self._check_same_plan(parse_plan(lines[0], journal)[0], journal)
        kept = len(lines[0]) + 1
        for line in lines[1:-1]:  # what follows the last newline is a line cut short
            try:
                layer, expert, checksum = (int(value) for value in json.loads(line))
            except (ValueError, TypeError):
                break
            kept += len(line) + 1
            # A record that somebody removed since is simply written again.
            if size_of(file_of(root, (layer, expert))) == self._plan.record_bytes:
                self._checksums[layer, expert] = checksum
        os.truncate(journal, kept)

    def _check_same_plan(self, found: Plan, file: pathlib.Path) -> None:
        for field in dataclasses.fields(Plan):
            old, new = getattr(found, field.name), getattr(self._plan, field.name)
            if old != new:
                raise UsageError(
                    f"{file} has {field.name} {old!r}, this target {new!r}; "
                    "choose another folder, or remove this one"
                )


class ExpertStore:
    """A whole store, open for reading from any thread.

    Attributes:
        path: the folder, or None for a store in memory.
        identity: what the writer said the target is; compare it before using the weights.
        layers: decoder layers with routed experts, ascending.
        num_experts: routed experts of a layer.
        shape: (3, F, D).
        encoding: of the stored records, by name (`expert_codec`).
        numbers: dtype of their numbers, as NumPy (ml_dtypes) has it; float32 if quantised.
        bytes_per_expert: bytes of one stored record.
        pairs: every layer-expert, by layer, then expert.
    """

    def __init__(
        self,
        path: pathlib.Path | None,
        plan: Plan,
        sums: dict[Pair, int],
        memory: dict[Pair, UInt8[np.ndarray, " bytes"]] | None = None,
    ) -> None:
        """Use `ExpertStore.open`, or `ExpertStoreWriter.finish`."""
        self.path = path
        self.identity = plan.identity
        self.layers = plan.layers
        self.num_experts = plan.num_experts
        self.shape = plan.shape
        self.encoding = plan.dtype
        self.numbers = plan.numbers
        self.bytes_per_expert = plan.record_bytes
        self.pairs: tuple[Pair, ...] = tuple(plan.pairs())
        self._plan = plan
        self._checksums = sums
        self._memory = memory or {}

    def check_fits(self, config: ModelConfig) -> None:
        """Refuses a store that is not of a target with this configuration.

        Raises:
            UsageError: layers, number or shape of the experts are others.
        """
        pairs = {
            "layers": (self.layers, config.moe_layers),
            "experts": (self.num_experts, config.moe.num_experts),
            "shape": (self.shape, config.expert_shape),
        }
        for name, (stored, expected) in pairs.items():
            if stored != expected:
                raise UsageError(
                    f"{self.path}: the store has {name} {stored}, the configuration {expected}; "
                    f"{AGAIN}"
                )

    @classmethod
    def empty(cls, identity: str) -> "ExpertStore":
        """The store of a dense target: in memory, without a layer."""
        plan = Plan(layers=(), num_experts=1, shape=(3, 1, 1), dtype="float32", identity=identity)
        return cls(None, plan, {})

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "ExpertStore":
        """Opens folder `path`; checks that every record is there with the right size.

        Raises:
            UsageError: no such folder, not a store (or an unfinished one), an unknown schema or
                version, a damaged manifest, or a record missing or of the wrong size.
        """
        root = absolute(path)
        if not root.is_dir():
            raise UsageError(f"{root} is not a folder; give the folder of an expert store")
        manifest = root / MANIFEST
        if not manifest.is_file():
            begun = (root / JOURNAL).exists()
            state = "unfinished: run the same conversion again" if begun else "not an expert store"
            raise UsageError(f"{root} has no {MANIFEST}; it is {state}")
        plan, checksums = read_manifest(manifest)
        for pair in plan.pairs():
            file = file_of(root, pair)
            if (size := size_of(file)) != plan.record_bytes:
                found = "is missing" if size is None else f"has {size} bytes"
                raise UsageError(f"{file} {found}, expected {plan.record_bytes} bytes; {_MEND}")
        return cls(root, plan, checksums)

    def read(
        self, layer: int, expert: int, into: UInt8[np.ndarray, " bytes"] | None = None
    ) -> Shaped[np.ndarray, "..."]:
        """Returns one record, read-only, after checking its size and checksum.

        It is as it is stored: [3, F, D] if plain, the bytes [N] if quantised; see `decode`. One of
        a store in memory is the store's own array, and neither copied nor checked. `into`, of
        `bytes_per_expert` bytes, is where one of a folder goes.

        Raises:
            UsageError: no such pair.
            ExpertReadError: the bytes are not those that were written, or cannot be had.
        """
        pair = (layer, expert)
        if pair not in self._checksums:
            raise UsageError(f"no (layer, expert) {pair} in {self.path or 'the store in memory'}")
        if self.path is None:
            data = self._memory[pair]
        else:
            data = np.empty(self.bytes_per_expert, np.uint8) if into is None else into
            self._read_file(pair, data)
        data = data[:]  # another view: the caller's own stays writeable
        data.flags.writeable = False
        if self.encoding in expert_codec.PLAIN:
            return data.view(self.numbers).reshape(self.shape)
        return data

    def _read_file(self, pair: Pair, data: UInt8[np.ndarray, " bytes"]) -> None:
        file, expected = file_of(self.path, pair), self.bytes_per_expert
        fail = partial(ExpertReadError, *pair, str(file))
        try:
            room, done = data.data, 0
            size = size_of(file) or 0  # 0 if the record is gone
            if size == expected:
                handle = os.open(file, os.O_RDONLY)
                try:
                    while done < expected and (got := os.preadv(handle, [room[done:]], done)):
                        done += got
                finally:
                    os.close(handle)
                size = done
        except OSError as error:
            raise fail(str(error)) from error
        if size != expected:
            raise fail(f"{size} bytes, expected {expected}; {_MEND}")
        if (checksum := zlib.crc32(room)) != self._checksums[pair]:
            reason = f"checksum {checksum:08x}, expected {self._checksums[pair]:08x}; {_MEND}"
            raise fail(reason)

    def forget(self, layer: int, expert: int, *, flush: bool = False) -> bool:
        """Drops a record's file from the page cache, as `page_cache.drop`. For a folder only."""
        path = file_of(self.path, (layer, expert))
        return page_cache.drop(path, self.bytes_per_expert // 2, flush=flush)

    def decode(self, record: Shaped[np.ndarray, "..."]) -> Shaped[np.ndarray, "3 F D"]:
        """The numbers of what `read` returned."""
        return expert_codec.decode(self.encoding, record, self.shape)

    def locate(self, layer: int, expert: int) -> str:
        """Where a record is, for messages: its file, or its key in memory."""
        return str(file_of(self.path, (layer, expert)))

    def verify_all(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Reads every record once; calls `progress(records checked, records)` after each.

        Raises:
            ExpertReadError: for the first record that is not as written.
        """
        for count, (layer, expert) in enumerate(self.pairs, start=1):
            self.read(layer, expert)
            if progress is not None:
                progress(count, len(self.pairs))

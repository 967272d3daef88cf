"""How an expert gets from store or host cache to the device: reading, casting, placing.

Memory is used again (`dejax.buffers`), bytes are not copied where they need not be: a record that
is as the device wants it is read straight into the memory that the device then has (CPU), and a
record in memory is handed over as it lies there.
"""

import contextlib
import dataclasses
import math
import threading
from collections.abc import Iterator
from typing import Any, Literal

import jax
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Shaped

from dejax.buffers import BufferPool
from dejax.ckpt import expert_codec
from dejax.ckpt.expert_codec import Packing
from dejax.ckpt.expert_store import ExpertReadError, ExpertStore
from dejax.errors import UsageError
from dejax.shapes import Pair
from infer.prefetch import Policy

OnDevice = jax.Array | tuple[jax.Array, ...]
"""An expert on the device: its bytes, or gate, up and down."""
_PINNED = "pinned_host"


@dataclasses.dataclass(frozen=True)
class DeviceForm:
    """How an expert lies on the device.

    Attributes:
        packing: of its bytes, as it is stored; None if it is numbers, three arrays [F, D].
        dtype: of what lies there.
        shape: of it all, [3, F, D] or [bytes].
    """

    packing: Packing | None
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Of one expert."""
        return math.prod(self.shape) * self.dtype.itemsize

    def parts(self, array: Shaped[np.ndarray, "..."]) -> tuple[Any, ...] | Any:
        """An array of this shape as what is put on the device: its three parts, if numbers."""
        return array if self.packing is not None else tuple(array)


def device_form(
    store: ExpertStore, compute_dtype: DTypeLike, unpack: Literal["host", "device"] | None
) -> DeviceForm:
    """The form in which experts of a store lie on the device.

    Args:
        unpack: where experts become numbers of the compute dtype: on the host, which is faster
            where host and device are one, or in the device's own steps, so that their bytes are
            moved and kept as they are stored; None chooses by the backend.
    """
    if unpack is None:
        unpack = "host" if jax.default_backend() == "cpu" else "device"
    if unpack == "host":
        return DeviceForm(None, np.dtype(compute_dtype), store.shape)
    if store.encoding in expert_codec.PLAIN:
        # Never wider than what is computed with.
        wide = np.dtype(compute_dtype).itemsize < store.numbers.itemsize
        return DeviceForm(None, np.dtype(compute_dtype) if wide else store.numbers, store.shape)
    packing = Packing(store.encoding, store.shape)
    return DeviceForm(packing, np.dtype(np.uint8), (store.bytes_per_expert,))


class Stager:
    """Takes experts from store to host cache to device; used by the transfer threads.

    Attributes:
        host_bytes: bytes in the host cache, as stored; never above the bound.
        retried_reads: reads of the store that failed and were tried again.
        warm_reads: with `cold`, reads after which the file was still in the page cache.
        pinned: whether the host cache is memory that the device reads by itself.
    """

    def __init__(
        self,
        store: ExpertStore,
        policy: Policy,
        form: DeviceForm,
        *,
        host_cache_bytes: int | None,
        retries: int,
        cold: bool = False,
        pinned: bool | None = None,
        device: jax.Device | None = None,  # pyright: ignore[reportInvalidTypeForm]
    ) -> None:
        """`cold`: what is read is dropped from the page cache, so that it is read from the disk.

        `pinned` None takes pinned memory for the host cache where the device is not the host.

        Raises UsageError where the page cache cannot be dropped.
        """
        self.host_bytes = self.retried_reads = self.warm_reads = 0
        self._store, self._form = store, form
        self._host_bound = math.inf if host_cache_bytes is None else host_cache_bytes
        self._host: dict[Pair, Any] = {}  # arrays of NumPy, or of JAX if pinned
        self._policy = policy
        self._retries = retries
        self._lock = threading.Lock()
        self._buffers = BufferPool()
        self._cold = cold
        if cold and store.path is None:
            raise UsageError(
                "the disk link reads a converted target's store, and this one is in memory; run: "
                "dejax convert MODEL --out DIR"
            )
        self._device = device
        on = device or jax.config.jax_default_device or jax.devices()[0]  # pyright: ignore
        self.pinned = (on.platform != "cpu" if pinned is None else pinned) and _PINNED in {
            memory.kind for memory in on.addressable_memories()
        }
        if self.pinned:
            self._device = jax.sharding.SingleDeviceSharding(on)
            self._pinned_at = jax.sharding.SingleDeviceSharding(on, memory_kind=_PINNED)
        # Where a record in memory is what the device needs, and the device is the host, nothing is
        # copied: the same arrays are handed out each time, which also saves making them.
        plain = form.packing is None and form.dtype == store.numbers
        lies_there = store.path is None and on.platform == "cpu" and not self._host_bound
        self._in_place = plain and lies_there and not self.pinned
        self._placed: dict[Pair, tuple[int, OnDevice]] = {}
        # JAX's contexts are per thread: what holds where the residency is made is taken along.
        self._default_device = jax.config.jax_default_device  # pyright: ignore

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """What a transfer thread runs in; without it float64 would silently become float32."""
        with (
            jax.enable_x64(self._form.dtype.itemsize == 8),
            jax.default_device(self._default_device),
        ):
            yield

    def forget_all(self) -> int:
        """Drops every record from the page cache; returns how many are still there."""
        return sum(not self._store.forget(*pair, flush=True) for pair in self._store.pairs)

    def load(self, pair: Pair) -> tuple[OnDevice, bool]:
        """Returns an expert, arrived on the device, and whether it had to come from the store.

        Raises:
            FailedError: it could not be read or placed; names layer, expert and file.
        """
        with self._lock:
            record = self._host.get(pair)
            if record is not None:
                self._policy.remove(pair)
                self._policy.add(pair)
        from_store = record is None
        if self._in_place:
            return self._put_in_place(pair, self._read(pair)), from_store
        if record is None:
            record = self._read(pair)
            if self.pinned and self._host_bound:  # else it would only be copied once more
                record = self._put(pair, record, self._pinned_at)
            self._keep(pair, record)
        return self._put(pair, record, self._device), from_store

    def _put_in_place(self, pair: Pair, record: Shaped[np.ndarray, "..."]) -> OnDevice:
        """The arrays over a record in memory, made once."""
        address = record.__array_interface__["data"][0]
        known, array = self._placed.get(pair, (None, ()))
        if known != address:
            array = self._put(pair, record, self._device)
            self._placed[pair] = address, array
        return array

    def close(self) -> None:
        """Drops the host cache and the memory that is kept for later."""
        self._host.clear()
        self._placed.clear()
        self._buffers.clear()

    def _read(self, pair: Pair) -> Shaped[np.ndarray, "..."]:
        attempt, store = 1, self._store
        into = () if store.path is None else (self._take((store.bytes_per_expert,), np.uint8),)
        while True:
            try:
                record = store.read(*pair, *into)
                break
            except Exception as error:  # a storage driver may raise anything
                if attempt > self._retries:
                    reason = error.reason if isinstance(error, ExpertReadError) else repr(error)
                    reason = f"{reason} ({attempt} attempts)"
                    raise ExpertReadError(*pair, store.locate(*pair), reason) from error
                self.retried_reads += 1
                attempt += 1
        if self._cold:
            self.warm_reads += not store.forget(*pair)
        return record

    def _take(self, shape: tuple[int, ...], dtype: DTypeLike) -> Shaped[np.ndarray, "..."]:
        return self._buffers.take(shape, dtype)

    def _keep(self, pair: Pair, record: Any) -> None:
        size = _bytes_of(record)
        with self._lock:
            if size > self._host_bound or pair in self._host:
                return
            while self.host_bytes + size > self._host_bound:
                victim = self._policy.pop()
                assert victim is not None, "a full host cache has something to evict"
                self.host_bytes -= _bytes_of(self._host.pop(victim))
            self._host[pair] = record
            self.host_bytes += size
            self._policy.add(pair)

    def _formed(self, record: Shaped[np.ndarray, "..."]) -> Shaped[np.ndarray, "..."]:
        """A record as it lies on the device: as it is, or in memory of its own."""
        form = self._form
        numbers = record if form.packing is not None else self._store.decode(record)
        if numbers.dtype == form.dtype and numbers.flags.c_contiguous:
            return numbers
        # On CPU `device_put` takes aligned memory over, which saves the copy.
        staged = self._take(form.shape, form.dtype)
        np.copyto(staged, numbers, casting="unsafe")
        return staged

    def _put(self, pair: Pair, record: Any, where: Any) -> OnDevice:
        try:
            host = isinstance(record, np.ndarray)
            staged = self._form.parts(self._formed(record)) if host else record
            array = jax.block_until_ready(jax.device_put(staged, where))
        except Exception as error:  # whatever the backend raises, out of memory above all
            file = self._store.locate(*pair)
            raise ExpertReadError(*pair, file, f"not placed on the device: {error}") from error
        dtypes = {part.dtype for part in jax.tree.leaves(array)}
        assert dtypes == {self._form.dtype}, (dtypes, self._form.dtype)
        return array


def _bytes_of(record: Any) -> int:
    return sum(part.nbytes for part in jax.tree.leaves(record))

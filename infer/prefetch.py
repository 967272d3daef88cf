"""What the transfer thread of `infer.residency` works with: slots, their order, and the loading.

One link, one queue. A demand load (the target pass waits for it) goes ahead of a draft load (a
draft pass waits for it), and both ahead of prefetches, which go by layer, because that is the order
in which the verification will want them (DraftExpert, arXiv 2607.24434, prefetching). Nothing here
locks: the residency calls it under its own lock.
"""

import collections
import contextlib
import dataclasses
import heapq
import math
import threading
from collections.abc import Iterator
from typing import Literal, Protocol, runtime_checkable

import jax
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Shaped

from dejax.ckpt import expert_codec
from dejax.ckpt.expert_codec import Packing
from dejax.ckpt.expert_store import ExpertReadError, ExpertStore
from dejax.errors import FailedError
from dejax.shapes import Pair

PassKind = Literal["draft", "demand"]
Kind = Literal["draft", "demand", "prefetch"]


@dataclasses.dataclass(frozen=True, slots=True)
class LoadEvent:
    """One completed transfer of one expert to the device.

    Attributes:
        kind: who wanted it when the transfer began: `demand` (a target pass was waiting), `draft`
            (a draft pass was waiting) or `prefetch` (nobody yet). A prefetch that is asked for
            while it still stands in the queue has hidden nothing, and becomes what asked for it.
        layer, expert: the pair.
        bytes: bytes moved over the link, that is of the record as it is stored.
        start, end: seconds of the residency's clock. Transfers do not overlap: the start is the
            later of the request and the previous end.
        stall: seconds by which this transfer made a pass wait. For one waiting thread, the stalls
            of all events add up to its waiting time; a prefetch that was in time has 0.
        from_store: the bytes came from the store, not from the host cache.
    """

    kind: Kind
    layer: int
    expert: int
    bytes: int
    start: float
    end: float
    stall: float
    from_store: bool


class Slot:
    """A layer-expert that is on the device or on its way there.

    Attributes:
        kind: as in `LoadEvent`; fixed once the transfer has begun.
        array: the expert on the device, [3, F, D]; None until it has arrived.
        queued: whether it still stands in the queue.
        holds: bits set by the residency for whoever still needs the expert.
        speculative: prefetched and not asked for yet; counts against the prefetch bound.
        wanted: the kind of the pass that waits for it, if one does.
        requested, waited_since: seconds; when it was queued, since when a pass waits (or None).
        done: set when `array` or `error` is.
    """

    __slots__ = (
        "array",
        "done",
        "error",
        "holds",
        "kind",
        "pair",
        "queued",
        "requested",
        "speculative",
        "waited_since",
        "wanted",
    )

    def __init__(self, pair: Pair, kind: Kind, requested: float) -> None:
        self.pair = pair
        self.kind: Kind = kind
        self.requested = requested
        self.queued = False
        self.array: jax.Array | None = None
        self.error: FailedError | None = None
        self.holds = 0
        self.speculative = False
        self.wanted: PassKind | None = None
        self.waited_since: float | None = None
        self.done = threading.Event()

    def fail(self, error: FailedError) -> None:
        """The expert will not come; wakes whoever waits for it."""
        self.error = error
        self.done.set()


class TransferQueue:
    """Slots that wait for the link, and the record of what has gone over it.

    An entry whose slot has moved on (promoted, cancelled) is passed over.
    """

    def __init__(self) -> None:
        self._demand: collections.deque[Slot] = collections.deque()
        self._draft: collections.deque[Slot] = collections.deque()
        self._prefetch: list[tuple[int, int, Slot]] = []
        self._pushed = 0
        self._events: list[LoadEvent] = []
        self._stalled_until = -math.inf

    def push(self, slot: Slot) -> None:
        """Queues a slot by its kind; call it again when the kind of a queued slot changes."""
        slot.queued = True
        if slot.kind == "demand":
            self._demand.append(slot)
        elif slot.kind == "draft":
            self._draft.append(slot)
        else:
            self._pushed += 1
            heapq.heappush(self._prefetch, (slot.pair[0], self._pushed, slot))

    def pop(self) -> Slot | None:
        """The next slot to transfer, or None."""
        for kind, waiting in (("demand", self._demand), ("draft", self._draft)):
            while waiting:
                slot = waiting.popleft()
                if slot.queued and slot.kind == kind:
                    slot.queued = False
                    return slot
        return next(self._pop_prefetches(None), None)

    def cancel_prefetches(self, last_layer: int | None = None) -> list[Slot]:
        """Takes out the prefetches of layers up to `last_layer` (None: of all layers)."""
        return list(self._pop_prefetches(last_layer))

    def book(self, slot: Slot, size: int, start: float, end: float, from_store: bool) -> None:
        """Records that `size` bytes of `slot` have arrived."""
        stall = 0.0
        if slot.waited_since is not None:
            stall = max(0.0, end - max(slot.waited_since, self._stalled_until))
            self._stalled_until = end
        event = LoadEvent(slot.kind, *slot.pair, size, start, end, stall, from_store)
        self._events.append(event)

    def take_events(self) -> list[LoadEvent]:
        """Returns what was recorded since the last call."""
        events, self._events = self._events, []
        return events

    def _pop_prefetches(self, last_layer: int | None) -> Iterator[Slot]:
        while self._prefetch and (last_layer is None or self._prefetch[0][0] <= last_layer):
            slot = heapq.heappop(self._prefetch)[2]
            if slot.queued and slot.kind == "prefetch":
                slot.queued = False
                yield slot


@runtime_checkable
class Policy(Protocol):
    """Chooses what a full cache gives up. It sees only what may go: a pair is added when the last
    use of it ends, and removed when it is used again, so a use shows as remove, then add."""

    def add(self, pair: Pair) -> None: ...

    def remove(self, pair: Pair) -> None: ...

    def pop(self) -> Pair | None:
        """Removes and returns the pair to evict; None if there is none."""
        ...


class LRU:
    """Gives up the least recently used pair."""

    def __init__(self) -> None:
        self._pairs: dict[Pair, None] = {}

    def add(self, pair: Pair) -> None:
        self._pairs[pair] = None

    def remove(self, pair: Pair) -> None:
        del self._pairs[pair]

    def pop(self) -> Pair | None:
        pair = next(iter(self._pairs), None)
        if pair is not None:
            del self._pairs[pair]
        return pair


@dataclasses.dataclass(frozen=True)
class DeviceForm:
    """How an expert lies on the device.

    Attributes:
        packing: of its bytes, as it is stored; None if it is numbers of the compute dtype.
        bytes: of one expert.
    """

    packing: Packing | None
    bytes: int


def device_form(
    store: ExpertStore, compute_dtype: DTypeLike, unpack: Literal["host", "device"] | None
) -> DeviceForm:
    """The form in which experts of a store lie on the device.

    Args:
        unpack: where quantised experts are decoded: on the host, which is faster where host and
            device are one, or in the device's own steps, so that their bytes are moved and kept as
            they are stored; None chooses by the backend.
    """
    if unpack is None:
        unpack = "host" if jax.default_backend() == "cpu" else "device"
    if unpack == "device" and store.encoding not in expert_codec.PLAIN:
        return DeviceForm(Packing(store.encoding, store.shape), store.bytes_per_expert)
    return DeviceForm(None, math.prod(store.shape) * np.dtype(compute_dtype).itemsize)


class Stager:
    """Takes an expert from store to host cache to device; used by the transfer thread alone.

    Attributes:
        host_bytes: bytes in the host cache, as stored; never above the bound.
        retried_reads: reads of the store that failed and were tried again.
    """

    def __init__(
        self,
        store: ExpertStore,
        policy: Policy,
        *,
        host_cache_bytes: int | None,
        compute_dtype: np.dtype,
        packed: bool,
        retries: int,
        device: jax.Device | None,  # pyright: ignore[reportInvalidTypeForm]
    ) -> None:
        """`packed` leaves quantised records as they are; who computes with them decodes them."""
        self.host_bytes = 0
        self.retried_reads = 0
        self._store = store
        self._host_bound = math.inf if host_cache_bytes is None else host_cache_bytes
        self._host: dict[Pair, np.ndarray] = {}
        self._policy = policy
        self._compute_dtype = compute_dtype
        self._packed = packed
        self._retries = retries
        self._device = device
        # JAX's contexts are per thread: what holds where the residency is made is taken along.
        self._default_device = jax.config.jax_default_device  # pyright: ignore

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """What the transfer thread runs in; without it float64 would silently become float32."""
        with (
            jax.enable_x64(self._compute_dtype.itemsize == 8),
            jax.default_device(self._default_device),
        ):
            yield

    def load(self, pair: Pair) -> tuple[Shaped[jax.Array, "..."], bool]:
        """Returns an expert, arrived on the device, and whether it had to come from the store.

        Raises:
            FailedError: it could not be read or placed; names layer, expert and file.
        """
        record = self._host.get(pair)
        from_store = record is None
        if record is None:
            record = self._read(pair)
            self._keep(pair, record)
        else:
            self._policy.remove(pair)
            self._policy.add(pair)
        try:
            return self._place(record), from_store
        except Exception as error:  # whatever the backend raises, out of memory above all
            file = self._store.locate(*pair)
            raise ExpertReadError(*pair, file, f"not placed on the device: {error}") from error

    def _read(self, pair: Pair) -> Shaped[np.ndarray, "..."]:
        attempt = 1
        while True:
            try:
                return self._store.read(*pair)
            except Exception as error:  # a storage driver may raise anything
                if attempt > self._retries:
                    reason = error.reason if isinstance(error, ExpertReadError) else repr(error)
                    reason = f"{reason} ({attempt} attempts)"
                    raise ExpertReadError(*pair, self._store.locate(*pair), reason) from error
                self.retried_reads += 1
                attempt += 1

    def _keep(self, pair: Pair, record: Shaped[np.ndarray, "..."]) -> None:
        if record.nbytes > self._host_bound:
            return
        while self.host_bytes + record.nbytes > self._host_bound:
            victim = self._policy.pop()
            assert victim is not None, "a full host cache has something to evict"
            self.host_bytes -= self._host.pop(victim).nbytes
        self._host[pair] = record
        self.host_bytes += record.nbytes
        self._policy.add(pair)

    def _place(self, record: Shaped[np.ndarray, "..."]) -> Shaped[jax.Array, "..."]:
        staged = record if self._packed else self._store.decode(record)
        wanted = np.dtype(np.uint8) if self._packed else self._compute_dtype
        if staged.dtype != wanted or not staged.flags.c_contiguous:
            # A new buffer every time, never written again: on CPU `device_put` aliases aligned
            # memory, which also saves the copy.
            numbers, staged = staged, _aligned_empty(staged.shape, wanted)
            np.copyto(staged, numbers, casting="unsafe")
        array = jax.device_put(staged, self._device).block_until_ready()
        assert array.dtype == wanted, (array.dtype, wanted)
        return array


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype, *, alignment: int = 64) -> np.ndarray:
    size = int(np.prod(shape)) * dtype.itemsize
    block = np.empty(size + alignment, np.uint8)
    offset = -block.ctypes.data % alignment
    return block[offset : offset + size].view(dtype).reshape(shape)

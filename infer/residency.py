"""Where every routed expert is: one object owns the truth, from the store to the device.

    store (every expert) -> host cache (bounded, as stored) -> device cache (bounded, compute dtype)

The decode loop asks for the experts of a layer with `acquire`, says with `prefetch` what a
verification will probably want, and opens and closes passes and rounds. A few threads make all
transfers, so that one expert is read while another is cast. Whatever the sizes, the policy and the
timing, `acquire` hands out the same weights (DraftExpert, arXiv 2607.24434: prefetching and
offloaded execution; its setting without a persistent expert cache is `device_cache_bytes=0`).

`infer.device_cache` tells who keeps an expert on the device, and how much lies there.

Sizes on the device are in the bytes that experts take there: as stored if they are packed, else of
the compute dtype, so that with bfloat16 records that are computed in float32 an expert takes twice
the bytes in the device cache that it takes in the host cache.

Host/device copies: one explicit `jax.device_put` a transfer, in a transfer thread; none back.
"""

import math
import operator
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import jax
from jax.typing import DTypeLike

from dejax.ckpt.expert_store import ExpertStore
from dejax.errors import FailedError, UsageError
from dejax.shapes import Pair
from infer.device_cache import PASS, ROUND, DeviceCache
from infer.link import Link, Pacer
from infer.prefetch import (
    LRU,
    Arrivals,
    Kind,
    LoadEvent,
    PassKind,
    Policy,
    Slot,
    TransferQueue,
)
from infer.staging import OnDevice, Stager, device_form

_HOLD_OF = {"demand": PASS, "draft": ROUND}


class Residency:
    """The experts of one target in store, host and device. Thread-safe; close it after use.

    Attributes:
        packing: how experts are packed on the device, None if they are in the compute dtype.
        bytes_per_expert: bytes of one expert on the device.
        form: how one lies there.
        prefetch_failures: prefetches that could not be read; the pass then loads on demand.
        stager: counts the bytes in the host cache, and the reads that were retried.
    """

    def __init__(
        self,
        store: ExpertStore,
        *,
        device_cache_bytes: int | None,
        host_cache_bytes: int | None,
        link: Link,
        compute_dtype: DTypeLike,
        prefetch_bytes: int,
        unpack: Literal["host", "device"] | None = None,
        readers: int = 1,
        retries: int = 2,
        device: jax.Device | None = None,  # pyright: ignore[reportInvalidTypeForm]
        policy: Callable[[], Policy] = LRU,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Starts the transfer threads.

        Args:
            store: an open expert store.
            device_cache_bytes, host_cache_bytes: bounds of the caches; None keeps everything.
                (To a store in memory a host cache adds a second copy.)
            compute_dtype: experts are cast to it on the host, before the transfer.
            unpack: where experts become numbers of the compute dtype, as in `device_form`.
            prefetch_bytes: most bytes (on the device) of experts that are queued, under way or
                arrived by prefetch in this round and not asked for yet; 0 prefetches nothing.
            readers: threads that make transfers.
            retries: how often a failed read is tried again.
            device: where experts go; None means JAX's default device, uncommitted.
            policy: makes the eviction policy of each of the two caches.

        Raises UsageError for a negative number.
        """
        sizes = (device_cache_bytes or 0, host_cache_bytes or 0, prefetch_bytes)
        if min(sizes) < 0 or retries < 0 or readers < 1:
            raise UsageError(
                f"residency: bytes {sizes}, retries {retries}, readers {readers}; expected >= 0, "
                "and at least one reader"
            )
        self.form = form = device_form(store, compute_dtype, unpack)
        self.packing, self.bytes_per_expert = form.packing, form.bytes
        self.prefetch_failures = 0
        self.stager = Stager(
            store,
            policy(),
            form,
            host_cache_bytes=host_cache_bytes,
            retries=retries,
            cold=link.cold,
            device=device,
        )
        self._pairs = frozenset(store.pairs)
        if link.cold and (kept := self.stager.forget_all()):
            raise FailedError(
                f"{kept} of {len(self._pairs)} experts stay in the page cache, so that their reads "
                f"would not come from the disk; put {store.path} on another file system"
            )
        self._record_bytes = store.bytes_per_expert
        bound = math.inf if device_cache_bytes is None else device_cache_bytes
        self._cache = DeviceCache(policy(), bound=bound, expert_bytes=form.bytes)
        self._prefetch_bound = prefetch_bytes
        self._clock = clock
        self._pacer = Pacer(link, clock=clock, sleep=sleep)

        self._queue = TransferQueue()
        self._prefetched: set[Pair] = set()
        self._broken: FailedError | None = None
        self._lock = threading.RLock()
        self._work = threading.Condition(self._lock)
        self._booking, self._booked = threading.Condition(self._lock), 0
        self._threads = [
            threading.Thread(target=self._run, name="dejax-transfer", daemon=True)
            for _ in range(readers)
        ]
        for thread in self._threads:
            thread.start()

    def acquire(self, layer: int, ids: Sequence[int], *, kind: PassKind) -> list[Any]:
        """Returns experts `ids` of `layer`, in that order; waits for those not on the device.

        Raises:
            UsageError, FailedError: as `request` and `Arrivals.take`.
        """
        return self.request(layer, ids, kind=kind).take(len(ids))

    def request(self, layer: int, ids: Sequence[int], *, kind: PassKind) -> Arrivals:
        """Asks for experts `ids` of `layer`, in that order; returns at once.

        `kind` says whose pass asks: the target's (`demand`) or the drafter's (`draft`).

        Raises:
            UsageError: no such expert.
            FailedError: the residency is closed.
        """
        hold, slots = _HOLD_OF[kind], []
        with self._lock:
            if self._broken is not None:
                raise self._broken
            for expert in ids:
                slot = self._cache.slots.get((layer, expert))
                if slot is None or slot.array is None:
                    slot = self._want((int(layer), int(expert)), kind)
                self._cache.hold(slot, hold)
                self._cache.settle(slot)
                slots.append(slot)
        return Arrivals(slots)

    def prefetch(self, pairs: Iterable[Pair], *, ahead: bool = False) -> None:
        """Asks for experts that are probably needed in this round; returns at once.

        Lower layers come first. What is on the device or on its way is only kept: until the round
        ends or, with `ahead`, until the pass releases its layer. What does not fit into
        `prefetch_bytes` is left out. A prefetch that fails is silent: the expert is loaded on
        demand.

        Raises:
            UsageError: no such expert.
            FailedError: the residency is closed.
        """
        with self._lock:
            if self._broken is not None:
                raise self._broken
            for pair in sorted(pairs, key=operator.itemgetter(0)):
                slot = self._cache.slots.get(pair)
                if slot is None:
                    speculative = self._cache.speculative_bytes + self.bytes_per_expert
                    if speculative > self._prefetch_bound:
                        continue
                    slot = self._enqueue((int(pair[0]), int(pair[1])), "prefetch")
                    self._cache.speculate(slot)
                self._cache.hold(slot, PASS if ahead else ROUND)

    def release(self, layer: int) -> None:
        """The target pass is done with `layer`: it lets go of what it acquired there.

        Prefetches of this and lower layers that still stand in the queue come too late, and are
        taken out. Without effect on what draft passes acquired.
        """
        with self._lock:
            if layer in self._cache.held_by_pass:
                self._cancel(layer)
                self._cache.release(layer)

    def end_pass(self) -> None:
        """The target pass is over: it lets go of everything it acquired."""
        with self._lock:
            for layer in list(self._cache.held_by_pass):
                self._cache.release(layer)

    def begin_round(self) -> None:
        """Opens a round (an autoregressive step is one too); ends one that was left open."""
        with self._lock:
            self.end_round()
            self._prefetched.clear()

    def end_round(self) -> None:
        """The verification is over: pass and round let go, queued prefetches are taken out.

        A prefetch that is under way is completed, and booked when it has arrived.
        """
        with self._lock:
            self._cancel(None)
            self.end_pass()
            self._cache.end_round()

    def close(self) -> None:
        """Ends the thread and drops every expert; whoever waits in `acquire` gets an error."""
        with self._lock:
            self._break(FailedError("the residency is closed"))
            self._work.notify_all()
        for thread in self._threads:
            thread.join()
        self._cache.clear()
        self.stager.close()

    def __enter__(self) -> "Residency":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def device_bytes(self) -> int:
        """Bytes of all experts on the device now."""
        return self._cache.bytes

    @property
    def peak_device_bytes(self) -> int:
        """The most so far, with those under way."""
        return self._cache.peak_bytes

    def is_available(self, pair: Pair) -> bool:
        """Whether an expert is on the device, or queued or under way."""
        return pair in self._cache.slots

    def is_resident(self, pair: Pair) -> bool:
        """Whether an expert is on the device now."""
        slot = self._cache.slots.get(pair)
        return slot is not None and slot.array is not None

    def available(self) -> set[Pair]:
        """The pairs for which `is_available` holds."""
        with self._lock:
            return set(self._cache.slots)

    def resident(self) -> set[Pair]:
        """The pairs that are on the device now."""
        with self._lock:
            return {pair for pair, slot in self._cache.slots.items() if slot.array is not None}

    def prefetched(self) -> set[Pair]:
        """The pairs whose prefetch began in this round and did not fail, asked for or not."""
        with self._lock:
            return set(self._prefetched)

    def take_events(self) -> list[LoadEvent]:
        """The transfers completed since the last call, in order."""
        with self._lock:
            return self._queue.take_events()

    # Bookkeeping; the lock is held.

    def _want(self, pair: Pair, kind: PassKind) -> Slot:
        """The slot of a missing pair, queued so that a pass of this kind can wait for it."""
        slot = self._cache.slots.get(pair) or self._enqueue(pair, kind)
        if slot.queued and slot.kind != kind and slot.kind != "demand":
            slot.kind = kind
            self._queue.push(slot)
        if slot.wanted is None:
            slot.waited_since = self._clock()
        if slot.wanted != "demand":
            slot.wanted = kind
        return slot

    def _enqueue(self, pair: Pair, kind: Kind) -> Slot:
        if pair not in self._pairs:
            raise UsageError(f"layer {pair[0]}, expert {pair[1]} is not in the expert store")
        slot = self._cache.slots[pair] = Slot(pair, kind, self._clock())
        self._queue.push(slot)
        self._work.notify()
        return slot

    def _cancel(self, last_layer: int | None) -> None:
        for slot in self._queue.cancel_prefetches(last_layer):
            self._cache.settle(slot)
            del self._cache.slots[slot.pair]

    def _break(self, error: FailedError) -> None:
        """Nothing will be loaded any more; nobody may be left waiting."""
        self._broken = self._broken or error
        self._booking.notify_all()
        for slot in list(self._cache.slots.values()):
            if not slot.done.is_set():
                slot.fail(error)
                del self._cache.slots[slot.pair]

    # The transfer thread.

    def _run(self) -> None:
        try:
            with self.stager.on_device():
                while self._transfer_one():
                    pass
        except BaseException as error:
            failed = FailedError(f"the transfer thread died of {error!r}; start the run again")
            failed.__cause__ = error
            with self._lock:
                self._break(failed)

    def _transfer_one(self) -> bool:
        """Waits for something to do, and does it; returns False when there is nothing any more.

        A function of its own, so that a waiting thread keeps no evicted expert alive.
        """
        if (slot := self._next()) is None:
            return False
        try:
            array, from_store = self.stager.load(slot.pair)
        except FailedError as error:
            self._failed(slot, error)
        else:
            booking = self._pacer.finish(self._record_bytes, requested=slot.requested)
            self._arrived(slot, array, booking, from_store)
        return True

    def _next(self) -> Slot | None:
        with self._lock:
            while self._broken is None:
                if (slot := self._queue.pop()) is None:
                    self._work.wait()
                    continue
                if slot.kind == "prefetch":
                    self._prefetched.add(slot.pair)
                self._cache.begin_loading()
                return slot
        return None

    def _arrived(
        self, slot: Slot, array: OnDevice, booking: tuple[float, float, int], from_store: bool
    ) -> None:
        start, end, number = booking
        with self._lock:
            # In the order in which they had the link, whichever thread comes here first.
            self._booking.wait_for(lambda: self._booked == number - 1 or self._broken)
            self._booked = number
            self._booking.notify_all()
            self._cache.end_loading()
            if self._broken is not None:
                return
            self._cache.put(slot, array)
            self._queue.book(slot, self._record_bytes, start, end, from_store)
            slot.done.set()

    def _failed(self, slot: Slot, error: FailedError) -> None:
        with self._lock:
            self._cache.end_loading()
            if self._broken is not None:
                return
            if slot.kind == "prefetch":
                self.prefetch_failures += 1
                self._prefetched.discard(slot.pair)
                if slot.wanted is not None:  # a pass waits already: it is that pass's load now
                    slot.kind = slot.wanted
                    self._queue.push(slot)
                    return
                self._cache.settle(slot)
            del self._cache.slots[slot.pair]
            slot.fail(error)

"""What the transfer threads of `infer.residency` work with: slots, their order, and who goes.

One link, one queue. A demand load (the target pass waits for it) goes ahead of a draft load (a
draft pass waits for it), and both ahead of prefetches, which go by layer, because that is the order
in which the verification will want them (DraftExpert, arXiv 2607.24434, prefetching). Nothing here
locks: the residency calls it under its own lock.
"""

import collections
import dataclasses
import heapq
import math
import threading
from collections.abc import Iterator
from typing import Any, Literal, Protocol, runtime_checkable

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
        array: the expert on the device (`infer.staging.OnDevice`); None until it has arrived.
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
        self.array: Any = None
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


class Arrivals:
    """Experts that were asked for, in their order, as they come in."""

    def __init__(self, slots: list[Slot]) -> None:
        self._slots = slots
        self._next = 0

    def __len__(self) -> int:
        """How many have not been taken."""
        return len(self._slots) - self._next

    def at_hand(self) -> int:
        """How many of the next ones have arrived, in a row."""
        waiting = (i for i, s in enumerate(self._slots[self._next :]) if not s.done.is_set())
        return next(waiting, len(self))

    def take(self, count: int) -> list[Any]:
        """The next `count` of them; waits for those that have not arrived.

        Each is gate, up and down [F, D] in the compute dtype, or bytes [N] to decode with
        `Residency.packing`.

        Raises:
            FailedError: one of them cannot be read (names layer, expert and file), or the
                residency was closed.
        """
        arrays = []
        for slot in self._slots[self._next : self._next + count]:
            slot.done.wait()
            if slot.error is not None:
                raise slot.error
            assert slot.array is not None
            arrays.append(slot.array)
        self._next += count
        return arrays


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

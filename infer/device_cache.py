"""What lies on the device and is on its way there, for `infer.residency`, which locks around it.

Who keeps an expert on the device:

- a target pass (`kind="demand"`) holds what it acquired until `release(layer)` or `end_pass`;
- a round holds what its draft passes acquired (`kind="draft"`) and what was prefetched in it, used
  or not, until `end_round`;
- what nobody holds belongs to the device cache and may be evicted. Held experts count towards the
  size of the cache: bytes there <= max(device_cache_bytes, bytes held + transfers under way).
"""

from collections.abc import Iterable
from typing import Any

from dejax.shapes import Pair
from infer.prefetch import Policy, Slot

PASS, ROUND = 1, 2
"""Who holds an expert: bits of `Slot.holds`."""


class DeviceCache:
    """The experts of one device: who holds each, what it may give up, and the bytes they take.

    Attributes:
        slots: every expert that is on the device, queued or under way.
        bytes: of all experts on the device now.
        peak_bytes: the most so far, with those under way.
        speculative_bytes: of what was prefetched and not asked for yet, arrived or not.
        held_by_pass: by layer, what the target pass acquired.
    """

    def __init__(self, policy: Policy, *, bound: int | float, expert_bytes: int) -> None:
        """`bound` is in bytes, infinite for a cache that keeps everything."""
        self.slots: dict[Pair, Slot] = {}
        self.bytes = self.peak_bytes = self.speculative_bytes = 0
        self.held_by_pass: dict[int, list[Slot]] = {}
        self._held_by_round: list[Slot] = []
        self._loading = 0  # bytes of those under way
        self._policy = policy
        self._bound = bound
        self._expert_bytes = expert_bytes

    def hold(self, slot: Slot, bit: int) -> None:
        """Keeps an expert for `PASS` or `ROUND`; without effect if it is kept for that already."""
        if slot.holds & bit:
            return
        if not slot.holds and slot.array is not None:
            self._policy.remove(slot.pair)
        slot.holds |= bit
        if bit == PASS:
            self.held_by_pass.setdefault(slot.pair[0], []).append(slot)
        else:
            self._held_by_round.append(slot)

    def release(self, layer: int) -> None:
        """Lets go of what the pass acquired in a layer."""
        self._let_go(self.held_by_pass.pop(layer), PASS)

    def end_round(self) -> None:
        """Lets go of what the round holds; prefetches that have arrived are not speculative now."""
        # Unused prefetches are let go first: the policy then takes them for the oldest.
        held = sorted(self._held_by_round, key=lambda slot: not slot.speculative)
        for slot in held:
            if slot.array is not None:
                self.settle(slot)
        self._let_go(held, ROUND)
        self._held_by_round.clear()

    def speculate(self, slot: Slot) -> None:
        """The slot is prefetched, and not asked for yet."""
        slot.speculative = True
        self.speculative_bytes += self._expert_bytes

    def settle(self, slot: Slot) -> None:
        """The slot is not speculative any more: asked for, arrived too late, or given up."""
        if slot.speculative:
            slot.speculative = False
            self.speculative_bytes -= self._expert_bytes

    def begin_loading(self) -> None:
        """Makes room for an expert that is now under way."""
        self._loading += self._expert_bytes
        self._evict()
        self.peak_bytes = max(self.peak_bytes, self.bytes + self._loading)

    def end_loading(self) -> None:
        """One has arrived, or will not."""
        self._loading -= self._expert_bytes

    def put(self, slot: Slot, array: Any) -> None:
        """An expert has arrived."""
        slot.array = array
        self.bytes += self._expert_bytes
        if not slot.holds:  # its round ended meanwhile
            self.settle(slot)
            self._policy.add(slot.pair)
        self._evict()

    def clear(self) -> None:
        """Drops every expert."""
        for kept in (self.slots, self.held_by_pass, self._held_by_round):
            kept.clear()
        self.bytes = 0

    def _let_go(self, slots: Iterable[Slot], bit: int) -> None:
        for slot in slots:
            slot.holds &= ~bit
            if not slot.holds and slot.array is not None:
                self.settle(slot)
                self._policy.add(slot.pair)
        self._evict()

    def _evict(self) -> None:
        """Makes room for what is there and under way, as far as nobody holds it."""
        while self.bytes + self._loading > self._bound:
            pair = self._policy.pop()
            if pair is None:
                return
            del self.slots[pair]
            self.bytes -= self._expert_bytes

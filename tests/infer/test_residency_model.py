"""The residency against an independent model, and under any timing."""

import random

import hypothesis
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from infer.prefetch import LRU
from tests.infer.residency_world import (
    BUSY,
    EXPERTS,
    LAYERS,
    PAIRS,
    SIZE,
    Store,
    assert_right,
    make,
    settle,
)
from tests.infer.residency_world import no_implicit_transfers as no_implicit_transfers


class Model:
    """The scope rules once more, for a residency at rest: who is on the device, oldest first."""

    def __init__(self, cache, prefetch):
        self.cache, self.bound = cache, prefetch
        self.resident, self.evictable, self.speculative = set(), [], set()
        self.by_pass, self.by_round = {}, []
        self.loads, self.peak = [], 0

    def held(self):
        return set(self.by_round).union(*self.by_pass.values())

    def hold(self, pair, holders):
        if pair in self.evictable:
            self.evictable.remove(pair)
        if pair not in holders:
            holders.append(pair)

    def load(self, pairs, kind):
        for pair in pairs:
            self.trim(incoming=1)
            self.resident.add(pair)
            self.peak = max(self.peak, len(self.resident))
            self.loads.append((kind, *pair))

    def trim(self, incoming=0):
        while self.evictable and len(self.resident) + incoming > self.cache:
            self.resident.remove(self.evictable.pop(0))

    def let_go(self, pairs):
        for pair in pairs:
            if pair not in self.held():
                self.evictable.append(pair)
        self.trim()

    def acquire(self, layer, ids, kind):
        pairs = list(dict.fromkeys((layer, expert) for expert in ids))
        for pair in pairs:
            if kind == "draft":
                self.hold(pair, self.by_round)
            else:
                self.hold(pair, self.by_pass.setdefault(layer, []))
            self.speculative.discard(pair)
        self.load([pair for pair in pairs if pair not in self.resident], kind)

    def prefetch(self, pairs):
        loads = []
        for pair in sorted(pairs, key=lambda pair: pair[0]):
            if pair not in self.resident and pair not in loads:
                if len(self.speculative) == self.bound:
                    continue
                self.speculative.add(pair)
                loads.append(pair)
            self.hold(pair, self.by_round)
        self.load(loads, "prefetch")

    def release(self, layer):
        self.let_go(self.by_pass.pop(layer, []))

    def end_pass(self):
        for layer in list(self.by_pass):
            self.release(layer)

    def end_round(self):
        self.end_pass()
        pairs, self.by_round = self.by_round, []
        self.let_go(sorted(pairs, key=lambda pair: pair not in self.speculative))
        self.speculative = set()


class AgainstTheModel(RuleBasedStateMachine):
    @initialize(cache=st.integers(0, 8), host=st.integers(0, 4), prefetch=st.integers(0, 6))
    def start(self, cache, host, prefetch):
        self.residency = make(cache=cache, host=host, prefetch=prefetch)
        self.model = Model(cache, prefetch)

    def teardown(self):
        if hasattr(self, "residency"):
            self.residency.close()

    @rule(
        layer=st.sampled_from(LAYERS),
        ids=st.lists(st.integers(0, EXPERTS - 1), max_size=5),
        kind=st.sampled_from(["draft", "demand"]),
    )
    def acquire(self, layer, ids, kind):
        assert_right(self.residency.acquire(layer, ids, kind=kind), layer, ids)
        self.model.acquire(layer, ids, kind)

    @rule(pairs=st.lists(st.sampled_from(PAIRS), max_size=8))
    def prefetch(self, pairs):
        self.residency.prefetch(pairs)
        settle(self.residency)
        self.model.prefetch(pairs)

    @rule(layer=st.sampled_from(LAYERS))
    def release(self, layer):
        self.residency.release(layer)
        self.model.release(layer)

    @rule()
    def end_pass(self):
        self.residency.end_pass()
        self.model.end_pass()

    @rule(name=st.sampled_from(["begin_round", "end_round"]))
    def end_round(self, name):
        getattr(self.residency, name)()
        self.model.end_round()

    @precondition(lambda self: hasattr(self, "model"))
    @invariant()
    def agrees(self):
        residency, model = self.residency, self.model
        assert residency.resident() == residency.available() == model.resident
        assert residency.device_bytes == len(model.resident) * SIZE
        assert residency.peak_device_bytes == model.peak * SIZE
        assert residency.device_bytes <= max(model.cache, len(model.held())) * SIZE
        events = [(event.kind, event.layer, event.expert) for event in residency.take_events()]
        assert events == model.loads
        model.loads = []


AgainstTheModel.TestCase.settings = hypothesis.settings(
    BUSY, max_examples=40, stateful_step_count=30
)
test_against_the_model = AgainstTheModel.TestCase


OPERATIONS = st.one_of(
    st.tuples(
        st.sampled_from(["draft", "demand"]),
        st.sampled_from(LAYERS),
        st.lists(st.integers(0, EXPERTS - 1), max_size=5),
    ),
    st.tuples(st.just("prefetch"), st.lists(st.sampled_from(PAIRS), max_size=8)),
    st.tuples(st.just("release"), st.sampled_from(LAYERS)),
    st.tuples(st.sampled_from(["end_pass", "begin_round", "end_round"])),
)


class Random:
    """A policy that gives up anything."""

    def __init__(self):
        self.pairs, self.random = [], random.Random(0)
        self.add, self.remove = self.pairs.append, self.pairs.remove

    def pop(self):
        return self.pairs.pop(self.random.randrange(len(self.pairs))) if self.pairs else None


@hypothesis.settings(BUSY, max_examples=60)
@hypothesis.given(
    operations=st.lists(OPERATIONS, max_size=40),
    cache=st.integers(0, 8),
    host=st.integers(0, 8),
    prefetch=st.integers(0, 8),
    policy=st.sampled_from([LRU, Random]),
    readers=st.integers(1, 4),
    failing=st.booleans(),
)
def test_results_and_bounds_hold_at_any_timing(
    operations, cache, host, prefetch, policy, readers, failing
):
    """Nothing waits for prefetches here, so that they overlap with whatever comes next."""
    noise = random.Random(0)

    def sometimes_fail(pair):
        if failing and noise.random() < 0.1:
            raise OSError("injected")

    store = Store(sometimes_fail)
    acquired, most = set(), 0
    sizes = dict(cache=cache, host=host, prefetch=prefetch)
    with make(store, policy=policy, retries=9, readers=readers, **sizes) as it:
        for name, *arguments in operations:
            if name in ("draft", "demand"):
                layer, ids = arguments
                acquired |= {(layer, expert) for expert in ids}
                most = max(most, len(acquired))
                assert_right(it.acquire(layer, ids, kind=name), layer, ids)
            else:
                if name in ("begin_round", "end_round"):
                    acquired = set()
                getattr(it, name)(*arguments)
            assert it.stager.host_bytes <= host * SIZE
        settle(it)
        pinned = {pair for name, *rest in operations if name == "prefetch" for pair in rest[0]}
        # Beyond the cache: what was acquired in a round, what was prefetched in one (bounded, and
        # what was there already), and the transfers under way.
        assert it.peak_device_bytes <= max(cache, most + len(pinned) + readers) * SIZE
        it.end_round()
        assert it.device_bytes <= cache * SIZE
        events = it.take_events()
        assert sum(1 for event in events if event.from_store) <= len(store.reads)
        assert all(a.end <= b.start <= b.end for a, b in zip(events, events[1:], strict=False))

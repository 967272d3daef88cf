"""The residency: right weights whatever happens, scopes, bounds, events, failures, closing.

Everything runs under a transfer guard that forbids implicit copies, in every thread.
"""

import contextlib
import random
import threading
import time
import weakref

import hypothesis
import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dejax.ckpt.expert_store import ExpertReadError, ExpertStore, ExpertStoreWriter
from dejax.errors import FailedError, UsageError
from infer.link import Link
from infer.prefetch import LRU
from infer.residency import Residency

LAYERS, EXPERTS, SHAPE = (1, 2, 4), 8, (3, 4, 8)
PAIRS = [(layer, expert) for layer in LAYERS for expert in range(EXPERTS)]
SIZE = 3 * 4 * 8 * 4  # bytes of an expert in float32

# A busy machine is no failure.
BUSY = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])


def expert_record(layer, expert, dtype=np.float32):
    """Another array for every pair; its values are exact in bfloat16."""
    grid = np.arange(96).reshape(SHAPE) % 7
    return (grid + 16 * layer + expert / 8).astype(ml_dtypes.bfloat16).astype(dtype)


EXPECTED = {pair: expert_record(*pair) for pair in PAIRS}


def build_store(path=None, dtype="float32"):
    plan = {"layers": LAYERS, "num_experts": EXPERTS, "shape": SHAPE, "dtype": dtype}
    writer = ExpertStoreWriter(path, identity="test", **plan)
    for pair in PAIRS:
        writer.write(*pair, expert_record(*pair, np.dtype(dtype)))
    return writer.finish()


STORE = build_store()


def assert_right(arrays, layer, ids):
    assert len(arrays) == len(ids)
    for array, expert in zip(arrays, ids, strict=True):
        np.testing.assert_array_equal(jax.device_get(array), EXPECTED[layer, expert])


def make(store=STORE, *, cache=None, host=None, prefetch=100, link=None, **options):
    """A residency with sizes in experts."""
    return Residency(
        store,
        device_cache_bytes=None if cache is None else cache * SIZE,
        host_cache_bytes=None if host is None else host * SIZE,
        prefetch_bytes=prefetch * SIZE,
        link=link or Link(),
        **({"compute_dtype": np.float32} | options),
    )


def wait_until(condition, seconds=60.0):
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, "nothing happened"
        time.sleep(0.0002)


def settle(residency):
    """Waits until nothing is queued or under way."""
    wait_until(lambda: residency.available() == residency.resident())


class Store(ExpertStore):
    """The test store with something in the way of reading it."""

    def __init__(self, before_read=lambda pair: None):
        vars(self).update(vars(STORE))
        self.before_read = before_read
        self.reads = []

    def read(self, layer, expert):
        self.reads.append((layer, expert))
        self.before_read((layer, expert))
        return super().read(layer, expert)


class GatedStore(Store):
    """Reads wait until the gate is open."""

    def __init__(self):
        self.gate = threading.Event()
        super().__init__(lambda pair: self.gate.wait(60))


class FakeClock:
    now = 0.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def in_thread(function):
    """Starts a thread; returns a function that joins it and gives its result or error."""
    result = []

    def body():
        try:
            result.append((function(), None))
        except Exception as error:
            result.append((None, error))

    thread = threading.Thread(target=body, daemon=True)
    thread.start()

    def join():
        thread.join(60)
        assert not thread.is_alive(), "the call hangs"
        value, error = result[0]
        if error is not None:
            raise error
        return value

    return join


@pytest.fixture(autouse=True)
def no_implicit_transfers():
    before = jax.config.jax_transfer_guard
    jax.config.update("jax_transfer_guard", "disallow")
    yield
    jax.config.update("jax_transfer_guard", before)


# Right weights.


@pytest.mark.parametrize("kind", ["draft", "demand"])
@pytest.mark.parametrize("cache", [0, 2, None])
def test_experts_come_in_the_order_of_the_ids(kind, cache):
    with make(cache=cache) as residency:
        for ids in ([3, 0, 5], [5, 3], [7, 7, 3, 7], [], (2, 6)):
            for layer in LAYERS:
                assert_right(residency.acquire(layer, ids, kind=kind), layer, ids)


@pytest.mark.parametrize(
    ("stored", "compute"),
    [("bfloat16", "float32"), ("float32", "float32"), ("float64", "float32")]
    + [("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("float64", "float64")],
)
def test_experts_have_the_compute_dtype(stored, compute):
    with jax.enable_x64(compute == "float64"):
        with make(build_store(dtype=stored), compute_dtype=compute) as residency:
            (array,) = residency.acquire(2, [5], kind="demand")
            assert array.dtype == compute
            assert residency.bytes_per_expert == residency.device_bytes == array.nbytes
            np.testing.assert_array_equal(jax.device_get(array).astype(np.float32), EXPECTED[2, 5])


def test_experts_go_to_the_device_asked_for():
    with make(device=jax.devices()[0]) as residency:
        (array,) = residency.acquire(2, [5], kind="demand")
        assert array.committed and array.devices() == {jax.devices()[0]}
    with make() as residency:
        (array,) = residency.acquire(2, [5], kind="demand")
        assert not array.committed


@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
def test_an_expert_at_hand_is_not_touched_by_later_loads(stored):
    with make(build_store(dtype=stored), cache=0, host=0) as residency:
        kept = {pair: residency.acquire(pair[0], [pair[1]], kind="demand") for pair in PAIRS}
        residency.end_pass()
        for pair in PAIRS:
            residency.acquire(pair[0], [pair[1]], kind="demand")
        for pair, arrays in kept.items():
            assert_right(arrays, pair[0], [pair[1]])


def test_a_planted_wrong_expert_is_noticed():
    class Wrong(Store):
        def read(self, layer, expert):
            return STORE.read(layer, (expert + 1) % EXPERTS)

    with make(Wrong()) as residency, pytest.raises(AssertionError):
        assert_right(residency.acquire(1, [0], kind="demand"), 1, [0])


def test_no_such_expert():
    with make() as residency:
        for pair in [(3, 0), (1, 8), (1, -1)]:
            with pytest.raises(UsageError, match=f"layer {pair[0]}, expert {pair[1]}"):
                residency.acquire(pair[0], [pair[1]], kind="demand")
            with pytest.raises(UsageError, match=f"layer {pair[0]}, expert {pair[1]}"):
                residency.prefetch([pair])
        assert_right(residency.acquire(1, [0], kind="demand"), 1, [0])


@pytest.mark.parametrize("option", ["device_cache_bytes", "host_cache_bytes", "prefetch_bytes"])
def test_negative_sizes_are_refused(option):
    sizes = {"device_cache_bytes": 0, "host_cache_bytes": 0, "prefetch_bytes": 0} | {option: -1}
    with pytest.raises(UsageError, match=">= 0"):
        Residency(STORE, link=Link(), compute_dtype=np.float32, **sizes)


# Scopes and bounds.


def test_without_a_cache_a_pass_keeps_its_experts_until_their_layer_is_released():
    with make(cache=0) as residency:
        residency.begin_round()
        residency.acquire(1, [0, 1], kind="demand")
        residency.acquire(2, [3], kind="demand")
        assert residency.resident() == {(1, 0), (1, 1), (2, 3)}
        residency.release(1)
        assert residency.resident() == {(2, 3)}
        residency.acquire(2, [3], kind="demand")
        assert len(residency.take_events()) == 3
        residency.end_pass()
        assert residency.resident() == set() and residency.device_bytes == 0


def test_without_a_cache_a_round_keeps_draft_experts_and_prefetches():
    with make(cache=0) as residency:
        residency.begin_round()
        residency.acquire(1, [0], kind="draft")
        residency.prefetch([(1, 5), (2, 6)])
        settle(residency)
        residency.end_pass()
        assert residency.resident() == {(1, 0), (1, 5), (2, 6)}
        assert residency.prefetched() == {(1, 5), (2, 6)}
        residency.acquire(1, [0, 5, 7], kind="demand")
        residency.release(1)
        assert residency.resident() == {(1, 0), (1, 5), (2, 6)}
        residency.end_round()
        assert residency.resident() == set()
        assert residency.prefetched() == {(1, 5), (2, 6)}
        residency.begin_round()
        assert residency.prefetched() == set()


def test_a_bounded_cache_gives_up_the_least_recently_used():
    with make(cache=3) as residency:
        for ids in ([0, 1, 2], [0], [3]):
            residency.acquire(1, ids, kind="demand")
            residency.release(1)
        assert residency.resident() == {(1, 2), (1, 0), (1, 3)}


def test_begin_round_ends_what_was_left_open():
    with make(cache=0) as residency:
        residency.begin_round()
        residency.acquire(1, [0], kind="draft")
        residency.acquire(1, [1], kind="demand")
        residency.begin_round()
        assert residency.resident() == set()


def test_an_evicted_expert_is_freed():
    with make(cache=0) as residency:
        arrays = residency.acquire(1, [0, 1], kind="demand")
        references = [weakref.ref(array) for array in arrays]
        del arrays
        assert all(reference() is not None for reference in references)
        residency.end_pass()
        wait_until(lambda: all(reference() is None for reference in references))


def test_a_prefetch_never_evicts_what_is_held():
    with make(cache=4) as residency:
        residency.begin_round()
        residency.acquire(1, [0, 1], kind="draft")
        residency.acquire(2, [0, 1], kind="demand")
        residency.prefetch([(4, expert) for expert in range(8)])
        settle(residency)
        held = {(1, 0), (1, 1), (2, 0), (2, 1)}
        assert residency.resident() == held | {(4, expert) for expert in range(8)}
        residency.end_round()
        assert len(residency.resident()) == 4


def test_a_prefetch_protects_what_is_in_the_cache():
    with make(cache=2) as residency:
        residency.acquire(1, [0, 1], kind="demand")
        residency.end_pass()
        residency.prefetch([(1, 0)])
        residency.acquire(2, [0, 1, 2], kind="demand")
        residency.end_pass()
        assert (1, 0) in residency.resident()
        assert [event.kind for event in residency.take_events()] == ["demand"] * 5


def test_prefetches_are_bounded_and_low_layers_come_first():
    with make(cache=0, prefetch=3) as residency:
        residency.begin_round()
        residency.prefetch([(4, 0), (2, 0), (4, 1), (1, 0)])
        settle(residency)
        assert residency.resident() == {(1, 0), (2, 0), (4, 0)}
        residency.prefetch([(1, 1)])
        assert not residency.is_available((1, 1))
        residency.acquire(1, [0], kind="demand")  # used: not speculative any more
        residency.prefetch([(1, 1), (1, 2)])
        settle(residency)
        assert residency.resident() == {(1, 0), (1, 1), (2, 0), (4, 0)}
        residency.end_round()
        residency.prefetch([(1, 0), (1, 1), (1, 2), (1, 3)])
        settle(residency)
        assert residency.resident() == {(1, 0), (1, 1), (1, 2)}
    with make(prefetch=0) as residency:
        residency.prefetch(PAIRS)
        assert residency.available() == set()


def test_the_host_cache_is_bounded_and_used():
    store = Store()
    with make(store, cache=0, host=2) as residency:
        for ids in ([0], [1], [0], [2], [0], [1]):
            residency.acquire(1, ids, kind="demand")
            residency.end_pass()
            assert residency.stager.host_bytes <= 2 * SIZE
        assert store.reads == [(1, 0), (1, 1), (1, 2), (1, 1)]
        from_store = [event.from_store for event in residency.take_events()]
        assert from_store == [True, True, False, True, False, True]


def test_without_a_host_cache_every_load_reads():
    store = Store()
    with make(store, cache=0, host=0) as residency:
        for _ in range(3):
            residency.acquire(1, [0], kind="demand")
            residency.end_pass()
        assert store.reads == [(1, 0)] * 3 and residency.stager.host_bytes == 0


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
    failing=st.booleans(),
)
def test_results_and_bounds_hold_at_any_timing(operations, cache, host, prefetch, policy, failing):
    """Nothing waits for prefetches here, so that they overlap with whatever comes next."""
    noise = random.Random(0)

    def sometimes_fail(pair):
        if failing and noise.random() < 0.1:
            raise OSError("injected")

    store = Store(sometimes_fail)
    acquired, most = set(), 0
    with make(store, cache=cache, host=host, prefetch=prefetch, policy=policy, retries=9) as it:
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
        # what was there already), and the transfer under way.
        assert it.peak_device_bytes <= max(cache, most + len(pinned) + 1) * SIZE
        it.end_round()
        assert it.device_bytes <= cache * SIZE
        events = it.take_events()
        assert sum(1 for event in events if event.from_store) <= len(store.reads)
        assert all(a.end <= b.start <= b.end for a, b in zip(events, events[1:], strict=False))


# Duplicates, promotion, order.


def test_nothing_is_loaded_twice():
    store = GatedStore()
    with make(store) as residency:
        residency.prefetch([(1, 0), (1, 0), (2, 0)])
        residency.prefetch([(2, 0), (1, 0)])
        calls = [
            in_thread(lambda: residency.acquire(1, [0, 1, 0], kind="demand")),
            in_thread(lambda: residency.acquire(1, [1, 0], kind="draft")),
        ]
        wait_until(lambda: residency.is_available((1, 1)))
        store.gate.set()
        assert_right(calls[0](), 1, [0, 1, 0])
        assert_right(calls[1](), 1, [1, 0])
        settle(residency)
        assert sorted(store.reads) == [(1, 0), (1, 1), (2, 0)]


def test_demand_goes_before_draft_before_prefetch_by_layer():
    store = GatedStore()
    with make(store, cache=0) as residency:
        residency.begin_round()
        residency.prefetch([(1, 7)])
        wait_until(lambda: store.reads == [(1, 7)])  # under way, so that all others queue up
        residency.prefetch([(4, 0), (2, 0), (1, 1), (2, 1), (1, 0)])
        draft = in_thread(lambda: residency.acquire(2, [6], kind="draft"))
        wait_until(lambda: residency.is_available((2, 6)))
        demand = in_thread(lambda: residency.acquire(2, [5, 1, 4], kind="demand"))
        wait_until(lambda: residency.is_available((2, 4)))
        store.gate.set()
        assert_right(draft(), 2, [6])
        assert_right(demand(), 2, [5, 1, 4])
        settle(residency)
        assert store.reads[1:4] == [(2, 5), (2, 1), (2, 4)]
        assert store.reads[4:] == [(2, 6), (1, 1), (1, 0), (2, 0), (4, 0)]
        kinds = {(event.layer, event.expert): event.kind for event in residency.take_events()}
        # (2, 1) was asked for while it still stood in the queue: nothing had been prefetched yet.
        assert kinds[2, 1] == "demand" and kinds[2, 6] == "draft" and kinds[2, 0] == "prefetch"
        assert residency.prefetched() == {(1, 7), (1, 0), (1, 1), (2, 0), (4, 0)}


@pytest.mark.parametrize("end", ["release", "end_round"])
def test_prefetches_that_come_too_late_are_taken_out(end):
    store = GatedStore()
    with make(store, cache=0) as residency:
        store.gate.set()
        residency.begin_round()
        residency.acquire(2, [3], kind="demand")
        store.gate.clear()
        residency.prefetch([(1, 0)])
        wait_until(lambda: store.reads[-1] == (1, 0))
        residency.prefetch([(1, 1), (2, 1), (4, 1)])
        residency.release(4)  # nothing was acquired there
        residency.release(1)
        assert len(residency.available()) == 5
        residency.release(2) if end == "release" else residency.end_round()
        left = {(1, 0), (4, 1)} if end == "release" else {(1, 0)}
        assert residency.available() == left
        store.gate.set()
        settle(residency)
        assert residency.resident() == (left if end == "release" else set())
        # A transfer that was under way is completed and booked, used or not.
        assert {(event.layer, event.expert) for event in residency.take_events()} == left | {(2, 3)}
        residency.prefetch([(1, expert) for expert in range(8)])  # the bound is free again
        settle(residency)
        assert len(residency.resident() & {(1, expert) for expert in range(8)}) == 8


def test_a_prefetch_under_way_over_the_end_of_a_round_counts_for_the_next():
    store = GatedStore()
    with make(store, cache=0, prefetch=1) as residency:
        residency.begin_round()
        residency.prefetch([(1, 0)])
        wait_until(lambda: store.reads)
        residency.begin_round()
        residency.prefetch([(1, 1)])
        assert residency.available() == {(1, 0)}
        residency.prefetch([(1, 0)])
        store.gate.set()
        settle(residency)
        assert residency.resident() == {(1, 0)}  # asked for in this round too: kept
        residency.begin_round()
        residency.prefetch([(1, 1)])
        settle(residency)
        assert residency.resident() == {(1, 1)}


# Events and times, on a clock that only the link moves.


def test_demand_loads_are_booked_with_exact_times():
    clock = FakeClock()
    link = Link(SIZE * 1.0, 0.5)
    with make(cache=0, link=link, clock=clock, sleep=clock.sleep) as residency:
        residency.acquire(1, [2, 0], kind="demand")
        residency.acquire(2, [1], kind="draft")
        clock.now = 10.0
        residency.acquire(4, [3], kind="demand")
        events = residency.take_events()
        assert residency.take_events() == []
    seen = [(e.kind, e.layer, e.expert, e.bytes, e.start, e.end, e.stall) for e in events]
    assert seen == [
        ("demand", 1, 2, SIZE, 0.0, 1.5, 1.5),
        ("demand", 1, 0, SIZE, 1.5, 3.0, 1.5),
        ("draft", 2, 1, SIZE, 3.0, 4.5, 1.5),
        ("demand", 4, 3, SIZE, 10.0, 11.5, 1.5),
    ]


def test_bytes_are_those_of_the_stored_record():
    with make(build_store(dtype="bfloat16")) as residency:
        residency.acquire(1, [0], kind="demand")
        assert residency.take_events()[0].bytes == SIZE // 2
        assert residency.device_bytes == SIZE and residency.stager.host_bytes == SIZE // 2


def test_a_prefetch_in_time_stalls_nobody():
    clock = FakeClock()
    with make(link=Link(SIZE * 1.0), clock=clock, sleep=clock.sleep) as residency:
        residency.prefetch([(1, 0)])
        settle(residency)
        clock.now = 5.0
        residency.acquire(1, [0], kind="demand")
        (event,) = residency.take_events()
        assert (event.kind, event.start, event.end, event.stall) == ("prefetch", 0.0, 1.0, 0.0)


def test_a_prefetch_that_is_waited_for_books_the_stall_and_no_demand_load():
    clock, store = FakeClock(), GatedStore()
    link = Link(SIZE / 8.0)
    with make(store, link=link, clock=clock, sleep=clock.sleep) as residency:
        residency.prefetch([(1, 0)])
        wait_until(lambda: store.reads)
        clock.now = 3.0
        call = in_thread(lambda: residency.acquire(1, [0, 1], kind="demand"))
        wait_until(lambda: residency.is_available((1, 1)))
        store.gate.set()
        assert_right(call(), 1, [0, 1])
        seen = [(e.kind, e.expert, e.start, e.end, e.stall) for e in residency.take_events()]
        assert seen == [("prefetch", 0, 0.0, 8.0, 5.0), ("demand", 1, 8.0, 16.0, 8.0)]
        assert residency.prefetched() == {(1, 0)}


def test_waiting_behind_a_prefetch_is_a_stall_too():
    clock, store = FakeClock(), GatedStore()
    link = Link(SIZE / 8.0)
    with make(store, link=link, clock=clock, sleep=clock.sleep) as residency:
        residency.prefetch([(1, 0)])
        wait_until(lambda: store.reads)
        clock.now = 3.0
        call = in_thread(lambda: residency.acquire(1, [1], kind="demand"))
        wait_until(lambda: residency.is_available((1, 1)))
        store.gate.set()
        assert_right(call(), 1, [1])
        assert [e.stall for e in residency.take_events()] == [0.0, 13.0]


# Failures.


@pytest.fixture
def folder_store(tmp_path):
    return build_store(tmp_path / "experts")


def test_a_flipped_byte_is_reported_and_nothing_else_suffers(folder_store):
    file = folder_store.locate(2, 5)
    with open(file, "r+b") as out:
        out.seek(200)
        out.write(b"\xff")
    with make(folder_store) as residency:
        for _ in range(2):
            with pytest.raises(ExpertReadError, match="checksum") as error:
                residency.acquire(2, [4, 5, 6], kind="demand")
            assert isinstance(error.value, FailedError)
            assert (error.value.layer, error.value.expert, error.value.file) == (2, 5, file)
            assert "layer 2, expert 5" in str(error.value) and file in str(error.value)
            assert "3 attempts" in str(error.value)
        assert_right(residency.acquire(2, [4, 6], kind="demand"), 2, [4, 6])
        residency.end_round()
        booked = [(event.layer, event.expert) for event in residency.take_events()]
        assert sorted(booked) == [(2, 4), (2, 6)]  # completed transfers only


def test_a_failed_read_is_tried_again():
    failures = []

    def fail_twice(pair):
        if len(failures) < 2:
            failures.append(pair)
            raise OSError("injected")

    with make(Store(fail_twice), retries=2) as residency:
        assert_right(residency.acquire(1, [0, 1], kind="demand"), 1, [0, 1])
        assert failures == [(1, 0)] * 2 and residency.stager.retried_reads == 2
    failures.clear()
    with make(Store(fail_twice), retries=1) as residency:
        with pytest.raises(ExpertReadError, match=r"injected.*2 attempts"):
            residency.acquire(1, [0], kind="demand")
        assert_right(residency.acquire(1, [0], kind="demand"), 1, [0])  # asked again, it works


def test_a_failed_prefetch_becomes_a_demand_load():
    broken = True

    def fail(pair):
        if broken and pair == (1, 0):
            raise OSError("injected")

    with make(Store(fail), cache=0, prefetch=1) as residency:
        residency.begin_round()
        residency.prefetch([(1, 0)])
        wait_until(lambda: residency.prefetch_failures)
        assert not residency.is_available((1, 0)) and residency.prefetched() == set()
        with pytest.raises(ExpertReadError):
            residency.acquire(1, [0], kind="demand")
        broken = False
        assert_right(residency.acquire(1, [0], kind="demand"), 1, [0])
        assert [event.kind for event in residency.take_events()] == ["demand"]
        residency.prefetch([(2, 0)])  # the failed one does not count against the bound
        settle(residency)
        assert (2, 0) in residency.resident()


def test_a_prefetch_that_fails_while_it_is_waited_for_is_loaded_anew():
    failures = iter([True, True, True])
    store = Store()
    waiting = threading.Event()

    def fail(pair):
        waiting.wait(60)
        if next(failures, False):
            raise OSError("injected")

    store.before_read = fail
    with make(store, retries=2) as residency:
        residency.prefetch([(1, 0)])
        wait_until(lambda: store.reads)
        call = in_thread(lambda: residency.acquire(1, [0, 1], kind="demand"))
        wait_until(lambda: residency.is_available((1, 1)))
        waiting.set()
        assert_right(call(), 1, [0, 1])
        assert residency.prefetch_failures == 1
        assert [event.kind for event in residency.take_events()] == ["demand"] * 2


def test_a_full_device_is_reported_with_the_expert(monkeypatch):
    def full(*_):
        raise RuntimeError("RESOURCE_EXHAUSTED")

    with make() as residency:
        monkeypatch.setattr(jax, "device_put", full)
        with pytest.raises(FailedError, match=r"layer 1, expert 0.*RESOURCE_EXHAUSTED"):
            residency.acquire(1, [0], kind="demand")


def test_a_dead_thread_leaves_nobody_waiting():
    class Broken(LRU):
        def add(self, pair):
            raise KeyError("a bug in a policy")

    with make(policy=Broken) as residency:
        for _ in range(2):
            call = in_thread(lambda: residency.acquire(1, [0, 1], kind="demand"))
            with pytest.raises(FailedError, match="a bug in a policy"):
                call()


def test_close_wakes_who_waits_and_ends_the_thread():
    store = GatedStore()
    residency = make(store)
    calls = [in_thread(lambda: residency.acquire(1, [0, 1], kind="demand")) for _ in range(2)]
    wait_until(lambda: store.reads)
    closing = in_thread(residency.close)
    for call in calls:
        with pytest.raises(FailedError, match="closed"):
            call()
    store.gate.set()
    closing()
    residency.close()
    assert not any(thread is residency._thread for thread in threading.enumerate())
    assert residency.resident() == set() and residency.device_bytes == 0
    for call in (lambda: residency.acquire(1, [0], kind="demand"), lambda: residency.prefetch([])):
        with pytest.raises(FailedError, match="closed"):
            call()


# Many threads.


@pytest.mark.parametrize("retries", [0, 6])
def test_stress(retries):
    """Eight readers, random delays and failures, everything else at random: no wrong expert."""
    noise = random.Random(0)

    def disturb(pair):
        if noise.random() < 0.2:
            time.sleep(noise.random() * 2e-4)
        if noise.random() < 0.05:
            raise OSError("injected")

    wrong, failed = [], []
    with make(Store(disturb), cache=6, host=8, prefetch=4, retries=retries) as residency:

        def read(seed):
            choose = random.Random(seed)
            for _ in range(250):
                layer = choose.choice(LAYERS)
                ids = [choose.randrange(EXPERTS) for _ in range(choose.randint(1, 4))]
                try:
                    arrays = residency.acquire(layer, ids, kind=choose.choice(["draft", "demand"]))
                except ExpertReadError as error:
                    failed.append(error)
                    continue
                for array, expert in zip(arrays, ids, strict=True):
                    if not np.array_equal(jax.device_get(array), EXPECTED[layer, expert]):
                        wrong.append((layer, expert))
                choose.choice(
                    [
                        lambda: residency.prefetch(choose.sample(PAIRS, 5)),
                        lambda: residency.release(choose.choice(LAYERS)),
                        residency.end_pass,
                        residency.begin_round,
                        residency.end_round,
                    ]
                )()
            return True

        joins = [in_thread(lambda seed=seed: read(seed)) for seed in range(8)]
        assert all(join() for join in joins)
        settle(residency)
        residency.end_round()
        assert residency.device_bytes <= 6 * SIZE
        assert residency._speculative_bytes == 0
    assert not wrong
    assert bool(failed) == (retries == 0)


def test_close_during_use_never_hangs():
    for seed in range(20):
        residency = make(Store(lambda pair: time.sleep(1e-4)), cache=2)

        def read(residency=residency, seed=seed):
            choose = random.Random(seed)
            with contextlib.suppress(FailedError):
                while True:
                    residency.prefetch(choose.sample(PAIRS, 3))
                    residency.acquire(choose.choice(LAYERS), [choose.randrange(8)], kind="demand")
                    residency.end_pass()

        joins = [in_thread(read) for _ in range(3)]
        time.sleep(0.002)
        residency.close()
        for join in joins:
            join()

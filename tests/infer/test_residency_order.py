"""The residency: duplicates, promotion, order, events and times."""

import pytest

from infer.link import Link
from tests.infer.residency_world import (
    SIZE,
    FakeClock,
    GatedStore,
    assert_right,
    build_store,
    in_thread,
    make,
    settle,
    wait_until,
)
from tests.infer.residency_world import no_implicit_transfers as no_implicit_transfers

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

"""The residency: right weights whatever happens, scopes and bounds."""

import weakref

import jax
import numpy as np
import pytest

from dejax.errors import UsageError
from infer.link import Link
from infer.residency import Residency
from tests.infer.residency_world import (
    EXPECTED,
    EXPERTS,
    LAYERS,
    PAIRS,
    SIZE,
    STORE,
    Store,
    assert_right,
    build_store,
    make,
    settle,
    wait_until,
)
from tests.infer.residency_world import no_implicit_transfers as no_implicit_transfers


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
            (parts,) = residency.acquire(2, [5], kind="demand")
            assert {part.dtype for part in parts} == {np.dtype(compute)}
            size = sum(part.nbytes for part in parts)
            assert residency.bytes_per_expert == residency.device_bytes == size
            found = np.stack(jax.device_get(parts)).astype(np.float32)
            np.testing.assert_array_equal(found, EXPECTED[2, 5])


def test_experts_go_to_the_device_asked_for():
    with make(device=jax.devices()[0]) as residency:
        (parts,) = residency.acquire(2, [5], kind="demand")
        assert all(part.committed for part in parts)
        assert all(part.devices() == {jax.devices()[0]} for part in parts)
    with make() as residency:
        (parts,) = residency.acquire(2, [5], kind="demand")
        assert not any(part.committed for part in parts)


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
        def read(self, layer, expert, into=None):
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
    """Where it has memory of its own: one in the store's lies there anyway."""
    with make(build_store(dtype="bfloat16"), cache=0) as residency:
        arrays = residency.acquire(1, [0, 1], kind="demand")
        references = [weakref.ref(part) for parts in arrays for part in parts]
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

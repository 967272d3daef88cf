"""The residency: failures, closing, and many threads."""

import contextlib
import random
import threading
import time

import jax
import numpy as np
import pytest

from dejax.ckpt.expert_store import ExpertReadError
from dejax.errors import FailedError
from infer.prefetch import LRU
from tests.infer.residency_world import (
    EXPECTED,
    EXPERTS,
    LAYERS,
    PAIRS,
    SIZE,
    GatedStore,
    Store,
    assert_right,
    build_store,
    in_thread,
    make,
    settle,
    wait_until,
)
from tests.infer.residency_world import no_implicit_transfers as no_implicit_transfers

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
    assert not set(residency._threads) & set(threading.enumerate())
    assert residency.resident() == set() and residency.device_bytes == 0
    for call in (lambda: residency.acquire(1, [0], kind="demand"), lambda: residency.prefetch([])):
        with pytest.raises(FailedError, match="closed"):
            call()


# Many threads.


@pytest.mark.parametrize(
    ("retries", "readers", "acquisitions"),
    [(0, 1, 2000), (6, 8, 2000), pytest.param(6, 8, 10_000, marks=pytest.mark.slow)],
)
def test_stress(retries, readers, acquisitions):
    """Eight threads that ask, random delays and failures, all else at random: no wrong expert."""
    noise = random.Random(0)

    def disturb(pair):
        if noise.random() < 0.2:
            time.sleep(noise.random() * 2e-4)
        if noise.random() < 0.05:
            raise OSError("injected")

    wrong, failed = [], []
    sizes = dict(cache=6, host=8, prefetch=4)
    with make(Store(disturb), retries=retries, readers=readers, **sizes) as residency:

        def read(seed):
            choose = random.Random(seed)
            for _ in range(acquisitions // 8):
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
        # What eight threads may hold at once, what a round prefetched, and what is under way.
        assert residency.peak_device_bytes <= len(PAIRS) * SIZE
        assert residency.stager.host_bytes <= 8 * SIZE
        assert residency._cache.speculative_bytes == 0
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

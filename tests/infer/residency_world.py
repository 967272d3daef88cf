"""A small expert store and what the residency's tests need around it.

Everything runs under a transfer guard that forbids implicit copies, in every thread.
"""

import threading
import time

import hypothesis
import jax
import ml_dtypes
import numpy as np
import pytest

from dejax.ckpt.expert_store import ExpertStore, ExpertStoreWriter
from infer.link import Link
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

    def read(self, layer, expert, into=None):
        self.reads.append((layer, expert))
        self.before_read((layer, expert))
        return super().read(layer, expert, into)


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

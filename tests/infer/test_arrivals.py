"""Experts that are computed as they arrive, and asked for ahead: never another token.

In float64. What is small is made to count as large, so that every size of piece is met.
"""

import random
import time
from typing import Any

import jax
import numpy as np
import pytest

from dejax.spec.control import ControlConfig
from infer import buckets
from infer.decode_options import DecodeOptions
from infer.decoder import Decoder, Offload
from infer.link import Link
from infer.prefetch import LRU
from infer.residency import Residency
from infer.staging import Stager, device_form
from tests.infer.random_target import SHAPES, draft_of, random_prompt, random_target, store_of
from tests.infer.residency_world import EXPECTED, STORE
from tests.infer.test_faults import Troubled

pytestmark = pytest.mark.usefixtures("x64")


EXPERT_BYTES = 3 * 16 * 32 * 8


def tokens_of(decoder, options, length=140):
    trace = decoder.run(random_prompt(length), options)
    return [token for record in trace for token in record.emitted]


def late(pair):
    """Reads in an order of their own, so that other numbers of experts are at hand each time."""
    time.sleep(random.random() * 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("piece_bytes", [1, 3 * EXPERT_BYTES])
def test_experts_that_come_one_by_one_give_the_same_tokens(shape, piece_bytes, monkeypatch):
    target = random_target(shape)
    store = store_of(target)
    options = DecodeOptions(mode="ar", max_new_tokens=12, stop_at_eos=False)
    with Decoder(target, store=store) as decoder:
        expected = tokens_of(decoder, options)
    monkeypatch.setattr(buckets, "PIECE_BYTES", piece_bytes)
    draft = draft_of(target)
    drafting = DecodeOptions(
        mode="draft-expert",
        max_new_tokens=12,
        stop_at_eos=False,
        control=ControlConfig(draft_length=4, truncate=False),
    )
    for look_ahead in (False, True):
        offload = Offload(device_cache=0, look_ahead=look_ahead)
        slow = Troubled(store, late)
        with Decoder(target, offload=offload, store=slow) as decoder:
            assert decoder.engine.experts.pieces  # pyright: ignore[reportAttributeAccessIssue]
            assert tokens_of(decoder, options) == expected
        with Decoder(target, draft=draft, offload=offload, store=slow) as decoder:
            assert tokens_of(decoder, drafting) == expected


def test_looking_ahead_brings_experts_before_they_are_asked_for():
    target = random_target("shared")
    options = DecodeOptions(mode="ar", max_new_tokens=8, stop_at_eos=False)
    with Decoder(target, offload=Offload(look_ahead=True), store=store_of(target)) as decoder:
        trace = decoder.run(random_prompt(20), options)
        kinds = {load.kind for record in trace for load in record.loads}
        first = target.config.moe_layers[0]
        prefetched = {pair for record in trace for pair in record.prefetched}
        assert kinds == {"demand", "prefetch"}
        assert prefetched and all(layer > first for layer, _ in prefetched)
        # What was asked for ahead is let go of with its layer.
        decoder.residency.end_round()
        assert decoder.residency.device_bytes == 0


@pytest.mark.slow
def test_after_warm_up_pieces_compile_nothing(monkeypatch):
    monkeypatch.setattr(buckets, "PIECE_BYTES", 1)
    target = random_target("shared")
    store = Troubled(store_of(target), late)
    options = DecodeOptions(mode="ar", max_new_tokens=10, stop_at_eos=False)
    compiled: list[Any] = []
    with Decoder(target, offload=Offload(look_ahead=True), store=store) as decoder:
        decoder.warm_up(options)
        seen = lambda event, *_, **__: compiled.append(event)  # noqa: E731
        jax.monitoring.register_event_duration_secs_listener(seen)
        try:
            decoder.run(random_prompt(150), options)
        finally:
            jax.monitoring.unregister_event_duration_listener(seen)
    assert not [event for event in compiled if "backend_compile" in event]


def test_a_host_cache_in_pinned_memory_gives_the_same_experts():
    """The CPU has such memory too, of a kind of its own."""
    form = device_form(STORE, np.float32, None)
    stager = Stager(STORE, LRU(), form, host_cache_bytes=10**6, retries=0, pinned=True)
    assert stager.pinned
    for _ in range(2):
        for pair in [(1, 0), (2, 3)]:
            parts, from_store = stager.load(pair)
            np.testing.assert_array_equal(np.stack(jax.device_get(parts)), EXPECTED[pair])
            assert {part.sharding.memory_kind for part in parts} != {"pinned_host"}
    assert not from_store and stager.host_bytes == 2 * form.bytes


def test_the_disk_link_reads_from_the_disk(tmp_path):
    from tests.infer.residency_world import build_store

    store = build_store(tmp_path / "experts")
    sizes = dict(device_cache_bytes=0, host_cache_bytes=0, prefetch_bytes=0)
    with Residency(store, link=Link(cold=True), compute_dtype=np.float32, **sizes) as residency:
        for _ in range(2):
            (parts,) = residency.acquire(1, [3], kind="demand")
            np.testing.assert_array_equal(np.stack(jax.device_get(parts)), EXPECTED[1, 3])
            residency.end_pass()
        assert residency.stager.warm_reads == 0
    assert store.forget(1, 3)

"""Decoding from quantised stores: exact to the quantised target, wherever experts are decoded."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from dejax.ckpt.expert_codec import QUANTISED
from dejax.ckpt.expert_store import ExpertStoreWriter
from dejax.spec.control import ControlConfig
from infer.decode_options import DecodeOptions
from infer.decoder import Decoder, Offload
from infer.staging import device_form
from tests.infer.random_target import draft_of, random_prompt, random_target

PROMPT = random_prompt(9)


pytestmark = pytest.mark.usefixtures("x64")


def quantised(target, encoding):
    """A target whose experts lie in a quantised store, and the same with them in memory."""
    config = target.config
    with ExpertStoreWriter(
        None,
        layers=config.moe_layers,
        num_experts=config.moe.num_experts,
        shape=config.expert_shape,
        dtype=encoding,
        identity=target.identity,
    ) as writer:
        for layer, stack in target.routed.items():
            for expert, record in enumerate(np.asarray(stack, np.float32)):
                writer.write(layer, expert, record)
        stored = dataclasses.replace(target, routed=None, store=writer.finish())
    layers = {layer: stored.layer_experts(layer) for layer in config.moe_layers}
    routed = {layer: jnp.asarray(stack, jnp.float64) for layer, stack in layers.items()}
    return stored, dataclasses.replace(target, routed=routed)


def tokens_of(trace):
    return [token for record in trace for token in record.emitted]


@pytest.mark.parametrize("unpack", ["host", "device"])
def test_prefetches_are_bounded_by_the_bytes_that_experts_take_on_the_device(unpack):
    few = random_target("shared").config
    config = dataclasses.replace(few, experts=dataclasses.replace(few.moe, num_experts=32))
    stored, _ = quantised(random_target(config), "int8")
    store = stored.store
    assert store is not None
    form = device_form(store, np.float64, unpack)
    assert form.bytes == (store.bytes_per_expert if form.packing else 8 * np.prod(store.shape))
    with Decoder(stored, offload=Offload(unpack=unpack)) as decoder:
        decoder.residency.begin_round()
        decoder.residency.prefetch(store.pairs)
        assert len(decoder.residency.available()) == 4 * config.routes_per_token < len(store.pairs)


@pytest.mark.slow
@pytest.mark.parametrize("encoding", QUANTISED)
def test_a_quantised_store_decodes_as_its_own_target(encoding):
    original = random_target("shared")
    stored, plain = quantised(original, encoding)
    options = {
        "ar": DecodeOptions(mode="ar", max_new_tokens=24),
        "draft-expert": DecodeOptions(
            mode="draft-expert", max_new_tokens=24, control=ControlConfig(draft_length=3)
        ),
    }
    with Decoder(plain) as decoder:
        expected = tokens_of(decoder.run(PROMPT, options["ar"]))
    for mode, unpack in itertools.product(options, ("host", "device")):
        with Decoder(stored, draft=draft_of(stored), offload=Offload(unpack=unpack)) as decoder:
            assert tokens_of(decoder.run(PROMPT, options[mode])) == expected, (mode, unpack)
            packed = decoder.residency.packing is not None
            assert packed == (unpack == "device")
            moved = decoder.residency.bytes_per_expert
        store = stored.store
        assert moved == (store.bytes_per_expert if packed else 8 * np.prod(store.shape))
    assert not np.array_equal(plain([PROMPT]), original([PROMPT]))

"""Training on the cache that decoding has: the draft's rows see what they will see in the loop."""

from functools import partial

import jax
import numpy as np
import pytest

from dejax.model import logits_of
from dejax.target import load_target
from infer.decoder import Decoder
from infer.passes import Drafting
from tests.families.random_folder import raw_config, write_folder
from tests.infer.random_target import SHAPES, VOCAB, draft_of, random_prompt, random_target
from train.distill_step import paired_forward
from train.kv_mix import draw_blocks
from train.stacked import stack_target

BLOCK, PROMPT = 4, random_prompt(9)
DRAFTED = random_prompt(BLOCK, seed=1)


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def trained_logits(target, draft, blocks):
    """Logits [T, V] of the draft stream over prompt and drafted tokens; None: its own cache."""
    tokens = np.asarray([PROMPT + DRAFTED], np.int32)
    batch = dict(
        tokens=tokens,
        positions=np.arange(tokens.size, dtype=np.int32)[None],
        segment_ids=np.ones_like(tokens),
        mask=np.ones(tokens.shape, np.float32),
    )
    batch |= {} if blocks is None else {"blocks": np.asarray([blocks], np.int32)}
    definition, params = stack_target(target.model, target.routed)
    forward = partial(paired_forward, definition, r=1, dtype=target.compute_dtype)
    outer, _, drafted, _ = jax.jit(forward)(params, draft.stacked_params(), batch)
    return np.asarray(logits_of(outer, drafted))[0]


def decoded_logits(target, draft):
    """Logits of the drafted tokens in the real loop: passes of one row after a target's prefill."""
    with Decoder(target, draft=draft) as decoder:
        engine = decoder.engine
        engine.begin()
        engine.residency.begin_round()
        engine.prefill(PROMPT)
        rows = [
            engine.draft_row(t, start=len(PROMPT) + i, drafting=Drafting(r=1))
            for i, t in enumerate(DRAFTED)
        ]
        engine.residency.end_round()
        return np.concatenate([row.logits for row in rows])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "shared",  # latent attention, a dense layer first
        "qwen3-moe-sparse",  # windows, dense layers between
        "gpt-oss",  # sinks, a window in every other layer
    ],
)
def test_a_block_sees_what_it_sees_in_the_decode_loop(name, tmp_path):
    if name in SHAPES:
        target = random_target(name)
    else:
        raw = raw_config(name, vocab_size=VOCAB)
        target = load_target(write_folder(tmp_path / "model", raw), dtype="float64")
    draft = draft_of(target)
    blocks = (np.arange(len(PROMPT) + BLOCK) + -len(PROMPT) % BLOCK) // BLOCK
    found = trained_logits(target, draft, blocks)[len(PROMPT) :]
    expected = decoded_logits(target, draft)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)
    # Each of these is another network: the paper's (its own cache), and blocks one token off.
    for others in (None, blocks - (np.arange(len(blocks)) == len(PROMPT)), 0 * blocks):
        other = trained_logits(target, draft, others)[len(PROMPT) :]
        assert np.abs(other - expected).max() > 1e-6


def test_blocks_are_full_but_for_the_first_and_the_last():
    blocks = draw_blocks(range(64), 30, block=BLOCK, seed=0, step=5)
    assert blocks.shape == (64, 30)
    firsts = set()
    for row in blocks:
        _, sizes = np.unique(row, return_counts=True)
        assert (np.diff(row) >= 0).all() and (sizes[1:-1] == BLOCK).all()
        firsts.add(int(sizes[0]))
    assert firsts == {1, 2, 3, 4}


def test_a_rows_blocks_do_not_depend_on_who_asks():
    whole = draw_blocks(range(8), 16, block=3, seed=1, step=2)
    parts = [draw_blocks(rows, 16, block=3, seed=1, step=2) for rows in (range(3), range(3, 8))]
    np.testing.assert_array_equal(whole, np.concatenate(parts))
    assert (draw_blocks(range(8), 16, block=3, seed=1, step=3) != whole).any()
    assert (draw_blocks(range(8), 16, block=3, seed=2, step=2) != whole).any()

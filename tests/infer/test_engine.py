"""The engine against whole forward passes: trees, padding, groups of experts, draft path, copies.

In float64 a row's logits may differ between passes of different sizes by the order of additions
inside a matrix product, some 1e-14 of their scale: 1e-10 is far above that and far below any real
difference.
"""

import contextlib
import dataclasses
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from dejax.draft.path import draft_experts
from dejax.errors import UsageError
from dejax.model import causal_mask, embed, layer_full, logits_of
from dejax.nn.experts import experts_of_tokens
from dejax.spec.control import ControlConfig
from dejax.spec.sampling import SamplingConfig
from infer import buckets
from infer import engine as engine_module
from infer.decode_options import DecodeOptions, Mode
from infer.decoder import Decoder
from infer.passes import Drafting
from tests.infer.random_target import (
    CONTEXT,
    SHAPES,
    VOCAB,
    draft_of,
    random_prompt,
    random_target,
)

TOLERANCE = 1e-10
PROMPT = random_prompt(9)


pytestmark = pytest.mark.usefixtures("x64")


@pytest.fixture(scope="module")
def engine(target):
    with jax.enable_x64(True), Decoder(target) as decoder:
        yield decoder.engine


def verify(engine, tokens, parents=None, prompt=PROMPT):
    """The target's pass over a block after `prompt`."""
    engine.begin()
    engine.residency.begin_round()
    engine.prefill(prompt)
    result = engine.target_rows(tokens, start=len(prompt), parents=parents)
    engine.residency.end_round()
    return result


def whole(target, tokens):
    """Logits [T, V] of one whole forward pass."""
    padded = np.zeros((1, CONTEXT), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(target(padded))[0, : len(tokens)]


def close(a, b, tolerance=TOLERANCE):
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)


# Rows.


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 128, 129, 260])
def test_a_prompt_of_any_number_of_blocks(engine, target, length):
    prompt = random_prompt(length)
    result = verify(engine, PROMPT[:3], prompt=prompt)
    close(result.logits, whole(target, prompt + PROMPT[:3])[length:])
    engine.begin()
    close(engine.prefill(prompt).logits[0], whole(target, prompt)[-1])


def test_a_prompt_in_two_parts(engine, target):
    engine.begin()
    engine.prefill(random_prompt(150))
    result = engine.prefill(PROMPT, start=150)
    close(result.logits[0], whole(target, random_prompt(150) + PROMPT)[-1])


def test_prompts_that_do_not_fit(engine):
    with pytest.raises(UsageError, match="the prompt has no tokens"):
        engine.prefill([])
    with pytest.raises(UsageError, match=f"has {CONTEXT + 1} tokens, the context holds {CONTEXT}"):
        engine.prefill([0] * (CONTEXT + 1))


@st.composite
def trees(draw):
    """Tokens and parents (-1: the committed sequence) of up to nine rows, and an order of them."""
    size = draw(st.integers(1, 9))
    parents = [draw(st.integers(-1, row - 1)) for row in range(size)]
    tokens = draw(st.lists(st.integers(0, VOCAB - 1), min_size=size, max_size=size))
    return tokens, parents, draw(st.permutations(range(size)))


def path_to(row, parents):
    path = []
    while row >= 0:
        path.append(row)
        row = parents[row]
    return path[::-1]


@hypothesis.settings(max_examples=15)
@hypothesis.given(trees())
def test_a_row_of_a_tree_is_the_end_of_a_chain(engine, target, tree):
    tokens, parents, order = tree
    result = verify(engine, tokens, parents)
    for row in range(len(tokens)):
        path = path_to(row, parents)
        chain = [tokens[node] for node in path]
        close(result.logits[row], whole(target, PROMPT + chain)[-1])
    # The same tree with its nodes in another order (parents still before children).
    depth = [len(path_to(row, parents)) for row in range(len(tokens))]
    order = sorted(order, key=depth.__getitem__)
    place = {node: index for index, node in enumerate(order)} | {-1: -1}
    moved = verify(engine, [tokens[i] for i in order], [place[parents[i]] for i in order])
    close(moved.logits, result.logits[list(order)])
    assert moved.routes == tuple(result.routes[i] for i in order)
    assert moved.used == result.used == frozenset().union(*result.routes)


def test_a_chain_needs_no_parents(engine):
    chain = verify(engine, PROMPT[:5])
    tree = verify(engine, PROMPT[:5], [-1, 0, 1, 2, 3])
    np.testing.assert_array_equal(chain.logits, tree.logits)


def test_no_row_sees_what_earlier_passes_left_in_the_scratch_slots(engine):
    clean = verify(engine, PROMPT[:4], [-1, 0, 0, -1])
    engine.begin()
    engine.prefill(PROMPT)
    engine._caches = [
        jax.tree.map(lambda slots: slots.at[len(PROMPT) :].set(1e6), cache)
        for cache in engine._caches
    ]
    dirty = engine.target_rows(PROMPT[:4], start=len(PROMPT), parents=[-1, 0, 0, -1])
    np.testing.assert_array_equal(clean.logits, dirty.logits)


# Padding and groups.


def test_padding_rows_change_nothing(engine, monkeypatch):
    tokens = random_prompt(5, seed=3)
    five = verify(engine, tokens)
    for rows in (1, 3, 4):
        result = verify(engine, tokens[:rows])
        close(result.logits, five.logits[:rows])
        assert result.routes == five.routes[:rows]
        assert result.used == frozenset().union(*result.routes)
    monkeypatch.setattr(engine_module, "ROW_BUCKETS", (9,))
    close(verify(engine, tokens).logits, five.logits)
    monkeypatch.setattr(engine.experts, "buckets", (SHAPES["shared"].moe.num_experts,))
    close(verify(engine, tokens).logits, five.logits)


@pytest.mark.parametrize("sizes", [(1, 2, 3), pytest.param((1, 3, 7), marks=pytest.mark.slow)])
def test_experts_in_groups_add_up_to_the_same(engine, target, monkeypatch, sizes):
    prompt, tokens = random_prompt(140), random_prompt(5, seed=3)
    expected = verify(engine, tokens, prompt=prompt)
    monkeypatch.setattr(buckets, "EXPERT_BUCKETS", sizes)
    with Decoder(target) as decoder:
        result = verify(decoder.engine, tokens, prompt=prompt)
        assert result.routes == expected.routes and result.used == expected.used
        close(result.logits, expected.logits)
        drafted = decoder.engine.draft_row(3, start=145, drafting=Drafting(r=3))
        close(drafted.logits, whole_after(decoder, prompt, 3))


def whole_after(decoder, prompt, token):
    rows = random_prompt(5, seed=3)
    return whole(decoder.engine.target, [*prompt, *rows, token])[-1:]


def test_the_grid_of_sizes_has_no_doubles(target, monkeypatch):
    for sizes in [(1, 2), (1, 2, 8), (1, 2, 16)]:
        monkeypatch.setattr(buckets, "EXPERT_BUCKETS", sizes)
        with Decoder(target) as decoder:
            grid = decoder.engine.experts.buckets
        assert list(grid) == sorted(set(grid)) and grid[-1] == min(8, sizes[-1])


# The draft path.


@pytest.mark.slow
@pytest.mark.parametrize(("with_draft", "r"), [(False, 1), (False, 2), (True, 1), (True, 3)])
def test_draft_rows_are_the_draft_path_after_a_target_prefix(target, with_draft, r):
    draft = draft_of(target) if with_draft else None
    tokens = random_prompt(4, seed=7)
    with Decoder(target, draft=draft) as decoder:
        engine = decoder.engine
        engine.begin()
        engine.residency.begin_round()
        engine.prefill(PROMPT)
        results = [
            engine.draft_row(token, start=len(PROMPT) + i, drafting=Drafting(r))
            for i, token in enumerate(tokens)
        ]
    expected = mixed_path(target, draft, PROMPT, tokens, r)
    close(np.concatenate([result.logits for result in results]), expected)
    layers = target.config.moe_layers
    for result in results:
        assert len(result.routes[0]) == target.config.moe.top_k * len(layers)
        assert result.used <= result.routes[0] and len(result.used) == r * len(layers)


def mixed_path(target, draft, prompt, tokens, r):
    """Logits of `tokens` in one pass: the target's experts for the prompt, then the draft path."""
    ids = jnp.asarray([prompt + tokens], jnp.int32)
    drafted = jnp.arange(ids.shape[1]) >= len(prompt)
    x = embed(target.model, ids, target.compute_dtype)
    for index, layer in enumerate(target.model.layers):
        stack = target.routed.get(index)
        params = draft.layer_params(index) if draft and stack is not None else None

        def experts(h, routing, stack: Any = stack, params=params):
            k = routing.ids.shape[-1]
            rows = h[0], routing.ids.reshape(-1, k), routing.gates.reshape(-1, k)
            full = experts_of_tokens(*rows, stack, block=16)[None]
            short = draft_experts(stack, params, r=r, block=16)(h, routing)
            return jnp.where(drafted[None, :, None], short, full)

        positions = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
        mask = causal_mask(jnp.zeros_like(ids))
        x, _ = layer_full(layer, x, positions=positions, mask=mask, experts=experts)
    return np.asarray(logits_of(target.model, x))[0, len(prompt) :]


# Compilation and copies.


@contextlib.contextmanager
def compilations():
    """A list that grows by the name of every function that is compiled."""
    names = []

    def listen(event, duration_secs, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(kwargs.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize(
    ("sizes", "draft_length", "width"),
    [
        pytest.param(buckets.EXPERT_BUCKETS, 2, 24, id="one group"),
        pytest.param((1, 2), 2, 40, id="groups", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_after_warm_up_nothing_compiles(monkeypatch, sizes, draft_length, width):
    """Of dimensions that no other test uses, so that nothing has been compiled before."""
    monkeypatch.setattr(buckets, "EXPERT_BUCKETS", sizes)
    moe = dataclasses.replace(SHAPES["shared"].moe, num_experts=4, top_k=2)
    config = dataclasses.replace(
        SHAPES["shared"], num_layers=2, width=width, vocab_size=48, context=300, experts=moe
    )
    target = random_target(config)
    lengths = (1, 9, 129, 200)
    with Decoder(target) as plain, Decoder(target, draft=draft_of(target)) as drafting:
        runs: list[tuple[Decoder, Mode, int]]
        runs = [(plain, "ar", 1), (plain, "top-r", 2), (drafting, "draft-expert", 1)]
        for decoder, mode, r in runs:
            control = ControlConfig(draft_length=draft_length)
            options = DecodeOptions(mode=mode, r=r, max_new_tokens=24, control=control)
            with compilations() as compiled:
                decoder.warm_up(options)
            assert compiled, mode
            with compilations() as compiled:
                for length in lengths:
                    for truncate in (True, False):
                        changed = dataclasses.replace(
                            options,
                            control=ControlConfig(draft_length=draft_length, truncate=truncate),
                            sampling=SamplingConfig(temperature=float(truncate)),
                        )
                        decoder.run(random_prompt(length, vocab=48), changed)
            assert compiled == [], mode


@pytest.mark.parametrize("mode", ["ar", "top-r", "draft-expert"])
def test_no_copy_is_implicit(target, mode):
    """In every thread. On CPU the guard sees copies to the device only."""
    draft = draft_of(target) if mode == "draft-expert" else None
    options = DecodeOptions(mode=mode, max_new_tokens=8, control=ControlConfig(draft_length=4))
    before = jax.config.jax_transfer_guard  # pyright: ignore[reportAttributeAccessIssue]
    with Decoder(target, draft=draft) as decoder:
        jax.config.update("jax_transfer_guard", "disallow")
        try:
            trace = decoder.run(random_prompt(140), options)
        finally:
            jax.config.update("jax_transfer_guard", before)
    assert sum(len(record.emitted) for record in trace) == 8


def test_a_pass_makes_the_copies_it_says(engine, target, monkeypatch):
    """In: the inputs once, unique ids once a MoE layer. Out: ids once a MoE layer, the logits."""
    counts = {"device_get": 0, "device_put": 0}

    def counted(name, original):
        def call(*args, **kwargs):
            counts[name] += 1
            return original(*args, **kwargs)

        return call

    engine.begin()
    engine.residency.begin_round()
    engine.prefill(PROMPT)
    # Experts at hand: what is counted is the pass, not the transfers.
    with Decoder(target) as decoder:
        decoder.engine.begin()
        for name in counts:
            monkeypatch.setattr(engine_module.jax, name, counted(name, getattr(jax, name)))
        loads = len(decoder.engine.residency.take_events())
        decoder.engine.target_rows(PROMPT[:3], start=0)
        loads = len(decoder.engine.residency.take_events()) - loads
    layers = len(target.config.moe_layers)
    assert counts == {"device_get": layers + 1, "device_put": layers + 1 + loads}

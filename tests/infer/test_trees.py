"""T0 for trees: in float64, drafts that branch change no token, in any family and engine."""

import dataclasses
import functools
from dataclasses import dataclass, field

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from dejax.config import DraftConfig
from dejax.draft.expert import random_draft
from dejax.errors import UsageError
from dejax.spec.control import ControlConfig
from dejax.spec.sampling import SamplingConfig
from dejax.spec.tree import TreeConfig, ancestor_mask, depths, full_tree
from dejax.spec.tree_options import parse_tree
from dejax.target import load_target
from infer.decode import decode, make_drafter
from infer.decode_options import DecodeOptions
from infer.decoder import Decoder, Offload
from infer.drafters import Proposal
from infer.report import stats
from tests.families.configurations import FIRST
from tests.families.random_folder import raw_config, write_folder
from tests.infer.random_target import SHAPES, draft_of, random_prompt, random_target, with_eos
from tests.infer.test_engine import compilations

GREEDY, SAMPLED = SamplingConfig(), SamplingConfig(temperature=1.0, seed=9)
FILTERED = SamplingConfig(temperature=1.3, top_k=12, top_p=0.95, seed=2)
TREES = ("2x2", "best8", "eagle:5,2,3", "static:0,0,0,1,1,2,4", "3x1")
FAMILIES = ("deepseek_v2", "qwen3_moe", "gpt_oss")
CAPACITY, ROWS = 96, 17


pytestmark = pytest.mark.usefixtures("x64")


def tokens_of(trace):
    return [token for record in trace for token in record.emitted]


def rounds(trace):
    return [record for record in trace if record.kind == "round"]


def run(engine, prompt, *, mode="ar", tree="chain", drafter=None, new=16, **options):
    options.setdefault("control", ControlConfig(draft_length=3, truncate=False))
    options = DecodeOptions(mode=mode, tree=parse_tree(tree), max_new_tokens=new, **options)
    drafter = make_drafter(engine, options) if drafter is None else drafter
    with jax.transfer_guard("disallow"):
        return tuple(decode(engine, prompt, options, drafter=drafter))


@pytest.fixture(scope="module")
def engine(target):
    """Target passes of one shape, since compiling takes most of the time here."""
    with jax.enable_x64(True):
        with Decoder(target, capacity=CAPACITY, strict_rows=ROWS) as decoder:
            yield decoder.engine


@pytest.fixture(scope="module")
def drafting(target):
    with jax.enable_x64(True):
        draft = draft_of(target)
        with Decoder(target, draft=draft, capacity=CAPACITY, strict_rows=ROWS) as decoder:
            yield decoder.engine


@functools.cache
def random_tree(size, seed):
    """Parents of a random tree, breadth first."""
    generator = np.random.default_rng(seed)
    return sorted(int(generator.integers(0, row)) for row in range(1, size + 1))


# One pass over a tree.


def families(folder):
    """One small target of a family, with end tokens taken out."""

    @functools.cache
    def make(family):
        raw = raw_config(FIRST[family], eos_token_id=None)
        return load_target(write_folder(folder / family, raw), "float64")

    return make


@pytest.fixture(scope="module")
def family_target(tmp_path_factory):
    return families(tmp_path_factory.mktemp("families"))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_of_a_tree_is_the_row_of_its_chain(family_target, family):
    """At every depth, with windows shorter than the tree's path, and siblings in any order."""
    target = family_target(family)
    prompt = random_prompt(20, vocab=256)
    parents = [0, 0, 1, 1, 2, 3, 6, 7, 8]
    tokens = random_prompt(len(parents), seed=3, vocab=256)
    with Decoder(target, capacity=CAPACITY, strict_rows=ROWS) as decoder:
        engine = decoder.engine

        def logits(tokens, parents):
            engine.begin()
            engine.residency.begin_round()
            engine.prefill(prompt)
            rows = [prompt[-1], *tokens]
            start = len(prompt) - 1
            found = engine.target_rows(rows, start=start, parents=[-1, *parents]).logits
            engine.residency.end_round()
            return found

        found = logits(tokens, parents)
        mask = ancestor_mask(parents)
        for row in range(len(parents) + 1):
            path = [above for above in np.flatnonzero(mask[row]) if above]
            chain = logits([tokens[above - 1] for above in path], list(range(len(path))))
            np.testing.assert_allclose(found[row], chain[-1], rtol=0, atol=1e-9)
        order = [2, 1, 5, 4, 3, 6, 7, 8, 9]  # the same tree with siblings exchanged
        place = {0: 0} | {old: new for new, old in enumerate(order, start=1)}
        permuted = logits(
            [tokens[old - 1] for old in order], [place[parents[old - 1]] for old in order]
        )
        for old, new in place.items():
            np.testing.assert_allclose(permuted[new], found[old], rtol=0, atol=1e-9)


# Whole decodes.


SLOWLY = [
    TREES[1],
    *(pytest.param(tree, marks=pytest.mark.slow) for tree in TREES if tree != TREES[1]),
]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["R0", "R5"])
@pytest.mark.parametrize("tree", SLOWLY)
def test_trees_change_no_token(engine, drafting, tree, sampling):
    for length in (1, 20, CAPACITY - 6):
        prompt = random_prompt(length)
        expected = run(engine, prompt, sampling=sampling)
        for mode, where in (("top-r", engine), ("draft-expert", drafting)):
            trace = run(where, prompt, mode=mode, tree=tree, sampling=sampling)
            assert tokens_of(trace) == tokens_of(expected)
            assert trace[-1].finish_reason == expected[-1].finish_reason


@pytest.mark.parametrize("tree", ["chain", "best8"])
def test_independent_draws_are_those_of_their_own_autoregressive_run(engine, drafting, tree):
    prompt = random_prompt(20)
    found = [
        tokens_of(run(where, prompt, sampling=SAMPLED, rule="R4", mode=mode, tree=tree))
        for where, mode in ((engine, "ar"), (engine, "top-r"), (drafting, "draft-expert"))
    ]
    assert found[0] == found[1] == found[2]
    assert found[0] != tokens_of(run(engine, prompt, sampling=SAMPLED))


@pytest.mark.parametrize(
    ("rule", "tree"),
    [("R1", "chain"), ("R3", "2x2"), pytest.param("R2", "2x2", marks=pytest.mark.slow)],
)
def test_rejection_is_greedy_at_temperature_0_and_can_be_repeated(engine, rule, tree):
    prompt = random_prompt(20)
    options = dict(mode="top-r", tree=tree, rule=rule)
    greedy = tokens_of(run(engine, prompt))
    assert tokens_of(run(engine, prompt, **options)) == greedy
    options["sampling"] = SAMPLED
    traces = [run(engine, prompt, **options, new=30) for _ in range(2)]
    assert tokens_of(traces[0]) == tokens_of(traces[1])
    assert 0 < stats(traces[0])["accepted"] < stats(traces[0])["drafted"]
    other = options | {"sampling": dataclasses.replace(SAMPLED, seed=1)}
    assert tokens_of(run(engine, prompt, **other, new=30)) != tokens_of(traces[0])


@pytest.mark.slow
def test_a_tree_accepts_more_than_its_first_children(engine):
    prompt = random_prompt(20)
    chain = stats(run(engine, prompt, mode="top-r", new=48))
    trace = run(engine, prompt, mode="top-r", tree="3x3:12", new=48)
    found = stats(trace)
    assert found["tokens_per_round"] > chain["tokens_per_round"]
    moved = [r for r in rounds(trace) if r.accepted and r.emitted[0] != r.drafted[0]]
    assert moved, "no sibling was ever accepted"
    for record in rounds(trace):
        assert len(record.drafted) <= 12 and record.draft_passes <= 3
        assert len(set(zip(record.parents, record.drafted, strict=True))) == len(record.drafted)
        assert max(depths(record.parents)) >= record.accepted


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["top-r", "draft-expert"])
def test_the_cache_after_trees_is_that_of_autoregressive_decoding(engine, drafting, mode):
    prompt, where = random_prompt(20), drafting if mode == "draft-expert" else engine

    def slots(engine, count):
        return [np.array(leaf)[:count] for leaf in jax.tree.leaves(engine._caches)]

    ends = []
    for options in ({}, {"mode": mode, "tree": "3x3:12"}):
        trace = run(where, prompt, new=30, **options)
        ends.append((tokens_of(trace), slots(where, len(prompt) + 29)))
    assert any(r.accepted and r.emitted[0] != r.drafted[0] for r in rounds(trace))
    assert ends[0][0] == ends[1][0]
    for left, right in zip(ends[0][1], ends[1][1], strict=True):
        np.testing.assert_allclose(left, right, rtol=0, atol=1e-12)


@dataclass
class Hostile:
    """Proposes trees of random shape, whose tokens are right, wrong, or repeat a sibling's."""

    sequence: list[int]
    generator: np.random.Generator
    sizes: list[int] = field(default_factory=list)

    def propose(self, tokens, limit):
        size = int(self.generator.integers(0, ROWS))
        parents = random_tree(size, int(self.generator.integers(100)))
        deep = depths(parents)[1:]
        right = [self.sequence[len(tokens) + depth - 1] for depth in deep.tolist()]
        wrong = self.generator.random(size) < 0.4
        drafted = [
            int(self.generator.integers(64)) if off else token
            for token, off in zip(right, wrong, strict=True)
        ]
        self.sizes.append(size)
        return Proposal(drafted, parents=parents)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["R0", "R5"])
def test_no_tree_changes_a_token(engine, sampling):
    for length in (20, CAPACITY - 20):  # the second ends with the context
        prompt = random_prompt(length, seed=length)
        expected = run(engine, prompt, sampling=sampling, new=30)
        tokens = tokens_of(expected)
        for seed in range(3):
            drafter = Hostile([*prompt, *tokens, *[0] * 40], np.random.default_rng(seed))
            trace = run(engine, prompt, drafter=drafter, sampling=sampling, new=30)
            assert tokens_of(trace) == tokens and max(drafter.sizes) > 5
            assert trace[-1].finish_reason == expected[-1].finish_reason
            assert max(record.accepted for record in rounds(trace)) > 1
            room = [CAPACITY - record.committed for record in rounds(trace)]
            deepest = [int(depths(record.parents).max()) for record in rounds(trace)]
            assert all(d < r for d, r in zip(deepest, room, strict=True))


@pytest.mark.slow
def test_nothing_is_drafted_below_an_end_token(target):
    prompt = random_prompt(20)
    with Decoder(target, capacity=CAPACITY, strict_rows=ROWS) as decoder:
        tokens = tokens_of(run(decoder.engine, prompt))
    end = tokens[6]
    with Decoder(with_eos(target, end), capacity=CAPACITY, strict_rows=ROWS) as decoder:
        trace = run(decoder.engine, prompt, mode="top-r", tree="3x3:12")
    assert tokens_of(trace) == tokens[: tokens.index(end) + 1]
    for record in rounds(trace):
        ends = {row for row, token in enumerate(record.drafted, start=1) if token == end}
        assert not ends & set(record.parents)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["resident", "callback"])
def test_trees_in_other_engines(target, engine, kind):
    prompt = random_prompt(20)
    cache = None if kind == "resident" else 0
    offload = Offload(cache, engine=kind)
    with Decoder(target, draft=draft_of(target), offload=offload, capacity=CAPACITY) as decoder:
        for sampling in (GREEDY, SAMPLED):
            expected = tokens_of(run(engine, prompt, sampling=sampling))
            options = dict(mode="draft-expert", tree="eagle:5,2,3", sampling=sampling)
            trace = run(decoder.engine, prompt, **options)
            assert tokens_of(trace) == expected
            assert sum(record.accepted for record in rounds(trace)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_trees_change_no_token_where_all_is_resident(family_target, family):
    """Latent attention; grouped queries with norms; sinks and windows shorter than the prompt.

    Offloaded: `test_every_way`. The reference is the host-driven engine's.
    """
    target = family_target(family)
    draft = random_draft(target.config, DraftConfig(width=8), seed=0, identity=target.identity)
    decoders = {
        mode: Decoder(
            target,
            draft=draft if mode == "draft-expert" else None,
            offload=Offload(0) if mode == "ar" else Offload(None, engine="resident"),
            capacity=CAPACITY,
        )
        for mode in ("ar", "top-r", "draft-expert")
    }

    @functools.cache
    def expected(length, seed, sampling, rule):
        engine = decoders["ar"].engine
        prompt = random_prompt(length, seed=seed, vocab=256)
        return tokens_of(run(engine, prompt, sampling=sampling, rule=rule))

    accepted = []

    @hypothesis.settings(max_examples=20)
    @hypothesis.given(
        mode=st.sampled_from(["top-r", "draft-expert"]),
        tree=st.sampled_from(TREES),
        how=st.sampled_from(
            [(GREEDY, "match"), (SAMPLED, "match"), (FILTERED, "match"), (SAMPLED, "R4")]
        ),
        length=st.sampled_from([1, 9, 30, CAPACITY - 4]),
        seed=st.integers(0, 9),
        prefetch=st.booleans(),
    )
    def sweep(mode, tree, how, length, seed, prefetch):
        sampling, rule = how
        prompt = random_prompt(length, seed=seed, vocab=256)
        options = dict(mode=mode, tree=tree, sampling=sampling, rule=rule, prefetch=prefetch)
        trace = run(decoders[mode].engine, prompt, **options)
        assert tokens_of(trace) == expected(length, seed, sampling, rule)
        accepted.append(sum(record.accepted for record in rounds(trace)))

    try:
        sweep()
    finally:
        for decoder in decoders.values():
            decoder.close()
    assert sum(accepted) > 20


@pytest.mark.slow
def test_after_warm_up_trees_compile_nothing():
    """Of dimensions that no other test uses, so that nothing has been compiled before."""
    moe = dataclasses.replace(SHAPES["shared"].moe, num_experts=4, top_k=2)
    config = dataclasses.replace(
        SHAPES["shared"], num_layers=2, width=56, vocab_size=48, context=CAPACITY, experts=moe
    )
    target = with_eos(random_target(config))
    for kind in ("host", "resident"):
        offload = Offload(None if kind == "resident" else 0, engine=kind)
        with Decoder(target, draft=draft_of(target), offload=offload) as decoder:
            for tree in ("2x1", "3x3:7"):
                options = DecodeOptions(
                    mode="draft-expert", tree=parse_tree(tree), max_new_tokens=20
                )
                with compilations() as compiled:
                    decoder.warm_up(options)
                assert compiled, tree
                with compilations() as compiled:
                    for length in (1, 9, 40):
                        decoder.run(random_prompt(length, vocab=48), options)
                assert compiled == [], tree


# What is refused.


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (TreeConfig(shape=full_tree(2, 5)), "the tree has 62 nodes; a pass verifies at most 32"),
        (parse_tree("6x4:8"), "passes of 6, 36, 216 nodes; expected at most 33 in one"),
        (parse_tree("eagle:32,16,20"), "expected at most 33 in one and 95 in all"),
        (parse_tree("1x200:4"), "in all"),
        (parse_tree("eagle:30,1,96"), "the tree is 96 deep; the target's context is 64 tokens"),
    ],
)
def test_trees_that_do_not_fit_are_refused(target, tree, message):
    small = dataclasses.replace(target, config=dataclasses.replace(target.config, context=64))
    options = DecodeOptions(mode="top-r", tree=tree)
    with Decoder(small) as decoder, pytest.raises(UsageError, match=message):
        decoder.run(random_prompt(5), options)

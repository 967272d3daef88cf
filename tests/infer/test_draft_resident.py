"""Drafts by experts that are on the device: other drafts, the same tokens (T0, in float64)."""

from contextlib import ExitStack

import jax
import numpy as np
import pytest

from dejax.errors import UsageError
from dejax.spec.control import ControlConfig
from dejax.spec.sampling import SamplingConfig
from dejax.spec.tree_options import parse_tree
from infer.decode import decode, make_drafter
from infer.decode_options import DecodeOptions
from infer.decoder import Decoder, Offload
from infer.decoding_arguments import DecodingArguments
from infer.generate import generate
from infer.passes import Drafting
from tests.infer.random_target import draft_of, random_prompt
from tests.infer.test_engine import compilations

SAMPLINGS = (SamplingConfig(), SamplingConfig(temperature=1.0, seed=4, top_k=9))
PROMPT = random_prompt(12)
RATIO = 0.0
"""Passes of the callback engine are compiled for each ratio: one does."""


pytestmark = pytest.mark.usefixtures("x64")


def open_decoder(target, *, cache, engine="host", mode="draft-expert"):
    """A decoder with this many experts cached (None: all)."""
    size = np.dtype(np.float64).itemsize * int(np.prod(target.config.expert_shape))
    offload = Offload(None if cache is None else cache * size, engine=engine)
    draft = draft_of(target) if mode == "draft-expert" else None
    return Decoder(target, draft=draft, offload=offload)


def rounds_of(decoder, ratio, *, mode="draft-expert", sampling=SAMPLINGS[0], prefetch=False, **how):
    options = DecodeOptions(
        mode=mode,
        max_new_tokens=20,
        sampling=sampling,
        control=ControlConfig(draft_length=2, truncate=False),
        prefetch=prefetch,
        draft_resident=ratio,
        **how,
    )
    drafter = make_drafter(decoder.engine, options)
    with jax.transfer_guard("disallow"):
        return tuple(decode(decoder.engine, PROMPT, options, drafter=drafter))


def tokens_of(trace):
    return [token for record in trace for token in record.emitted]


def drafts(trace):
    return [(r.drafted, r.draft_used, r.draft_routes) for r in trace]


def draft_loads(trace):
    return sum(load.kind == "draft" for record in trace for load in record.loads)


@pytest.fixture(scope="module")
def expected(target):
    with jax.enable_x64(True), open_decoder(target, cache=0, mode="ar") as decoder:
        return [tokens_of(rounds_of(decoder, None, mode="ar", sampling=s)) for s in SAMPLINGS]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["host", "callback"])
def test_tokens_are_the_autoregressive_ones(target, expected, engine):
    experts = len(target.config.moe_layers) * target.config.moe.num_experts
    drafted = 0
    for cache in (0, experts // 2, None):
        with open_decoder(target, cache=cache, engine=engine) as decoder:
            for sampling, tokens in zip(SAMPLINGS, expected, strict=True):
                trace = rounds_of(decoder, RATIO, sampling=sampling, prefetch=sampling.seed == 4)
                assert tokens_of(trace) == tokens, cache
                for record in trace:
                    router = {pair for routes in record.draft_routes for pair in routes}
                    assert record.draft_used <= router
                    drafted += len(record.drafted)
    assert drafted


@pytest.mark.parametrize("engine", ["host", pytest.param("callback", marks=pytest.mark.slow)])
def test_where_all_are_resident_drafts_stay_as_they_are(target, engine):
    with open_decoder(target, cache=None, engine=engine) as decoder:
        for layer in target.config.moe_layers:
            decoder.residency.acquire(layer, range(target.config.moe.num_experts), kind="demand")
        decoder.residency.end_pass()
        assert drafts(rounds_of(decoder, RATIO)) == drafts(rounds_of(decoder, None))


def test_without_a_cache_the_first_pass_of_a_round_is_the_router_s(target):
    """What a round's own passes have loaded is on the device until it ends, and is used again."""
    with open_decoder(target, cache=0) as decoder:
        engine, residency = decoder.engine, decoder.residency

        def passes(ratio):
            engine.begin()
            engine.prefill(PROMPT)
            residency.begin_round()
            assert not residency.resident()
            drafting = Drafting(r=1, resident=ratio)
            found = [engine.draft_row(7, start=12 + i, drafting=drafting) for i in range(3)]
            residency.end_round()
            return found

        plain, preferring = passes(None), passes(RATIO)
        np.testing.assert_array_equal(plain[0].logits, preferring[0].logits)
        assert plain[0].used == preferring[0].used
        for result in preferring:
            assert len(result.used) == len(target.config.moe_layers)
            assert result.used <= result.routes[0]


@pytest.mark.parametrize("engine", ["host", pytest.param("callback", marks=pytest.mark.slow)])
def test_a_pass_reads_the_substitute_with_the_substitutes_gate(target, engine):
    """Every layer's top-1 is missing and its third is there: the pass is one of that expert."""
    with open_decoder(target, cache=1000, engine=engine) as decoder:
        made, residency = decoder.engine, decoder.residency
        made.begin()
        made.prefill(PROMPT)
        residency.begin_round()
        ranks = ranked(target, made)
        first = ranks[0][0]
        residency._cache.clear()
        residency.acquire(first, [ranks[0][1][2]], kind="demand")
        residency.end_pass()
        residency.take_events()
        result = made.draft_row(7, start=12, drafting=Drafting(r=1, resident=RATIO))
        residency.end_round()
        used = dict(sorted(result.used))
        assert used[first] == ranks[0][1][2]
        assert sum(load.kind == "draft" for load in residency.take_events()) == len(used) - 1


def ranked(target, engine):
    """The router's experts of the first MoE layer at the next token, best-ranked first."""
    layer = target.config.moe_layers[0]
    chosen, before = [], frozenset()
    for r in range(1, target.config.moe.top_k + 1):
        passed = engine.draft_row(7, start=12, drafting=Drafting(r))
        used = {e for at, e in passed.used if at == layer}
        chosen += list(used - before)
        before = used
    return [(layer, chosen)]


@pytest.mark.slow
def test_both_engines_draft_alike(target):
    experts = len(target.config.moe_layers) * target.config.moe.num_experts
    found = {}
    for engine in ("host", "callback"):
        with open_decoder(target, cache=experts // 2, engine=engine) as decoder:
            found[engine] = [rounds_of(decoder, ratio) for ratio in (None, RATIO)]
    for host, callback in zip(found["host"], found["callback"], strict=True):
        assert drafts(host) == drafts(callback)
    loads = [draft_loads(trace) for trace in found["host"]]
    assert loads[0] > loads[1]  # what the option is for


@pytest.mark.slow
def test_trees_are_drafted_so_too(target, expected):
    with open_decoder(target, cache=8) as decoder:
        trace = rounds_of(decoder, RATIO, tree=parse_tree("2x2"), prefetch=True)
    assert tokens_of(trace) == expected[0]


@pytest.mark.slow
def test_nothing_compiles_after_warm_up(target):
    options = DecodeOptions(
        mode="draft-expert",
        max_new_tokens=12,
        control=ControlConfig(draft_length=2, truncate=False),
        draft_resident=RATIO,
    )
    with ExitStack() as stack:
        for engine in ("host", "callback"):
            decoder = stack.enter_context(open_decoder(target, cache=8, engine=engine))
            decoder.warm_up(options)
            with compilations() as compiled:
                decoder.run(PROMPT, options)
            assert compiled == [], engine


def test_what_it_cannot_do_is_refused(target):
    with pytest.raises(UsageError, match="--draft-resident is for engines that load experts"):
        generate(target, [PROMPT], mode="top-r", engine="resident", draft_resident=0.8)
    with pytest.raises(UsageError, match="draft_resident is 1.5; expected a ratio of gates"):
        DecodeOptions(mode="top-r", draft_resident=1.5)
    with pytest.raises(UsageError, match="rule R1 with --draft-resident"):
        control = ControlConfig(truncate=False)
        DecodeOptions(mode="top-r", draft_resident=0.8, rule="R1", control=control)


def test_the_programs_take_it():
    given = DecodingArguments(draft_resident=0.5)
    assert given.options("top-r").draft_resident == given.given()["draft_resident"] == 0.5
    given.check_mode("top-r", drafts=False)
    with pytest.raises(UsageError, match="--draft-resident is for --mode top-r"):
        given.check_mode("n-gram", drafts=False)
    with pytest.raises(UsageError, match="--draft-resident is for engines that load experts"):
        DecodingArguments(draft_resident=0.5, engine="resident")

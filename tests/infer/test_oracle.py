"""True routes for draft trees: those that the verification then has; and what is not counted."""

import itertools

import jax
import pytest

from dejax.spec.control import ControlConfig
from dejax.spec.sampling import SamplingConfig
from dejax.spec.tree import Node
from dejax.spec.tree_options import parse_tree
from infer.decode_options import DecodeOptions
from infer.decoder import Decoder, Offload, expert_store
from infer.oracle import TrueRoutes
from infer.report import rounds_of
from infer.resident import load_resident
from tests.infer.random_target import CONTEXT, draft_of, random_prompt

pytestmark = pytest.mark.usefixtures("x64")


@pytest.fixture(scope="module")
def decoder(target):
    with jax.enable_x64(True):
        offload = Offload(0, prefetch=0)  # so that runs do not depend on what comes when
        store = expert_store(target, Offload())
        place = dict(offload=offload, store=store, strict_rows=9)
        with Decoder(target, draft=draft_of(target), **place) as decoder:
            yield decoder


@pytest.fixture
def oracle(target):
    return TrueRoutes(target, load_resident(target), CONTEXT)


def options(**more):
    control = ControlConfig(draft_length=4, truncate=False)
    more = dict(mode="ecospec", tree=parse_tree("best8"), prefetch=False) | more
    return DecodeOptions(max_new_tokens=20, control=control, **more)


def tokens_of(trace):
    return [token for record in trace for token in record.emitted]


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(temperature=1.0, seed=9)])
def test_a_verification_has_the_routes_that_were_foreseen(decoder, oracle, sampling):
    """Over prompts one after the other; what was seen once is not passed over again."""
    told = []

    def foresee(tokens, nodes):
        root, known = oracle(tokens, nodes)
        told.append(
            (
                root,
                {
                    (tuple(tokens), *_path(known, row)): known[row - 1].routes
                    for row in range(1, len(known) + 1)
                },
            )
        )
        return root, known

    chosen = options(sampling=sampling)
    for length in (20, 1, 70):
        prompt = random_prompt(length)
        expected = tokens_of(decoder.run(prompt, options(sampling=sampling, mode="draft-expert")))
        told.clear()
        trace = decoder.run(prompt, chosen, foresee=foresee)
        assert tokens_of(trace) == expected
        before = oracle.passes
        decoder.forget()
        again = decoder.run(prompt, chosen, foresee=oracle)
        assert tokens_of(again) == expected and oracle.passes == before > 0
        drafting = [record for record in rounds_of(trace) if record.draft_passes]
        text = [*prompt, *expected]
        for (root, known), record in zip(told, drafting, strict=True):
            tokens = tuple(text[: record.committed])
            assert record.rows_routes[0] == root
            for row, routes in enumerate(record.rows_routes[1:], start=1):
                path = _tokens_to(record.drafted, record.parents, row)
                assert known[tokens, *path] == routes


def _path(nodes, row):
    return _tokens_to([n.token for n in nodes], [n.parent for n in nodes], row)


def _tokens_to(tokens, parents, row):
    """The tokens from below the pending one down to a row."""
    path = []
    while row:
        path.append(tokens[row - 1])
        row = parents[row - 1]
    return path[::-1]


def test_a_long_gap_is_filled_first(oracle):
    """More new tokens than rows of a pass: the routes are those of a fresh look."""
    text, nodes = random_prompt(80), [Node(5, 0, 1, 0.5, 0.5), Node(6, 1, 2, 0.5, 0.25)]
    oracle(text[:10], nodes)
    after_gap = oracle(text, nodes)
    fresh = TrueRoutes(oracle._engine.target, oracle._engine.residency, CONTEXT)
    assert fresh(text, nodes) == after_gap


def test_what_foreseeing_takes_is_no_part_of_the_decode(decoder):
    def slow(tokens, nodes):
        decoder.engine.clock.aside += 1000.0
        return frozenset(), list(nodes)

    trace = decoder.run(random_prompt(20), options(mode="draft-expert"), foresee=slow)
    drafting = [record for record in rounds_of(trace) if record.draft_passes]
    assert all(r.draft_seconds < -900 and r.total_seconds < -900 for r in drafting)
    assert all(record.target_seconds > 0 for record in drafting)


@pytest.mark.parametrize("tree", ["chain", "best8"])
def test_the_controller_s_time_is_a_part_of_the_round(decoder, tree):
    mode = "draft-expert" if tree == "chain" else "ecospec"
    trace = decoder.run(random_prompt(20), options(mode=mode, tree=parse_tree(tree)))
    for before, record in itertools.pairwise(rounds_of(trace)):
        assert 0 < record.control_seconds
        # What follows a round is control of the next.
        assert record.control_seconds < record.total_seconds + before.total_seconds

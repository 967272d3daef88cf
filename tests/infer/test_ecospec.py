"""T0 for EcoSpec: in float64, choosing drafts by their experts' cost changes no token."""

import dataclasses

import jax
import numpy as np
import pytest

from dejax.config import DraftConfig
from dejax.draft.expert import random_draft
from dejax.errors import UsageError
from dejax.spec.control import ControlConfig
from dejax.spec.ecospec import PREDICTORS, EcoConfig
from dejax.spec.rules import REJECTION
from dejax.spec.sampling import SamplingConfig
from dejax.spec.tree_options import parse_tree
from dejax.target import load_target
from infer.arguments import parse
from infer.bench_ecospec import replayed
from infer.decode import decode, make_drafter
from infer.decode_options import DecodeOptions, check_options
from infer.decoder import Decoder, Offload, expert_store
from infer.generate_arguments import Arguments
from infer.report import rounds_of, stats
from infer.timing import Pace
from tests.families.configurations import FIRST
from tests.families.random_folder import raw_config, write_folder
from tests.infer.random_target import draft_of, random_prompt

GREEDY, SAMPLED = SamplingConfig(), SamplingConfig(temperature=1.0, seed=9)
CAPACITY, ROWS = 96, 17
COSTS = (1.0, 0.3, 3.0)
ECO = ["--mode", "ecospec", "--draft", "init"]


pytestmark = pytest.mark.usefixtures("x64")


def tokens_of(trace):
    return [token for record in trace for token in record.emitted]


def run(decoder, prompt, *, mode="ecospec", tree="best8", new=24, pace=None, cost=3.0, **options):
    predictor = options.pop("predictor", "router")
    options = DecodeOptions(
        mode=mode,
        tree=parse_tree(tree),
        max_new_tokens=new,
        control=ControlConfig(draft_length=4, truncate=False),
        eco=EcoConfig(cost, predictor),
        **options,
    )
    engine = decoder.engine
    drafter = make_drafter(engine, options)
    with jax.transfer_guard("disallow"):
        return tuple(decode(engine, prompt, options, drafter=drafter, pace=pace))


def decoder_of(target, draft, cache):
    """A decoder with a share of the experts cached."""
    store = expert_store(target, Offload())
    offload = Offload(int(cache * len(store.pairs)) * store.bytes_per_expert)
    place = dict(offload=offload, capacity=CAPACITY, store=store, strict_rows=ROWS)
    return Decoder(target, draft=draft, **place)


@pytest.fixture(scope="module")
def decoders(target):
    with jax.enable_x64(True):
        made = [decoder_of(target, draft_of(target), cache) for cache in (0.0, 0.5)]
        yield made
        for decoder in made:
            decoder.close()


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["R0", "R5"])
@pytest.mark.parametrize("length", [20, 1, CAPACITY - 6])
def test_expert_cost_changes_no_token(decoders, length, sampling):
    pace = Pace()  # what is learned goes from decode to decode
    prompt = random_prompt(length)
    expected = run(decoders[0], prompt, mode="ar", sampling=sampling)
    for decoder in decoders:
        for predictor, tree, cost in zip(PREDICTORS, ("2x2", "chain", "best8"), COSTS, strict=True):
            way = dict(tree=tree, cost=cost, predictor=predictor, sampling=sampling)
            trace = run(decoder, prompt, pace=pace, **way)
            assert tokens_of(trace) == tokens_of(expected)
            assert trace[-1].finish_reason == expected[-1].finish_reason


@pytest.mark.slow
def test_expert_cost_changes_no_token_in_another_family(tmp_path):
    raw = raw_config(FIRST["qwen3_moe"], eos_token_id=None)
    target = load_target(write_folder(tmp_path / "model", raw), "float64")
    draft = random_draft(target.config, DraftConfig(width=8), seed=0, identity=target.identity)
    prompt = random_prompt(20, vocab=256)
    for cache in (0.0, 0.5):
        with decoder_of(target, draft, cache) as decoder:
            for sampling in (GREEDY, SAMPLED):
                expected = tokens_of(run(decoder, prompt, mode="ar", sampling=sampling))
                assert tokens_of(run(decoder, prompt, sampling=sampling)) == expected


@pytest.mark.parametrize("tree", ["best8", pytest.param("2x2", marks=pytest.mark.slow)])
def test_at_no_cost_drafts_are_those_of_confidence(decoders, tree):
    prompt = random_prompt(20)
    for decoder in decoders:
        plain = run(decoder, prompt, mode="draft-expert", tree=tree)
        eco = run(decoder, prompt, tree=tree, cost=0.0)
        for left, right in zip(rounds_of(plain), rounds_of(eco), strict=True):
            assert (left.drafted, left.parents) == (right.drafted, right.parents)


def test_a_cost_leaves_out_what_needs_many_experts(decoders):
    """Over the same tokens fewer nodes a round, and fewer experts."""
    prompt = random_prompt(20)
    found = {cost: stats(run(decoders[0], prompt, cost=cost)) for cost in (0.0, 3.0)}
    assert 0 < found[3.0]["drafted"] / found[3.0]["rounds"] < 8
    assert found[3.0]["drafted"] / found[3.0]["rounds"] < (
        found[0.0]["drafted"] / found[0.0]["rounds"]
    )
    assert found[3.0]["unique_layer_experts"] < found[0.0]["unique_layer_experts"]


@pytest.mark.slow
def test_where_all_is_resident_experts_count_too(target):
    prompt = random_prompt(20)
    offload = Offload(None, engine="resident")
    with Decoder(target, draft=draft_of(target), offload=offload, capacity=CAPACITY) as decoder:
        traces = [run(decoder, prompt, cost=cost) for cost in (0.0, 3.0)]
        assert tokens_of(traces[0]) == tokens_of(traces[1])
        plain, eco = map(stats, traces)
    assert eco["unique_layer_experts"] < plain["unique_layer_experts"]


def test_recorded_rounds_under_other_choices(decoders, target):
    """All nodes chosen: what was recorded. None: autoregressive steps. The likeliest: between."""
    trace = run(decoders[0], random_prompt(20), mode="draft-expert", tree="2x2")
    recorded = [record for record in rounds_of(trace) if record.drafted]
    whole = replayed([trace], target.config, lambda nodes, paid, use: range(1, len(nodes) + 1))
    emitted = sum(len(record.emitted) for record in recorded)
    assert whole["tokens_per_round"] == emitted / len(recorded)
    unique = np.mean([len(record.required) for record in recorded])
    assert whole["unique_layer_experts"] == pytest.approx(unique)
    none = replayed([trace], target.config, lambda nodes, paid, use: [])
    assert (none["tokens_per_round"], none["nodes"]) == (1.0, 0.0)
    assert none["unique_layer_experts"] == target.config.routes_per_token
    one = replayed([trace], target.config, lambda nodes, paid, use: [1])
    first = [record.emitted[0] == record.drafted[0] for record in recorded]
    assert one["tokens_per_round"] == pytest.approx(1 + np.mean(first))
    seen = []

    def look(nodes, paid, use):
        seen.append((paid.root, nodes[0].routes))
        return []

    replayed([trace], target.config, look, true_routes=True)
    assert seen == [record.rows_routes[:2] for record in recorded]


# What is refused.


@pytest.mark.parametrize("rule", REJECTION)
def test_rejection_rules_are_refused(rule):
    with pytest.raises(UsageError, match=f"rule {rule} would lose the target's law: mode ecospec"):
        DecodeOptions(mode="ecospec", rule=rule)
    DecodeOptions(mode="ecospec", rule="R4")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--mode", "ecospec"], "--mode ecospec needs --draft"),
        (["--expert-cost", "2"], "--expert-cost is for --mode ecospec, not ar"),
        (
            ["--mode", "top-r", "--predictor", "table"],
            "--predictor is for --mode ecospec, not",
        ),
        ([*ECO, "--expert-cost", "-1"], "--expert-cost: '-1' is out of range"),
        ([*ECO, "--predictor", "x"], "--predictor: 'x' is not one of persistence, table, router"),
        ([*ECO, "--no-truncate", "--rule", "R1"], "rule R1 would lose the target's law: mode eco"),
        (
            [*ECO, "--rule", "R1"],
            "law: mode ecospec chooses nodes by the experts that their sampled",
        ),
        (["--mode", "ecospec", "--rule", "R1"], "rule R1 would lose the target's law: mode eco"),
        ([*ECO, "--tree", "2x2", "--rule", "R2"], "rule R2 would lose the target's law: mode eco"),
        ([*ECO, "--tree", "2x2", "--rule", "R3"], "rule R3 would lose the target's law: mode eco"),
        ([*ECO, "--tree", "eagle:0"], "--tree: 'eagle:0': expected numbers from 1"),
        ([*ECO, "--draft-length", "0"], "--draft-length: '0' is out of range"),
        ([*ECO, "--strict"], "--strict is for chains"),
    ],
)
def test_a_wrong_call_is_one_line(argv, message):
    with pytest.raises(UsageError) as refused:
        parse(Arguments, ["tiny", "--prompt", "x", *argv], prog="generate", description="")
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_what_does_not_fit_the_target_is_refused(target, decoders):
    config = target.config
    with pytest.raises(UsageError, match="mode ecospec needs draft experts"):
        check_options(DecodeOptions(mode="ecospec"), config, drafts=False)
    with pytest.raises(UsageError, match="the tree is 16 deep; the target's context is 16 tokens"):
        small = dataclasses.replace(config, context=16)
        options = DecodeOptions(mode="ecospec", control=ControlConfig(draft_length=16))
        check_options(options, small, drafts=True)
    other = dataclasses.replace(draft_of(target), identity="another")
    with pytest.raises(UsageError, match="trained for target another, not for"):
        Decoder(target, draft=other)

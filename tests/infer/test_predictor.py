"""T0 for a trained predictor of experts: whatever it says, no token changes; and it is heard."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax.ckpt.draft_state import draft_identity, resolve_draft
from dejax.ckpt.predictor_file import FILE, save_predictor
from dejax.cli import main
from dejax.draft.predictor import ExpertPredictor, expert_logits, predictor_shapes
from dejax.errors import UsageError
from dejax.spec.control import ControlConfig
from dejax.spec.ecospec import EcoConfig, ExpertCost
from dejax.spec.sampling import SamplingConfig
from dejax.spec.tree_options import parse_tree
from dejax.target import read_outline
from infer.arguments import parse
from infer.bench_ecospec import replayed
from infer.bench_trees import PLACES, in_all_places
from infer.decode import decode, make_drafter
from infer.decode_options import DecodeOptions
from infer.decoder import Decoder, Offload, expert_store
from infer.expert_recall import DEPTHS, NAMES, prediction_cost, recall_by_depth
from infer.generate import generate
from infer.generate_arguments import Arguments
from infer.node_predictor import NodePredictor
from infer.report import rounds_of
from infer.timing import Pace
from infer.trace import read_trace, write_trace
from tests.infer.random_target import draft_of, random_prompt

GREEDY, SAMPLED = SamplingConfig(), SamplingConfig(temperature=1.0, seed=9)
RULES = {"R0": ("match", GREEDY), "R4": ("R4", SAMPLED), "R5": ("match", SAMPLED)}


pytestmark = pytest.mark.usefixtures("x64")


def predictor_of(target, draft, *, seed=0):
    """One that says something, though nothing that was learned."""
    rng = np.random.default_rng(seed)
    shapes = predictor_shapes(target.config, 5)
    return ExpertPredictor(
        params={name: jnp.asarray(rng.standard_normal(s), "float32") for name, s in shapes.items()},
        layers=target.config.moe_layers,
        target=target.identity,
        draft=draft_identity(draft),
        training={},
    )


def decoder_of(target, *, cache=0.0, engine="host"):
    draft, store = draft_of(target), expert_store(target, Offload())
    size = None if engine == "resident" else int(cache * len(store.pairs)) * store.bytes_per_expert
    return Decoder(
        target,
        draft=draft,
        predictor=predictor_of(target, draft),
        offload=Offload(size, engine=engine),
        store=store,
    )


@pytest.fixture(scope="module")
def decoders(target):
    with jax.enable_x64(True):
        made = [decoder_of(target, cache=cache) for cache in (0.0, 0.5)]
        yield made
        for decoder in made:
            decoder.close()


def run(decoder, prompt, *, mode="ecospec", tree="best8", cost=0.3, pace=None, **options):
    options = DecodeOptions(
        mode=mode,
        tree=parse_tree(tree),
        max_new_tokens=20,
        control=ControlConfig(draft_length=4, truncate=False),
        eco=EcoConfig(cost, "trained"),
        **options,
    )
    drafter = make_drafter(decoder.engine, options)
    with jax.transfer_guard("disallow"):
        return tuple(decode(decoder.engine, prompt, options, drafter=drafter, pace=pace))


def pairs_of(config, ids):
    """Pairs of a row's experts, [L, K]."""
    numbered = zip(config.moe_layers, ids, strict=True)
    return frozenset((layer, int(expert)) for layer, chosen in numbered for expert in chosen)


def tokens_of(trace):
    return [token for record in trace for token in record.emitted]


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_a_trained_predictor_changes_no_token(decoders, rule):
    pace, prompt, (name, sampling) = Pace(), random_prompt(20), RULES[rule]
    way = dict(rule=name, sampling=sampling)
    expected = run(decoders[0], prompt, mode="ar", **way)
    for decoder in decoders:
        for tree in ("best8", "chain"):
            trace = run(decoder, prompt, tree=tree, cost=1.0, pace=pace, **way)
            assert tokens_of(trace) == tokens_of(expected)
            rounds = [record for record in rounds_of(trace) if record.drafted]
            assert rounds and all(len(r.predicted) == len(r.drafted) for r in rounds)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["callback", "resident"])
def test_other_engines_predict_the_same(target, decoders, engine):
    """Of chains: in a level of several nodes the host engine uses what its other rows loaded."""
    prompt = random_prompt(20)
    expected = run(decoders[0], prompt, tree="chain", cost=0.0)
    with decoder_of(target, engine=engine) as decoder:
        found = run(decoder, prompt, tree="chain", cost=0.0)
    for one, other in zip(rounds_of(expected), rounds_of(found), strict=True):
        assert (one.drafted, one.predicted) == (other.drafted, other.predicted)


@pytest.mark.parametrize("tree", ["best8", "chain"])
def test_at_no_cost_drafts_are_those_of_confidence(decoders, tree):
    prompt = random_prompt(20)
    for decoder in decoders:
        plain = run(decoder, prompt, mode="draft-expert", tree=tree)
        eco = run(decoder, prompt, tree=tree, cost=0.0)
        for left, right in zip(rounds_of(plain), rounds_of(eco), strict=True):
            assert (left.drafted, left.parents) == (right.drafted, right.parents)


def test_a_node_without_a_pass_has_the_experts_that_the_predictor_names(decoders, monkeypatch):
    """And one with a pass those of the draft's routers: the choice sees both."""
    seen, real = [], ExpertCost.candidates

    def candidates(self, nodes, paid):
        found = real(self, nodes, paid)
        seen.append((nodes, paid, found.experts, self.use))
        return found

    monkeypatch.setattr(ExpertCost, "candidates", candidates)
    run(decoders[0], random_prompt(20), tree="2x2")
    for nodes, paid, experts, use in seen:
        grid = use.grid
        free = {*grid.flat(paid.root).tolist(), *grid.flat(paid.available).tolist()}
        for node, row in zip(nodes, experts.tolist(), strict=True):
            told = node.predicted if node.routes is None else grid.flat(node.routes)
            assert {number for number in row if number >= 0} == set(told.tolist()) - free
    assert {node.routes is None for nodes, *_ in seen for node in nodes} == {True, False}


def test_predictions_are_the_largest_logits(target):
    draft = draft_of(target)
    predictor = predictor_of(target, draft)
    asked = NodePredictor(target, predictor)
    rng, config = np.random.default_rng(1), target.config
    states, tokens = rng.standard_normal((3, config.width)), [5, 9, 5]
    chosen = np.array([[rng.permutation(8)[:3] for _ in config.moe_layers] for _ in range(3)])
    parents = [pairs_of(config, row) for row in chosen]
    found = asked(list(states), tokens, parents, size=4)
    token = target.model.embedding[...][jnp.asarray(tokens)]
    logits = expert_logits(predictor.params, jnp.asarray(states), token, jnp.asarray(chosen))
    for row, numbers in enumerate(found):
        best = np.argsort(-np.asarray(logits[row]), axis=-1)[:, :3]
        assert asked.grid.pairs(numbers) == pairs_of(config, best)


@pytest.mark.slow
def test_recall_is_told_by_depth_for_every_predictor(decoders):
    prompts = [random_prompt(length) for length in (9, 14)]
    rows = recall_by_depth(decoders[0], prompts, max_new_tokens=16)
    every = [row for row in rows if row["nodes"] == "all"]
    assert [row["depth"] for row in every] == list(range(1, DEPTHS + 1))
    assert all(0 <= row[name] <= 1 for row in rows for name in NAMES)
    # The draft's routers, where they have seen a node, know more than weights drawn at random.
    assert all(row["router"] > row["trained"] for row in every)


def test_what_a_prediction_takes_is_told(decoders):
    cost = prediction_cost(decoders[0].engine.predictor, count=8, repeats=2)
    assert cost["candidates"] == 8 and cost["device_us"] > 0 and cost["host_us"] > 0


def test_recorded_rounds_are_replayed_with_what_was_predicted(decoders, target):
    trace, seen = run(decoders[0], random_prompt(20), tree="2x2", cost=0.0), []

    def look(nodes, paid, use):
        seen.append(tuple(use.grid.pairs(node.predicted) for node in nodes))
        return []

    replayed([trace], target.config, look)
    assert seen == [record.predicted for record in rounds_of(trace) if record.drafted] != []
    names = {run.name for run in in_all_places(trained=True)}
    assert names - {run.name for run in in_all_places()} == {
        f"EcoSpec, cost 0.3, trained{place}" for place in PLACES
    }


def test_a_trace_keeps_what_was_predicted(decoders, tmp_path):
    trace = run(decoders[0], random_prompt(20))
    write_trace(tmp_path / "t.jsonl", {}, {"0": trace})
    read = read_trace(tmp_path / "t.jsonl")[1]["0"]
    assert [record.predicted for record in read] == [record.predicted for record in trace]


# What is refused.


def test_a_predictor_that_does_not_belong_is_refused(target):
    draft = draft_of(target)
    options = dict(draft=draft, mode="ecospec", eco=EcoConfig(0.3, "trained"), max_new_tokens=4)
    with pytest.raises(UsageError, match="the predictor is trained, and none was given"):
        generate(target, [random_prompt(5)], **options)
    other = dataclasses.replace(predictor_of(target, draft), target="another")
    with pytest.raises(UsageError, match="the predictor: was trained for target another, not for"):
        generate(target, [random_prompt(5)], predictor=other, **options)
    other = predictor_of(target, draft_of(target, seed=4))
    with pytest.raises(
        UsageError, match="was trained with draft experts .*, and the draft here is"
    ):
        generate(target, [random_prompt(5)], predictor=other, **options)


def arguments(*more):
    argv = ["tiny", "--prompt", "x", "--mode", "ecospec", "--draft", "init", *more]
    return parse(Arguments, argv, prog="generate", description="")


def test_the_command_line_takes_a_file(tmp_path, capsys):
    outline = read_outline("tiny")
    draft = resolve_draft("init", outline)
    path = save_predictor(tmp_path / FILE, predictor_of(outline, draft))
    args = arguments("--predictor", str(path))
    assert args.decoding.eco.predictor == "trained"
    assert args.check()[1].draft == draft_identity(draft)
    assert arguments("--predictor", "table").decoding.eco.predictor == "table"
    with pytest.raises(UsageError, match="'tabel' is not one of .*; did you mean 'table'?"):
        arguments("--predictor", "tabel")
    call = ["generate", "tiny", "--prompt", "x", "--mode", "ecospec", "--draft", "init:1"]
    assert main([*call, "--predictor", str(tmp_path)]) == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert len(told) == 1 and "was trained with draft experts" in told[0]

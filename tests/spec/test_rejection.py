"""The law of the output under R1 to R4, by enumeration of everything that chance may decide.

The negative controls drop drafted tokens by their value, and must be seen to change the law.
"""

import functools
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dejax.errors import UsageError
from dejax.spec.chance import Stream, draw_at, quantile
from dejax.spec.confidence import Readout, law_features
from dejax.spec.control import ControlConfig, DraftController
from dejax.spec.rejection import accept_by_rejection, draw_children
from dejax.spec.rules import Drafted, IndependentDraw, Rejection, check_rule, make_rule
from dejax.spec.sampling import SamplingConfig, log_probs
from dejax.spec.tree import CHAIN, TreeConfig, full_tree, grow
from dejax.spec.tree_options import parse_tree
from tests.spec.enumeration import distance, law_of_outcomes

EXACT = 1e-12
PLAIN = SamplingConfig(temperature=1.0)
FILTERED = SamplingConfig(temperature=0.7, top_k=3, top_p=0.9)


def random_laws(seed: int, vocab: int, *, zeros: bool = False):
    """Two logits vectors [V], target's and draft's; with `zeros`, some tokens are impossible."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(2, vocab)) * 1.5
    if zeros:
        rows[0, rng.integers(vocab)] = -np.inf
        rows[1, rng.integers(vocab)] = -np.inf
    return rows


def one_row(p, q, chance, *, count, replace, dropped=lambda token: False, slots=None):
    """The token that a row emits when `count` children are drafted from q."""
    tokens = draw_children(q, count, chance, replace=replace)
    tokens = [token for slot, token in enumerate(tokens) if slots is None or slot in slots]
    tokens = [token for token in tokens if not dropped(token)]
    rows = {token: row for row, token in enumerate(dict.fromkeys(tokens), start=1)}
    result = accept_by_rejection(
        list(rows),
        [0] * len(rows),
        [rows[token] for token in tokens],
        lambda row: p if row == 0 else np.full(len(p), 1 / len(p)),
        lambda row: q,
        chance,
        replace=replace,
    )
    return list(rows)[result.rows[0] - 1] if result.rows else result.token


def softmax(logits):
    return np.exp(log_probs(logits, PLAIN))


RULES = {"R1": (1, True), "R2": (2, True), "R2-3": (3, True), "R3": (2, False), "R3-3": (3, False)}


@pytest.mark.parametrize("rule", RULES)
@given(seed=st.integers(0, 10**6), vocab=st.integers(2, 4), zeros=st.booleans())
@settings(max_examples=25)
def test_a_row_has_the_targets_law(rule, seed, vocab, zeros):
    count, replace = RULES[rule]
    p, q = map(softmax, random_laws(seed, vocab, zeros=zeros and vocab > 2))
    found = law_of_outcomes(lambda chance: one_row(p, q, chance, count=count, replace=replace))
    assert distance(found, dict(enumerate(p))) < EXACT


@pytest.mark.parametrize("rule", RULES)
def test_dropping_by_value_changes_the_law_and_by_slot_does_not(rule):
    count, replace = RULES[rule]
    p, q = np.array([0.4, 0.3, 0.2, 0.1]), np.array([0.25, 0.1, 0.3, 0.35])
    truth = dict(enumerate(p))

    def law(**how):
        run = lambda chance: one_row(p, q, chance, count=count, replace=replace, **how)  # noqa: E731
        return law_of_outcomes(run)

    assert distance(law(dropped=lambda token: q[token] < 0.3), truth) > 0.01
    assert distance(law(slots={0}), truth) < EXACT
    assert distance(law(slots=set()), truth) < EXACT


def test_equal_laws_accept_everything():
    p = softmax(random_laws(0, 5)[0])
    for count, replace in RULES.values():
        found = law_of_outcomes(lambda chance, how=(count, replace): accept_first(p, chance, *how))
        assert found[True] == pytest.approx(1.0, abs=1e-12)


def accept_first(p, chance, count, replace):
    tokens = draw_children(p, count, chance, replace=replace)
    rows = range(1, len(tokens) + 1)
    law = lambda row: p  # noqa: E731
    result = accept_by_rejection(tokens, [0] * len(tokens), rows, law, law, chance, replace=replace)
    return result.rows == (1,)


# Whole decodes of a toy target: three tokens, in rounds.

V = 3


def logits_after(tokens, *, drafts):
    """Logits [V] of a toy model whose law depends on all tokens so far."""
    return _logits_after(tuple(tokens), drafts)


@functools.cache
def _logits_after(tokens, drafts):
    state = 17 if drafts else 5
    for token in tokens:
        state = (state * 31 + token + 1) % 10007
    return np.random.default_rng(state).normal(size=V) * 1.2


def decode(acceptance, new, propose):
    """The first `new` tokens of a decode in rounds."""
    tokens = [0]
    while len(tokens) <= new:
        drafted = propose(acceptance.draft, tokens, new - len(tokens))
        paths = [tokens]
        for token, parent in zip(drafted.tokens, drafted.parents, strict=True):
            paths.append([*paths[parent], token])
        logits = np.stack([logits_after(path, drafts=False) for path in paths])
        result = acceptance.accept(drafted, logits, position=len(tokens))
        tokens += [*(drafted.tokens[row - 1] for row in result.rows), result.token]
    return tuple(tokens[1 : new + 1])


def truth(new, sampling=PLAIN):
    law = {}
    for tokens in itertools.product(range(V), repeat=new):
        sequence, probability = [0], 1.0
        for token in tokens:
            probability *= np.exp(log_probs(logits_after(sequence, drafts=False), sampling))[token]
            sequence.append(token)
        law[tokens] = probability
    return law


def chain(length, keep):
    """Chains of at most `length` tokens; `keep(logits, token)` ends one."""

    def propose(draft, tokens, limit):
        sequence, logits, drafted = list(tokens), {}, []
        for row in range(min(length, limit)):
            here = logits_after(sequence, drafts=True)
            token = draft.pick(here, position=len(sequence))
            if not keep(here, token):
                break
            logits[row] = here
            drafted.append(token)
            sequence.append(token)
        return Drafted(drafted, range(len(drafted)), (), logits)

    return propose


def tree(config, choose=None):
    """Trees of a configuration; `choose(nodes)` keeps some of the rows."""

    def propose(draft, tokens, limit):
        logits = {}

        def children(nodes, rows, counts):
            found = []
            for row, count in zip(rows, counts, strict=True):
                path = []
                at = row
                while at:
                    path.insert(0, nodes[at - 1].token)
                    at = nodes[at - 1].parent
                logits[row] = logits_after([*tokens, *path], drafts=True)
                position = len(tokens) + len(path)
                found.append(draft.children(logits[row], position=position, count=count))
            return found

        grown = grow(config, limit, children)
        nodes, tries = grown.nodes, grown.tries
        if choose is not None:
            kept = choose(nodes)
            tries = [row for row in tries if row in kept]
            nodes = [node for row, node in enumerate(nodes, start=1) if row in kept]
            index = {0: 0} | {row: place for place, row in enumerate(sorted(kept), start=1)}
            tries = [index[row] for row in tries]
            logits = {index[row]: law for row, law in logits.items() if row in index}
            parents = [index[node.parent] for node in nodes]
            return Drafted([node.token for node in nodes], parents, tries, logits)
        return Drafted([n.token for n in nodes], [n.parent for n in nodes], tries, logits)

    return propose


def decoded_law(propose, *, replace, new=3, sampling=PLAIN):
    run = lambda chance: decode(Rejection(sampling, chance, replace), new, propose)  # noqa: E731
    return law_of_outcomes(run)


@pytest.mark.parametrize("length", [1, 2])
def test_chains_have_the_targets_law(length):
    whole = chain(length, lambda logits, token: True)
    assert distance(decoded_law(whole, replace=True), truth(3)) < EXACT


def test_temperature_and_filters_apply_to_both_sides():
    whole = chain(2, lambda logits, token: True)
    law = decoded_law(whole, replace=True, sampling=FILTERED)
    assert distance(law, truth(3, FILTERED)) < EXACT
    assert distance(law, truth(3)) > 0.01


def test_stopping_by_what_is_known_before_a_token_is_drawn_keeps_the_law():
    sure = chain(2, lambda logits, token: softmax(logits).max() >= 0.6)
    assert distance(decoded_law(sure, replace=True), truth(3)) < EXACT


def test_stopping_by_the_drawn_token_changes_the_law():
    unsure = chain(1, lambda logits, token: softmax(logits)[token] >= 0.4)
    assert distance(decoded_law(unsure, replace=True, new=2), truth(2)) > 0.01


def test_stopping_by_a_confidence_head_keeps_the_law():
    """Its scores are any function of what came before; here the draft's first logit."""
    readout = Readout(np.array([1.0, 0.5, -0.3]), np.array([1.5]), np.array([0.8]))
    values = []

    def keep(logits, token):
        values.append(readout(float(logits[0]), law_features(logits, PLAIN), 1))
        return values[-1] >= 0.6

    assert distance(decoded_law(chain(2, keep), replace=True), truth(3)) < EXACT
    assert min(values) < 0.6 < max(values)


def controlled(controller):
    """Chains that the controller itself stops; a token's pass routes to an expert of its own."""

    def propose(draft, tokens, limit):
        config = ControlConfig(draft_length=2, tau=1.1, budget=0, controller=controller)
        control = DraftController(config, top_k=1, moe_layers=1)
        sequence, logits, drafted = list(tokens), {}, []
        control.begin_round(frozenset({(0, 0)}) if tokens[-1] else frozenset())
        for row in range(min(2, limit)):
            here = logits_after(sequence, drafts=True)
            token, sure = draft.pick(here, position=len(sequence)), draft.confidence(here)
            routes = frozenset({(0, token)})
            if not control.keep(sure, routes if control.needs_look(sure) else None):
                break
            logits[row] = here
            drafted.append(token)
            sequence.append(token)
            control.extend(routes)
        return Drafted(drafted, range(len(drafted)), (), logits)

    return propose


def test_the_producer_keeps_the_law_and_the_consumer_does_not():
    assert distance(decoded_law(controlled("producer"), replace=True), truth(3)) < EXACT
    assert distance(decoded_law(controlled("consumer"), replace=True), truth(3)) > 0.01


SHAPES = [
    (0, 0),
    (0, 0, 0),
    (0, 1),
    *(pytest.param(s, marks=pytest.mark.slow) for s in [(0, 0, 1), (0, 0, 2)]),
]


@pytest.mark.parametrize("replace", [True, False], ids=["R2", "R3"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_static_trees_have_the_targets_law(shape, replace):
    new = 3 if 1 in shape or 2 in shape else 2
    law = decoded_law(tree(TreeConfig(shape=shape)), replace=replace, new=new)
    assert distance(law, truth(new)) < EXACT


@pytest.mark.parametrize("replace", [True, False], ids=["R2", "R3"])
def test_pruning_a_tree_by_value_changes_the_law(replace):
    def likelier(nodes):
        first = [row for row, node in enumerate(nodes, start=1) if node.parent == 0]
        return {max(first, key=lambda row: nodes[row - 1].own)} if first else set()

    pruned = tree(TreeConfig(shape=(0, 0)), likelier)
    assert distance(decoded_law(pruned, replace=replace, new=2), truth(2)) > 0.01


def test_a_draft_that_was_looked_up_is_rejected_exactly():
    def looked_up(draft, tokens, limit):
        return Drafted([tokens[-1]], [0]) if limit else Drafted((), ())

    for replace in (True, False):
        assert distance(decoded_law(looked_up, replace=replace), truth(3)) < EXACT


def test_greedy_rejection_is_greedy_decoding():
    greedy = SamplingConfig()
    for propose in (chain(2, lambda *_: True), tree(TreeConfig(shape=(0, 0, 1)))):
        assert list(decoded_law(propose, replace=False, sampling=greedy)) == [
            max(truth(3, greedy), key=truth(3, greedy).__getitem__)
        ]


# The stream.


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["R1", "R2", "R3"])
def test_drawn_decodes_have_the_targets_law(rule):
    """The same with drawn numbers; a control that drops by value is found out."""
    draws = 700
    law = truth(2)
    keys = list(law)
    expected = draws * np.array([law[key] for key in keys])

    def p_value(propose):
        acceptance = make_rule(rule, PLAIN, sample=0, vocab_size=V)
        counts = dict.fromkeys(keys, 0)
        for _ in range(draws):
            counts[decode(acceptance, 2, propose)] += 1
        return stats.chisquare([counts[key] for key in keys], expected).pvalue

    if rule == "R1":
        right = chain(1, lambda *_: True)
    else:
        right = tree(TreeConfig(shape=(0, 0)))
    assert p_value(right) > 1e-3
    assert p_value(chain(1, lambda logits, token: softmax(logits)[token] >= 0.4)) < 1e-3


def test_a_stream_repeats_itself_and_differs_by_seed_and_sample():
    def first(seed, sample):
        stream = Stream(seed=seed, sample=sample)
        return [stream.draw(np.full(1000, 1e-3)) for _ in range(8)]

    assert first(1, 2) == first(1, 2)
    assert len({tuple(first(seed, sample)) for seed in (0, 1) for sample in (0, 1)}) == 4


def test_a_streams_numbers_are_uniform():
    stream = Stream(seed=4, sample=0)
    numbers = [stream._next() for _ in range(4_000)]
    assert stats.kstest(numbers, "uniform").pvalue > 1e-3
    pairs = np.histogram2d(numbers[::2], numbers[1::2], bins=5)[0].ravel()
    assert stats.chisquare(pairs).pvalue > 1e-3


def test_a_quantile_is_never_a_token_without_mass():
    law = np.array([0.0, 0.5, 0.0, 0.5, 0.0])
    found = [quantile(law, u) for u in (1e-300, 0.49, 0.5, 0.51, 1 - 2**-53, 1.0)]
    assert found == [1, 1, 3, 3, 3, 3]


# R4: the target draws alone.


def test_independent_draws_belong_to_positions_and_have_the_law():
    law = np.array([0.1, 0.2, 0.0, 0.7])
    draws = [draw_at(law, seed=3, sample=1, position=n) for n in range(4_000)]
    assert draws[:50] == [draw_at(law, seed=3, sample=1, position=n) for n in range(50)]
    counts = np.bincount(draws, minlength=4)
    assert counts[2] == 0
    inside = [0, 1, 3]
    assert stats.chisquare(counts[inside], len(draws) * law[inside]).pvalue > 1e-3
    picker = IndependentDraw(SamplingConfig(1.0, seed=3), 1)
    with np.errstate(divide="ignore"):
        assert [picker.pick(np.log(law), position=n) for n in range(50)] == draws[:50]


@given(seed=st.integers(0, 1000), length=st.integers(0, 3))
@settings(max_examples=30)
def test_independent_draws_are_those_of_autoregressive_decoding(seed, length):
    sampling = SamplingConfig(temperature=1.0, seed=seed)
    rules = [make_rule("R4", sampling, sample=0, vocab_size=V) for _ in range(2)]
    alone = decode(rules[0], 8, lambda draft, tokens, limit: Drafted((), ()))
    keep = lambda logits, token: softmax(logits)[token] >= 0.4  # noqa: E731  even by value
    assert decode(rules[1], 8, chain(length, keep)) == alone
    assert decode(rules[1], 8, tree(parse_tree("2x2:3"))) == alone


# What is refused.


@pytest.mark.parametrize(
    ("rule", "control", "tree", "message"),
    [
        ("R6", {}, "chain", "rule 'R6' is unknown"),
        ("R1", {}, "chain", "controller consumer drops a drafted token"),
        ("R2", {"controller": "cost"}, "chain", "controller cost drops"),
        ("R3", {}, "chain", "lose the target's law"),
        ("R1", {"truncate": False}, "2x2", "rule R1 is for chains"),
        ("R2", {}, "best8", "keeps nodes by the confidence"),
        ("R3", {}, "eagle:8", "keeps nodes by the confidence"),
    ],
)
def test_what_would_lose_the_law_is_refused(rule, control, tree, message):
    with pytest.raises(UsageError, match=message):
        check_rule(rule, control=ControlConfig(**control), tree=parse_tree(tree))


@pytest.mark.parametrize(
    ("rule", "control", "tree"),
    [
        ("match", {}, CHAIN),
        ("R4", {}, parse_tree("best8")),
        ("R1", {"controller": "producer"}, CHAIN),
        ("R1", {"controller": "random"}, CHAIN),
        ("R1", {"budget": "off"}, CHAIN),
        ("R1", {"truncate": False}, CHAIN),
        ("R2", {}, TreeConfig(shape=full_tree(2, 2))),
        ("R3", {}, TreeConfig(shape=(0, 0, 1))),
    ],
)
def test_what_keeps_the_law_is_allowed(rule, control, tree):
    check_rule(rule, control=ControlConfig(**control), tree=tree)

"""Choosing nodes by expert cost: the greedy choice against all choices, and what it is told."""

import dataclasses
import itertools

import jaxtyping
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dejax.errors import UsageError
from dejax.spec.ecospec import Candidates, EcoConfig, ExpertCost, path_greedy
from dejax.spec.ecospec_oracle import best_rate
from dejax.spec.expert_use import DECAY, ExpertGrid, ExpertUse
from dejax.spec.tree import Node, Paid, full_tree, most_confident, subtree

GRID = ExpertGrid(layers=(1, 2, 4), experts=8, top_k=2)
WHOLE = full_tree(2, 3)


COSTS = st.sampled_from([0.0, 0.02, 0.1, 0.5])


@st.composite
def trees(draw, most=9, experts=12, expert=COSTS):
    """Arguments of `Candidates`; equal confidences and equal routes are common."""
    count = draw(st.integers(0, most))
    parents = [draw(st.integers(0, row)) for row in range(count)]
    gains: list[float] = []
    own = st.sampled_from([1.0, 0.9, 0.5, 0.5, 0.3, 1e-3])
    for parent in parents:
        gains.append(draw(own) * (gains[parent - 1] if parent else 1.0))
    routes = [sorted(draw(st.sets(st.integers(0, experts - 1), max_size=4))) for _ in parents]
    table = np.array([r + [-1] * (4 - len(r)) for r in routes], np.int32).reshape(count, 4)
    base = draw(st.sampled_from([0.5, 1.0, 3.0]))
    row = draw(st.sampled_from([0.0, 0.0, 0.05]))
    return parents, np.array(gains), table, base, draw(expert), row


def all_choices(parents, most):
    """Every prefix-closed choice of at most so many nodes."""
    rows = range(1, len(parents) + 1)
    for size in range(min(most, len(parents)) + 1):
        for chosen in itertools.combinations(rows, size):
            if all(parents[row - 1] in (0, *chosen) for row in chosen):
                yield chosen


def recorded_like(generator, *, parents=WHOLE, layers=5, experts=24, top_k=3):
    """A round as decodes have them: likely experts, and half of a node's are its parent's."""
    likely = generator.dirichlet(np.full(experts, 0.4), size=layers) + 1e-4
    routes: list[np.ndarray] = []
    gains: list[float] = []
    for parent in (None, *parents):
        own = np.empty((layers, top_k), int)
        for layer, law in enumerate(likely):
            drawn = generator.choice(experts, top_k, replace=False, p=law / law.sum())
            kept = [] if parent is None else routes[parent][layer][generator.random(top_k) < 0.5]
            own[layer] = [*kept, *(e for e in drawn if e not in kept)][:top_k]
        routes.append(own)
        if parent is not None:
            gains.append(generator.beta(1.2, 0.8) * (gains[parent - 1] if parent else 1.0))
    flat = [(own + experts * np.arange(layers)[:, None]).ravel() for own in routes]
    table = np.array(flat[1:], np.int32)
    table[np.isin(table, flat[0])] = -1
    cost = float(generator.choice([0.1, 0.3, 1.0, 3.0, 10.0]))
    return Candidates(parents, np.array(gains), table, 1.0 + cost, cost / (layers * top_k))


# The greedy choice.


@given(trees(), st.integers(0, 10))
def test_a_choice_is_a_tree_and_never_worse_than_none(tree, most):
    nodes = Candidates(*tree)
    rows = path_greedy(nodes, most)
    assert len(rows) == len(set(rows)) <= most
    subtree(nodes.parents, rows)  # raises where a parent is missing
    assert nodes.rate(rows) >= nodes.rate([])


@given(trees(expert=st.just(0.0)), st.integers(0, 10))
def test_without_a_cost_it_is_the_confidence_tree(tree, most):
    nodes = dataclasses.replace(Candidates(*tree), row=0.0)
    plain = [Node(0, p, 1, 1.0, g) for p, g in zip(nodes.parents, nodes.gains, strict=True)]
    assert set(path_greedy(nodes, most)) == set(most_confident(plain, most))


@given(trees(), st.integers(0, 10))
def test_where_nothing_has_to_be_paid_it_is_the_confidence_tree(tree, most):
    nodes = Candidates(*tree)
    free = dataclasses.replace(nodes, row=0.0, experts=np.full_like(nodes.experts, -1))
    plain = [Node(0, p, 1, 1.0, g) for p, g in zip(nodes.parents, nodes.gains, strict=True)]
    assert set(path_greedy(free, most)) == set(most_confident(plain, most))


@given(trees(most=7), st.integers(1, 7))
@settings(max_examples=60)
def test_no_choice_is_better_than_the_best(tree, most):
    """Of all choices of a few nodes: an optimum without the bound is what the cut finds."""
    nodes = Candidates(*tree)
    rates = {rows: nodes.rate(rows) for rows in all_choices(nodes.parents, len(nodes.parents))}
    rows, rate = best_rate(nodes)
    assert rate == pytest.approx(max(rates.values()), rel=1e-9)
    assert rate == nodes.rate(rows) and tuple(rows) in rates
    greedy = path_greedy(nodes, most)
    assert nodes.rate(greedy) <= rate * (1 + 1e-12)
    assert rates[tuple(sorted(greedy))] == nodes.rate(greedy)


@pytest.mark.parametrize("rounds", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_greedy_comes_to_99_percent_of_the_optimum(rounds):
    generator = np.random.default_rng(7)
    shares, by_confidence = [], []
    for _ in range(rounds):
        nodes = recorded_like(generator)
        best = best_rate(nodes)[1]
        shares.append(nodes.rate(path_greedy(nodes, 14)) / best)
        likeliest = np.argsort(-nodes.gains, kind="stable")[:8] + 1
        by_confidence.append(nodes.rate(likeliest.tolist()) / best)
    assert np.mean(shares) >= 0.99 and max(shares) <= 1 + 1e-12
    assert np.mean(by_confidence) < 0.95  # the rounds leave something to be chosen


@pytest.mark.parametrize("most", [2, 4])
def test_greedy_comes_to_99_percent_of_the_optimum_under_a_bound(most):
    generator = np.random.default_rng(8)
    shares = []
    for _ in range(30):
        nodes = recorded_like(generator, parents=[0, 0, 1, 1, 2, 3, 3, 5], layers=4)
        best = max(nodes.rate(rows) for rows in all_choices(nodes.parents, most))
        shares.append(nodes.rate(path_greedy(nodes, most)) / best)
    assert np.mean(shares) >= 0.99


def test_a_likely_path_goes_before_free_nodes_where_room_is_short():
    """Node 2 costs an expert; the five others cost nothing and are worth nearly nothing."""
    table = np.array([[-1], [5], [-1], [-1], [-1], [-1]], np.int32)
    gains = np.array([0.02, 0.9, 0.02, 0.01, 0.01, 0.01])
    nodes = Candidates([0] * 6, gains, table, base=1.0, expert=0.1)
    assert path_greedy(nodes, 2) == [2, 1]


def test_shared_experts_are_paid_once():
    """Alone neither child is worth its experts; what the first one brings, the second has free."""
    table = np.array([[1, 2, 3], [4, 5, 6], [1, 2, 3]], np.int32)
    nodes = Candidates([0, 0, 1], np.array([0.5, 0.4, 0.3]), table, base=1.0, expert=0.2)
    assert path_greedy(nodes, 3) == [1, 3]
    assert nodes.rate([1, 3]) == pytest.approx(1.8 / 1.6)
    assert nodes.rate([1, 2, 3]) == pytest.approx(2.2 / 2.2)


# What a choice is told.


def pairs(*numbers):
    """Numbers of `GRID` as pairs."""
    return frozenset((GRID.layers[n // 8], n % 8) for n in numbers)


def nodes_of(parents, gains, routes):
    return [
        Node(token, parent, 1, 1.0, gain, None if used is None else pairs(*used))
        for token, (parent, gain, used) in enumerate(
            zip(parents, gains, routes, strict=True), start=10
        )
    ]


def choose(nodes, most=9, *, cost=1.0, predictor="router", use=None, **paid):
    use = ExpertUse(GRID) if use is None else use
    return list(ExpertCost(EcoConfig(cost, predictor), use)(nodes, most, Paid(**paid)))


@given(st.data())
def test_what_costs_nothing_changes_nothing(data):
    """Experts that are resident, on their way, or the pending token's may be in any node's set."""
    numbers = st.integers(0, GRID.size - 1)
    free = data.draw(st.sets(numbers, min_size=1, max_size=20))
    root = data.draw(st.sets(numbers, max_size=6))
    count = data.draw(st.integers(1, 7))
    parents = [data.draw(st.integers(0, row)) for row in range(count)]
    gains: list[float] = []
    for parent in parents:
        own = data.draw(st.floats(0.01, 1.0))
        gains.append(own * (gains[parent - 1] if parent else 1.0))
    routes = [data.draw(st.sets(numbers, max_size=6)) - free - root for _ in parents]
    more = [
        used | data.draw(st.sets(st.sampled_from(sorted(free | root)), max_size=6 - len(used)))
        for used in routes
    ]
    most = data.draw(st.integers(1, 7))
    cost = data.draw(st.sampled_from([0.0, 0.3, 3.0]))
    told = dict(cost=cost, root=pairs(*root), available=pairs(*free))
    plain = choose(nodes_of(parents, gains, routes), most, **told)
    assert choose(nodes_of(parents, gains, more), most, **told) == plain


def test_where_all_is_resident_reading_costs_and_what_was_used_lately_does_not():
    everything = pairs(*range(GRID.size))
    nodes = nodes_of([0, 0], [0.5, 0.4], [range(6), [8, 9]])
    told = dict(root=pairs(0), before=everything, available=everything)
    assert choose(nodes, 1, **told) == [2]
    use = ExpertUse(GRID)
    use.observe([1], [pairs(*range(6))], [0])
    assert choose(nodes, 1, use=use, **told) == [1]
    assert choose(nodes, 1, cost=0.0, **told) == [1]


def test_a_round_that_has_loaded_much_already_may_as_well_verify_more():
    nodes = nodes_of([0], [0.3], [[1, 2, 3]])
    assert choose(nodes) == []
    assert choose(nodes, available=pairs(*range(12, 24))) == [1]
    assert choose(nodes, before=pairs(*range(12, 24)), available=pairs(*range(12, 24))) == []


def test_each_predictor_says_what_it_knows():
    use = ExpertUse(GRID)
    use.observe([11, 12], [pairs(16, 17), pairs(20, 21)], [0])
    # Tokens 10 and 11 below the pending one, 12 and 13 below token 10.
    nodes = nodes_of([0, 0, 1, 1], [1.0, 0.9, 0.8, 0.7], [[8, 9], None, None, None])
    paid = Paid(root=pairs(0, 1))

    def found(predictor):
        told = ExpertCost(EcoConfig(1.0, predictor), use).candidates(nodes, paid)
        return [sorted(set(row) - {-1}) for row in told.experts.tolist()]

    assert found("router") == [[8, 9], [16, 17], [20, 21], [8, 9]]
    assert found("table") == [[16, 17], [16, 17], [20, 21], [16, 17]]
    assert found("persistence") == [[16, 17]] * 4
    # Of a trained predictor the nodes without a pass have what it says.
    assert found("trained") == found("router")
    told = np.array([3, 4], np.int32)
    nodes = [dataclasses.replace(node, predicted=told) for node in nodes]
    assert found("trained") == [[8, 9], [3, 4], [3, 4], [3, 4]]
    assert found("router") == [[8, 9], [16, 17], [20, 21], [8, 9]]


def test_use_is_learned_from_what_was_committed():
    use = ExpertUse(GRID)
    assert use.last() is None and use.of_token(3) is None and not len(use.hot(4))
    use.observe([3, 4, 5], [pairs(1, 2), pairs(2, 3), pairs(6)], [0, 1])
    assert use.last().tolist() == [2, 3] == use.of_token(4).tolist()
    assert use.of_token(5).tolist() == [6]
    assert use.hot(9).tolist() == [2, 3, 1]  # scores 1 + DECAY, 1, DECAY
    use.observe([3], [pairs(7)], [0])
    assert use.of_token(3).tolist() == [7]
    assert use.hot(2).tolist() == ([2, 7] if DECAY * (1 + DECAY) > 1 else [7, 2])


def test_tokens_that_were_not_seen_for_long_are_forgotten(monkeypatch):
    monkeypatch.setattr("dejax.spec.expert_use._MOST_TOKENS", 3)
    use = ExpertUse(GRID)
    for token in (1, 2, 3, 1, 4):
        use.observe([token], [pairs(token)], [0])
    assert [token for token in range(6) if use.of_token(token) is not None] == [1, 3, 4]


@pytest.mark.parametrize("pair", [(3, 0), (1, 8)])
def test_routes_of_another_model_are_refused(pair):
    use = ExpertUse(GRID)
    with pytest.raises(UsageError, match=f"layer {pair[0]}, expert {pair[1]} are another model's"):
        use.observe([1], [{(1, 0), pair}], [0])
    with pytest.raises(UsageError, match="this target has 8 experts in layers 1 to 4"):
        choose([Node(1, 0, 1, 1.0, 1.0, frozenset([pair]))])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expert_cost": -1.0}, "expert_cost must be a finite number >= 0, got -1.0"),
        ({"expert_cost": float("inf")}, "expert_cost must be a finite number >= 0"),
        ({"predictor": "guess"}, "'persistence', 'table', 'router', 'trained', got 'guess'"),
    ],
)
def test_what_is_no_setting_is_refused(monkeypatch, options, message):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(UsageError, match=message):
        EcoConfig(**options)

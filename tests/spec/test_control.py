"""The stop rule: when it looks, what it charges to which row, and what the budgets count."""

import math
from dataclasses import replace

import jaxtyping
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dejax.errors import UsageError
from dejax.spec.control import ControlConfig, DraftController
from dejax.spec.cost import Calibration, StepTimes

# Routes of the passes over the pending token (0) and over the drafted tokens v_1, v_2, ...
PENDING = {(0, 0), (1, 0)}
ROUTES = [
    PENDING,
    {(0, 0), (1, 1)},  # v_1 brings 1 new pair
    {(0, 1), (1, 2)},  # v_2 brings 2
    {(0, 0), (1, 2)},  # v_3 brings 0
    {(0, 3), (1, 3)},  # v_4 brings 2
]


def make(**settings) -> DraftController:
    return DraftController(ControlConfig(**settings), top_k=1, moe_layers=2)


def draft(control, confidences, *, limit=4, available=frozenset(), hide_budget=None):
    """Algorithm 1's loop. Returns the kept tokens (1, 2, ...) and the passes run (0, 1, ...)."""
    kept, passes = [], [0]

    def draft_pass(token):
        passes.append(token)
        return ROUTES[token]

    control.begin_round(ROUTES[0], available=available)
    while len(kept) < limit:
        token = len(kept) + 1
        sure = confidences[token - 1]
        routes = draft_pass(token) if control.needs_look(sure) else None
        if not control.keep(sure, routes, available=available, hide_budget=hide_budget):
            break
        kept.append(token)
        if routes is None and len(kept) < limit:
            control.extend(draft_pass(token), available=available)
    return kept, passes


def test_sure_tokens_are_kept_whatever_they_cost():
    control = make(budget=0)
    kept, passes = draft(control, [0.6, 0.9, 1.0, 0.7])  # tau itself is sure
    assert kept == [1, 2, 3, 4]
    assert passes == [0, 1, 2, 3]  # nobody looks at the last token
    assert control.union == frozenset().union(*ROUTES[:4])


def test_consumer_charges_a_token_with_the_row_it_becomes():
    # v_1 brings 1, v_2 brings 2, v_3 none, v_4 two.
    assert draft(make(budget=0), [0.1] * 4) == ([], [0, 1])
    assert draft(make(budget=1), [0.1] * 4) == ([1], [0, 1, 2])
    assert draft(make(budget=2), [0.1] * 4) == ([1, 2, 3, 4], [0, 1, 2, 3, 4])
    # Unsure at v_3 alone: its row costs nothing.
    assert draft(make(budget=0), [0.9, 0.9, 0.1, 0.9]) == ([1, 2, 3, 4], [0, 1, 2, 3])
    # Unsure at v_2 alone: two new pairs.
    assert draft(make(budget=1), [0.9, 0.1, 0.9, 0.9]) == ([1], [0, 1, 2])


def test_producer_charges_one_row_early_and_runs_no_extra_pass():
    # v_1 is charged for the pending row (2), v_2 for v_1's row (1), v_3 for 2, v_4 for none.
    assert draft(make(budget=1, controller="producer"), [0.1] * 4) == ([], [0])
    late = [0.9, 0.1, 0.1, 0.1]
    assert draft(make(budget=0, controller="producer"), late) == ([1], [0, 1])
    assert draft(make(budget=1, controller="producer"), late) == ([1, 2], [0, 1, 2])
    assert draft(make(budget=2, controller="producer"), [0.1] * 4) == ([1, 2, 3, 4], [0, 1, 2, 3])
    only_last = [0.9, 0.9, 0.9, 0.1]
    assert draft(make(budget=0, controller="producer"), only_last)[0] == [1, 2, 3, 4]
    assert draft(make(budget=0), only_last)[0] == [1, 2, 3]


def test_producer_never_decides_by_the_routes_of_the_pass_over_the_token():
    for routes in (None, ROUTES[2], ROUTES[4] | ROUTES[2]):
        control = make(budget=1, controller="producer")
        control.begin_round(PENDING)
        assert not control.needs_look(0.1)
        assert control.keep(0.9, ROUTES[1])  # one new pair, charged to the next token
        assert control.keep(0.1, routes)


def test_dropped_tokens_do_not_enter_the_union():
    control = make(budget=1)
    draft(control, [0.1] * 4)
    assert control.union == frozenset(PENDING | ROUTES[1])


def test_each_round_starts_afresh():
    control = make(budget=1)
    for _ in range(2):
        assert draft(control, [0.1] * 4) == ([1], [0, 1, 2])
    control.begin_round({(1, 5)})
    assert control.union == {(1, 5)}
    producer = make(budget=1, controller="producer")
    draft(producer, [0.9] * 4)
    producer.begin_round({(0, 0)})
    assert producer.keep(0.1)


def test_begin_round_does_not_change_the_callers_set():
    routes = {(0, 0)}
    control = make(budget=9)
    control.begin_round(routes)
    control.extend({(1, 1)})
    assert routes == {(0, 0)}


def test_pairs_of_different_layers_are_different():
    control = make(budget=0)
    control.begin_round({(0, 3)})
    assert control.keep(0.1, {(0, 3)})
    assert not control.keep(0.1, {(1, 3)})


def test_default_budget_is_half_of_what_a_token_routes_to():
    for top_k, moe_layers, budget in [(6, 26, 78), (3, 3, 4), (1, 1, 0)]:
        control = DraftController(ControlConfig(), top_k=top_k, moe_layers=moe_layers)
        control.begin_round(set())
        assert control.keep(0.1, {(0, e) for e in range(budget)})
        control.begin_round(set())
        assert not control.keep(0.1, {(0, e) for e in range(budget + 1)})


def test_cache_budget_counts_only_what_must_be_loaded():
    control = make(budget="cache")
    control.begin_round(PENDING)
    routes = {(0, 0), (0, 5), (0, 6), (0, 7)}  # (0, 0) is in the union already
    resident = {(0, 5)}
    assert not control.keep(0.1, routes, available=resident, hide_budget=1)
    assert control.keep(0.1, routes, available=resident, hide_budget=2)
    control.begin_round(PENDING)
    assert control.keep(0.1, routes, available=resident | {(0, 6), (0, 7)}, hide_budget=0)
    # Kept pairs are on their way: they are not counted again.
    assert control.keep(0.1, routes, hide_budget=0)


def test_cache_budget_of_the_producer_counts_as_of_the_pass():
    """By the time a token is decided, its producer's pairs are in flight because of that pass."""
    control = make(budget="cache", controller="producer")
    control.begin_round(PENDING, available={(0, 0)})
    assert not control.keep(0.1, available=PENDING, hide_budget=0)
    assert control.keep(0.1, available=PENDING, hide_budget=1)
    control.extend({(0, 8), (0, 9)}, available={(0, 9)})
    assert not control.keep(0.1, hide_budget=0)
    assert control.keep(0.1, {(1, 7)}, available={(1, 7)}, hide_budget=1)
    assert control.keep(0.1, hide_budget=0)


def test_other_budgets_ignore_what_is_available():
    control = make(budget=0)
    control.begin_round(PENDING)
    assert not control.keep(0.1, {(0, 5)}, available={(0, 5)}, hide_budget=9)


def test_budget_off_is_confidence_alone_and_never_looks():
    for controller in ("consumer", "producer"):
        control = make(budget="off", controller=controller)
        assert draft(control, [0.9, 0.6, 0.59, 0.9]) == ([1, 2], [0, 1, 2])
        control.begin_round(PENDING)
        assert not control.keep(0.1, PENDING)  # even a token that would add nothing


def test_tau_above_one_is_expansion_alone():
    assert draft(make(budget=1, tau=1.5), [1.0] * 4) == ([1], [0, 1, 2])
    assert draft(make(budget=1, tau=1.0), [1.0] * 4)[0] == [1, 2, 3, 4]
    assert draft(make(budget=0, tau=0.0), [0.0] * 4)[0] == [1, 2, 3, 4]


# The cost-derived stop.

TIMES = StepTimes(draft=0.1, row=0.2, load=0.05, rate=1.0)  # a row 0.3 tokens, a load 0.05


def test_cost_keeps_what_its_time_is_worth():
    control = make(controller="cost")
    control.begin_round(PENDING, times=TIMES)
    assert control.needs_look(0.31) and not control.needs_look(0.3)
    # ROUTES[2] has two new pairs: 0.3 + 2 * 0.05 tokens.
    assert not control.keep(0.4, ROUTES[2], hide_budget=0)
    assert control.keep(0.41, ROUTES[2], hide_budget=0)


def test_cost_goes_by_the_product_of_the_confidences():
    control = make(controller="cost")
    control.begin_round(PENDING, times=TIMES)
    assert control.keep(0.8, PENDING, hide_budget=0)
    assert control.keep(0.8, PENDING, hide_budget=0)
    assert control.needs_look(0.48) and not control.needs_look(0.46)  # 0.64 * 0.47 = 0.3
    assert not control.keep(0.46, PENDING, hide_budget=0)
    control.begin_round(PENDING, times=TIMES)  # and starts afresh
    assert control.keep(0.46, PENDING, hide_budget=0)


def test_cost_counts_the_loads_that_nothing_hides():
    control = make(controller="cost")
    routes = {(0, 0), (0, 5), (0, 6), (0, 7)}  # (0, 0) is the pending token's
    for available, hidden, kept in [
        (frozenset(), 0, False),  # 0.3 + 3 * 0.05
        (frozenset(), 1, True),
        ({(0, 6)}, 0, True),
        (frozenset(), 99, True),
    ]:
        control.begin_round(PENDING, times=TIMES)
        assert control.keep(0.42, routes, available=available, hide_budget=hidden) is kept
    assert control.union == PENDING | routes


def test_cost_that_was_not_measured_yet_is_none():
    control = make(controller="cost")
    assert draft(control, [0.01] * 4, hide_budget=0) == ([1, 2, 3, 4], [0, 1, 2, 3, 4])


def test_cost_ignores_tau_and_budget():
    for ignored in ({"tau": 0.0}, {"tau": 2.0}, {"budget": "off"}, {"budget": "cache"}):
        control = make(controller="cost", **ignored)
        control.begin_round(PENDING, times=TIMES)
        assert control.needs_look(0.9) and not control.needs_look(0.1)
        assert control.keep(0.41, ROUTES[2], hide_budget=0)


@settings(max_examples=100)
@given(
    st.lists(st.floats(0.05, 1.0), min_size=6, max_size=6),
    st.lists(st.integers(0, 6), min_size=6, max_size=6),
    st.floats(0.1, 5.0),
)
def test_cost_is_the_rule_written_out(sure, new, rate):
    times = StepTimes(draft=0.1, row=0.05, load=0.03, rate=rate)
    expected, survival = 0, 1.0
    for confidence, count in zip(sure, new, strict=True):
        survival *= confidence
        if not survival > rate * (0.1 + 0.05 + 0.03 * max(0, count - 2)):
            break
        expected += 1
    control = make(controller="cost")
    control.begin_round(set(), times=times)
    kept = 0
    for index, (confidence, count) in enumerate(zip(sure, new, strict=True)):
        routes = {(index, e) for e in range(count)}
        looked = control.needs_look(confidence)
        if not control.keep(confidence, routes if looked else None, hide_budget=2):
            break
        kept += 1
    assert kept == expected


def test_cost_learns_what_confidences_are_worth():
    calibration = Calibration()
    assert calibration(0.55) == pytest.approx(0.55)
    for _ in range(50):
        calibration.observe([0.55, 0.95, 0.15], accepted=2)
    # All seen at 0.5 to 0.6 were accepted, none at 0.1 to 0.2, and 0.3 to 0.4 was never seen.
    assert calibration(0.55) > 0.95 and calibration(0.15) < 0.02
    assert calibration(0.35) == pytest.approx(0.35)
    before = calibration(0.75)
    calibration.observe([0.15, 0.75, 0.75], accepted=0)  # what follows a rejected one tells nothing
    assert calibration(0.75) == before
    for confidence in (0.0, 1.0):
        assert 0 <= calibration(confidence) <= 1
    control = DraftController(
        ControlConfig(controller="cost"), top_k=1, moe_layers=2, calibration=calibration
    )
    control.begin_round(PENDING, times=replace(TIMES, rate=3.0))  # a row costs 0.9 tokens
    assert control.needs_look(0.55) and not control.needs_look(0.75)
    assert control.keep(0.55, PENDING, hide_budget=0)
    assert control.keep(0.55, PENDING, hide_budget=0)


# The random controller.


def lengths_of(keep, rounds=400, limit=6):
    control = make(controller="random", keep=keep)
    lengths = []
    for pending in range(rounds):
        control.begin_round(PENDING, pending=pending)
        assert not control.needs_look(0.0)
        kept = 0
        while kept < limit and control.keep(0.0):
            kept += 1
        lengths.append(kept)
    return lengths


def test_random_has_the_mean_length_that_it_says():
    for keep in (0.3, 0.75):
        expected = sum(keep**i for i in range(1, 7))
        lengths = lengths_of(keep)
        assert abs(sum(lengths) / len(lengths) - expected) < 0.25
        assert lengths == lengths_of(keep)  # and the same ones every time
    assert set(lengths_of(0.0, 50)) == {0} and set(lengths_of(1.0, 50)) == {6}


@pytest.mark.parametrize("controller", ["consumer", "producer", "cost", "random"])
@pytest.mark.parametrize("budget", [None, 0, "cache", "off"])
def test_without_truncation_every_draft_is_full_length(controller, budget):
    control = make(truncate=False, budget=budget, tau=2.0, keep=0.0, controller=controller)
    assert draft(control, [0.0] * 4) == ([1, 2, 3, 4], [0, 1, 2, 3])


routes_of_a_pass = st.sets(st.tuples(st.integers(0, 2), st.integers(0, 4)), max_size=6)


@settings(max_examples=200)
@given(
    st.lists(routes_of_a_pass, min_size=6, max_size=6),
    st.lists(st.sampled_from([0.2, 0.9]), min_size=5, max_size=5),
    st.integers(0, 4),
    st.sampled_from(["consumer", "producer"]),
    st.booleans(),
)
def test_stop_rule_against_the_paper_written_out(passes, sure, budget, controller, eager):
    """Also for the loop that runs the pass before deciding, as Algorithm 1 prints it."""
    expected = 0
    for i in range(1, 6):
        row = i if controller == "consumer" else i - 1
        before = set().union(*passes[:row])
        if sure[i - 1] < 0.6 and len(passes[row] - before) > budget:
            break
        expected = i
    control = make(budget=budget, controller=controller)
    control.begin_round(passes[0])
    kept = 0
    for i in range(1, 6):
        routes = passes[i] if eager or control.needs_look(sure[i - 1]) else None
        if not control.keep(sure[i - 1], routes):
            break
        kept = i
        if routes is None:
            control.extend(passes[i])
    assert kept == expected
    assert control.union == set().union(*passes[: kept + 1])


# What callers may get wrong.


def test_missing_inputs_of_the_rule_are_refused():
    control = make(budget=0)
    control.begin_round(PENDING)
    with pytest.raises(ValueError, match="needs the routes of the pass over it, got None"):
        control.keep(0.1)
    control = make(budget="cache")
    control.begin_round(PENDING)
    with pytest.raises(ValueError, match="the 'cache' budget needs hide_budget"):
        control.keep(0.1, PENDING)
    assert control.keep(0.9)  # a sure token needs neither
    control = make(controller="cost")
    control.begin_round(PENDING, times=TIMES)
    with pytest.raises(ValueError, match="needs the routes of the pass over it, got None"):
        control.keep(0.9)
    with pytest.raises(ValueError, match="controller 'cost' needs hide_budget"):
        control.keep(0.9, PENDING)
    assert not control.keep(0.1)  # too dear without any load: nothing more is asked for


BUDGET = (
    "budget must be an integer >= 0, 'cache', 'off' (no expansion test) or None "
    "(half of k * L), got "
)


@pytest.fixture
def unchecked(monkeypatch):
    """Runs without the annotation checks of the test session, as users do."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("draft_length", 0, "draft_length must be an integer >= 1, got 0"),
        ("draft_length", 2.0, "draft_length must be an integer >= 1, got 2.0"),
        ("truncate", 1, "truncate must be True or False, got 1"),
        ("tau", -0.1, "tau must be a finite number >= 0 (above 1: always unsure), got -0.1"),
        ("tau", math.nan, "tau must be a finite number >= 0 (above 1: always unsure), got nan"),
        ("tau", math.inf, "tau must be a finite number >= 0 (above 1: always unsure), got inf"),
        ("budget", -1, BUDGET + "-1"),
        ("budget", 1.5, BUDGET + "1.5"),
        ("budget", True, BUDGET + "True"),
        ("budget", "many", BUDGET + "'many'"),
        (
            "controller",
            "best",
            "controller must be one of 'consumer', 'producer', 'cost', 'random', got 'best'",
        ),
        ("keep", 1.1, "keep must be a probability from 0 to 1, got 1.1"),
        ("keep", math.nan, "keep must be a probability from 0 to 1, got nan"),
    ],
)
def test_control_config_is_checked(field, value, message, unchecked):
    with pytest.raises(UsageError) as error:
        ControlConfig(**{field: value})
    assert str(error.value) == message


def test_defaults_and_the_smallest_draft():
    config = ControlConfig()
    assert (config.draft_length, config.truncate, config.tau) == (8, True, 0.6)
    assert (config.budget, config.controller) == (None, "consumer")
    assert config.keep == 0.75
    assert ControlConfig(draft_length=1).draft_length == 1


def test_controller_arguments_are_checked():
    with pytest.raises(UsageError, match="top_k must be an integer >= 1, got 0"):
        DraftController(ControlConfig(), top_k=0, moe_layers=2)
    with pytest.raises(UsageError, match="moe_layers must be an integer >= 1, got 0"):
        DraftController(ControlConfig(), top_k=2, moe_layers=0)

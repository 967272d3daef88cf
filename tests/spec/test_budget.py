"""Verification budgets: what a restricted routing may be, and where it is the router's own."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from dejax.errors import UsageError
from dejax.spec.budget import VerifyBudget, restrict


def routing(seed, rows, experts, top_k, *, bias=0.0):
    """A router's ids, gates and probabilities; `bias` sets choice and gate apart."""
    random = np.random.default_rng(seed)
    logits = random.normal(size=(rows, experts)) + random.normal(size=experts)
    scores = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    choice = scores + bias * random.random(experts)
    ids = np.argsort(-choice, axis=1)[:, :top_k]
    ids = np.take_along_axis(ids, np.argsort(-np.take_along_axis(scores, ids, 1), axis=1), 1)
    return ids, 2.5 * np.take_along_axis(scores, ids, 1), scores


CASES = dict(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 9),
    top_k=st.integers(1, 6),
    bias=st.sampled_from([0.0, 0.5]),
    budget=st.integers(1, 30),
    select=st.sampled_from(["substitution", "truncation"]),
    weights=st.sampled_from(["compensate", "raw"]),
    rank=st.sampled_from(["weight", "residency"]),
)


@hypothesis.settings(max_examples=300)
@hypothesis.given(**CASES)
def test_hard_rules(seed, rows, top_k, bias, budget, select, weights, rank):
    ids, gates, scores = routing(seed, rows, 24, top_k, bias=bias)
    config = VerifyBudget(budget, select, weights, rank)
    found = restrict(ids, gates, scores, config, resident={0, 5, 7})
    used = found.gates > 0
    assert len(np.unique(found.ids)) <= budget + found.rescued <= budget + rows
    np.testing.assert_array_equal(found.ids[:, 0], ids[:, 0])  # every row keeps its top-1
    assert used[:, 0].all()
    for row in range(rows):
        mine = found.ids[row][used[row]].tolist()
        assert len(set(mine)) == len(mine)
        if select == "truncation":
            assert set(mine) <= set(ids[row].tolist())
    if len(np.unique(ids)) <= budget:  # enough for all: the router's own, to the bit
        np.testing.assert_array_equal(found.ids, ids)
        np.testing.assert_array_equal(found.gates, gates)
        assert not found.rescued
    elif weights == "compensate":
        np.testing.assert_allclose(found.gates.sum(axis=1), gates.sum(axis=1))
    else:
        kept = used & (found.ids == ids)
        np.testing.assert_array_equal(found.gates[kept], gates[kept])


def test_a_substitute_has_the_gate_that_the_rule_would_give_it():
    scores = np.array([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4], [0.1, 0.6, 0.1, 0.2]])
    ids = np.array([[0, 1], [3, 2], [1, 3]])
    gates = 3 * np.take_along_axis(scores, ids, 1)
    # Together: 0.6, 1.1, 0.6, 0.7. Expert 1 and 3 are the best two; row 0 keeps its top-1 too.
    found = restrict(ids, gates, scores, VerifyBudget(2, weights="raw"))
    np.testing.assert_array_equal(found.ids, [[0, 1], [3, 1], [1, 3]])
    np.testing.assert_allclose(found.gates, 3 * np.array([[0.4, 0.3], [0.4, 0.2], [0.6, 0.2]]))
    assert found.rescued == 1
    shorter = restrict(ids, gates, scores, VerifyBudget(2, "truncation", "raw"))
    np.testing.assert_allclose(shorter.gates, 3 * np.array([[0.4, 0.3], [0.4, 0], [0.6, 0.2]]))


def test_what_is_resident_goes_first_if_it_is_asked_for():
    ids, gates, scores = routing(0, 6, 24, 4)
    resident = {int(e) for e in np.argsort(scores.sum(axis=0))[:8]}  # the least wanted
    found = restrict(ids, gates, scores, VerifyBudget(8, rank="residency"), resident=resident)
    assert set(np.unique(found.ids)) <= resident | set(ids[:, 0])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(experts=0), "expected 1 or more"),
        (dict(experts=4, exact_every=-1), "expected 0 or more rounds"),
    ],
)
def test_bad_budgets_are_refused(options, says):
    with pytest.raises(UsageError, match=says):
        VerifyBudget(**options)

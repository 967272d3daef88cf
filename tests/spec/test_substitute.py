"""Which expert a draft pass takes in place of one that is not on the device."""

import hypothesis
import numpy as np
from hypothesis import strategies as st

from dejax.spec.substitute import prefer_resident


def order_of(gates, resident, *, r=1, ratio=0.8):
    found = prefer_resident(np.array([gates]), np.array([resident], bool), r=r, ratio=ratio)
    return found[0].tolist()


def test_the_best_ranked_resident_whose_gate_suffices():
    gates = [0.5, 0.45, 0.42, 0.39]
    assert order_of(gates, [1, 1, 1, 1]) == [0, 1, 2, 3]  # the top-1 is there
    assert order_of(gates, [0, 0, 1, 1]) == [2, 1, 0, 3]
    assert order_of(gates, [0, 0, 0, 1]) == [0, 1, 2, 3]  # 0.39 < 0.8 x 0.5
    assert order_of(gates, [0, 0, 0, 1], ratio=0.78) == [3, 1, 2, 0]
    assert order_of(gates, [0, 0, 0, 0], ratio=0.0) == [0, 1, 2, 3]
    assert order_of([0.5, 0.1], [0, 1], ratio=0.0) == [1, 0]
    assert order_of([0.5, 0.5], [0, 1], ratio=1.0) == [1, 0]  # as large is large enough


def test_each_of_several_is_replaced_by_another():
    gates = [0.5, 0.45, 0.42, 0.41]
    assert order_of(gates, [0, 0, 1, 1], r=2) == [2, 3, 0, 1]
    assert order_of(gates, [1, 0, 0, 1], r=2) == [0, 3, 2, 1]
    # The second asks less of its substitute than the first.
    assert order_of([0.5, 0.4, 0.35, 0.1], [0, 0, 1, 0], r=2) == [0, 2, 1, 3]


def test_ranks_need_not_go_by_gate():
    """With plain gates the ranks are those of the choice, which adds a bias to the score."""
    assert order_of([0.3, 0.2, 0.6], [0, 1, 1]) == [2, 1, 0]


@hypothesis.given(st.data())
def test_rows_are_independent_and_no_expert_is_lost(data):
    rows, k = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    r = data.draw(st.integers(1, k))
    ratio = data.draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    gates = -np.sort(-rng.random((rows, k)), axis=1)
    resident = rng.random((rows, k)) < 0.5
    order = prefer_resident(gates, resident, r=r, ratio=ratio)
    for row in range(rows):
        assert sorted(order[row]) == list(range(k))
        assert order[row].tolist() == order_of(gates[row], resident[row], r=r, ratio=ratio)
        for kept, place in enumerate(order[row, :r]):
            if place != kept:
                assert resident[row, place] and not resident[row, kept]
                assert gates[row, place] >= ratio * gates[row, kept]
            elif not resident[row, kept]:
                left = set(range(r, k)) - set(order[row, :r])
                enough = {p for p in left if gates[row, p] >= ratio * gates[row, kept]}
                assert not any(resident[row, p] for p in enough)

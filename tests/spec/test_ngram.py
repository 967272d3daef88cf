"""Prompt lookup: the longest suffix, its first place, and what followed."""

from hypothesis import given, settings
from hypothesis import strategies as st

from dejax.spec.ngram import LONGEST, lookup


def test_the_longest_suffix_wins_over_shorter_ones():
    assert lookup([3, 8, 1, 2, 3, 4, 5, 2, 3, 6, 1, 2, 3], 3) == [4, 5, 2]
    assert lookup([3, 8, 0, 2, 3, 4, 5, 2, 3, 6, 1, 2, 3], 2) == [4, 5]  # two tokens: 2, 3
    assert lookup([3, 8, 0, 9, 3, 4, 5, 7, 3], 2) == [8, 0]  # one token


def test_of_equal_places_the_first_counts():
    assert lookup([1, 7, 1, 8, 1, 9, 1], 1) == [7]


def test_what_follows_may_run_into_the_suffix_and_ends_with_the_text():
    assert lookup([5, 6, 5, 6], 8) == [5, 6]
    assert lookup([4, 4, 4, 4], 8) == [4]
    assert lookup([4, 4], 8) == [4]


def test_new_or_too_few_tokens_give_nothing():
    assert lookup([1, 2, 3], 4) == []
    assert lookup([1], 4) == [] and lookup([], 4) == []
    assert lookup([1, 1], 0) == []


@settings(max_examples=200)
@given(st.lists(st.integers(0, 3), max_size=24), st.integers(1, 6), st.integers(1, 4))
def test_against_the_definition_written_out(tokens, limit, longest):
    expected = []
    for size in range(longest, 0, -1):
        places = [i for i in range(len(tokens) - size) if tokens[i : i + size] == tokens[-size:]]
        if places:
            after = places[0] + size
            expected = tokens[after : after + limit]
            break
    assert lookup(tokens, limit, longest=longest) == expected
    assert LONGEST == 3

"""Acceptance is exact for any drafter, and every generation ends in the same place."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dejax.spec.accept import Accepted, accept, draft_limit, finish
from dejax.spec.sampling import SamplingConfig, TokenPicker

V = 5
CONTEXT = 24
PROMPT = [1, 2, 3]
Draft = tuple[list[int], list[int]]  # tokens, parents
Drafter = Callable[[list[int], int], Draft]


# The walk.


@pytest.mark.parametrize(
    ("tokens", "picks", "expected"),
    [
        ([], [7], Accepted((), 7)),  # an autoregressive step
        ([4], [7, 1], Accepted((), 7)),
        ([7], [7, 1], Accepted((1,), 1)),
        ([7, 1, 3], [7, 1, 3, 9], Accepted((1, 2, 3), 9)),  # all, and the bonus
        ([7, 1, 3], [7, 1, 4, 9], Accepted((1, 2), 4)),
        ([7, 1, 3], [7, 2, 3, 9], Accepted((1,), 2)),
        ([7, 1, 3], [6, 1, 3, 9], Accepted((), 6)),  # later rows agree and do not count
        ([1, 3], [7, 1, 3], Accepted((), 7)),  # shifted by one row
    ],
)
def test_chain(tokens, picks, expected):
    assert accept(tokens, list(range(len(tokens))), picks) == expected


def test_tree_descends_into_the_matching_sibling():
    #        0
    #   1:4     2:5
    # 3:6 4:7  5:6 6:8
    tokens, parents = np.array([4, 5, 6, 7, 6, 8]), np.array([0, 0, 1, 1, 2, 2])
    picks = np.array([5, 6, 6, 0, 0, 9, 0])
    result = accept(tokens, parents, picks)
    assert result == Accepted((2, 5), 9)
    assert all(type(value) is int for value in (*result.rows, result.token))


def test_the_first_of_equal_siblings_counts():
    assert accept([4, 4, 5], [0, 0, 2], [4, 5, 5, 1]) == Accepted((1,), 5)


@st.composite
def trees(draw):
    size = draw(st.integers(0, 12))
    tokens = draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    parents = [draw(st.integers(0, row)) for row in range(size)]
    picks = draw(st.lists(st.integers(0, 2), min_size=size + 1, max_size=size + 1))
    used: set[tuple[int, int]] = set()
    for node, parent in enumerate(parents):  # siblings differ: here an id is (token, how often)
        while (parent, tokens[node]) in used:
            tokens[node] += 3
        used.add((parent, tokens[node]))
    return tokens, parents, picks


@settings(max_examples=200)
@given(trees())
def test_lossless_accept_equals_brute_force(tree):
    """Of all paths from the root, the longest on which every node is its parent's pick."""
    tokens, parents, picks = tree
    agreeing: list[tuple[int, ...]] = [()]
    for leaf in range(1, len(tokens) + 1):
        path = [leaf]
        while path[0] != 0:
            path.insert(0, parents[path[0] - 1])
        if all(picks[a] == tokens[b - 1] for a, b in itertools.pairwise(path)):
            agreeing.append(tuple(path[1:]))
    best = max(agreeing, key=len)
    result = accept(tokens, parents, picks)
    assert result == Accepted(best, picks[best[-1] if best else 0])
    emitted = [picks[row] for row in (0, *result.rows)]
    assert emitted == [*(tokens[row - 1] for row in result.rows), result.token]


def test_arrays_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"N \+ 1 picks, got 2, 2 and 2"):
        accept([1, 2], [0, 1], [1, 2])
    with pytest.raises(ValueError, match="got 2, 1 and 3"):
        accept([1, 2], [0], [1, 2, 3])
    with pytest.raises(ValueError, match="parent of row 2 must be a row from 0 to 1, got 2"):
        accept([1, 2], [0, 2], [1, 2, 3])
    with pytest.raises(ValueError, match="parent of row 1 must be a row from 0 to 0, got -1"):
        accept([1], [-1], [1, 2])


# The end of a generation.


@pytest.mark.parametrize(
    ("emitted", "limits", "expected"),
    [
        ([5, 6], (0, 10, 10), ([5, 6], None)),
        ([5, 0, 6], (0, 10, 10), ([5, 0], "eos")),
        ([0, 9], (0, 10, 10), ([0], "eos")),
        ([5, 9, 0], (0, 10, 10), ([5, 9], "eos")),  # several end tokens
        ([5, 6, 7], (8, 10, 10), ([5, 6], "length")),
        ([5, 6], (8, 10, 10), ([5, 6], "length")),
        ([5], (8, 10, 10), ([5], None)),
        ([5, 6, 7], (0, 10, 2), ([5, 6], "context")),
        ([5, 6], (0, 10, 3), ([5, 6], None)),
        ([5, 0], (8, 10, 2), ([5, 0], "eos")),  # all three at once
        ([5, 6], (8, 10, 2), ([5, 6], "length")),
        ([5, 6, 0], (8, 10, 2), ([5, 6], "length")),  # the end token lies beyond
        ([], (0, 10, 10), ([], None)),
        ([], (0, 10, 0), ([], "context")),
        ([5], (0, 10, 0), ([], "context")),
        ([5], (10, 10, 5), ([], "length")),
    ],
)
def test_finish(emitted, limits, expected):
    already, max_new_tokens, context_left = limits
    assert expected == finish(
        emitted,
        already=already,
        max_new_tokens=max_new_tokens,
        context_left=context_left,
        eos_ids={0, 9},
    )


def test_finish_without_end_tokens():
    kept, reason = finish([0, 9], already=0, max_new_tokens=2, context_left=5, eos_ids=())
    assert (kept, reason) == ([0, 9], "length")


@settings(max_examples=200)
@given(
    st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=4), max_size=6),
    st.integers(1, 12),
    st.integers(0, 12),
)
def test_finish_does_not_see_how_tokens_were_grouped(rounds, max_new_tokens, context):
    def run(groups):
        tokens: list[int] = []
        reason = None
        for group in groups:
            if reason is None:
                kept, reason = finish(
                    group,
                    already=len(tokens),
                    max_new_tokens=max_new_tokens,
                    context_left=context - len(tokens),
                    eos_ids={0},
                )
                tokens += kept
        return tokens, reason

    assert run(rounds) == run([[token] for token in itertools.chain(*rounds)])


@pytest.mark.parametrize(
    ("remaining_new", "context_left", "expected"),
    [(100, 100, 8), (9, 100, 8), (8, 100, 7), (1, 100, 0), (100, 8, 7), (100, 1, 0), (0, 0, 0)],
)
def test_draft_limit(remaining_new, context_left, expected):
    assert draft_limit(8, remaining_new=remaining_new, context_left=context_left) == expected


@settings(max_examples=100)
@given(st.integers(1, 8), st.integers(1, 12), st.integers(1, 12))
def test_draft_limit_is_the_longest_that_can_matter(draft_length, remaining_new, context_left):
    """A full accept is never cut, and one token more would be emitted no sooner."""
    room = min(remaining_new, context_left)
    limit = draft_limit(draft_length, remaining_new=remaining_new, context_left=context_left)
    kept, _ = finish(
        [1] * (limit + 1),
        already=0,
        max_new_tokens=remaining_new,
        context_left=context_left,
        eos_ids=(),
    )
    assert len(kept) == limit + 1
    assert limit == draft_length or limit + 1 == room


# Whole generations on a toy target: logits are a fixed random function of the last two tokens.

TABLE = np.random.default_rng(0).normal(size=(V, V, V)) * 1.5


def target_logits(sequence: list[int]) -> np.ndarray:
    return TABLE[sequence[-2], sequence[-1]]


def decode(
    drafter: Drafter, config: SamplingConfig, *, max_new_tokens: int, eos_ids: set[int]
) -> tuple[list[int], str, int]:
    """The round: draft, one verification pass over all rows, accept, finish."""
    picker = TokenPicker(config, sample=0, vocab_size=V)
    sequence, new, rounds, reason = list(PROMPT), 0, 0, None
    while reason is None:
        limit = draft_limit(
            4, remaining_new=max_new_tokens - new, context_left=CONTEXT - len(sequence)
        )
        tokens, parents = drafter(sequence, limit)
        picks = []
        for row in range(len(tokens) + 1):
            path: list[int] = []
            at = row
            while at > 0:
                path.insert(0, tokens[at - 1])
                at = parents[at - 1]
            prefix = sequence + path
            picks.append(picker.pick(target_logits(prefix), position=len(prefix)))
        result = accept(np.array(tokens, int), np.array(parents, int), np.array(picks))
        kept, reason = finish(
            [picks[row] for row in (0, *result.rows)],
            already=new,
            max_new_tokens=max_new_tokens,
            context_left=CONTEXT - len(sequence),
            eos_ids=eos_ids,
        )
        sequence += kept
        new += len(kept)
        rounds += 1
        picker.forget(len(sequence))
    return sequence[len(PROMPT) :], reason, rounds


def no_draft(sequence: list[int], limit: int) -> Draft:
    return [], []


def chain(tokens: list[int]) -> Draft:
    return tokens, list(range(len(tokens)))


def make_drafter(kind: str, config: SamplingConfig, reference: list[int], seed: int) -> Drafter:
    """Drafters good and bad. Those named `long` ignore the limit they are given."""
    rng = np.random.default_rng(seed)

    def future(sequence: list[int], count: int) -> list[int]:
        done = len(sequence) - len(PROMPT)
        return reference[done : done + count]

    def random_tree(sequence: list[int], limit: int) -> Draft:
        size = int(rng.integers(0, 9))
        parents = [int(rng.integers(0, row + 1)) for row in range(size)]
        return [int(token) for token in rng.integers(0, V, size)], parents

    drafters: dict[str, Drafter] = {
        "wrong": lambda s, n: chain([(token + 1) % V for token in future(s, n)]),
        "random": lambda s, n: chain([int(token) for token in rng.integers(0, V, n)]),
        "random long": lambda s, n: chain([int(token) for token in rng.integers(0, V, n + 5)]),
        "repeats": lambda s, n: chain([s[-1]] * n),
        "perfect": lambda s, n: chain(future(s, n)),
        "perfect long": lambda s, n: chain(future(s, n + 5) + [0, 1]),
        "perfect then wrong": lambda s, n: chain([*future(s, n // 2), (future(s, 9)[-1] + 1) % V]),
        "ends at once": lambda s, n: chain([0] * n),
        "ends within": lambda s, n: chain([*future(s, 2), 0, 0]),
        "random tree": random_tree,
    }
    return drafters[kind]


DRAFTERS = (
    "wrong",
    "random",
    "random long",
    "repeats",
    "perfect",
    "perfect long",
    "perfect then wrong",
    "ends at once",
    "ends within",
    "random tree",
)


@settings(max_examples=100)
@given(
    st.sampled_from(DRAFTERS),
    st.sampled_from([SamplingConfig(), SamplingConfig(1.0), SamplingConfig(0.8, 3, 0.9)]),
    st.integers(0, 50),
    st.integers(1, 40),
    st.sampled_from([set(), {0}]),
)
def test_lossless_with_any_drafter(kind, config, seed, max_new_tokens, eos_ids):
    config = SamplingConfig(config.temperature, config.top_k, config.top_p, seed)
    limits = {"max_new_tokens": max_new_tokens, "eos_ids": eos_ids}
    reference, reason, steps = decode(no_draft, config, **limits)
    endless, _, _ = decode(no_draft, config, max_new_tokens=CONTEXT, eos_ids=set())
    drafter = make_drafter(kind, config, endless, seed)
    tokens, drafted_reason, rounds = decode(drafter, config, **limits)
    assert (tokens, drafted_reason) == (reference, reason)
    assert steps == len(reference)
    if kind == "wrong":
        assert rounds == steps
    if kind == "perfect":  # up to four accepted tokens and a bonus in every round
        assert rounds == -(-len(reference) // 5)


@pytest.mark.parametrize(("eos_ids", "reason"), [({0, 1, 2, 3, 4}, "eos"), (set(), "context")])
def test_the_toy_generations_reach_every_end(eos_ids, reason):
    tokens, found, _ = decode(no_draft, SamplingConfig(), max_new_tokens=99, eos_ids=eos_ids)
    assert found == reason
    assert len(tokens) == (1 if reason == "eos" else CONTEXT - len(PROMPT))
    assert decode(no_draft, SamplingConfig(), max_new_tokens=2, eos_ids=set())[1] == "length"

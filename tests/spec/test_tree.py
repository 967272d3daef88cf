"""Draft trees: masks, growth, the choice of nodes, names, and Sequoia's optimum by brute force."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dejax.errors import UsageError
from dejax.spec.sampling import SamplingConfig, TokenPicker
from dejax.spec.sequoia import best_static_tree
from dejax.spec.tree import (
    CHAIN,
    Node,
    TreeConfig,
    accepted_path,
    ancestor_mask,
    depths,
    full_tree,
    grow,
    is_chain,
    most_confident,
    subtree,
)
from dejax.spec.tree_options import parse_tree, show_tree

TREE = [0, 0, 1, 1, 2, 5]


@st.composite
def parent_lists(draw):
    size = draw(st.integers(0, 12))
    return sorted(draw(st.integers(0, row)) for row in range(size))


# Arrays.


def test_masks_and_depths_of_a_small_tree():
    assert depths(TREE).tolist() == [0, 1, 1, 2, 2, 2, 3]
    seen = [np.flatnonzero(row).tolist() for row in ancestor_mask(TREE)]
    assert seen == [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4], [0, 2, 5], [0, 2, 5, 6]]


@given(parent_lists())
def test_a_row_sees_its_path(parents):
    mask = ancestor_mask(parents)
    assert mask.sum(1).tolist() == (depths(parents) + 1).tolist()
    for row, parent in enumerate(parents, start=1):
        assert (mask[row] == mask[parent] | np.eye(len(mask), dtype=bool)[row]).all()


@given(st.integers(0, 9))
def test_a_chain_is_a_tree_of_width_one(length):
    assert is_chain(range(length)) and is_chain(full_tree(1, length))
    assert (ancestor_mask(range(length)) == np.tri(length + 1)).all()
    assert depths(range(length)).tolist() == list(range(length + 1))
    assert not is_chain([0, 0])


def test_the_accepted_path_is_found_by_its_tokens():
    tokens = [7, 8, 7, 9, 7, 5]
    assert accepted_path(tokens, TREE, [8, 7, 5, 3]) == (2, 5, 6)
    assert accepted_path(tokens, TREE, [7, 9]) == (1, 4)
    assert accepted_path(tokens, TREE, [9]) == accepted_path(tokens, TREE, []) == ()


@given(parent_lists(), st.data())
def test_a_prefix_closed_choice_is_a_tree_of_its_own(parents, data):
    rows = data.draw(st.sets(st.integers(1, max(len(parents), 1))))
    closed = all(row <= len(parents) and parents[row - 1] in {0, *rows} for row in rows)
    if not closed:
        with pytest.raises(ValueError, match="without its parent"):
            subtree(parents, rows)
        return
    kept, found = subtree(parents, rows)
    mask = ancestor_mask(parents)[np.ix_([0, *kept], [0, *kept])]
    assert kept == sorted(rows) and (ancestor_mask(found) == mask).all()


# Growth.


def drafted(sizes):
    """A draft that gives child j of any row token 10 * depth + j, and confidence 0.6 / (j + 1)."""

    def draft(nodes, rows, counts):
        sizes.append(len(rows))
        deep = [nodes[row - 1].depth if row else 0 for row in rows]
        return [
            [(10 * (depth + 1) + rank, 0.6 / (rank + 1)) for rank in range(count)]
            for depth, count in zip(deep, counts, strict=True)
        ]

    return draft


@pytest.mark.parametrize("limit", [1, 2, 3, 9])
def test_a_full_tree_grows_to_its_shape(limit):
    sizes: list[int] = []
    config = TreeConfig(shape=full_tree(2, 3))
    grown = grow(config, limit, drafted(sizes))
    assert [node.parent for node in grown.nodes] == list(full_tree(2, min(limit, 3)))
    assert sizes == [1, 2, 4][:limit] and grown.tries == list(range(1, len(grown.nodes) + 1))
    assert config.pass_rows() == [2, 4] and config.widths() == [2, 4, 8] and config.levels == 3


def test_a_static_tree_has_fewer_nodes_where_a_law_has_fewer_tokens_or_text_ends():
    shape = TreeConfig(shape=(0, 0, 1, 1, 2, 5))
    assert [n.parent for n in grow(shape, 9, drafted([])).nodes] == list(shape.shape or ())
    assert shape.pass_rows() == [2, 1]
    ended = grow(shape, 9, drafted([]), ends=(10,))
    assert [(n.parent, n.token) for n in ended.nodes] == [(0, 10), (0, 11), (2, 20), (3, 30)]
    lone = grow(shape, 9, lambda nodes, rows, counts: [[(5, 0.5)] for _ in rows])
    assert [node.parent for node in lone.nodes] == [0, 1]


def test_equal_draws_share_a_node_and_are_tried_twice():
    grown = grow(TreeConfig(shape=(0, 0, 0, 1)), 2, lambda n, rows, c: [[(4, 0.5)] * 3] * len(rows))
    assert [(node.token, node.parent) for node in grown.nodes] == [(4, 0), (4, 1)]
    assert grown.tries == [1, 1, 1, 2]


def test_the_most_confident_nodes_are_expanded_and_kept():
    sizes: list[int] = []
    config = TreeConfig(branching=3, depth=3, expand=2, keep=5)
    nodes = grow(config, 9, drafted(sizes)).nodes
    assert sizes == [1, 2, 2] == [1, *config.pass_rows()] and config.widths() == [3, 6, 6]
    assert len(nodes) == 15 and config.nodes == 5
    kept = list(most_confident(nodes, config.keep))
    bar = sorted((node.confidence for node in nodes), reverse=True)[4]
    assert all(nodes[row - 1].confidence >= bar for row in kept)
    subtree([node.parent for node in nodes], kept)  # prefix-closed


@given(parent_lists(), st.data())
def test_a_choice_by_confidence_is_prefix_closed_even_on_ties(parents, data):
    nodes: list[Node] = []
    for parent in parents:
        own = data.draw(st.sampled_from([0.0, 0.5, 1.0]))
        above = nodes[parent - 1].confidence if parent else 1.0
        nodes.append(Node(0, parent, 1, own, own * above))
    rows = most_confident(nodes, data.draw(st.integers(0, 12)))
    subtree(parents, rows)


@pytest.mark.parametrize(
    "sampling",
    [SamplingConfig(), SamplingConfig(1.0, seed=3), SamplingConfig(0.8, top_k=3, seed=4)],
    ids=["greedy", "sampled", "few"],
)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 8))
def test_children_are_what_would_be_picked_one_after_the_other(sampling, seed, count):
    picker = TokenPicker(sampling, sample=0, vocab_size=6)
    logits = np.round(np.random.default_rng(seed).normal(size=6), 1)
    found = picker.children(logits, position=2, count=count)
    assert found[0][0] == picker.pick(logits, position=2)
    scores = picker.scores(logits, position=2)
    most = min(count, int((scores > -np.inf).sum()))
    best = sorted(range(6), key=lambda token: (-scores[token], token))[:most]
    assert [token for token, _ in found] == best
    sure = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
    np.testing.assert_allclose([own for _, own in found], sure[best])


# Names.


@pytest.mark.parametrize(
    ("text", "nodes", "levels", "passes"),
    [
        ("chain", 0, 0, []),
        ("2x3", 14, 3, [2, 4]),
        ("best8", 8, 3, [2, 4]),
        ("2x3:8", 8, 3, [2, 4]),
        ("3x1", 3, 1, []),
        ("eagle:20", 20, 6, [4] * 5),
        ("eagle:9,2,3", 9, 3, [2, 2]),
        ("static:0,0,1,3", 4, 3, [1, 1]),
    ],
)
def test_trees_by_name(text, nodes, levels, passes):
    tree = parse_tree(text)
    assert (tree.nodes, tree.levels, tree.pass_rows()) == (nodes, levels, passes)
    assert parse_tree(show_tree(tree)) == tree
    assert tree.is_chain == (tree == CHAIN)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bush", "'bush' is no tree; expected chain, BxD"),
        ("", "is no tree"),
        ("2x", "is no tree"),
        ("-2x3", "is no tree"),
        ("0x3", "expected numbers from 1"),
        ("2x3:0", "expected numbers from 1"),
        ("10x9", "more than 10000 nodes"),
        ("99999x1", "expected numbers from 1 to 10000"),
        ("eagle:", "is no tree"),
        ("eagle:0", "expected numbers from 1"),
        ("9" * 5000 + "x1", "is no tree"),
        ("static:0," + "9" * 5000, "is no tree"),
        ("static:1", "parent of node 1 is 1"),
        ("static:0,0,3", "parent of node 3 is 3; expected an earlier node"),
        ("static:0,1,0", "breadth first"),
    ],
)
def test_bad_names_are_refused(text, message):
    with pytest.raises(UsageError, match=message):
        parse_tree(text)


# The static optimum.


def all_trees(nodes):
    """Parents, breadth first, of every ordered tree of so many nodes."""
    for parents in itertools.product(*(range(row) for row in range(1, nodes + 1))):
        if list(parents) == sorted(parents):
            yield parents


def value(parents, acceptance):
    """Tokens a round of a tree; nothing where a row has more children than there are ranks."""
    worth, ranks = [1.0], dict.fromkeys(range(len(parents) + 1), 0)
    for parent in parents:
        if ranks[parent] == len(acceptance):
            return 0.0
        worth.append(worth[parent] * acceptance[ranks[parent]])
        ranks[parent] += 1
    return sum(worth)


@given(
    acceptance=st.lists(st.floats(0.01, 0.9), min_size=1, max_size=3),
    draft=st.floats(0.01, 0.5),
    row=st.floats(0.01, 0.3),
    levels=st.integers(1, 4),
)
def test_the_static_tree_is_the_best_of_all(acceptance, draft, row, levels):
    best = best_static_tree(
        acceptance,
        draft_seconds=draft,
        verify_seconds=lambda rows: 1.0 + row * (rows - 1),
        most_nodes=5,
        most_levels=levels,
    )
    costs = [1.0]
    for nodes in range(1, 6):
        for parents in all_trees(nodes):
            deep = int(depths(parents).max())
            if deep <= levels and value(parents, acceptance):
                seconds = deep * draft + 1.0 + row * nodes
                costs.append(seconds / value(parents, acceptance))
    assert best.seconds_per_token == pytest.approx(min(costs))
    if best.parents:
        assert value(best.parents, acceptance) == pytest.approx(best.tokens_per_round)
        assert max(depths(best.parents)) <= levels and len(best.parents) <= 5


def test_cheap_rows_make_wide_trees_and_dear_drafts_make_none():
    options = dict(verify_seconds=lambda rows: 1.0, most_nodes=12, most_levels=4)
    wide = best_static_tree([0.6, 0.2, 0.1], draft_seconds=0.1, **options)
    assert len(wide.parents) == 12 and not is_chain(wide.parents)
    assert best_static_tree([0.6], draft_seconds=9.0, **options).parents == ()

"""Overlap, unique experts and their nulls, on routings whose statistics are known."""

import numpy as np
import pytest

from dejax.errors import UsageError
from dejax.routing.overlap import (
    RoutingRecord,
    expert_load,
    expert_shares,
    independent_overlap,
    independent_unique,
    overlap,
    shuffled_overlap,
    shuffled_unique,
    unique_experts,
)

E, K = 32, 4


def record_of(ids, documents=None, positions=None, num_experts=E):
    """One or several layers of ids; by default one document."""
    ids = np.asarray(ids)
    ids = ids if ids.ndim == 3 else ids[None]
    tokens = ids.shape[1]
    documents = np.zeros(tokens, int) if documents is None else np.asarray(documents)
    positions = np.arange(tokens) if positions is None else np.asarray(positions)
    return RoutingRecord(ids, documents, positions, num_experts)


def planted(keep: int, *, documents: int = 40, length: int = 200, seed: int = 0) -> RoutingRecord:
    """Documents in which each token keeps exactly `keep` experts of the one before it."""
    rng = np.random.default_rng(seed)
    chosen = np.argsort(rng.random((documents, E)))[:, :K]
    tokens = [chosen]
    for _ in range(length - 1):
        # Smallest first: experts that were not chosen before, in random order.
        key = rng.random((documents, E))
        np.put_along_axis(key, chosen, np.inf, axis=1)
        new = np.argsort(key)[:, : K - keep]
        chosen = np.concatenate([rng.permuted(chosen, axis=1)[:, :keep], new], axis=1)
        tokens.append(chosen)
    return record_of(
        np.stack(tokens, axis=1).reshape(-1, K),
        np.repeat(np.arange(documents), length),
        np.tile(np.arange(length), documents),
    )


@pytest.mark.parametrize("keep", [0, 1, 2, 3, 4])
def test_a_planted_overlap_is_recovered(keep):
    record = planted(keep)
    assert overlap(record)[0] == keep / K
    assert unique_experts(record, rows=2)[0] == pytest.approx((2 - keep / K) * K)


@pytest.mark.parametrize("keep", [1, 3])
def test_both_nulls_forget_the_planted_overlap(keep):
    record = planted(keep)
    shares = expert_shares(record)
    assert independent_overlap(shares)[0] == pytest.approx(K / E, rel=0.05)
    assert shuffled_overlap(record)[0] == pytest.approx(K / E, rel=0.05)
    for rows in (2, 4, 8):
        expected = E * (1 - (1 - K / E) ** rows)
        assert independent_unique(shares, rows=rows)[0] == pytest.approx(expected, rel=0.01)
        assert shuffled_unique(record, rows=rows)[0] == pytest.approx(expected, rel=0.01)


def test_overlap_decays_with_distance_as_the_chain_says():
    # The excess over the stationary K / E shrinks by one factor a step.
    record = planted(3, documents=100, length=300)
    base = K / E
    factor = (3 / K - base) / (1 - base)
    for distance in (1, 2, 3):
        expected = base + (1 - base) * factor**distance
        assert overlap(record, distance=distance)[0] == pytest.approx(expected, rel=0.01)


def test_popular_experts_are_no_overlap_of_neighbours():
    rng = np.random.default_rng(0)
    popularity = np.log(1 / np.arange(1, E + 1))
    noise = rng.gumbel(size=(20000, E))
    ids = np.argsort(-(popularity + noise), axis=1)[:, :K]
    record = record_of(ids, np.arange(20000) // 100, np.arange(20000) % 100)
    shares = expert_shares(record)
    assert independent_overlap(shares)[0] > 2 * K / E
    assert overlap(record)[0] == pytest.approx(independent_overlap(shares)[0], rel=0.02)
    assert shuffled_overlap(record)[0] == pytest.approx(overlap(record)[0], rel=0.02)
    measured = unique_experts(record, rows=4)[0]
    assert measured == pytest.approx(shuffled_unique(record, rows=4)[0], rel=0.01)


def test_the_shuffle_keeps_positions():
    # Experts are a function of the position alone: no document has anything of its own.
    positions = np.tile(np.arange(50), 10)
    ids = (positions[:, None] // 2 * K + np.arange(K)) % E
    record = record_of(ids, np.repeat(np.arange(10), 50), positions)
    assert shuffled_overlap(record)[0] == overlap(record)[0]
    assert shuffled_unique(record, rows=8)[0] == unique_experts(record, rows=8)[0]
    assert overlap(record)[0] > 2 * independent_overlap(expert_shares(record))[0]


def test_the_shuffle_takes_every_token_from_another_document():
    # A document's tokens all use its own experts: any repeat would be seen.
    documents = np.repeat(np.arange(8), 30)
    record = record_of(documents[:, None] * K + np.arange(K), documents, np.tile(np.arange(30), 8))
    assert overlap(record)[0] == 1 and shuffled_overlap(record)[0] == 0
    assert unique_experts(record, rows=8)[0] == K
    assert shuffled_unique(record, rows=8)[0] == 8 * K
    assert np.isnan(shuffled_unique(record, rows=9)[0])  # there are eight documents


def test_blocks_stay_in_one_document_and_do_not_jump():
    ids = np.arange(6)[:, None] * 4 + np.arange(4)
    # Two documents, the first one interrupted (a row ended and its positions start again).
    record = record_of(ids, [0, 0, 0, 1, 1, 1], [0, 1, 0, 0, 1, 3])
    for rows, blocks in ((1, 6), (2, 2)):
        assert unique_experts(record, rows=rows)[0] == 4 * rows, blocks
    assert np.isnan(unique_experts(record, rows=3)[0])
    assert np.isnan(overlap(record, distance=2)[0])
    assert np.isnan(overlap(record.where(np.zeros(6, bool)))[0])


def test_layers_are_told_apart_and_order_in_a_row_does_not_matter():
    one, two = planted(1).ids[0], planted(3, seed=1).ids[0]
    record = planted(1)
    both = RoutingRecord(
        np.stack([one, two[:, ::-1]]), record.documents, record.positions, record.num_experts
    )
    assert overlap(both).tolist() == [1 / K, 3 / K]


def test_load():
    ids = np.array([[0, 1], [0, 2], [0, 1], [0, 2]])
    shares = expert_shares(record_of(ids, num_experts=4))
    assert shares.tolist() == [[1, 0.5, 0.5, 0]]
    load = expert_load(shares)
    assert (load.max_over_mean[0], load.min_over_mean[0], load.dead[0]) == (2, 0, 1)
    assert independent_overlap(shares)[0] == 1.5 / 2


def test_where_selects_tokens():
    record = planted(2)
    part = record.where(record.documents < 10)
    assert part.ids.shape == (1, 2000, K) and overlap(part)[0] == 0.5


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[0, 4]], "ids from 0 to 4; expected 0 to 3"),
        ([[0, 1], [1, 1]], "same expert twice"),
    ],
)
def test_errors(ids, message):
    with pytest.raises(UsageError, match=message):
        record_of(ids, num_experts=4)

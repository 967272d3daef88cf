"""Statistics of hand-made records with answers worked out by hand."""

import dataclasses
import math
from typing import Any

import pytest

from infer.prefetch import LoadEvent
from infer.report import (
    acceptance_by_rank,
    alpha_by_position,
    distinct_ngrams,
    identity,
    loads_by_kind,
    rounds_of,
    shuffled_quality,
    stats,
)
from infer.trace import Round


def pairs(*ids):
    return frozenset((1, i) for i in ids)


def load(kind, *, seconds=1.0, size=100):
    return LoadEvent(kind, 1, 0, size, 2.0, 2.0 + seconds, 0.0, True)


PREFILL = Round(
    kind="prefill",
    committed=10,
    emitted=(1,),
    required=pairs(0, 1, 2, 3),
    loads=(load("demand"), load("demand")),
    total_seconds=3.0,
    target_seconds=3.0,
)
FULL = Round(  # all three accepted, and a bonus
    kind="round",
    committed=11,
    drafted=(5, 6, 7),
    parents=(0, 1, 2),
    confidences=(0.9, 0.8, 0.7),
    draft_passes=3,
    draft_used=pairs(0, 1),
    required=pairs(0, 1, 2, 3, 4, 5),
    resident=pairs(5),
    prefetched=pairs(2, 3, 7, 8),
    accepted=3,
    emitted=(5, 6, 7, 8),
    loads=(load("draft"), load("prefetch", seconds=0.5), load("demand", size=50)),
    draft_seconds=0.3,
    target_seconds=0.5,
    total_seconds=1.0,
    device_seconds=0.4,
    load_seconds=0.2,
)
PARTLY = Round(  # the second rejected, after a look in vain at a fourth
    kind="round",
    committed=15,
    drafted=(1, 2, 3),
    parents=(0, 1, 2),
    confidences=(0.9, 0.5, 0.5),
    draft_passes=4,
    draft_used=pairs(0),
    required=pairs(0, 1, 2, 3),
    prefetched=pairs(1),
    accepted=1,
    emitted=(1, 9),
    draft_seconds=0.4,
    target_seconds=0.5,
    total_seconds=1.5,
    device_seconds=0.5,
    load_seconds=0.1,
)
CUT = Round(  # both accepted, but the first was an end token
    kind="round",
    committed=17,
    drafted=(4, 4),
    parents=(0, 1),
    confidences=(1.0, 1.0),
    draft_passes=2,
    required=pairs(0, 1),
    resident=pairs(0, 1),
    accepted=2,
    emitted=(4,),
    finish_reason="eos",
    draft_seconds=0.2,
    target_seconds=0.2,
    total_seconds=0.5,
)
STEP = Round(  # autoregressive
    kind="round",
    committed=18,
    required=pairs(0, 1, 2),
    emitted=(3,),
    loads=(load("demand"),),
    target_seconds=0.4,
    total_seconds=0.5,
    device_seconds=0.2,
    load_seconds=0.3,
)


def test_a_decode_worked_out_by_hand():
    result = stats([PREFILL, FULL, PARTLY, CUT])
    assert result["drafted"] == 8 and result["accepted"] == 6
    assert result["acceptance_rate"] == 6 / 8
    assert result["rounds"] == 3 and result["emitted"] == 7  # the prefill's token is not counted
    assert result["tokens_per_round"] == 7 / 3
    # First tokens: 3 of 3; second: 2 of 3; third, of the two drafts that had one: FULL only.
    assert result["alpha_pos"] == [1.0, 2 / 3, 1.0]
    assert result["unique_layer_experts"] == (6 + 4 + 2) / 3
    assert result["draft_layer_experts"] == (2 + 1 + 0) / 3
    # FULL: of the missing 2, 3, 4 (5 was resident, 0 and 1 the drafter's own) came 2 and 3, of
    # four prefetched. PARTLY: of the missing 1, 2, 3 came 1, of one prefetched.
    assert result["prefetch_recall"] == (2 + 1) / (3 + 3)
    assert result["prefetch_precision"] == (2 + 1) / (4 + 1)
    assert result["loads"] == {
        "draft": {"count": 1, "bytes": 100, "seconds": 1.0},
        "prefetch": {"count": 1, "bytes": 100, "seconds": 0.5},
        "demand": {"count": 1, "bytes": 50, "seconds": 1.0},
    }
    assert result["prefill_loads"]["demand"] == {"count": 2, "bytes": 200, "seconds": 2.0}
    assert result["prefill_seconds"] == 3.0 and result["decode_seconds"] == 3.0
    assert result["decode_tps"] == 7 / 3.0
    assert result["draft_pass_seconds"] == pytest.approx(0.9 / 9)
    assert result["target_pass_seconds"] == pytest.approx(1.2 / 3)
    assert result["host_share"] == pytest.approx((3.0 - 1.2) / 3.0)


def test_autoregressive_decoding_has_no_drafts_to_speak_of():
    result = stats([PREFILL, STEP, STEP])
    assert result["tokens_per_round"] == 1.0 and result["decode_tps"] == 2.0
    assert result["drafted"] == result["accepted"] == 0 and result["alpha_pos"] == []
    undefined = ("acceptance_rate", "prefetch_recall", "prefetch_precision", "draft_pass_seconds")
    assert [result[name] for name in undefined] == [None] * 4
    assert result["draft_layer_experts"] is None
    assert result["loads"]["demand"]["count"] == 2 and result["loads"]["draft"]["count"] == 0


@pytest.mark.parametrize("trace", [[], [PREFILL]])
def test_nothing_decoded_is_no_division_by_zero(trace):
    result = stats(trace)
    assert result["rounds"] == result["emitted"] == result["decode_seconds"] == 0
    assert result["tokens_per_round"] is None and result["decode_tps"] is None
    assert result["prefill_seconds"] == 3.0 * len(trace)


def test_several_traces_joined_are_one_sum():
    traces = [[PREFILL, FULL], [PREFILL, PARTLY, STEP]]
    joined = stats([record for trace in traces for record in trace])
    apart = [stats(trace) for trace in traces]
    for name in ("drafted", "accepted", "rounds", "emitted", "prefill_seconds", "decode_seconds"):
        assert joined[name] == sum(result[name] for result in apart), name
    for kind, entry in joined["loads"].items():
        assert entry["count"] == sum(result["loads"][kind]["count"] for result in apart)


def test_rejected_first_tokens_leave_later_positions_out():
    rejected = Round(kind="round", committed=1, drafted=(1, 2), accepted=0, emitted=(3,))
    assert alpha_by_position([rejected]) == [0.0]
    assert alpha_by_position([rejected, PARTLY]) == [0.5, 0.0]
    assert alpha_by_position([]) == []


def test_depths_of_trees_count_where_something_was_drafted_below():
    #   0 -> 1:4, 2:5;  1 -> 3:6;  2 -> 4:6;  4 -> 5:7
    tree: dict[str, Any] = dict(
        kind="round", committed=1, drafted=(4, 5, 6, 6, 7), parents=(0, 0, 1, 2, 4)
    )
    deep = Round(**tree, accepted=3, emitted=(5, 6, 7, 8))
    first = Round(**tree, accepted=2, emitted=(4, 6, 9))  # a leaf at depth 2
    none = Round(**tree, emitted=(9,))
    assert alpha_by_position([deep]) == [1.0, 1.0, 1.0]
    assert alpha_by_position([first]) == [1.0, 1.0]
    assert alpha_by_position([deep, first, none]) == [2 / 3, 1.0, 1.0]
    # Of row 0 in all three, rank 1 once, rank 2 once; below, single children, one of them a leaf.
    assert acceptance_by_rank([deep, first, none]) == [(1 + 3) / (3 + 3), 1 / 3]
    ended = Round(**tree, accepted=2, emitted=(5,))  # the generation ended within the path
    assert alpha_by_position([ended]) == [1.0, 1.0]


def test_the_control_has_the_prefetches_of_other_rounds():
    rounds = [
        Round(kind="round", committed=1, required=pairs(*needs), prefetched=pairs(*guess))
        for needs, guess in [((0, 1), (0, 1)), ((), ()), ((2, 3), (2, 3)), ((0, 2), (0, 5))]
    ]
    found = stats(rounds)
    assert found["prefetch_recall"] == 5 / 6 and found["prefetch_precision"] == 5 / 6
    # Half of three on: the first is given {2, 3}, the third {0, 5}, the last {0, 1}.
    assert shuffled_quality(rounds) == (1 / 6, 1 / 6)
    assert (found["shuffled_recall"], found["shuffled_precision"]) == (1 / 6, 1 / 6)
    assert shuffled_quality(rounds[:2]) == (None, None)


def test_prefetches_without_use_have_precision_zero_and_no_prefetch_has_none():
    wasted = Round(kind="round", committed=1, required=pairs(1), prefetched=pairs(2), emitted=(3,))
    assert stats([wasted])["prefetch_recall"] == stats([wasted])["prefetch_precision"] == 0.0
    needless = Round(
        kind="round",
        committed=1,
        required=pairs(1, 2),
        resident=pairs(1),
        draft_used=pairs(2),
        prefetched=pairs(2),
        emitted=(3,),
    )
    assert stats([needless])["prefetch_recall"] is None  # nothing was missing
    assert stats([needless])["prefetch_precision"] == 1.0


def test_rounds_and_loads():
    assert rounds_of([PREFILL, FULL, STEP]) == [FULL, STEP]
    assert loads_by_kind([])["prefetch"] == {"count": 0, "bytes": 0, "seconds": 0.0}


def test_the_speedup_is_what_its_parts_say():
    found = identity(stats([PREFILL, FULL, PARTLY, CUT]), stats([PREFILL, STEP, STEP]))
    assert found["tokens_per_round"] == 7 / 3
    # An AR token takes 0.5 s; three rounds take 1.2 s of target passes, 0.9 s of draft passes and
    # 3.0 s in all.
    assert found["cost_verify"] == pytest.approx(1.2 / 3 / 0.5)
    assert found["cost_draft_total"] == pytest.approx(0.9 / 3 / 0.5)
    assert found["cost_other"] == pytest.approx(0.9 / 3 / 0.5)
    assert found["measured_speedup"] == pytest.approx((7 / 3.0) / (2 / 1.0))
    assert found["predicted_speedup"] == pytest.approx(found["measured_speedup"])
    beside_itself = identity(stats([STEP]), stats([STEP]))
    assert beside_itself["predicted_speedup"] == pytest.approx(1.0)
    assert beside_itself["cost_draft_total"] == 0.0


@pytest.mark.parametrize(("of", "ar"), [([], [STEP]), ([FULL], []), ([], [])])
def test_the_speedup_of_nothing_is_no_division_by_zero(of, ar):
    found = identity(stats(of), stats(ar))
    assert found["measured_speedup"] is None and found["predicted_speedup"] is None


def test_governed_rounds_are_counted():
    governed = dataclasses.replace(STEP, governed=True)
    result = stats([PREFILL, governed, FULL, governed])
    assert result["governed_rounds"] == 2 and result["rounds"] == 3
    assert stats([STEP])["governed_rounds"] == 0


def test_distinct_ngrams():
    assert distinct_ngrams([[1, 2, 3, 4, 5], [1, 2, 3, 4]]) == 2 / 3
    assert distinct_ngrams([[7] * 10]) == 1 / 7
    assert distinct_ngrams([[1, 2, 3]]) is None
    assert distinct_ngrams([[1, 2, 1]], n=1) == 2 / 3


def test_no_statistic_is_nan():
    def numbers(value):
        if isinstance(value, dict):
            return [n for entry in value.values() for n in numbers(entry)]
        if isinstance(value, list):
            return [n for entry in value for n in numbers(entry)]
        return [value] if isinstance(value, float) else []

    for trace in ([], [PREFILL], [PREFILL, STEP], [PREFILL, FULL, PARTLY, CUT]):
        assert all(math.isfinite(n) for n in numbers(stats(trace)))


def test_the_controller_s_share_is_of_all_rounds():
    rounds = [
        Round("round", 3, emitted=(1,), control_seconds=control, total_seconds=1.0)
        for control in (0.25, 0.0)
    ]
    assert stats(rounds)["controller_share"] == 0.125

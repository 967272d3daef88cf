"""The closed forms of `dejax upcycle`, its grouping of neurons and its text, on small arrays."""

import json

import numpy as np
import pytest

from dejax.errors import UsageError
from tests.train.small_model import tokenizer_of
from train.upcycle_fit import RIDGES, Moments, RouterMoments, fit_correction, fit_router
from train.upcycle_measure import routing_statistics
from train.upcycle_split import Activity, balanced_clusters, order_neurons
from train.upcycle_target import choose_layout
from train.upcycle_text import calibration_windows, check_apart, held_out_windows

RNG = np.random.default_rng(0)
D, N, ROWS = 6, 8, 400


def folds_of(own_map, gap_map, *, noise=0.0, folds=4):
    """Moments of rows whose own and gap are linear in phi, but for noise; and the rows."""
    rng, moments, rows = np.random.default_rng(1), [], []
    for _ in range(folds):
        phi = rng.standard_normal((ROWS, N))
        own = phi @ own_map.T + noise * rng.standard_normal((ROWS, D))
        gap = phi @ gap_map.T + noise * rng.standard_normal((ROWS, D))
        fold = Moments.zero(D, N)
        fold.add(phi[:100], own[:100], gap[:100])
        fold.add(phi[100:], own[100:], gap[100:])
        moments.append(fold)
        rows.append((phi, own + gap))
    return moments, rows


def test_the_correction_finds_the_map_that_is_missing():
    own, gap = RNG.standard_normal((2, D, N))
    found = fit_correction(folds_of(own, gap)[0])
    assert found.ridge == min(RIDGES)  # there is no noise to be wary of
    np.testing.assert_allclose(found.change, (own + gap) / (1 + found.ridge), atol=0.1)
    assert found.beta == pytest.approx(1, abs=0.1)
    assert found.after < 0.02 * found.before


def test_a_gap_that_is_noise_is_not_chased():
    """Own is worth making up for; the gap says nothing on rows it was not fitted on."""
    own = RNG.standard_normal((D, N))
    rng = np.random.default_rng(2)
    folds, _ = folds_of(own, np.zeros((D, N)))
    for fold in folds:
        fold.gap += 30 * rng.standard_normal((D, N))
    assert fit_correction(folds).beta < 0.6


def test_the_error_after_is_that_on_the_fold_left_out():
    moments, rows = folds_of(*RNG.standard_normal((2, D, N)), noise=2.0)
    found = fit_correction(moments)
    left = [
        np.sum(np.square(wanted - phi @ change.T))
        for (phi, wanted), change in zip(rows, found.by_fold, strict=True)
    ]
    assert found.after == pytest.approx(sum(left) / (4 * ROWS * D))
    before = sum(np.sum(np.square(wanted)) for _, wanted in rows)
    assert found.before == pytest.approx(before / (4 * ROWS * D))
    seen = [np.sum(np.square(wanted - phi @ found.change.T)) for phi, wanted in rows]
    assert sum(seen) < sum(left) < before


def test_the_router_ranks_experts_as_their_norms_do():
    weight, bias = RNG.standard_normal((5, D)), RNG.standard_normal(5)
    moments = RouterMoments.zero(D, 5)
    h = RNG.standard_normal((3000, D)) + 0.5
    moments.add(h, h @ weight.T + bias)
    found, selection = fit_router(moments, sharpness=1e-3)
    scores = 1 / (1 + np.exp(-h @ found.T)) + selection
    wanted = np.argsort(h @ weight.T + bias, axis=1)
    assert (np.argsort(scores, axis=1) == wanted).all(axis=1).mean() > 0.98


def test_neurons_that_act_together_share_an_expert():
    rng = np.random.default_rng(0)
    causes = rng.exponential(size=(2000, 4))
    acts = np.repeat(causes, 8, axis=1) + 0.1 * rng.exponential(size=(2000, 32))
    acts[:, [3, 20]] *= 50  # the most important ones
    mixed = rng.permutation(32)
    acts = acts[:, mixed]
    activity = Activity(acts.sum(axis=0), acts.T @ acts, len(acts))
    order = order_neurons(activity, shared=2, experts=3, rng=rng)
    assert sorted(order) == list(range(32))
    assert set(mixed[order[:2]]) == {3, 20}
    groups = balanced_clusters(activity.correlation(np.arange(32)), 4, np.random.default_rng(1))
    assert np.bincount(groups).tolist() == [8] * 4
    causes_of = [set(mixed[groups == group] // 8) for group in range(4)]
    assert all(len(causes) == 1 for causes in causes_of)


@pytest.mark.parametrize(
    "neurons, expected",
    [(1536, (384, 36, 32, 18)), (3072, (768, 36, 64, 18)), (8192, (2048, 48, 128, 24)),
     (192, (32, 5, 32, 2))],
)  # fmt: skip
def test_layouts_by_default(neurons, expected):
    layout = choose_layout(neurons, 4)
    assert (layout.shared, layout.experts, layout.width, layout.top_k) == expected


def write_text(path, kinds):
    lines = [json.dumps({"text": "word " * 3 + str(i), "kind": kind}) for i, kind in kinds]
    path.write_text("\n".join(lines))
    return path


def test_calibration_has_no_padding_and_depends_on_the_seed_alone(tmp_path):
    options = dict(tokens=4096, window=64, multiple=8)
    a, b, c = (calibration_windows(tokenizer_of(), (), seed=s, **options) for s in (0, 0, 1))
    assert a["tokens"].shape == (64, 64) and (a["segment_ids"] > 0).all()
    assert all((a[key] == b[key]).all() for key in a)
    assert (a["tokens"] != c["tokens"]).any()


def test_files_add_kinds_of_their_own(tmp_path):
    file = write_text(tmp_path / "mine.jsonl", [(i, "own") for i in range(300)])
    options = dict(tokens=4096, window=64, multiple=8, seed=0)
    plain, more = (calibration_windows(tokenizer_of(), f, **options) for f in ((), (file,)))
    word = tokenizer_of()("word word", add_special_tokens=False)["input_ids"][-1:]
    rate = [np.isin(batch["tokens"], word).mean() for batch in (plain, more)]
    assert rate[1] > rate[0]
    windows = held_out_windows(tokenizer_of(), (file,), window=64, most=3)
    assert {kind: batch["tokens"].shape for kind, batch in windows.items()} == {"own": (3, 64)}


def test_text_that_would_not_be_used_is_refused(tmp_path):
    file = write_text(tmp_path / "mine.jsonl", [(0, "own")])
    options = dict(window=64, multiple=4, seed=0)
    with pytest.raises(UsageError, match="no token was taken of kind own; .*at least [0-9]+ for"):
        calibration_windows(tokenizer_of(), (file,), tokens=256, **options)


def test_text_is_not_fitted_and_measured_on(tmp_path):
    mine = write_text(tmp_path / "mine.jsonl", [(i, "own") for i in range(3)])
    other = write_text(tmp_path / "other.jsonl", [(i, "own") for i in range(3, 6)])
    both = write_text(tmp_path / "both.jsonl", [(i, "else") for i in (7, 2)])
    check_apart((mine,), (other,))
    check_apart((mine,), ())
    with pytest.raises(UsageError, match="both.jsonl: line 2: calibration text and measured on"):
        check_apart((mine,), (other, both))


def test_routing_statistics_of_a_known_record():
    from dejax.routing.overlap import RoutingRecord

    ids = np.array([[[0, 1], [0, 1], [0, 2], [0, 3]]])
    record = RoutingRecord(ids, np.zeros(4, int), np.arange(4), 4)
    found = routing_statistics(record)
    assert found["load_max_over_mean"] == [2.0]
    assert found["overlap"] == [pytest.approx((2 + 1 + 1) / 3 / 2)]
    assert found["unique_4"] == [4.0]

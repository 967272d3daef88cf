"""What measured times come to: medians, the price of a row, and what hides behind a draft."""

import pytest

from infer.prefetch import LoadEvent
from infer.timing import Timings


def loads(*seconds):
    return [LoadEvent("demand", 1, 0, 100, 2.0, 2.0 + each, 0.0, True) for each in seconds]


def measured(*, step=1.0, row=0.1):
    """Timings with AR steps, draft passes and target passes over several widths."""
    timings = Timings()
    timings.begin()
    for rows in (1, 1, 3, 5, 5, 9):
        timings.target_pass(rows, 0.8 + row * rows + 0.3, waited=0.3)
    timings.round(1, step, plain=True)
    for _ in range(3):
        timings.draft_pass(0.4, waited=0.1)
    timings.loads(loads(0.0625, 0.0625))
    return timings


def test_nothing_is_told_before_a_step_and_a_draft_were_measured():
    timings = Timings()
    assert timings.step_times() is None and timings.step_seconds == 0
    timings.draft_pass(0.1, waited=0.0)
    assert timings.step_times() is None
    timings.round(1, 1.0, plain=True)
    times = timings.step_times()
    assert times is not None and (times.row, times.load) == (0.0, 0.0)
    assert timings.hidden_loads(3, in_flight=0) == 0


def test_the_price_of_a_row_is_the_slope_without_the_loads():
    times = measured().step_times()
    assert times is not None
    assert times.row == pytest.approx(0.1)
    assert times.draft == pytest.approx(0.4) and times.load == 0.0625
    flat = measured(row=-0.05).step_times()  # noise may slope down; a row never pays back
    assert flat is not None and flat.row == 0.0


def test_the_rate_starts_at_the_steps_and_is_never_below_it():
    timings = measured(step=0.5)
    timings.begin()
    times = timings.step_times()
    assert times is not None and times.rate == pytest.approx(2.0)
    timings.round(4, 0.5, plain=False)
    times = timings.step_times()
    assert times is not None and times.rate == pytest.approx(5 / 1.0)
    timings.round(1, 50.0, plain=False)
    times = timings.step_times()
    assert times is not None and times.rate == pytest.approx(2.0)


def test_one_outlier_changes_nothing():
    timings = measured()
    before = timings.step_times(), timings.hidden_loads(4, in_flight=0)
    timings.draft_pass(100.0, waited=0.0)
    timings.target_pass(5, 100.0, waited=0.0)
    timings.loads(loads(100.0))
    after = timings.step_times(), timings.hidden_loads(4, in_flight=0)
    assert before[0] is not None and after[0] is not None and before[1] == after[1]
    assert after[0].draft == before[0].draft and after[0].load == before[0].load
    # A pass more at one width weighs that width more, and these lie on one line.
    assert after[0].row == pytest.approx(before[0].row)


def test_what_hides_is_the_time_in_which_the_link_is_free():
    timings = measured()  # 0.3 s of a pass without its own loads, 0.0625 s a load
    assert timings.hidden_loads(2, in_flight=0) == 9
    assert timings.hidden_loads(2, in_flight=5) == 4
    assert timings.hidden_loads(2, in_flight=50) == 0
    assert timings.hidden_loads(0, in_flight=0) == 0

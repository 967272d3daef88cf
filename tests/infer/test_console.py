"""Progress as plain lines: what is aside of it is in no rate."""

import pytest

from infer import console


@pytest.fixture
def clock(monkeypatch):
    """A clock that is moved by hand."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def test_time_aside_is_in_no_rate(clock, capsys):
    with console.progress("train", 11, "steps") as bar:
        with bar.aside("compiling", 1):
            clock[0] += 1000
        bar.advance(1)
        for _ in range(5):
            clock[0] += 2
            bar.advance(1)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "train: compiling",
        "train: 4/11 steps  0.5 steps/s  14s left",
        "train: 6/11 steps  0.5 steps/s  10s left",
    ]


def test_a_rate_that_is_not_known_yet_is_not_shown(clock, capsys):
    with console.progress("train", 2, "steps") as bar:
        with bar.aside(units=1):
            clock[0] += 9
        bar.advance(1)
    assert capsys.readouterr().err == "train: 1/2 steps  after 0s\n"


def test_what_an_earlier_run_did_counts_for_no_rate(clock, capsys):
    with console.progress("train", 110, "steps", done=100) as bar:
        for _ in range(3):
            clock[0] += 2
            bar.advance(1)
    assert capsys.readouterr().err == "train: 103/110 steps  0.5 steps/s  14s left\n"

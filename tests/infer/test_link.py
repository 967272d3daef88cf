"""Links: their text form, and the pacing of a simulated one on a clock moved by sleeping alone."""

import pytest

from dejax.errors import UsageError
from infer.link import Link, Pacer, parse_link


class FakeClock:
    """Sleeps exactly, or late by `late` seconds."""

    def __init__(self, late=0.0):
        self.now = 0.0
        self.late = late
        self.sleeps = 0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        assert seconds > 0
        self.sleeps += 1
        self.now += seconds + self.late


@pytest.mark.parametrize(
    ("text", "link", "described"),
    [
        ("real", Link(), "real link"),
        ("sim:16", Link(16e9), "simulated link, 16 GB/s"),
        ("sim:0.5,0", Link(0.5e9), "simulated link, 0.5 GB/s"),
        ("sim:25,10", Link(25e9, 1e-5), "simulated link, 25 GB/s, 10 us a transfer"),
    ],
)
def test_parse(text, link, described):
    assert parse_link(text) == link
    assert link.simulated is (text != "real")
    assert link.describe() == described


@pytest.mark.parametrize(
    "text",
    ["", "Real", "real:1", "sim", "sim:", "sim:0", "sim:-1", "sim:nan", "sim:inf", "sim:fast"]
    + ["sim:1,", "sim:1,-1", "sim:1,nan", "sim:1,inf", "sim:1,2,3", "pcie:16", "16"],
)
def test_parse_says_what_it_accepts(text):
    with pytest.raises(UsageError, match="real, disk, sim:GBPS or sim:GBPS,LATENCY_US") as error:
        parse_link(text)
    assert repr(text) in str(error.value)


def test_a_link_is_checked_however_it_is_made():
    for arguments in [(0.0,), (-1.0,), (float("nan"),), (1.0, -1.0), (None, 1.0)]:
        with pytest.raises(UsageError):
            Link(*arguments)


def test_transfers_queue_up_on_a_simulated_link():
    clock = FakeClock()
    pacer = Pacer(Link(1024.0, 0.5), clock=clock, sleep=clock.sleep)
    assert pacer.finish(1024, requested=0.0)[:2] == (0.0, 1.5)
    assert clock.now == 1.5
    assert pacer.finish(2048, requested=0.25)[:2] == (1.5, 4.0)  # asked for during the first
    clock.now = 10.0
    assert pacer.finish(512, requested=9.0)[:2] == (9.0, 10.0)  # the link was idle
    assert clock.now == 10.0


def test_a_simulated_link_is_never_faster_than_the_transfer_itself():
    clock = FakeClock()
    pacer = Pacer(Link(1024.0), clock=clock, sleep=clock.sleep)
    clock.now = 3.0  # it took 3 s to move what the link would move in 1 s
    assert pacer.finish(1024, requested=0.0)[:2] == (0.0, 3.0)
    assert clock.sleeps == 0
    assert pacer.finish(1024, requested=0.0)[:2] == (3.0, 4.0)


def test_late_sleeps_do_not_add_up():
    clock = FakeClock(late=0.125)
    pacer = Pacer(Link(1024.0), clock=clock, sleep=clock.sleep)
    ends = [pacer.finish(256, requested=0.0)[1] for _ in range(8)]
    assert ends == [0.25 * count for count in range(1, 9)]
    assert clock.now == 2.125  # the last sleep's delay alone


def test_a_short_sleep_is_continued():
    clock = FakeClock()
    pacer = Pacer(Link(1024.0), clock=clock, sleep=lambda seconds: clock.sleep(seconds / 2 + 1e-3))
    _, end, _ = pacer.finish(1024, requested=0.0)
    assert end == 1.0 and clock.now >= 1.0 and clock.sleeps > 1


def test_the_real_link_only_books():
    clock = FakeClock()
    pacer = Pacer(Link(), clock=clock, sleep=clock.sleep)
    clock.now = 2.0
    assert pacer.finish(1 << 30, requested=1.0)[:2] == (1.0, 2.0)
    clock.now = 5.0
    assert pacer.finish(1 << 30, requested=1.0)[:2] == (2.0, 5.0)
    assert clock.sleeps == 0

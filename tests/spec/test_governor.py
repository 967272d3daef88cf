"""The governor under simulated times: what it may lose, and what it must gain."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dejax.spec.governor import Decision, Governor, GovernorConfig

SHORT = GovernorConfig(first_measure=2, measure=1, test=2, set=3, rest=4, longest_rest=8)


class World:
    """Rounds whose tokens and seconds are simulated; an AR step takes `step` seconds."""

    def __init__(self, config=None, *, step=1.0):
        self.decisions: list[Decision] = []
        self.governor = Governor(config, on_decision=self.decisions.append)
        self.step, self.tokens, self.seconds, self.speculative = step, 0, 0.0, 0

    def round(self, tokens, steps, *, plain=1.0):
        """One round: `tokens` for `steps` AR steps if it may speculate; whether it did."""
        speculates = self.governor.speculates
        tokens = tokens if speculates else 1
        seconds = self.step * (steps if speculates else plain)
        self.governor.observe(tokens=tokens, seconds=seconds, speculative=speculates)
        self.tokens += tokens
        self.seconds += seconds
        self.speculative += speculates
        return speculates

    @property
    def speed(self):
        """Beside autoregressive decoding."""
        return self.tokens * self.step / self.seconds


def pattern(world, rounds):
    """Which of so many rounds that give 2 tokens for one step speculate."""
    return "".join("s" if world.round(2, 1.0) else "p" for _ in range(rounds))


def test_phases_where_speculation_pays():
    world = World(SHORT)
    assert pattern(world, 12) == "pp" + "ss" + "psss" + "psss"
    (made,) = world.decisions  # that it goes on is no news
    assert made == Decision(True, tokens=2.0, steps=1.0, retry_tokens=0, first=True)
    assert made.utility == 2.0


def test_phases_where_it_does_not():
    world = World(SHORT)
    kinds = ["s" if world.round(1, 1.5) else "p" for _ in range(26)]
    # Two to measure, two tests, then rests of 4, 8 and 8 (the longest) tokens.
    assert "".join(kinds) == "ppss" + "ppppss" + "ppppppppss" + "pppppp"
    assert [made.retry_tokens for made in world.decisions] == [4, 8, 8]
    assert [made.first for made in world.decisions] == [True, False, False]
    assert not any(made.speculate for made in world.decisions)
    assert (world.decisions[0].tokens, world.decisions[0].steps) == (1.0, 1.5)


def test_after_a_rest_it_must_pay_by_a_margin():
    world = World(SHORT)
    for steps, on in [(1.1, False), (0.97, False), (0.9, True)]:
        before = len(world.decisions)
        while len(world.decisions) == before:
            world.round(1, steps)
        assert world.decisions[-1].speculate is on, steps
    assert World(SHORT).decisions == []
    straight = World(SHORT)
    while not straight.decisions:
        straight.round(1, 0.97)
    assert straight.decisions[0].speculate  # at first no margin is asked for


def test_success_makes_the_next_rest_short_again():
    world = World(SHORT)
    while len(world.decisions) < 2:
        world.round(1, 1.5)
    assert [made.retry_tokens for made in world.decisions] == [4, 8]
    while len(world.decisions) < 3:
        world.round(4, 1.0)
    while len(world.decisions) < 4:
        world.round(1, 1.5)
    assert world.decisions[-1].retry_tokens == 4


def test_used_up_credit_ends_a_phase_at_once_and_lengthens_the_rest():
    world = World()
    while not world.decisions:
        world.round(1, 8.0)  # the credit is 6
    assert world.speculative == 1
    (made,) = world.decisions
    config = world.governor.config
    left = config.credit + config.rate * world.tokens - 7.0
    assert not made.speculate and left < 0
    assert made.retry_tokens == pytest.approx((config.retry_credit - left) / config.rate, abs=2)
    rested = 0
    while not world.governor.speculates:
        world.round(1, 8.0)
        rested += 1
    assert rested == pytest.approx(made.retry_tokens, abs=1)


def test_what_one_sequence_gained_is_not_there_for_the_next():
    world = World()
    for _ in range(40):
        world.round(4, 1.0)
    world.governor.begin()
    lost = 0.0
    while world.governor.speculates:
        world.round(1, 2.0)
        lost += 1.0
    assert lost <= world.governor.config.credit + 2


def test_rounds_that_drafted_nothing_measure_and_do_not_count():
    governor = Governor(SHORT)
    for _ in range(50):
        governor.observe(tokens=1, seconds=1.0, speculative=False)
    assert governor.speculates  # still to be tested
    governor.observe(tokens=1, seconds=3.0, speculative=True)
    assert governor.speculates
    governor.observe(tokens=1, seconds=3.0, speculative=True)
    assert not governor.speculates


def test_speculative_rounds_before_anything_is_measured_are_passed_over():
    governor = Governor(SHORT)
    governor.observe(tokens=1, seconds=100.0, speculative=True)
    assert not governor.speculates  # it measures first


def test_no_time_at_all_is_no_division_by_zero():
    world = World(SHORT, step=0.0)
    for _ in range(20):
        world.round(2, 1.0)
    assert world.decisions[0].speculate
    assert Decision(True, 2.0, 0.0, 0, True).utility == float("inf")


# The two promises.

rounds_of_any_kind = st.tuples(st.integers(1, 9), st.floats(1.0, 6.0))
regimes = st.lists(st.tuples(st.integers(1, 120), rounds_of_any_kind), min_size=1, max_size=12)


@settings(max_examples=60)
@given(regimes, st.floats(1e-4, 10.0), st.lists(st.integers(60, 300), max_size=3))
def test_never_below_095_of_autoregressive_speed(regimes, step, starts):
    """Any times and acceptance that change at any tokens, sequences that begin anywhere."""
    world = World(step=step)
    excess = lambda: world.seconds / step - world.tokens  # noqa: E731
    starts = sorted({0, *starts})
    began: list[tuple[int, float]] = []
    end = 0
    config = world.governor.config
    while world.tokens < 400:
        for length, (tokens, steps) in regimes:
            end += length
            while world.tokens < min(end, 400):
                if starts and world.tokens >= starts[0]:
                    starts.pop(0)
                    world.governor.begin()
                    began.append((world.tokens, excess()))
                world.round(tokens, steps)
                for first, before in began:
                    within = config.credit + 5.0 + config.rate * (world.tokens - first)
                    assert excess() - before <= within + 1e-6
    assert world.speed >= 0.95


@settings(max_examples=15)
@given(st.randoms(use_true_random=False), st.integers(1, 4), st.floats(2.0, 6.0))
def test_an_opponent_that_sees_the_phase_wins_no_more(generator, tokens, steps):
    """Good in tests and bad afterwards, or the other way round, or by the toss of a coin."""
    for good in ("test", "set", None):
        world = World()
        while world.tokens < 400:
            pays = generator.random() < 0.5 if good is None else world.governor._phase == good
            world.round(*((5, 1.5) if pays else (tokens, steps)))
        assert world.speed >= 0.95


@settings(max_examples=30)
@given(st.integers(1, 9), st.floats(1.02, 5.0), st.floats(1e-4, 10.0))
def test_nearly_full_gain_where_speculation_pays(tokens, utility, step):
    """After the first test; a round takes one AR step at least."""
    steps = max(1.0, tokens / utility)
    if tokens / steps < 1.02:
        return
    world = World(step=step)
    while not world.decisions:
        world.round(tokens, steps)
    before, seconds = world.tokens, world.seconds
    while world.tokens - before < 1000:
        world.round(tokens, steps)
    gained = (world.tokens - before) * step / (world.seconds - seconds)
    assert gained >= 0.95 * tokens / steps


def chance(generator, share, length):
    """Tokens of a round whose drafted tokens are each accepted with probability `share`."""
    tokens = 1
    while tokens <= length and generator.random() < share:
        tokens += 1
    return tokens


@pytest.mark.parametrize("utility", [0.7, 0.95, 1.5, 2.0])
def test_noise_in_times_and_acceptance(utility):
    """Means over 20 runs: rounds of 1 to 5 tokens, AR steps and rounds that vary by a tenth."""
    share, length = 0.8, 4
    mean = sum(share**i for i in range(length + 1))
    speeds = []
    for seed in range(20):
        generator = random.Random(seed)
        world = World()
        while world.tokens < 400:
            noise = generator.lognormvariate(0, 0.1), generator.lognormvariate(0, 0.1)
            tokens = chance(generator, share, length)
            world.round(tokens, noise[0] * mean / utility, plain=noise[1])
        speeds.append(world.speed)
    overall = len(speeds) / sum(1 / speed for speed in speeds)
    assert overall >= 0.95 * max(1.0, utility)
    assert min(speeds) >= 0.9


def test_a_change_for_the_better_is_found():
    world = World()
    while world.tokens < 300:
        world.round(1, 2.0)
    assert world.speculative < 20
    before, seconds = world.tokens, world.seconds
    while world.tokens < 2300:
        world.round(3, 1.5)
    assert (world.tokens - before) / (world.seconds - seconds) > 1.7

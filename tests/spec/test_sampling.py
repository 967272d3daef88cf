"""Token choice: the generator, the law, the seeded draw, and what the draw may depend on."""

import math

import jaxtyping
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dejax.errors import FailedError, UsageError
from dejax.spec import sampling
from dejax.spec.sampling import SamplingConfig, TokenPicker, gumbel_noise, log_probs, threefry2x32

few_logits = st.lists(
    st.one_of(st.integers(-3, 3).map(float), st.floats(-30, 30), st.just(-math.inf)),
    min_size=1,
    max_size=9,
).filter(lambda values: max(values) > -math.inf)
configs = st.builds(
    SamplingConfig,
    temperature=st.sampled_from([0.25, 0.7, 1.0, 3.0]),
    top_k=st.integers(0, 10),
    top_p=st.sampled_from([0.05, 0.3, 0.5, 0.9, 0.999, 1.0]),
)


@pytest.fixture
def unchecked(monkeypatch):
    """Runs without the annotation checks of the test session, as users do."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def expected_log_probs(logits: list[float], config: SamplingConfig) -> list[float]:
    """The law in plain Python, from its definition."""
    ids = [i for i, value in enumerate(logits) if value > -math.inf]
    scores = {i: (logits[i] - max(logits)) / config.temperature for i in ids}
    ids.sort(key=lambda i: (-scores[i], i))
    if config.top_k:
        ids = ids[: config.top_k]
    total = sum(math.exp(scores[i]) for i in ids)
    if config.top_p < 1:
        kept, mass = [], 0.0
        for i in ids:
            if mass >= config.top_p * total:
                break
            kept.append(i)
            mass += math.exp(scores[i])
        ids = kept
    log_total = math.log(sum(math.exp(scores[i]) for i in ids))
    inside = set(ids)
    return [scores[i] - log_total if i in inside else -math.inf for i in range(len(logits))]


# The generator.


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 2, (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry_known_answers(key, counter, expected):
    """Vectors of Random123's kat_vectors file (threefry2x32, 20 rounds)."""
    first, second = (np.array([word], np.uint32) for word in counter)
    words = threefry2x32(key, (first, second))
    assert tuple(int(word[0]) for word in words) == expected


def test_noise_is_pinned():
    """A change of these numbers changes the tokens of every seed that users have noted down."""
    noise = gumbel_noise(seed=7, sample=3, position=41, token_ids=np.array([0, 1, 50_000]))
    np.testing.assert_allclose(
        noise, [2.2410211684251804, 1.120784940432979, 0.5631813180179975], rtol=1e-14
    )


def test_noise_of_a_token_does_not_depend_on_the_others_asked_for():
    everything = gumbel_noise(seed=1, sample=2, position=3, token_ids=np.arange(1000))
    some = np.array([999, 0, 17, 500, 18])
    part = gumbel_noise(seed=1, sample=2, position=3, token_ids=some)
    np.testing.assert_array_equal(part, everything[some])
    assert part.dtype == np.float64
    one = gumbel_noise(seed=1, sample=2, position=3, token_ids=np.array([17], np.int64))
    assert one[0] == everything[17]


def test_noise_is_gumbel_and_changes_with_each_of_the_four_integers():
    base = {"seed": 5, "sample": 0, "position": 9, "token_ids": np.arange(20_000)}
    streams = [
        gumbel_noise(**base),
        gumbel_noise(**{**base, "seed": 6}),
        gumbel_noise(**{**base, "sample": 1}),
        gumbel_noise(**{**base, "position": 10}),
        gumbel_noise(**{**base, "token_ids": np.arange(20_000, 40_000)}),
    ]
    for noise in streams:
        assert stats.kstest(noise, "gumbel_r").pvalue > 1e-3
    correlation = np.corrcoef(streams) - np.eye(len(streams))
    assert np.abs(correlation).max() < 4.5 / math.sqrt(20_000)


@pytest.mark.parametrize("word", [0, 2**32 - 1])
def test_noise_is_finite_at_the_ends_of_the_uniform(monkeypatch, word):
    extreme = np.full(1, word, np.uint32)
    monkeypatch.setattr(sampling, "threefry2x32", lambda key, counter: (extreme, extreme))
    noise = gumbel_noise(seed=0, sample=0, position=0, token_ids=np.array([0]))
    bits = (word << 20 | word >> 12) & (2**52 - 1)
    assert math.isfinite(noise[0])
    assert noise[0] == pytest.approx(-math.log(-math.log1p((2 * bits + 1 - 2**53) / 2**53)))


# The law.


@settings(max_examples=200)
@given(few_logits, configs)
def test_log_probs_follow_the_definition(logits, config):
    law = log_probs(np.array(logits), config)
    np.testing.assert_allclose(law, expected_log_probs(logits, config), rtol=1e-9, atol=1e-9)
    assert np.exp(law).sum() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (SamplingConfig(1.0), [0.4, 0.3, 0.2, 0.1]),
        (SamplingConfig(1.0, top_k=2), [4 / 7, 3 / 7, 0, 0]),
        (SamplingConfig(1.0, top_k=99), [0.4, 0.3, 0.2, 0.1]),
        (SamplingConfig(1.0, top_p=0.39), [1, 0, 0, 0]),  # never empty
        (SamplingConfig(1.0, top_p=0.41), [4 / 7, 3 / 7, 0, 0]),  # reaching, not staying below
        (SamplingConfig(1.0, top_p=0.95), [0.4, 0.3, 0.2, 0.1]),
        # top-p acts on what top-k left, renormalised: 4/7 < .6 <= 1.
        (SamplingConfig(1.0, top_k=2, top_p=0.55), [1, 0, 0, 0]),
        (SamplingConfig(1.0, top_k=2, top_p=0.6), [4 / 7, 3 / 7, 0, 0]),
        # temperature acts first: squared and normalised, 16/30 > .5.
        (SamplingConfig(0.5, top_p=0.5), [1, 0, 0, 0]),
        (SamplingConfig(0.5), [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
        (SamplingConfig(0.0), [1, 0, 0, 0]),
    ],
)
def test_log_probs_by_hand(config, expected):
    logits = np.log([0.4, 0.3, 0.2, 0.1]).astype(np.float32)
    np.testing.assert_allclose(np.exp(log_probs(logits, config)), expected, rtol=1e-6)


def test_top_p_stops_where_the_mass_is_exactly_reached():
    law = log_probs(np.zeros(4), SamplingConfig(1.0, top_p=0.5))
    np.testing.assert_array_equal(np.isfinite(law), [True, True, False, False])


@pytest.mark.parametrize("config", [SamplingConfig(1.0, top_k=3), SamplingConfig(1.0, top_p=0.55)])
def test_ties_at_the_boundary_keep_the_lower_ids(config):
    law = log_probs(np.array([0.0, 1.0, 0.0, 0.0, 1.0]), config)
    np.testing.assert_array_equal(np.isfinite(law), [config.top_k == 3, True, False, False, True])


def test_a_wide_nucleus_in_a_large_vocabulary():
    """The sort of a first few hundred candidates must not cut the nucleus short."""
    logits = np.random.default_rng(0).normal(size=2000)
    for top_p in (0.1, 0.9, 0.9999):
        config = SamplingConfig(1.0, top_p=top_p)
        expected = expected_log_probs(list(logits), config)
        np.testing.assert_allclose(log_probs(logits, config), expected, rtol=1e-9)


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-3, 1e300])
def test_extreme_temperatures_stay_finite(temperature):
    law = log_probs(np.array([3e4, -3e4, 2.9e4, 3e4]), SamplingConfig(temperature))
    expected = [0.25] * 4 if temperature > 1 else [0.5, 0, 0, 0.5]
    np.testing.assert_allclose(np.exp(law), expected, atol=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("config", [SamplingConfig(), SamplingConfig(1.0)])
def test_diverged_logits_are_reported(config, bad):
    logits = np.array([0.0, bad, 1.0])
    picker = TokenPicker(config, sample=0, vocab_size=3)
    message = f"largest of the logits that choose the token at position 12 is {bad}, expected a"
    with pytest.raises(FailedError, match=message):
        picker.pick(logits, position=12)
    with pytest.raises(FailedError, match=f"largest of the logits is {bad}"):
        picker.confidence(logits)
    with pytest.raises(FailedError, match=f"largest of the logits is {bad}"):
        log_probs(logits, config)


def test_a_row_without_any_allowed_token_is_reported():
    with pytest.raises(FailedError, match="is -inf"):
        log_probs(np.full(3, -np.inf), SamplingConfig(1.0))


# The picker.


def test_greedy_takes_the_lowest_of_equals():
    picker = TokenPicker(SamplingConfig(), sample=0, vocab_size=5)
    assert picker.pick(np.array([-np.inf, 2.0, 1.0, 2.0, 0.0]), position=0) == 1
    assert picker.pick(np.array([1, 2, 3, 3, 3], ml_dtypes.bfloat16), position=0) == 2
    assert type(picker.pick(np.zeros(5), position=1)) is int


def test_seeded_pick_is_the_argmax_of_law_plus_noise():
    rng = np.random.default_rng(1)
    config = SamplingConfig(0.8, top_k=5, top_p=0.9, seed=11)
    picker = TokenPicker(config, sample=4, vocab_size=8)
    for position in range(200):
        logits = rng.normal(size=8)
        noise = gumbel_noise(seed=11, sample=4, position=position, token_ids=np.arange(8))
        expected = np.argmax(log_probs(logits, config) + noise)
        assert picker.pick(logits, position=position) == expected
        assert np.argmax(picker.scores(logits, position=position)) == expected


def test_seeded_pick_depends_on_seed_sample_position_and_logits_only(monkeypatch):
    """Any order, any repetition, any forgetting, another picker: the same token."""
    rng = np.random.default_rng(2)
    config = SamplingConfig(1.0, top_k=20, seed=3)
    cases = [(int(rng.integers(40)), rng.normal(size=50)) for _ in range(150)]
    fresh = [
        TokenPicker(config, sample=6, vocab_size=50).pick(logits, position=position)
        for position, logits in cases
    ]
    monkeypatch.setattr(sampling, "_MAX_POSITIONS", 3)
    shared = TokenPicker(config, sample=6, vocab_size=50)
    for i in rng.permutation(np.repeat(np.arange(150), 2)):
        position, logits = cases[i]
        assert shared.pick(logits, position=position) == fresh[i]
        if rng.random() < 0.2:
            shared.forget(int(rng.integers(40)))
        assert len(shared._noise) <= 3
    for other in (SamplingConfig(1.0, top_k=20, seed=4), config):
        changed = TokenPicker(other, sample=7 - (other != config), vocab_size=50)
        picks = [changed.pick(logits, position=position) for position, logits in cases]
        assert picks != fresh


def test_noise_is_computed_once_a_position_and_for_survivors_only(monkeypatch):
    asked: list[tuple[int, list[int]]] = []

    def counting(*, seed, sample, position, token_ids):
        asked.append((position, list(token_ids)))
        return gumbel_noise(seed=seed, sample=sample, position=position, token_ids=token_ids)

    monkeypatch.setattr(sampling, "gumbel_noise", counting)
    picker = TokenPicker(SamplingConfig(1.0, top_k=2), sample=0, vocab_size=6)
    draft, target = np.array([0, 5, 4, 0, 0, 0.0]), np.array([0, 5, 0, 4, 0, 0.0])
    picker.pick(draft, position=8)
    picker.pick(draft, position=8)
    picker.pick(target, position=8)
    assert asked == [(8, [1, 2]), (8, [3])]
    picker.pick(draft, position=9)
    picker.forget(9)
    picker.pick(draft, position=9)
    assert asked[2:] == [(9, [1, 2])]
    picker.pick(draft, position=8)
    assert asked[3:] == [(8, [1, 2])]


LAW_CASES = [
    (SamplingConfig(1.0, seed=1), 2.0),
    (SamplingConfig(0.6, top_k=4, seed=2), 1.0),
    (SamplingConfig(1.4, top_p=0.8, seed=3), 1.0),
    (SamplingConfig(1.0, top_k=6, top_p=0.9, seed=4), 1.0),
]


@pytest.mark.parametrize("along", ["sample", "position"])
@pytest.mark.parametrize(("config", "scale"), LAW_CASES)
def test_picks_follow_the_law(config, scale, along, unchecked):
    """Chi-square over independent samples at one position, and over positions of one sample."""
    logits = scale * np.random.default_rng(config.seed).normal(size=8)
    draws = 2000
    if along == "sample":
        pickers = [TokenPicker(config, sample=i, vocab_size=8) for i in range(draws)]
        picks = [picker.pick(logits, position=77) for picker in pickers]
    else:
        picker = TokenPicker(config, sample=5, vocab_size=8)
        picks = [picker.pick(logits, position=i) for i in range(draws)]
    counts = np.bincount(picks, minlength=8)
    law = np.exp(log_probs(logits, config))
    inside = law > 0
    assert counts[~inside].sum() == 0
    assert stats.chisquare(counts[inside], draws * law[inside]).pvalue > 1e-3
    # Negative control: the same test tells this law from one that is a little off.
    wrong = np.exp(0.7 * np.log(law[inside]))
    assert stats.chisquare(counts[inside], draws * wrong / wrong.sum()).pvalue < 1e-3


def test_shared_noise_matches_as_often_as_theory_says(unchecked):
    """Exactly sum_x 1 / sum_y max(p_y/p_x, q_y/q_x), and so at least (1 - TV) / (1 + TV)."""
    rng = np.random.default_rng(4)
    config = SamplingConfig(1.0, seed=9)
    draws = 1500
    for case in range(4):
        p, q = rng.dirichlet(np.full(6, 0.7), size=2) + 1e-6
        p, q = p / p.sum(), q / q.sum()
        picker = TokenPicker(config, sample=case, vocab_size=6)
        matches = [
            picker.pick(np.log(p), position=i) == picker.pick(np.log(q), position=i)
            for i in range(draws)
        ]
        exact = sum(1 / np.maximum(p / p[x], q / q[x]).sum() for x in range(6))
        variation = 0.5 * np.abs(p - q).sum()
        noise = 4 * math.sqrt(exact * (1 - exact) / draws)
        assert exact >= (1 - variation) / (1 + variation) - 1e-12
        assert np.mean(matches) == pytest.approx(exact, abs=noise)


@settings(max_examples=40)
@given(few_logits, configs)
def test_confidence_is_the_largest_probability(logits, config):
    row = np.array(logits)
    picker = TokenPicker(config, sample=0, vocab_size=len(row))
    largest = np.exp(max(expected_log_probs(logits, config)))
    assert picker.confidence(row) == pytest.approx(largest)
    assert 0 < picker.confidence(row) <= 1
    greedy = TokenPicker(SamplingConfig(0.0, top_k=1), sample=0, vocab_size=len(row))
    softmax = np.exp(max(expected_log_probs(logits, SamplingConfig(1.0))))
    assert greedy.confidence(row) == pytest.approx(softmax)


# What users may get wrong.


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", -0.5, "temperature must be a finite number >= 0 (0 is greedy), got -0.5"),
        (
            "temperature",
            math.nan,
            "temperature must be a finite number >= 0 (0 is greedy), got nan",
        ),
        (
            "temperature",
            math.inf,
            "temperature must be a finite number >= 0 (0 is greedy), got inf",
        ),
        ("temperature", "1", "temperature must be a finite number >= 0 (0 is greedy), got '1'"),
        ("top_k", -1, "top_k must be an integer >= 0 (0 keeps all), got -1"),
        ("top_k", 1.5, "top_k must be an integer >= 0 (0 keeps all), got 1.5"),
        ("top_p", 0.0, "top_p must be a number above 0 and at most 1 (1 keeps all), got 0.0"),
        ("top_p", 1.01, "top_p must be a number above 0 and at most 1 (1 keeps all), got 1.01"),
        ("top_p", math.nan, "top_p must be a number above 0 and at most 1 (1 keeps all), got nan"),
        ("seed", -1, "seed must be an integer from 0 to 4294967295, got -1"),
        ("seed", 2**32, "seed must be an integer from 0 to 4294967295, got 4294967296"),
        ("seed", True, "seed must be an integer from 0 to 4294967295, got True"),
    ],
)
def test_sampling_config_is_checked(field, value, message, unchecked):
    with pytest.raises(UsageError) as error:
        SamplingConfig(**{field: value})
    assert str(error.value) == message


def test_limits_of_the_config_are_allowed(unchecked):
    config = SamplingConfig(temperature=2, top_k=10**9, top_p=1, seed=2**32 - 1)
    assert config.rule == "R5"
    assert SamplingConfig().rule == "R0"


def test_picker_arguments_are_checked(unchecked):
    with pytest.raises(UsageError, match="sample must be an integer from 0 to 4294967295, got -1"):
        TokenPicker(SamplingConfig(), sample=-1, vocab_size=4)
    with pytest.raises(UsageError, match="vocab_size must be an integer >= 1, got 0"):
        TokenPicker(SamplingConfig(), sample=0, vocab_size=0)
    picker = TokenPicker(SamplingConfig(1.0), sample=0, vocab_size=4)
    with pytest.raises(UsageError, match="position must be an integer from 0 to 4294967295"):
        picker.pick(np.zeros(4), position=-1)
    for call in (picker.confidence, lambda row: picker.pick(row, position=0)):
        for shape in [(5,), (1, 4)]:
            with pytest.raises(ValueError, match="logits must be one row of 4, got shape"):
                call(np.zeros(shape))

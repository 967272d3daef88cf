"""T0: in float64, every mode emits the tokens of autoregressive decoding, whatever the settings.

The yardstick of autoregressive decoding is a loop that knows nothing of the engine: one forward
pass over the whole sequence a token. All other modes are held against autoregressive decoding.
"""

import contextlib
import dataclasses
import functools
from dataclasses import dataclass

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from dejax.ckpt.draft_state import resolve_draft
from dejax.spec.control import ControlConfig
from dejax.spec.governor import Governor, GovernorConfig
from dejax.spec.sampling import SamplingConfig, gumbel_noise, log_probs
from dejax.target import load_target
from infer.decode import decode, make_drafter
from infer.decode_options import DecodeOptions, Mode
from infer.decoder import Decoder, Offload
from infer.link import parse_link
from infer.report import stats
from infer.timing import Pace
from tests.infer.random_target import (
    CONTEXT,
    SHAPES,
    draft_of,
    random_prompt,
    random_target,
    store_of,
)

LENGTHS = (1, 6, 23, 60, 127, 128, 129, 250, CONTEXT - 5, CONTEXT - 1)
"""Prompts around the 128 rows of a prefill block, and prompts that leave little of the context."""
SAMPLINGS = (
    SamplingConfig(),
    SamplingConfig(temperature=1.0),
    SamplingConfig(temperature=0.7, seed=11),
    SamplingConfig(temperature=1.5, top_k=5, seed=3),
    SamplingConfig(temperature=1.2, top_p=0.8, seed=2**32 - 1),
    SamplingConfig(temperature=2.0, top_k=20, top_p=0.9, seed=5),
)
HASTY = GovernorConfig(first_measure=1, measure=1, test=1, set=2, rest=2, longest_rest=2)
"""A governor that comes to every kind of phase within a few tokens."""


pytestmark = pytest.mark.usefixtures("x64")


@dataclass(frozen=True)
class Place:
    """Where the experts are: caches in experts (None: all of them), kind of store, link."""

    device_cache: int | None = 0
    host_cache: int | None = None
    on_disk: bool = False
    link: str = "real"


@dataclass(frozen=True)
class Case:
    """What fixes the tokens: target, prompt, and how tokens are chosen and end.

    `horizon` is the length of the one autoregressive run from which cases that end earlier are cut.
    """

    shape: str
    length: int
    sampling: SamplingConfig
    sample: int
    max_new_tokens: int
    stop_at_eos: bool
    horizon: int = 40


@dataclass(frozen=True)
class Setting:
    """What must not matter."""

    mode: Mode
    r: int
    control: dict
    prefetch: bool
    place: Place
    governed: bool = False


class Lab:
    """Targets, their decoders and their autoregressive tokens, each made once."""

    def __init__(self, folder):
        self.folder = folder
        self.open = contextlib.ExitStack()
        self.target = functools.cache(random_target)
        self.disk = functools.cache(lambda shape: store_of(self.target(shape), folder / shape))
        self.memory = functools.cache(lambda shape: store_of(self.target(shape)))
        self.decoder = functools.cache(self._decoder)
        self.autoregressive = functools.cache(self._autoregressive)

    def _decoder(self, shape: str, with_draft: bool, place: Place) -> Decoder:
        target = self.target(shape)
        store = self.disk(shape) if place.on_disk else self.memory(shape)
        size = store.bytes_per_expert
        offload = Offload(
            device_cache=None if place.device_cache is None else place.device_cache * size,
            host_cache=None if place.host_cache is None else place.host_cache * size,
            link=parse_link(place.link),
        )
        draft = draft_of(target) if with_draft else None
        return self.open.enter_context(Decoder(target, draft=draft, offload=offload, store=store))

    def run(self, case: Case, setting: Setting):
        """The trace of one prompt. Nothing is compiled ahead: a sweep needs few of the sizes."""
        decoder = self.decoder(case.shape, setting.mode == "draft-expert", setting.place)
        options = DecodeOptions(
            mode=setting.mode,
            r=setting.r,
            max_new_tokens=case.max_new_tokens,
            sampling=case.sampling,
            control=ControlConfig(**setting.control),
            prefetch=setting.prefetch,
            stop_at_eos=case.stop_at_eos,
        )
        prompt = random_prompt(case.length)
        drafter = make_drafter(decoder.engine, options)
        pace = Pace(governor=Governor(HASTY) if setting.governed else None)
        with jax.transfer_guard("disallow"):
            return tuple(
                decode(
                    decoder.engine, prompt, options, sample=case.sample, drafter=drafter, pace=pace
                )
            )

    def expected(self, case: Case):
        """Autoregressive tokens and why they end, cut by hand from one long run without ends."""
        endless = dataclasses.replace(case, max_new_tokens=case.horizon, stop_at_eos=False)
        tokens = outcome(self.autoregressive(endless))[0]
        room = CONTEXT - case.length
        for count, token in enumerate(tokens, start=1):
            if case.stop_at_eos and token in SHAPES[case.shape].eos_ids:
                return tokens[:count], "eos"
            if count == case.max_new_tokens:
                return tokens[:count], "length"
            if count == room:
                return tokens[:count], "context"
        raise AssertionError("the long run is too short")

    def _autoregressive(self, case: Case):
        return self.run(case, Setting("ar", 1, {}, False, Place()))


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    lab = Lab(tmp_path_factory.mktemp("stores"))
    with lab.open:
        yield lab


def outcome(trace):
    """New tokens and why they ended."""
    return [token for record in trace for token in record.emitted], trace[-1].finish_reason


def naive(target, case: Case):
    """Tokens of a loop over whole forward passes, chosen by the definition of the rule."""
    tokens = random_prompt(case.length)
    for _ in range(case.max_new_tokens):
        padded = np.zeros((1, CONTEXT), np.int32)
        padded[0, : len(tokens)] = tokens
        logits = np.asarray(target(padded))[0, len(tokens) - 1]
        law = log_probs(logits, case.sampling)
        if case.sampling.temperature > 0:
            ids = np.arange(len(logits))
            law = law + gumbel_noise(
                seed=case.sampling.seed, sample=case.sample, position=len(tokens), token_ids=ids
            )
        tokens.append(int(np.argmax(law)))
        if case.stop_at_eos and tokens[-1] in target.config.eos_ids:
            return tokens[case.length :], "eos"
        if len(tokens) == case.length + case.max_new_tokens:
            break
        if len(tokens) == CONTEXT:
            return tokens[case.length :], "context"
    return tokens[case.length :], "length"


SLOW_SHAPES = [
    shape if shape == "shared" else pytest.param(shape, marks=pytest.mark.slow) for shape in SHAPES
]


@pytest.mark.parametrize("shape", SLOW_SHAPES)
@pytest.mark.parametrize("sampling", [SAMPLINGS[0], SAMPLINGS[3]], ids=["greedy", "sampled"])
def test_autoregressive_decoding_is_the_argmax_of_whole_forward_passes(lab, shape, sampling):
    for length in (1, 60, 129, CONTEXT - 5):
        case = Case(shape, length, sampling, 1, 12, stop_at_eos=length != 60, horizon=12)
        tokens = naive(lab.target(shape), case)
        assert outcome(lab.autoregressive(case)) == tokens == lab.expected(case), case


def places(experts: int):
    """Caches of nothing, one expert, half and all; both stores; real and simulated links."""
    return st.builds(
        Place,
        device_cache=st.sampled_from([0, 1, experts // 2, None]),
        host_cache=st.sampled_from([0, 1, None]),
        on_disk=st.booleans(),
        link=st.sampled_from(["real", "sim:10", "sim:10,100"]),
    )


CONTROLS = st.fixed_dictionaries(
    {
        "draft_length": st.integers(1, 10),
        "truncate": st.booleans(),
        "tau": st.sampled_from([0.0, 0.3, 0.6, 0.9, 1.1]),
        "budget": st.sampled_from([None, 0, 1, 4, 100, "cache", "off"]),
        "controller": st.sampled_from(["consumer", "producer", "cost", "random"]),
        "keep": st.sampled_from([0.5, 0.9]),
    }
)


@st.composite
def cases(draw, shape: str, longest: int):
    return Case(
        shape,
        draw(st.sampled_from(LENGTHS)),
        draw(st.sampled_from(SAMPLINGS)),
        sample=draw(st.integers(0, 1)),
        max_new_tokens=draw(st.sampled_from([longest, longest // 2, 2, 1])),
        stop_at_eos=draw(st.booleans()),
        horizon=longest,
    )


def settings(top_k: int, experts: int):
    return st.builds(
        Setting,
        mode=st.sampled_from(["ar", "n-gram", "top-r", "top-r", "draft-expert", "draft-expert"]),
        r=st.integers(1, top_k),
        control=CONTROLS,
        prefetch=st.booleans(),
        place=places(experts),
        governed=st.booleans(),
    )


@hypothesis.settings(max_examples=80)
@hypothesis.given(case=cases("shared", 14), setting=settings(top_k=3, experts=16))
def test_tokens_equal_autoregressive_decoding(lab, case, setting):
    assert outcome(lab.run(case, setting)) == lab.expected(case)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "top_k", "experts"), [("shared", 3, 16), ("bare", 2, 16), ("groups", 3, 24)]
)
def test_tokens_equal_autoregressive_decoding_in_every_shape(lab, shape, top_k, experts):
    @hypothesis.seed(1)
    @hypothesis.settings(max_examples=200, derandomize=False)
    @hypothesis.given(case=cases(shape, 24), setting=settings(top_k, experts))
    def sweep(case, setting):
        assert outcome(lab.run(case, setting)) == lab.expected(case)

    sweep()


@pytest.mark.parametrize("sampling", SAMPLINGS[:2], ids=["greedy", "sampled"])
@pytest.mark.parametrize("mode", ["top-r", "draft-expert"])
def test_the_sweep_sees_accepted_and_rejected_drafts(lab, mode, sampling):
    control = {"draft_length": 4, "truncate": False}
    case = Case("shared", 23, sampling, 0, 40, stop_at_eos=False)
    trace = lab.run(case, Setting(mode, 1, control, True, Place()))
    assert 0.1 < stats(trace)["acceptance_rate"] < 0.9
    assert outcome(trace) == lab.expected(case)


def test_every_routed_expert_in_the_draft_path_makes_it_the_target(lab):
    control = {"draft_length": 5, "truncate": False}
    case = Case("shared", 23, SAMPLINGS[1], 0, 30, stop_at_eos=False)
    top_k = SHAPES["shared"].moe.top_k
    result = stats(lab.run(case, Setting("top-r", top_k, control, True, Place())))
    assert result["acceptance_rate"] == 1.0 and result["drafted"] > 20


def test_a_store_in_a_shorter_dtype_is_widened_exactly(lab):
    target, prompt = lab.target("shared"), random_prompt(23)
    short = {layer: stack.astype(jnp.bfloat16) for layer, stack in target.routed.items()}
    rounded = {layer: stack.astype(jnp.float64) for layer, stack in short.items()}
    store = store_of(dataclasses.replace(target, routed=short))
    options = DecodeOptions(mode="top-r", max_new_tokens=16)
    with Decoder(dataclasses.replace(target, routed=rounded)) as decoder:
        expected = outcome(tuple(decode(decoder.engine, prompt, DecodeOptions(max_new_tokens=16))))
    with Decoder(target, store=store) as decoder:
        drafter = make_drafter(decoder.engine, options)
        trace = tuple(decode(decoder.engine, prompt, options, drafter=drafter))
    assert outcome(trace) == expected


def test_seeds_and_samples_matter(lab):
    samplings = [SamplingConfig(temperature=1.0, seed=seed) for seed in (0, 1)]
    tokens = [
        lab.expected(Case("shared", 23, sampling, sample, 16, stop_at_eos=False))[0]
        for sampling in samplings
        for sample in (0, 1)
    ]
    assert len(set(map(tuple, tokens))) == 4


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS[:2], ids=["greedy", "sampled"])
def test_the_embedded_target_in_float64(sampling):
    """Real routing over 64 experts a layer, with draft experts that are wrong most of the time."""
    target = load_target("tiny", dtype="float64")
    texts = ["Once upon a time", "def add(a, b):", "The capital of France", "1 2 3 4 5 6 7"]
    prompts = [target.tokenizer.encode(text * 3) for text in texts]
    tokens, rates = {}, {}
    runs: list[tuple[Mode, int, bool]]
    runs = [("ar", 1, True), ("top-r", 2, False), ("draft-expert", 1, True)]
    for mode, r, truncate in runs:
        control = ControlConfig(draft_length=4, truncate=truncate)
        options = DecodeOptions(
            mode=mode, r=r, max_new_tokens=32, sampling=sampling, control=control
        )
        draft = resolve_draft("init", target) if mode == "draft-expert" else None
        with Decoder(target, draft=draft, capacity=128) as decoder:
            drafter = make_drafter(decoder.engine, options)
            traces = [
                tuple(decode(decoder.engine, prompt, options, drafter=drafter))
                for prompt in prompts
            ]
        tokens[mode] = [outcome(trace) for trace in traces]
        rates[mode] = stats([record for trace in traces for record in trace])["acceptance_rate"]
    assert tokens["ar"] == tokens["top-r"] == tokens["draft-expert"]
    assert 0 < rates["top-r"] < 1

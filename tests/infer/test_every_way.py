"""T0 counted: in float64 no way to draft, to stop, to branch or to accept changes a token.

Every drafter with every controller or tree, under every rule that has the tokens of autoregressive
decoding, on random targets of three families, with nothing and with half of the experts cached:
each by name, then as hypothesis draws them. The prompts are counted.
"""

import collections
import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, get_args

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from dejax.config import DraftConfig
from dejax.draft.expert import random_draft
from dejax.spec.control import ControlConfig, Controller
from dejax.spec.ecospec import PREDICTORS, EcoConfig
from dejax.spec.governor import Governor
from dejax.spec.rules import REJECTION, RULES
from dejax.spec.sampling import SamplingConfig
from dejax.spec.tree_options import parse_tree
from infer.decode import decode, make_drafter
from infer.decode_options import MODES, DecodeOptions
from infer.decoder import Decoder, Offload, expert_store
from infer.timing import Pace
from tests.infer.random_target import random_prompt
from tests.infer.test_lossless import HASTY
from tests.infer.test_trees import CAPACITY, FAMILIES, ROWS, TREES, Hostile, families, tokens_of

NEW = 6
PROMPTS = 200
"""Prompts over all families, at least."""
CONTROLS: dict[str, dict[str, Any]] = {
    "none": dict(truncate=False),
    "consumer": dict(tau=0.6, budget=4),
    "producer": dict(tau=0.6, budget=4, controller="producer"),
    "cost": dict(controller="cost"),
    "random": dict(controller="random", keep=0.6),
    "confidence": dict(tau=0.3, budget="off"),
    "expansion": dict(tau=1.1, budget=4),
    "cache": dict(tau=0.9, budget="cache"),
}
BLIND = ("none", "producer", "random", "confidence")
"""Controllers that rejection rules may have: they do not look at drafted values."""
STATIC = ("2x2", "3x1", "static:0,0,0,1,1,2,4")
MATCHES = ("R0", "R5", "R4")


@dataclass(frozen=True)
class Way:
    """How to draft, and the rule that accepts; mode "hostile" proposes what it likes."""

    rule: str
    mode: str
    control: str = "none"
    tree: str = "chain"
    predictor: str = "router"


def ways() -> list[Way]:
    """All of them."""
    found = [Way(rule, "n-gram") for rule in MATCHES]
    found += [Way(rule, "hostile") for rule in ("R0", "R5")]
    for mode in ("top-r", "draft-expert"):
        found += [Way(rule, mode, control) for control in CONTROLS for rule in MATCHES]
        found += [Way(rule, mode, tree=tree) for tree in TREES for rule in MATCHES]
        # Rejection is greedy at temperature 0.
        found += [Way(rule, mode, control) for control in BLIND for rule in ("R1", "R2", "R3")]
        found += [Way(rule, mode, tree=tree) for tree in STATIC for rule in ("R2", "R3")]
    return found + [
        Way(rule, "ecospec", tree=tree, predictor=predictor)
        for tree in ("chain", "best8", "2x2")
        for predictor in PREDICTORS
        for rule in MATCHES
    ]


@dataclass(frozen=True)
class Rest:
    """What neither names: the prompt (its length and seed), and what must not matter."""

    length: int
    seed: int
    half: bool
    prefetch: bool
    governed: bool
    r: int
    cost: float
    temperature: float


def some_rest(number: int, *, half: bool = False) -> Rest:
    """That of a number: another prompt for each."""
    generator = np.random.default_rng(number)
    flag = lambda: bool(generator.integers(2))  # noqa: E731
    return Rest(
        length=int(generator.integers(3, 40)),
        seed=number,
        half=half,
        prefetch=flag(),
        governed=flag(),
        r=int(generator.integers(1, 3)),
        cost=float(generator.choice([0.0, 0.3, 3.0])),
        temperature=float(generator.choice([0.7, 1.0, 1.5])),
    )


RESTS = st.builds(
    Rest,
    length=st.sampled_from([1, 9, 30, CAPACITY - 4]),
    seed=st.integers(0, 2**16),
    half=st.booleans(),
    prefetch=st.booleans(),
    governed=st.booleans(),
    r=st.integers(1, 2),
    cost=st.sampled_from([0.0, 0.3, 3.0]),
    temperature=st.sampled_from([0.7, 1.0, 1.5]),
)


class World:
    """A target, its decoders at cache 0 and half, and what autoregressive decoding gives."""

    def __init__(self, target):
        config = target.config
        self.vocab, self.prompts = config.vocab_size, set()
        draft = random_draft(config, DraftConfig(width=8), seed=0, identity=target.identity)
        store = expert_store(target, Offload())
        half = len(store.pairs) // 2 * store.bytes_per_expert
        # Target passes of one shape, since compiling takes most of the time here.
        place: Any = dict(capacity=CAPACITY, store=store, strict_rows=ROWS)
        self.decoders = {
            (drafts, cached): Decoder(
                target,
                draft=draft if drafts else None,
                offload=Offload(half if cached else 0),
                **place,
            )
            for drafts in (False, True)
            for cached in (False, True)
        }
        self.expected = functools.cache(self._expected)

    def run(self, way: Way, rest: Rest, prompt: list[int]):
        """The trace."""
        greedy = way.rule not in ("R4", "R5")
        rule: Any = "match" if way.rule in ("R0", "R5") else way.rule
        hostile = way.mode == "hostile"
        options = DecodeOptions(
            mode="ar" if hostile else way.mode,  # pyright: ignore[reportArgumentType]
            r=rest.r,
            max_new_tokens=NEW,
            sampling=SamplingConfig() if greedy else SamplingConfig(rest.temperature, seed=9),
            control=ControlConfig(draft_length=4, **CONTROLS[way.control]),
            prefetch=rest.prefetch,
            tree=parse_tree(way.tree),
            rule=rule,
            eco=EcoConfig(rest.cost, way.predictor),  # pyright: ignore[reportArgumentType]
        )
        engine = self.decoders[way.mode in ("draft-expert", "ecospec"), rest.half].engine
        drafter: Any = make_drafter(engine, options)
        if hostile:
            sequence = [*prompt, *self.expected(way.rule, rest.temperature, tuple(prompt))]
            drafter = Hostile([*sequence, *[0] * 40], np.random.default_rng(rest.seed))
        pace = Pace(governor=Governor(HASTY) if rest.governed else None)
        with jax.transfer_guard("disallow"):
            return tuple(decode(engine, prompt, options, drafter=drafter, pace=pace))

    def _expected(self, rule: str, temperature: float, prompt: tuple[int, ...]) -> list[int]:
        rest = dataclasses.replace(some_rest(0), governed=False, temperature=temperature)
        rule = rule if rule in MATCHES else "R0"
        return tokens_of(self.run(Way(rule, "ar"), rest, list(prompt)))

    def check(self, way: Way, rest: Rest) -> int:
        """Holds a way against autoregressive decoding; the number of accepted tokens."""
        prompt = random_prompt(rest.length, seed=rest.seed, vocab=self.vocab)
        trace = self.run(way, rest, prompt)
        assert tokens_of(trace) == self.expected(way.rule, rest.temperature, tuple(prompt))
        self.prompts.add(tuple(prompt))
        return sum(record.accepted for record in trace)


def caches(number: int, way: Way) -> tuple[bool, ...]:
    """Whether half of the experts are cached, for the way of a number: once so and once not."""
    return (bool(number % 2),) if way.rule in REJECTION else (False, True)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_no_way_changes_a_token(tmp_path, family):
    """Latent attention; grouped queries with norms; sinks and windows shorter than the prompt."""
    # Every controller and tree meets every family, each with another rule.
    first, known = FAMILIES.index(family), list(enumerate(ways()))
    mine = [(n, way) for n, way in known if (n + n // len(MATCHES)) % len(FAMILIES) == first]
    # Rejection at temperature 0 is greedy again: with one of the caches it will do.
    named = [(n, way, half) for n, way in mine for half in caches(n, way)]
    accepted: collections.Counter[str] = collections.Counter()
    checked = set()
    with jax.enable_x64(True):
        world = World(families(tmp_path)(family))

        @hypothesis.settings(max_examples=8)
        @hypothesis.given(way=st.sampled_from(ways()), rest=RESTS)
        def sweep(way, rest):
            accepted[way.mode] += world.check(way, rest)
            checked.add((way, rest.half))

        for number, way, half in named:
            rest = some_rest(2 * number + half, half=half)
            sweep = hypothesis.example(way=way, rest=rest)(sweep)
        try:
            sweep()
        finally:
            for decoder in world.decoders.values():
                decoder.close()
    assert checked >= {(way, half) for _, way, half in named}
    assert len(world.prompts) * len(FAMILIES) >= PROMPTS
    # Drafts were accepted, so that not only refusing them was looked at.
    assert all(accepted[mode] for mode in ("top-r", "draft-expert", "ecospec")), accepted


def test_no_way_is_left_out():
    """By mode, what the rules that keep the tokens of autoregressive decoding go with."""
    known = ways()
    assert len(known) == len(set(known))
    assert sum(len(caches(*each)) for each in enumerate(known)) >= PROMPTS
    assert {way.mode for way in known} == {*MODES, "hostile"} - {"ar", "moe-spec"}
    assert {way.rule for way in known} == {"R0", "R5", *RULES} - {"match"}
    controllers = {CONTROLS[way.control].get("controller", "consumer") for way in known}
    assert controllers == set(get_args(Controller))

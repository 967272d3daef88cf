"""The oracle of prefetching: told of what a run before required, and of nothing else."""

from dataclasses import replace

import jax
import pytest

from dejax.spec.control import ControlConfig
from infer.bench_decode import drafting
from infer.decode_options import DecodeOptions
from infer.decoder import Decoder, Offload
from infer.engines import EngineLike, ResidencyLike
from infer.prefetch_oracle import _Told, required, told_run
from infer.report import rounds_of
from tests.infer.random_target import draft_of, random_prompt

pytestmark = pytest.mark.usefixtures("x64")

PROMPT = random_prompt(12)
OPTIONS = DecodeOptions(
    mode="draft-expert",
    max_new_tokens=16,
    control=ControlConfig(draft_length=3, truncate=False),
    prefetch=True,
)


@pytest.fixture(scope="module")
def decoder(target):
    offload = Offload(prefetch=2**30)
    with jax.enable_x64(True):
        with Decoder(target, draft=draft_of(target), offload=offload) as decoder:
            yield decoder


def test_the_verification_s_experts_are_prefetched_and_no_others(decoder):
    plain = decoder.run(PROMPT, OPTIONS)
    told = told_run(decoder, PROMPT, OPTIONS, required(plain))
    assert len(rounds_of(plain)) > 2
    for before, record in zip(plain, told, strict=True):
        assert (record.committed, record.drafted) == (before.committed, before.drafted)
        assert (record.emitted, record.required) == (before.emitted, before.required)
        assert record.prefetched <= record.required
        if record.drafted:  # what no draft pass loaded for itself came before it was waited for
            assert record.prefetched
            missing = record.required - record.draft_used - record.prefetched
            demanded = {(e.layer, e.expert) for e in record.loads if e.kind == "demand"}
            assert missing <= demanded
    assert any(
        record.prefetched != before.prefetched for before, record in zip(plain, told, strict=True)
    )


def test_untold_it_prefetches_nothing(decoder):
    plain = decoder.run(PROMPT, OPTIONS)
    first = plain[1].committed
    told = told_run(decoder, PROMPT, OPTIONS, {first: plain[1].required})
    assert [r.emitted for r in told] == [r.emitted for r in plain]
    assert [bool(r.prefetched) for r in told[:3]] == [False, True, False]


def test_it_is_an_engine_like_any_other(decoder):
    engine = _Told(decoder.engine, {})
    assert isinstance(engine, EngineLike) and isinstance(engine.residency, ResidencyLike)


def test_rows_of_an_oracle_say_so():
    runs = drafting()
    oracles = [run for run in runs if run.prefetch_oracle]
    assert len(oracles) == 2
    for run in oracles:
        assert "not a real system" in run.name
        # There is the same run without it, which has another decoder.
        (same,) = [r for r in runs if r == replace(run, name=r.name, prefetch_oracle=False)]
        assert same.name != run.name and same.place != run.place

"""Mode moe-spec: exact where the budget allows it, within the budget, and labelled lossy."""

import json
from collections import Counter
from typing import Any

import pytest

from dejax import cli
from dejax.errors import UsageError
from dejax.spec.budget import VerifyBudget
from dejax.spec.control import ControlConfig
from infer.decode_options import DecodeOptions
from infer.decoder import Decoder, Offload
from infer.engine import Engine
from infer.generate import generate
from tests.infer.random_target import draft_of, random_prompt

PROMPTS = [random_prompt(12, seed=seed) for seed in range(3)]
CONTROL = ControlConfig(draft_length=4, truncate=False)


pytestmark = pytest.mark.usefixtures("x64")


def traces(target, budget, *, mode: Any = "moe-spec", new=16, prompts=PROMPTS):
    options = DecodeOptions(mode=mode, max_new_tokens=new, control=CONTROL)
    draft = None if mode == "ar" else draft_of(target)
    with Decoder(target, draft=draft, verify_budget=budget) as decoder:
        return [decoder.run(prompt, options) for prompt in prompts]


def tokens(trace):
    return [token for record in trace for token in record.emitted]


@pytest.mark.slow
@pytest.mark.parametrize("select", ["substitution", "truncation"])
def test_a_budget_for_all_changes_nothing(target, select):
    whole = VerifyBudget(target.config.moe.num_experts, select)
    found = [tokens(trace) for trace in traces(target, whole)]
    assert found == [tokens(trace) for trace in traces(target, None, mode="ar")]


def test_no_verification_uses_more_than_its_budget(target):
    budget = VerifyBudget(3)
    wide = rescued = 0
    for trace in traces(target, budget):
        for record in trace[1:]:
            layers = Counter(layer for layer, _ in record.required)
            assert all(used <= 3 + len(record.drafted) + 1 for used in layers.values())
            assert sum(layers.values()) <= 3 * len(layers) + record.rescued
            wide += len(record.drafted) == 4
            rescued += record.rescued
    assert wide and rescued  # the budget was felt


def test_one_row_with_room_for_its_experts_is_exact(target):
    one = DecodeOptions(mode="moe-spec", max_new_tokens=1)
    budget = VerifyBudget(target.config.moe.top_k)
    with Decoder(target, draft=draft_of(target), verify_budget=budget) as decoder:
        engine = decoder.engine
        decoder.run(PROMPTS[0], one)
        found = engine.target_rows(PROMPTS[0][-1:], start=len(PROMPTS[0]) - 1)
    with Decoder(target) as decoder:
        decoder.run(PROMPTS[0], DecodeOptions(mode="ar", max_new_tokens=1))
        exact = decoder.engine.target_rows(PROMPTS[0][-1:], start=len(PROMPTS[0]) - 1)
    assert (found.logits == exact.logits).all() and found.rescued == 0


def test_committed_tokens_are_computed_again(target, monkeypatch):
    seen = []
    prefill = Engine.prefill
    monkeypatch.setattr(
        Engine,
        "prefill",
        lambda self, given, *, start=0: (
            seen.append((start, list(given))) or prefill(self, given, start=start)
        ),
    )
    (trace,) = traces(target, VerifyBudget(2, exact_every=2), prompts=PROMPTS[:1])
    (start, prompt), *again = seen
    assert (start, prompt) == (0, PROMPTS[0]) and again
    text = PROMPTS[0] + tokens(trace)
    end = len(prompt)
    for start, given in again:  # each goes on where the last one ended
        assert start == end and text[start : start + len(given)] == given
        end += len(given)
    assert len(again) == (len(trace) - 2) // 2


@pytest.mark.slow
def test_what_is_lossy_says_so(target):
    options: Any = dict(draft=draft_of(target), max_new_tokens=6, control=CONTROL, governor=False)
    lossy = generate(target, PROMPTS[:1], mode="moe-spec", verify_budget=VerifyBudget(2), **options)
    exact = generate(target, PROMPTS[:1], mode="draft-expert", **options)
    assert [g.lossless for g in (*lossy, *exact)] == [False, True]
    assert lossy[0].stats["verify_budget"]["experts"] == 2
    with pytest.raises(UsageError, match="give both or neither"):
        generate(target, PROMPTS[:1], mode="draft-expert", verify_budget=VerifyBudget(2), **options)


@pytest.mark.slow
def test_the_program_says_that_it_is_lossy(capsys):
    argv = ["generate", "tiny", "--prompt", "Hello", "--max-new-tokens", "4", "--draft", "init"]
    argv += ["--no-governor", "--mode", "moe-spec", "--approx-verify-budget", "6", "--json", "-"]
    assert cli.main(argv) == 0
    printed = capsys.readouterr()
    assert "NOT lossless: verification uses 6 experts a layer" in printed.err
    (generation,) = json.loads(printed.out)["generations"]
    assert generation["lossless"] is False and generation["mode"] == "moe-spec"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--mode", "moe-spec", "--draft", "init"], "--approx-verify-budget N: give both"),
        (["--approx-verify-budget", "6"], "--approx-verify-budget N: give both or neither"),
        (["--approx-verify-budget", "0"], "'0' is out of range"),
        (["--approx-rank", "residency"], "--approx-... needs --approx-verify-budget"),
        (["--mode", "moe-spec", "--approx-verify-budget", "6"], "needs --draft"),
    ],
)
def test_bad_calls_are_one_line(capsys, argv, says):
    assert cli.main(["generate", "tiny", "--prompt", "x", *argv]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("dejax: error: ") and says in line


def test_other_engines_and_strict_are_refused(target):
    more: Any
    for more in (dict(offload=Offload(engine="resident", device_cache=None)), dict(strict_rows=8)):
        with pytest.raises(UsageError, match="for engine host"):
            Decoder(target, verify_budget=VerifyBudget(2), **more)

"""The suite behind the demo's tables, on a small random target."""

import dataclasses

import jax.numpy as jnp
import pytest

from dejax.errors import UsageError
from infer.bench_kinds import by_kind, first_of_each_kind, runs
from infer.decode_options import DecodeOptions
from infer.decoder import Decoder, Offload
from infer.link import parse_link
from infer.plots import plot_acceptance, plot_losses, plot_modes, plot_unique, unique_by_length
from infer.resident import ResidentDecoder
from infer.suite import Run, Suite, choose_link, compare_resident, run_all, standard_runs
from infer.trace import Round
from tests.infer.random_target import draft_of, random_target

PROMPTS = [("a", [3, 1, 4, 1, 5]), ("b", [2, 7])]


@pytest.fixture(scope="module")
def target():
    return random_target("shared", dtype=jnp.float32)


@pytest.fixture(scope="module")
def results(target):
    suite = Suite(target, draft_of(target), PROMPTS, 6, parse_link("sim:1"))
    runs = [
        Run("AR", "ar"),
        Run("top-1, K=2", "top-r", draft_length=2),
        Run("draft", "draft-expert", draft_length=2, truncate=True, prefetch=True, cache=0.5),
        Run("AR", "ar", temperature=0.8),
        Run("draft", "draft-expert", draft_length=2, temperature=0.8),
    ]
    return run_all(suite, runs)


@pytest.mark.slow
def test_every_run_is_held_against_its_own_reference(results):
    assert [r.row["identical_to_ar"] for r in results] == [True] * 5
    assert all(not r.row["divergences"] for r in results)
    tokens = [[p["tokens"] for p in r.row["prompts"]] for r in results]
    assert tokens[0] == tokens[1] == tokens[2] and tokens[3] == tokens[4]
    assert tokens[0] != tokens[3]  # the seeded runs have a reference of their own


@pytest.mark.slow
def test_rows_say_what_was_run(results):
    row = results[2].row
    assert row["mode"] == "draft-expert" and row["options"]["cache"] == 0.5
    assert row["options"]["simulated"] is True and "simulated" in row["options"]["link"]
    assert row["stats"]["drafted"] >= row["stats"]["accepted"]
    assert row["stats"]["emitted"] == 2 * 5  # the first token of a prompt is the prefill's


def test_figures_by_kind_are_of_the_prompts_of_that_kind(results):
    first, second, whole = by_kind(results[2], ["chat", "code"])
    assert [row["kind"] for row in (first, second, whole)] == ["chat", "code", "all"]
    own = [prompt["stats"] for prompt in results[2].row["prompts"]]
    for row, found in zip((first, second), own, strict=True):
        assert row["acceptance_rate"] == found["acceptance_rate"] and row["prompts"] == 1
        assert row["tokens_per_round"] == found["tokens_per_round"]
    assert whole["emitted"] == first["emitted"] + second["emitted"] and whole["identical_to_ar"]
    assert [row["cache"] for row in by_kind(results[2], ["all"] * 2)] == [0.5, 0.5]


def test_so_many_prompts_of_each_kind():
    records = [{"id": i, "category": "ab"[i % 2]} for i in range(6)] + [{"id": 6}]
    found = first_of_each_kind(records, 2)
    assert {kind: [r["id"] for r in own] for kind, own in found.items()} == {
        "a": [0, 2],
        "b": [1, 3],
        "prompts": [6],
    }
    made = runs(4, 0.8)
    assert [(run.temperature, run.cache) for run in made if run.mode == "ar"] == [(0, 0), (0.8, 0)]
    assert len(made) == 6 and len({run.name for run in made}) == 6


@pytest.mark.slow
def test_a_wrong_token_is_not_reported_as_identical(target, monkeypatch):
    suite = Suite(target, draft_of(target), PROMPTS, 6, parse_link("sim:1"))

    def spoiled(self, prompt, options, **kwargs):
        trace = original(self, prompt, options, **kwargs)
        if options.mode != "top-r":
            return trace
        last = trace[-1]
        wrong = tuple((token + 1) % 64 for token in last.emitted)
        return (*trace[:-1], dataclasses.replace(last, emitted=wrong))

    original = Decoder.run
    monkeypatch.setattr(Decoder, "run", spoiled)
    _, row = (r.row for r in run_all(suite, [Run("AR", "ar"), Run("top-1", "top-r")]))
    assert row["identical_to_ar"] is False
    assert {d["id"] for d in row["divergences"]} == {"a", "b"}
    assert {d["float64_verdict"] for d in row["divergences"]} == {"real"}


def test_standard_runs_cover_the_modes():
    runs = standard_runs(6, every_seeded=False)
    greedy = [run for run in runs if run.temperature == 0]
    assert {run.mode for run in greedy} == {"ar", "top-r", "draft-expert"}
    assert len(runs) - len(greedy) == 3
    assert {run.r for run in greedy if run.mode == "top-r"} == {1, 2, 3}
    assert {run.r for run in standard_runs(2, every_seeded=False) if run.mode == "top-r"} == {1, 2}
    assert len(standard_runs(6, every_seeded=True)) == 2 * len(greedy)
    referred = {run.temperature for run in runs if run.is_reference}
    assert referred == {run.temperature for run in runs}


def test_a_suite_that_does_not_fit_the_context_is_refused(target):
    suite = Suite(target, draft_of(target), PROMPTS, 400, parse_link("real"))
    with pytest.raises(UsageError, match="the context has 320"):
        run_all(suite, [Run("AR", "ar")])


def test_the_link_is_chosen_from_measured_compute(target):
    link = choose_link(target, [1, 2, 3], tokens=4)
    assert link.simulated and link.bytes_per_second > 0


@pytest.mark.slow
def test_the_resident_step_decodes_as_the_host_loop_does(target):
    prompt, new = [5, 6, 7, 8], 8
    tokens, seconds = ResidentDecoder(target, len(prompt) + new).decode(prompt, new)
    options = DecodeOptions(max_new_tokens=new, stop_at_eos=False)
    with Decoder(target, offload=Offload(device_cache=None), capacity=12) as decoder:
        trace = decoder.run(prompt, options)
    assert tokens == [token for record in trace for token in record.emitted]
    assert seconds > 0
    found = compare_resident(target, prompt, tokens=new, repeats=1)
    assert found["identical"] and found["host_loop_tps"] > 0 and 0 <= found["host_share"] <= 1


def test_unique_by_length_counts_windows():
    routes = [frozenset({(1, 0), (1, 1)}), frozenset({(1, 1), (1, 2)}), frozenset({(1, 5), (1, 6)})]
    trace = [Round(kind="round", committed=i, rows_routes=(r,)) for i, r in enumerate(routes)]
    assert unique_by_length([trace], 5) == [2.0, 3.5, 5.0]


def test_plots_are_written(results, tmp_path):
    rows = [result.row for result in results]
    plot_modes(rows, tmp_path / "a.png", link="simulated link")
    plot_acceptance(rows, tmp_path / "b.png")
    plot_unique({"x": [1.0, 2.0]}, tmp_path / "c.png")
    plot_losses([{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}], tmp_path / "d.png")
    for name in "abcd":
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")

"""`python -m train.confidence`: a draft folder with a head, or one line of complaint."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from dejax.ckpt.draft_state import HEAD_FILE, load_draft, resolve_draft, save_draft
from dejax.cli import run_module
from dejax.target import load_target
from tests.train.small_model import write_documents, write_model
from train.confidence import _all_over, choose_prompts, main

SMALL = ["--prompts", "12", "--held-out", "2", "--new-tokens", "10", "--draft-length", "3"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model, a draft of it, and documents."""
    place = tmp_path_factory.mktemp("confidence")
    folder = write_model(place / "model")
    target = load_target(folder)
    save_draft(place / "draft", resolve_draft("init", target), target.config)
    write_documents(place / "text.jsonl")
    return place


def call(place, out, *more):
    given = {"--draft": "draft", "--target": "model", "--data": "text.jsonl", "--out": out}
    words = [word for flag, name in given.items() for word in (flag, str(place / name))]
    return [*words, *SMALL, *more]


@pytest.mark.slow
def test_the_same_draft_comes_out_with_a_head_in_it(place, capsys):
    results = []
    for out in ("first", "second"):
        file = place / f"{out}.json"
        assert main(call(place, out, "--json", str(file))) == 0
        results.append(json.loads(file.read_text()))
    shown = capsys.readouterr().out
    assert "probability" in shown and "head" in shown and "2 other prompts" in shown
    target = load_target(place / "model")
    before, after = load_draft(place / "draft"), load_draft(place / "first", target)
    for layer in target.config.moe_layers:
        for name, value in before.layer_params(layer).items():
            np.testing.assert_array_equal(after.layer_params(layer)[name], value)
    assert after.head.biases.shape == (2, 3) and after.identity == before.identity
    assert after.training["confidence_head"]["prompts"] == 12
    files = [(place / out / HEAD_FILE).read_bytes() for out in ("first", "second")]
    assert files[0] == files[1]
    found = results[0]["held_out"]
    assert found == results[1]["held_out"]
    for regime in ("greedy", "sampled"):
        for who in ("head", "probability"):
            row = found[regime][who]
            assert 0 <= row["ece"] <= 1 and 0 <= row["brier"] <= 1
            assert len(row["ece_by_position"]) == 3
        assert found[regime]["head"]["brier"] < found[regime]["probability"]["brier"]


def test_bad_input_is_one_line(place, tmp_path, capsys):
    def refused(argv):
        assert run_module_with(argv) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and "Traceback" not in error
        return error

    def run_module_with(argv):
        return run_module("confidence", lambda _: main(argv))

    assert "exists; choose a new folder" in refused(call(place, "draft"))
    few = write_documents(tmp_path / "few.jsonl", count=9)
    argv = call(place, "new")
    argv[argv.index("--data") + 1] = str(few)
    assert "9 documents gave 9 prompts to fit to and 0 to measure on" in refused(argv)
    argv[argv.index("--data") + 1] = str(tmp_path / "nowhere.jsonl")
    assert "nowhere.jsonl" in refused(argv)
    other = write_model(tmp_path / "other", seed=1)
    argv = call(place, "new")
    argv[argv.index("--target") + 1] = str(other)
    assert "was trained for target" in refused(argv)
    argv = call(place, "new")
    argv[argv.index("--draft") + 1] = str(place / "model")
    assert "no adapter_config.json" in refused(argv)
    argv = call(place, "new")
    argv[argv.index("--new-tokens") + 1] = "1"
    assert "expected 2 or more" in refused(argv)
    assert not (place / "new").exists()


def test_prompts_are_taken_from_all_over_and_none_is_in_both_kinds(place):
    assert sorted(_all_over(11)) == list(range(11)) and list(_all_over(9))[:3] == [0, 8, 4]
    target = load_target(place / "model")
    speaker = SimpleNamespace(name="m", config=target.config, tokenizer=target.tokenizer)
    data = str(place / "text.jsonl")
    fit, judged = choose_prompts(speaker, data, (38, 2), new_tokens=10)
    assert len(fit) == 38 and len(judged) == 2
    some, _ = choose_prompts(speaker, data, (5, 1), new_tokens=10)
    assert some == fit[:5]

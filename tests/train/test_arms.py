"""The arms of the losses: trained once each, measured with what was saved."""

import dataclasses
import json

import pytest

from dejax.errors import UsageError
from dejax.target import load_target
from tests.train.dense_model import write_dense
from tests.train.small_model import write_model
from train import arms, distill_measures
from train.closed_form import InitConfig
from train.config_files import load_config
from train.document_files import open_source
from train.packed_rows import split_documents


def row(arm, seed, **figures):
    return {"arm": arm, "seed": seed} | figures


def test_means_and_spreads_are_over_the_seeds_of_an_arm():
    rows = [
        row("a", 0, kl=1.0, alpha_4=0.5),
        row("b", 0, kl=3.0),
        row("b", 1, kl=5.0, alpha_4=0.25),
    ]
    first, second = arms.summary(rows)
    assert (first["arm"], first["seeds"], first["spread"]["kl"]) == ("a", 1, 0)
    assert second["seeds"] == 2 and second["mean"]["kl"] == 4 and second["spread"]["kl"] == 2
    assert first["mean"]["alpha_4"] == 0.5


def test_the_table_has_what_was_measured(capsys):
    figures = dict(kl=0.25, agreement=0.75, acceptance_rate=0.5, alpha_1=0.625)
    rows = [row("top-1", 0, **figures), row("+ x", 0, **figures), row("+ x", 1, **figures)]
    rows[2]["agreement"] = 0.78
    arms.print_arms_table(arms.summary(rows), 7)
    shown = capsys.readouterr().out
    assert "76.5 (3.0)" in shown and "62.5" in shown and "0.250" in shown and "7 steps" in shown


def test_a_target_that_has_no_arms_is_refused_before_it_is_loaded(tmp_path, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("loaded")

    monkeypatch.setattr(arms, "load_target", never)
    dense, silent = write_dense(tmp_path / "dense"), write_model(tmp_path / "silent")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (silent / name).unlink(missing_ok=True)
    told = {
        dense: "is a dense llama; expected a mixture of experts",
        silent: "has no tokenizer; the arms need one, for the text that they are trained and",
    }
    for folder, message in told.items():
        with pytest.raises(UsageError) as raised:
            arms.main(["--target", str(folder), "--out", str(tmp_path / "out")])
        assert str(raised.value).startswith(f"--target: {folder} {message}")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def short(monkeypatch):
    """Runs of two steps, and texts of a few tokens."""

    def config(name, changes=()):
        found = load_config(name, changes)
        loop = dataclasses.replace(found.loop, log_every=1)
        return dataclasses.replace(found, loop=loop, init=InitConfig(tokens=1024), seq_len=128)

    monkeypatch.setattr(arms, "load_config", config)
    monkeypatch.setattr(arms, "NEW_TOKENS", 10)
    monkeypatch.setattr(arms, "ON_POLICY_PROMPTS", 6)
    monkeypatch.setattr(arms, "ON_POLICY_TOKENS", 40)
    monkeypatch.setattr(distill_measures, "MOST_PROMPTS", 3)


@pytest.mark.slow
def test_arms_are_trained_once_and_measured_as_saved(short, tmp_path, monkeypatch):
    target = load_target("tiny")
    chosen = {name: arms.ARMS[name] for name in ("+ residual", "+ router, on-policy")}
    options = dict(seeds=1, steps=2, out=tmp_path, arms=chosen)
    rows = arms.run_arms(target, "tiny", **options)
    assert [r["arm"] for r in rows] == ["top-1", *chosen]
    assert rows[1]["kl"] != rows[2]["kl"] != rows[0]["kl"]
    for found in rows:  # training, decode loop and the draft loaded afresh
        assert abs(found["tokens_per_round"] - found["simulated_tokens_per_round"]) < 0.02
        assert 0 < found["alpha_1"] <= 1

    def never(*args, **kwargs):
        raise AssertionError("trained again")

    monkeypatch.setattr(arms, "distill", never)
    assert arms.run_arms(target, "tiny", **options) == rows
    documents = list(open_source("demo").documents())
    held = {
        documents[i].messages[0]["content"]
        for i in split_documents(len(documents))[1]
        if documents[i].messages
    }
    (file,) = tmp_path.glob("*/on_policy.json")
    written = json.loads(file.read_text())["generations"]
    assert len(written) >= 6 and not held & {generation["prompt"] for generation in written}

"""The card of an upcycled model, and the answers in it."""

import json

import pytest

from tests.train.dense_model import write_dense
from tests.train.small_model import write_model
from train import upcycle_answers, upcycle_card


def run_of(**options) -> dict:
    """A result with easily told numbers."""
    row = dict(dense_perplexity=6.0, perplexity=7.25, kl=0.125, agreement=0.75, tokens=100)
    unique = {f"{kind}unique_{n}": [9.0, 11.0] for kind in ("", "independent_") for n in (4, 8)}
    return dict(
        dense="Small.gguf",
        options={"--correct": True, "--seed": 0, "--tokens": 4096} | options,
        layout=dict(shared=384, experts=36, width=32, top_k=18, first_dense=1, active_share=0.625),
        layers=[dict(layer=1, beta=0.5, ridge=0.1, before=0.2, after=0.1)],
        quality=dict(code=row, all=row | dict(agreement=0.8)),
        routing=dict(
            load_max_over_mean=[1.0, 3.0],
            load_min_over_mean=[0.5, 0.5],
            unused_experts=[0, 2],
            overlap=[0.5, 0.75],
            independent_overlap=[0.25, 0.25],
            **unique,
        ),
        draft_agreement={"0": 0.375, "1": 0.5},
        draft_tokens=50,
        fit_seconds=60.0,
        seconds=90.0,
        peak_memory_bytes=2**31,
    )


def test_a_card_says_what_was_measured(tmp_path):
    files = []
    config = dict(
        loop=dict(steps=20), batch_size=2, seq_len=512, trained=["routers", "norms"],
        optimizer=dict(learning_rate=2e-4), balance_weight=0.01,
    )  # fmt: skip
    healed = run_of() | {"healing": dict(config=config, trained_params=2_500_000)}
    for place, run in enumerate((run_of(), run_of(**{"--correct": False, "--seed": 3}), healed)):
        files.append(tmp_path / f"{place}.json")
        files[-1].write_text(json.dumps(run))
    answers = [dict(id="q1", prompt="Why?", answers={"dense": "So.\n# no title", "moe": "Or."})]
    (tmp_path / "answers.json").write_text(json.dumps(answers))
    out = tmp_path / "docs" / "card.md"
    argv = ["--runs", *map(str, files), "--answers", str(tmp_path / "answers.json")]
    arm = dict(arm="+ residual", seeds=2, mean=dict(kl=0.25, agreement=0.5, alpha_1=0.75))
    arms = dict(target="small", steps=7, settings=["draft.width=64"], arms=[arm])
    (tmp_path / "arms.json").write_text(json.dumps(arms))
    row = dict(run="draft experts, greedy", kind="code", prompts=4, acceptance_rate=0.5)
    row |= dict(tokens_per_round=2.5, bytes_per_token=2e6, identical_to_ar=True)
    plain = row | dict(run="AR", acceptance_rate=None)
    whole = plain | dict(run="AR of all", kind="all", tokens_per_round=1.0)
    kinds = dict(
        model="small", options=dict(draft_length=4, max_new_tokens=9), rows=[plain, row, whole]
    )
    kinds["draft_experts"] = dict(width=64, top_r=3, steps=110)
    (tmp_path / "kinds.json").write_text(json.dumps(kinds))
    argv += ["--arms", str(tmp_path / "arms.json"), "--kinds", str(tmp_path / "kinds.json")]
    upcycle_card.main([*argv, "--out", str(out), "--note", "Take this one."])
    text = out.read_text()
    upcycle_card.main([*argv, "--out", str(tmp_path / "named.md"), "--drafts-of", str(files[2])])
    named = " ".join((tmp_path / "named.md").read_text().split())
    assert "on 384/36/18, 4 k, healed 20 k: 7 steps an arm" in named
    assert "Decoding 384/36/18, 4 k, healed 20 k with" in named
    assert "# Small.gguf as a mixture of experts" in text and "Take this one." in text
    assert "| 384/36/18, 4 k | 62.5% | 0.8 | 0.125 | 7.25 | 6 | 100 |" in text
    assert "| 384/36/18, 4 k, uncorrected, seed 3 | 7.25, 0.750 |" in text
    assert "| 384/36/18, 4 k | 2 | 3 | 2 | 0.625 | 0.25 | 10 | 10 | 10 | 10 |" in text
    assert "| 384/36/18, 4 k | 0.375 | 0.5 | 50 |" in text
    assert "| 384/36/18, 4 k | 0.5 | 0.1 | 0.2 | 0.1 | 90 | 60 | 2 GiB |" in text
    assert "    So.\n    # no title\n" in text
    assert "| 384/36/18, 4 k, healed 20 k | 62.5% |" in text
    told = "| 384/36/18, 4 k, healed 20 k | routers, norms | 2.5 M | 20 | 20480 | 0.0002 | 0.01 |"
    assert told in text and text.count("2 GiB") == 2  # a healing has no fits
    told = " ".join(text.split())
    assert "on small: 7 steps an arm, with `draft.width=64`." in told
    assert "| + residual | 2 | 0.25 | 50 | - | - | - | 75 |" in text
    assert "| draft experts, greedy | code | 4 | 50.0% | 2.5 | 2 | yes |" in text
    assert "draft experts of width 64, trained for 110 steps, that keep the first 3" in text
    assert "| AR |" not in text and "| AR of all | all | 4 | - | 1 | 2 | yes |" in text


@pytest.mark.slow
def test_answers_of_several_models_stand_side_by_side(tmp_path):
    dense, moe = write_dense(tmp_path / "dense"), write_model(tmp_path / "moe")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "a", "prompt": "Hi"}\n{"id": "b", "prompt": "Ho"}\n')
    out = tmp_path / "answers.json"
    options = ["--out", str(out), "--prompts", str(prompts), "--tokens", "4"]
    upcycle_answers.main([str(dense), str(moe), *options])
    found = json.loads(out.read_text())
    assert [record["id"] for record in found] == ["a", "b"]
    assert all(set(record["answers"]) == {"dense", "moe"} for record in found)

"""The card of an upcycled model, and the answers in it."""

import json

import pytest

from dejax.errors import UsageError
from tests.train.dense_model import write_dense
from tests.train.small_model import write_model
from train import upcycle_answers, upcycle_card

ASKED = {"DENSE": "d", "--correct": True, "--seed": 0, "--tokens": 4096, "--dtype": "float32"}


def run_of(**options) -> dict:
    """A result with easily told numbers."""
    row = dict(dense_perplexity=6.0, perplexity=7.25, kl=0.125, agreement=0.75, tokens=100)
    unique = {f"{kind}unique_{n}": [9.0, 11.0] for kind in ("", "independent_") for n in (4, 8)}
    return dict(
        dense="Small.gguf",
        identity="a" * 32,
        options=ASKED | options,
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
    healed |= {"identity": "b" * 32}
    for place, run in enumerate((run_of(), run_of(**{"--correct": False, "--seed": 3}), healed)):
        files.append(tmp_path / f"{place}.json")
        files[-1].write_text(json.dumps(run))
    answers = [dict(id="q1", prompt="Why?", answers={"dense": "So.\n# no title", "moe": "Or."})]
    (tmp_path / "answers.json").write_text(json.dumps(answers))
    out = tmp_path / "docs" / "card.md"
    argv = ["--runs", *map(str, files), "--answers", str(tmp_path / "answers.json")]
    arm = dict(arm="+ residual", seeds=2, mean=dict(kl=0.25, agreement=0.5, alpha_1=0.75))
    arms = dict(identity="b" * 32, steps=7, settings=["draft.width=64"], arms=[arm])
    (tmp_path / "arms.json").write_text(json.dumps(arms))
    row = dict(run="draft experts, greedy", kind="code", prompts=4, acceptance_rate=0.5)
    row |= dict(tokens_per_round=2.5, bytes_per_token=2e6, identical_to_ar=True)
    plain = row | dict(run="AR", acceptance_rate=None)
    whole = plain | dict(run="AR of all", kind="all", tokens_per_round=1.0)
    kinds = dict(identity="a" * 32, rows=[plain, row, whole])
    kinds["options"] = dict(draft_length=4, max_new_tokens=9)
    kinds["draft_experts"] = dict(width=64, top_r=3, steps=110)
    (tmp_path / "kinds.json").write_text(json.dumps(kinds))
    argv += ["--arms", str(tmp_path / "arms.json"), "--kinds", str(tmp_path / "kinds.json")]
    upcycle_card.main([*argv, "--out", str(out), "--note", "Take this one."])
    text = out.read_text()
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
    assert "on 384/36/18, 4 k, healed 20 k: 7 steps an arm, with `draft.width=64`." in told
    assert "Decoding 384/36/18, 4 k with draft experts of width 64" in told
    assert "| + residual | 2 | 0.25 | 50 | - | - | - | 75 |" in text
    assert "| draft experts, greedy | code | 4 | 50.0% | 2.5 | 2 | yes |" in text
    assert "draft experts of width 64, trained for 110 steps, that keep the first 3" in told
    assert "| AR |" not in text and "| AR of all | all | 4 | - | 1 | 2 | yes |" in text


def without(value: dict, *path: str) -> dict:
    """A copy without a field of a field."""
    copy = json.loads(json.dumps(value))
    inner = copy
    for name in path[:-1]:
        inner = inner[name]
    del inner[path[-1]]
    return copy


@pytest.mark.parametrize(
    "run, message",
    [
        (without(run_of(), "options"), "it has no 'options'"),
        (without(run_of(), "quality", "all"), "quality has no 'all'"),
        (without(run_of(), "quality", "code", "kl"), "quality.code has no 'kl'"),
        (without(run_of(), "routing", "overlap"), "routing has no 'overlap'"),
        (run_of() | {"layout": "384/36/18"}, "layout is no object"),
        (run_of() | {"layers": []}, "layers is no list with something in it"),
        (run_of() | {"seconds": "9"}, "seconds is '9'"),
        (run_of() | {"healing": {}}, "it has no 'config'"),
        ([], "it is no object"),
    ],
)
def test_a_run_that_lacks_something_is_refused(tmp_path, run, message):
    file = tmp_path / "run.json"
    file.write_text(json.dumps(run))
    with pytest.raises(UsageError, match="not a result of `dejax upcycle --json`: ") as refused:
        upcycle_card.main(["--runs", str(file), "--out", str(tmp_path / "card.md")])
    assert str(refused.value).endswith(message) and "run.json" in str(refused.value)
    assert not (tmp_path / "card.md").exists()


def test_results_that_do_not_go_together_are_refused(tmp_path):
    def file(name: str, value) -> str:
        (tmp_path / name).write_text(json.dumps(value))
        return str(tmp_path / name)

    def refused(*argv: str) -> str:
        with pytest.raises(UsageError) as error:
            upcycle_card.main([*argv, "--out", str(tmp_path / "card.md")])
        return str(error.value)

    run = file("run.json", run_of())
    assert "run.json are both 384/36/18, 4 k" in refused("--runs", run, file("b.json", run_of()))
    other = run_of() | {"dense": "Other.gguf", "options": ASKED | {"DENSE": "other"}}
    line = refused("--runs", run, file("other.json", other))
    assert "other.json: made from Other.gguf, " in line and "from another model" in line
    arms = dict(identity="c" * 32, steps=7, settings=[], arms=[dict(arm="a", seeds=1, mean={})])
    of_no_run = refused("--runs", run, "--arms", file("arms.json", arms))
    assert f"arms.json: of the MoE {'c' * 32}, which is that of no run; expected" in of_no_run
    empty = file("empty.json", arms | {"arms": []})
    assert "arms is no list with something" in refused("--runs", run, "--arms", empty)
    assert "not a result of `python -m infer.bench_kinds" in refused("--runs", run, "--kinds", run)
    assert "not answers of" in refused("--runs", run, "--answers", file("none.json", [3]))
    with pytest.raises(UsageError, match="not written to standard output"):
        upcycle_card.main(["--runs", run, "--out", "-"])


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

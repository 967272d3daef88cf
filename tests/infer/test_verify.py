"""The exactness gate: what it compares, and that it fails where tokens really differ."""

import json

import pytest

from dejax import cli
from infer import verify as program
from tests.families.random_folder import raw_config, write_folder

PROMPTS = [{"id": "a", "prompt": [3, 1, 4, 1, 5]}, {"id": "b", "prompt": [9, 2, 6]}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verify")
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, PROMPTS)))
    return write_folder(folder / "model", raw_config("no-yarn-all-moe"))


def verify(model, *more):
    """Exit status and result of the verb on the two prompts."""
    result = model.parent / "result.json"
    result.unlink(missing_ok=True)
    prompts = ["--prompts", str(model.parent / "prompts.jsonl"), "--max-new-tokens", "8"]
    argv = ["verify", str(model), *prompts, "--json", str(result), *more]
    return cli.main(argv), json.loads(result.read_text()) if result.exists() else None


@pytest.mark.slow
def test_every_mode_is_compared(model, capsys):
    status, result = verify(model, "--draft", "init")
    assert status == 0 and result is not None
    assert [(row["dtype"], row["mode"]) for row in result["rows"]] == [
        ("float32", "top-r"),
        ("float32", "n-gram"),
        ("float32", "draft-expert"),
        ("float32", "ecospec"),
    ]
    for row in result["rows"]:
        assert (row["prompts"], row["tokens"], row["real"]) == (2, 16, 0)
        assert row["identical"] + row["near_ties"] == 2
    assert "tokens beside autoregressive decoding" in capsys.readouterr().out


@pytest.mark.slow
def test_float64_needs_no_setting_and_sampling_is_compared_too(model):
    status, result = verify(model, "--dtypes", "float64", "bfloat16", "--temperature", "0.8")
    assert status == 0 and result is not None
    assert [row["dtype"] for row in result["rows"]] == ["float64"] * 2 + ["bfloat16"] * 2
    assert [row["identical"] for row in result["rows"][:2]] == [2, 2]


@pytest.mark.slow
def test_a_real_difference_fails_the_gate(model, monkeypatch, capsys):
    original = program.generate

    def wrong(target, prompts, *, mode, **options):
        found = original(target, prompts, mode=mode, **options)
        if mode != "ar":
            found[1].tokens[3] = (found[1].tokens[3] + 1) % target.config.vocab_size
        return found

    monkeypatch.setattr(program, "generate", wrong)
    status, result = verify(model, "--draft-length", "1")
    assert status == 1 and result is not None
    (divergence,) = result["rows"][0]["divergences"]
    assert (divergence["id"], divergence["index"], divergence["float64_verdict"]) == (
        "b",
        3,
        "real",
    )
    shown = capsys.readouterr().err
    assert "prompt b differs at new token 3" in shown
    assert "tokens differ from autoregressive decoding: top-r in float32" in shown


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--r", "99"], "--r is 99; the target routes to"),
        (["--dtypes", "int8"], "int8"),
        (["--max-new-tokens", "99999"], "no prompt fits the context"),
    ],
)
def test_bad_calls_are_one_line(model, capsys, more, message):
    status, result = verify(model, *more)
    assert status == 2 and result is None
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_trees_are_verified_and_n_grams_stay_chains(model):
    status, result = verify(model, "--draft", "init", "--tree", "best8", "--dtypes", "float64")
    assert status == 0 and result is not None
    assert [row["identical"] for row in result["rows"]] == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rule", "R4"], "--rule R4 emits other tokens of the same law; verify compares tokens"),
        (["--tree", "2x5"], "the tree has 62 nodes; a pass verifies at most 32"),
    ],
)
def test_what_cannot_be_compared_is_refused(model, monkeypatch, capsys, options, message):
    monkeypatch.setattr("infer.loading.load_target", None)
    assert cli.main(["verify", str(model), *options]) == 2
    assert message in capsys.readouterr().err

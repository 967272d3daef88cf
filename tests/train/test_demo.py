"""The demo from end to end on the embedded target, cut short."""

import dataclasses
import json

import pytest

from dejax import cli
from infer.suite import standard_runs
from train import demo
from train.closed_form import InitConfig
from train.config_files import load_config
from train.loop import LoopConfig


@pytest.fixture
def short(monkeypatch):
    """Few steps on short rows, and few tokens of one prompt."""
    config = dataclasses.replace(
        load_config("distill_tiny"),
        loop=LoopConfig(steps=3, log_every=1),
        init=InitConfig(tokens=2048),
        seq_len=128,
    )
    monkeypatch.setattr(demo, "load_config", lambda name: config)
    original = demo.decode_prompts

    def fewer(target, draft, **settings):
        return original(target, draft, **(settings | {"count": 1, "tokens": 8}))

    monkeypatch.setattr(demo, "decode_prompts", fewer)


@pytest.mark.slow
def test_demo_end_to_end(short, tmp_path, capsys):
    results = tmp_path / "results.json"
    status = cli.main(["demo", "--out", str(tmp_path / "out"), "--json", str(results)])
    shown = capsys.readouterr()
    assert status == 0, shown.err
    found = json.loads(results.read_text())
    assert {"target", "distill", "arms", "modes", "seconds"} <= found.keys()
    assert found["target"] == "tiny"
    assert [arm["name"] for arm in found["arms"]] == [
        "top-1",
        "top-1 + mean residual",
        "closed form",
        "all losses",
    ]
    for arm in found["arms"]:
        assert {"kl", "agreement", "router_agreement", "prefetch_recall"} < arm.keys()
    assert len([row for row in found["modes"] if row["options"]["temperature"] > 0]) == 3
    for row in found["modes"]:
        assert row["identical_to_ar"] is True and row["divergences"] == []
        if row["mode"] != "ar":
            assert row["stats"]["drafted"] > 0
    for title in ("teacher-forced", "Drafting 4 tokens", "Verification", "Decoding speed"):
        assert title in shown.out
    assert "simulated link" in shown.out
    for name in ("speed", "acceptance", "unique_experts", "losses"):
        assert (tmp_path / "out" / f"{name}.png").stat().st_size > 5000
    page = (tmp_path / "out" / "demo.html").read_text()
    assert page.count("data:image/png;base64,") == 4 and "Verification" in page
    assert "://" not in page  # nothing is fetched
    assert (tmp_path / "out" / "draft" / "adapter.safetensors").is_file()


@pytest.mark.slow
def test_demo_takes_ready_draft_experts(short, monkeypatch, tmp_path, capsys):
    # The other runs do not depend on where the draft experts are from.
    names = ("AR", "top-1, K=4", "draft-expert, K=4")
    few = [run for run in standard_runs(6, every_seeded=False) if run.name in names]
    monkeypatch.setattr(demo, "standard_runs", lambda top_k, every_seeded: few)
    out = tmp_path / "out"
    assert cli.main(["demo", "--draft", "init:3", "--out", str(out)]) == 0
    found = json.loads((out / "demo.json").read_text())
    assert found["distill"] == {"draft": "init:3"}
    assert [arm["name"] for arm in found["arms"]] == ["top-1", "top-1 + mean residual", "given"]
    assert all(row["identical_to_ar"] for row in found["modes"])
    assert sorted(path.name for path in out.iterdir()) == [
        "acceptance.png",
        "demo.html",
        "demo.json",
        "speed.png",
        "unique_experts.png",
    ]
    assert "teacher-forced" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--draft", "init", "--full"], "--full trains every arm of the losses"),
        (["--draft", "nowhere"], "nowhere"),
    ],
)
def test_demo_refuses_draft_experts_that_it_cannot_take(tmp_path, capsys, options, says):
    assert cli.main(["demo", *options, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_demo_needs_a_target_that_is_there(tmp_path, capsys):
    status = cli.main(["demo", "--target", str(tmp_path / "none"), "--out", str(tmp_path / "out")])
    assert status == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "out").exists()

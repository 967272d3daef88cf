"""`dejax bench`: every suite on small targets, its JSON, plots and page; bad calls."""

import json
from dataclasses import fields

import pytest

from dejax.cli import main
from dejax.errors import UsageError
from infer.bench_limits import Limits
from infer.bench_plots import lines_of
from infer.bench_rows import Row, spread
from infer.synthetic import SHAPES
from tests.train.dense_model import write_dense
from train.bench import SUITES
from train.performance_page import main as page

CONTRACT = (
    "name model mode options link simulated tps ratio_to_ar limit_tps share_of_limit "
    "link_utilisation tokens_per_round cost_verify cost_draft acceptance_rate bytes_per_token "
    "accepted_per_expert_loaded prefetch_recall prefetch_precision peak_rss_bytes repeats spread"
).split()


def test_rows_have_the_fields_of_the_contract():
    assert set(CONTRACT) <= {field.name for field in fields(Row)}
    assert spread([1.0]) is None and spread([1.0, 2.0, 3.0]) == 1.0


def test_the_limit_is_a_layer_s_longer_part():
    limits = Limits(step=1.0, feed_forward=0.1, moe_layers=4, streamed=0.5)
    assert limits.offloaded(0.05) == 1.0  # hidden behind the computation
    assert limits.offloaded(0.6) == pytest.approx(1.0 + 4 * 0.5)


def test_lines_are_told_apart_by_what_runs():
    rows = [
        {"mode": "ar", "options": {"cache": c, "look_ahead": look}, "tps": 10 * c + look}
        for c in (0.5, 0.0)
        for look in (False, True)
    ]
    assert lines_of(rows, "cache", "tps") == [
        ("AR", [(0.0, 0.0), (0.5, 5.0)]),
        ("AR, look-ahead", [(0.0, 1.0), (0.5, 6.0)]),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("suite", SUITES)
def test_every_suite_runs_and_makes_a_page(suite, tmp_path, capsys):
    options = ["--draft", "init", "--count", "1", "--max-new-tokens", "12", "--repeats", "1"]
    assert main(["bench", suite, *options, "--out", str(tmp_path)]) == 0
    assert "tiny" in capsys.readouterr().out
    result = json.loads((tmp_path / f"{suite}.json").read_text())
    assert result["suite"] == suite and result["command"].startswith(f"dejax bench {suite}")
    assert result["versions"]["jax"] and result["machine"]["cpus"] >= 1
    for row in result["rows"]:
        assert set(CONTRACT) <= set(row)
        assert row["simulated"] == bool(row["link"] and row["link"].startswith("simulated"))
        assert row["tps"] or row["seconds"] or row["bytes_per_second"]
        assert row["options"].get("identical_to_ar", True)
        if row["mode"] == "ar" and row["ratio_to_ar"] is not None:
            assert (row["limit_tps"] or 1) > 0 and row["tokens_per_round"] == 1
    if suite == "decode":
        governed = [row for row in result["rows"] if row["name"].endswith("governed: chat")]
        assert len(governed) == 3 and all(row["ratio_to_same_cache"] > 0 for row in governed)
    out = tmp_path / "performance.md"
    assert page(["--results", str(tmp_path / f"{suite}.json"), "--out", str(out)]) == 0
    text = out.read_text()
    assert "## tiny" in text and f"### {suite}" in text
    assert ("**Simulated links**" in text) == any(row["simulated"] for row in result["rows"])
    for plot in (tmp_path / "performance").glob("*.png"):
        assert f"performance/{plot.name}" in text


@pytest.mark.slow
def test_a_dense_target_is_measured_beside_a_moe(tmp_path):
    dense_folder = write_dense(tmp_path / "dense", max_position_embeddings=1024)
    options = ["--count", "1", "--max-new-tokens", "12", "--repeats", "1"]
    for model in ("tiny", str(dense_folder)):
        out = str(tmp_path / model.replace("/", "-"))
        assert main(["bench", "verify", "--model", model, *options, "--out", out]) == 0
    files = [str(file) for file in tmp_path.glob("*/verify.json")]
    assert page(["--results", *files, "--out", str(tmp_path / "performance.md")]) == 0
    text = (tmp_path / "performance.md").read_text()
    assert "## Dense and MoE" in text and str(dense_folder) not in text
    assert (tmp_path / "performance" / "dense-and-moe.png").exists()
    assert main(["bench", "decode", "--model", str(dense_folder), *options]) == 2


@pytest.mark.slow
def test_a_synthetic_target_is_read_from_disk(tmp_path, capsys):
    shape = tmp_path / "shape"
    shape.mkdir()
    config = json.loads((SHAPES / "deepseek_v2_lite" / "config.json").read_text())
    small = dict(hidden_size=64, intermediate_size=96, moe_intermediate_size=32, vocab_size=128)
    small |= dict(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
    small |= dict(num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8)
    (shape / "config.json").write_text(json.dumps(config | small))
    model = f"synthetic:{shape}:layers=3"
    store = ["--store", str(tmp_path / "store")]
    assert main(["bench", "link", "--model", model, *store, "--link", "disk"]) == 0
    assert "disk, cold, plain preadv" in capsys.readouterr().out
    decode = ["bench", "decode", "--model", model, *store, "--link", "disk", "--repeats", "1"]
    assert main([*decode, "--count", "1", "--max-new-tokens", "6", "--json", "-"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["link"] for row in rows} == {"disk, page cache dropped"}
    assert not any(row["simulated"] for row in rows)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nothing"], "not one of link, decode"),
        (["decode", "--model", "synthetic:none"], "expected synthetic:CONFIG"),
        (["decode", "--model", "synthetic:deepseek_v2_lite:layers=1"], "expected 2 to 27"),
        (["decode", "--model", "synthetic:deepseek_v2_lite:width=1"], "expected synthetic:CONFIG"),
        (["decode", "--experts", "bf16"], "--experts is for --model synthetic"),
        (["decode", "--link", "disk", "--model", "synthetic:deepseek_v2_lite"], "give --store"),
        (["decode", "--link", "fast"], "expected"),
        (["decode", "--max-new-tokens", "100000"], "no prompt fits"),
        (["decode", "--max-new-tokens", "1"], "--max-new-tokens 1: expected 2 or more"),
        (["verify", "--max-new-tokens", "9"], "--max-new-tokens 9: expected 10 or more"),
        (["budget", "--max-new-tokens", "7"], "--max-new-tokens 7: expected 8 or more"),
    ],
)
def test_bad_calls_are_one_line(arguments, says, capsys):
    assert main(["bench", *arguments]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert says in error and "Traceback" not in error


def test_a_page_is_made_of_results_only(tmp_path, capsys):
    file = tmp_path / "other.json"
    file.write_text("{}")
    with pytest.raises(UsageError, match="not a result of dejax bench"):
        page(["--results", str(file), "--out", str(tmp_path / "page.md")])

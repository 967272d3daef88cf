"""`dejax bench`: every suite on small targets, its JSON, plots and page; bad calls."""

import json
from dataclasses import fields, replace
from typing import get_args

import pytest

from dejax.ckpt import page_cache
from dejax.cli import main
from dejax.errors import UsageError
from dejax.spec.budget import Rank
from infer.bench_budget import budgets, name_of
from infer.bench_decode import LOADS
from infer.bench_limits import Limits
from infer.bench_plots import lines_of
from infer.bench_rows import Row, spread
from infer.bench_trees import COSTS, GROWN, MOST, SIZES, beside_same_size, in_all_places
from infer.synthetic import SHAPES
from tests.families.configurations import FIRST
from tests.families.random_folder import raw_config, write_folder
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


@pytest.mark.parametrize(("top_k", "experts", "size"), [(6, 64, 12), (18, 36, 27), (2, 8, 4)])
def test_no_budget_is_compared_twice(top_k, experts, size):
    found = budgets(top_k, experts)
    assert len({name_of(budget, experts) for budget in found}) == len(found)
    assert [budget.experts for budget in found if budget.exact_every] == [size]
    assert found[-1].experts == experts > max(budget.experts for budget in found[:-1])


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
@pytest.mark.parametrize("suite", [suite for suite in SUITES if suite != "trees"])
def test_every_suite_runs_and_makes_a_page(suite, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("train.bench.LOADS", LOADS[::2])  # each is waited for in full
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
    if suite == "budget":
        assert all(r["options"]["lossless"] == (r["mode"] != "moe-spec") for r in result["rows"])
        budgets = [r["options"]["budget"] for r in result["rows"] if r["mode"] == "moe-spec"]
        ranked = [[b["experts"] for b in budgets if b["rank"] == rank] for rank in get_args(Rank)]
        assert set(ranked[1]) < set(ranked[0]) and len(ranked[1]) == 5
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
def test_systems_are_told_side_by_side(tmp_path, capsys, monkeypatch):
    """Those of the smallest and the largest tree: each system compiles for a while."""
    runs = [
        run
        for run in in_all_places()
        if (run.controller, run.governor) == ("consumer", False)
        and (run.predictor, run.expert_cost) == ("router", COSTS[0])
        and run.tree in ("chain", f"{GROWN}:{SIZES[0]}", f"{GROWN}:{SIZES[-1]}")
    ]
    assert len(runs) == 3 * 6
    monkeypatch.setattr("train.bench.in_all_places", lambda trained: runs)
    model = write_folder(tmp_path / "small", raw_config(FIRST["qwen3_moe"], eos_token_id=None))
    argv = ["bench", "trees", "--model", str(model), "--draft", "init", "--link", "sim:1"]
    argv += ["--count", "1", "--max-new-tokens", "12", "--repeats", "1", "--out", str(tmp_path)]
    assert main(argv) == 0
    assert "no real system" in capsys.readouterr().out
    rows = json.loads((tmp_path / "trees.json").read_text())["rows"]
    assert [row["name"] for row in rows] == [run.name for run in runs]
    for row in rows:
        options = row["options"]
        assert row["tps"] > 0 and options["identical_to_ar"] and row["read_per_token"] > 0
        assert (row["bytes_per_token"] is None) == (options["engine"] == "resident")
        assert (row["controller_share"] is None) == (row["mode"] == "ar")
        assert options["oracle"] == ("no real system" in row["name"])
        assert options["oracle"] == (options.get("real_system") is False)
        assert row["nodes_per_round"] <= MOST and (row["link"] is None) == (options["cache"] == 1)
    page_file = tmp_path / "page.md"
    assert page(["--results", str(tmp_path / "trees.json"), "--out", str(page_file)]) == 0
    text = page_file.read_text()
    assert "**not a real system**" in text and "performance/small-trees.png" in text


def test_bytes_are_held_against_trees_of_the_same_size():
    options = {"cache": 0.0, "engine": "host", "temperature": 0.0, "tree": "2x3:4"}
    trees = [
        Row(
            f"{n}",
            "m",
            "draft-expert",
            options,
            nodes_per_round=n,
            bytes_per_token=10.0 * n,
            read_per_token=1.0,
        )
        for n in (2.0, 4.0)
    ]
    chain = replace(trees[0], options=options | {"tree": "chain"}, bytes_per_token=0.0)
    other = replace(trees[0], options=options | {"cache": 0.5}, bytes_per_token=0.0)
    eco = replace(trees[0], mode="ecospec", nodes_per_round=3.0, bytes_per_token=24.0)
    rows = [*trees, chain, other, eco]
    assert beside_same_size(eco, rows).bytes_to_same_size == pytest.approx(24 / 30)
    assert beside_same_size(replace(eco, nodes_per_round=5.0), rows).bytes_to_same_size is None
    assert beside_same_size(chain, rows) == chain
    # Where nothing is moved, what is read counts.
    rows = [replace(row, bytes_per_token=None, read_per_token=8.0) for row in trees]
    eco = replace(eco, bytes_per_token=None, read_per_token=4.0)
    assert beside_same_size(eco, rows).bytes_to_same_size == pytest.approx(0.5)


@pytest.mark.parametrize("suite", ["trees", "budget", "decode"])
def test_draft_experts_are_read_before_the_target(suite, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("train.bench.load_shown", lambda *_: pytest.fail("the target is loaded"))
    assert main(["bench", suite, "--draft", str(tmp_path / "none")]) == 2
    assert "does not exist; expected an adapter folder" in capsys.readouterr().err


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


def small_shape(folder):
    """A `--model` of random weights: DeepSeek-V2-Lite's shape, small."""
    config = json.loads((SHAPES / "deepseek_v2_lite" / "config.json").read_text())
    small = dict(hidden_size=64, intermediate_size=96, moe_intermediate_size=32, vocab_size=128)
    small |= dict(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
    small |= dict(num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | small))
    return f"synthetic:{folder}:layers=3"


FEW = ("--repeats", "1", "--count", "1", "--max-new-tokens", "6", "--json", "-")


@pytest.mark.slow
def test_a_synthetic_target_is_read_from_disk(tmp_path, capsys):
    model = small_shape(tmp_path / "shape")
    store = ["--store", str(tmp_path / "store")]
    assert main(["bench", "link", "--model", model, *store, "--link", "disk"]) == 0
    assert "disk, cold, plain preadv" in capsys.readouterr().out
    decode = ["bench", "decode", "--model", model, *store, "--link", "disk"]
    assert main([*decode, *FEW]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["link"] for row in rows} == {"disk, page cache dropped"}
    assert not any(row["simulated"] for row in rows)


@pytest.mark.slow
def test_int4_experts_from_disk_are_held_against_plain_reads(tmp_path, capsys, monkeypatch):
    """The paper's setting of flash and int4; then a file system whose cache cannot be dropped."""
    given = ["--store", str(tmp_path / "store"), "--experts", "int4", "--link", "disk"]
    decode = ["bench", "decode", "--model", small_shape(tmp_path / "shape"), *given]
    assert main([*decode, *FEW]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    for row in rows:
        rate = row["options"]["link_bytes_per_second"]
        assert row["options"]["encoding"] == "int4" and rate > 0
        assert row["link_utilisation"] > 0
        assert (row["limit_tps"] is None) == bool(row["options"]["look_ahead"])
    # A layer's three matrices in half a byte a number and scales, for 6 experts of 2 layers.
    numbers = 6 * 2 * 3 * 64 * 32
    assert numbers / 2 < rows[0]["bytes_per_token"] < numbers
    monkeypatch.setattr(page_cache, "drop", lambda *args, **how: False)
    assert main([*decode, *FEW]) == 1
    assert "stay in the page cache" in capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nothing"], "not one of link, decode"),
        (["decode", "--model", "synthetic:none"], "expected synthetic:CONFIG"),
        (["decode", "--model", "synthetic:deepseek_v2_lite:layers=1"], "expected 2 to 27"),
        (["decode", "--model", "synthetic:deepseek_v2_lite:width=1"], "expected synthetic:CONFIG"),
        (["decode", "--experts", "bf16"], "--experts is for --model synthetic"),
        (["decode", "--link", "disk", "--model", "synthetic:deepseek_v2_lite"], "give --store"),
        (["decode", "--link", "disk"], "tiny is none; run: dejax convert tiny --out DIR"),
        (["decode", "--link", "fast"], "expected"),
        (["decode", "--max-new-tokens", "100000"], "no prompt fits"),
        (["decode", "--max-new-tokens", "1"], "--max-new-tokens 1: expected 2 or more"),
        (["verify", "--max-new-tokens", "9"], "--max-new-tokens 9: expected 10 or more"),
        (["budget", "--max-new-tokens", "7"], "--max-new-tokens 7: expected 8 or more"),
        (["budget"], "bench budget verifies drafts of draft experts: give --draft"),
        (["trees"], "bench trees verifies drafts of draft experts: give --draft"),
        (["decode", "--out", ""], "--out: the path is empty; expected a name"),
        (["decode", "--model", ""], "--model: the path is empty; expected a name"),
        (["decode", "--draft", ""], "--draft: the path is empty; expected a name"),
        (["decode", "--json", ""], "--json: the path is empty; expected a name"),
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

"""`dejax upcycle` on small random dense models: exactness, parity, resuming, bad input."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import train.upcycle as program
from dejax.cli import main as dejax
from dejax.errors import UsageError
from dejax.target import load_target
from tests.ckpt.smollm2 import smollm2
from tests.train.dense_model import write_dense
from tests.train.small_model import tokenizer_of, write_model
from train import upcycle_quality
from train.upcycle_layers import Windows
from train.upcycle_state import Unfinished, finished_layers

LAYOUT = ["--shared", "64", "--experts", "4"]
FEW = ["--tokens", "2048", "--held-out"]
TOKENS = np.random.default_rng(0).integers(0, 256, (2, 64))


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Path:
    return write_dense(tmp_path_factory.mktemp("dense") / "model")


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """A little text to measure on, of one kind."""
    path = tmp_path_factory.mktemp("text") / "held.jsonl"
    path.write_text(json.dumps({"text": "the draft path leaves out what the experts do " * 4}))
    return path


def run(dense: Path, out: Path, text: Path, *more: str) -> dict:
    """The result of a call that succeeds."""
    result = out.with_suffix(".json")
    program.main([str(dense), "--out", str(out), *LAYOUT, *FEW, str(text), *more,
                  "--json", str(result)])  # fmt: skip
    return json.loads(result.read_text())


def difference(one: Path, other: Path) -> float:
    return float(np.abs(np.asarray(load_target(one)(TOKENS) - load_target(other)(TOKENS))).max())


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_with_every_expert_chosen_it_is_the_dense_model(tmp_path, text, family):
    """Whatever beta: nothing is left out, and there is no gap."""
    dense = write_dense(tmp_path / "dense", family)
    done = run(dense, tmp_path / "moe", text, "--top-k", "4", "--dtype", "float32")
    assert difference(dense, tmp_path / "moe") < 2e-4
    assert done["quality"]["all"]["agreement"] == 1 and done["layout"]["active_share"] == 1
    assert all(layer["before"] < 1e-9 and layer["after"] < 1e-9 for layer in done["layers"])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_transformers_computes_the_same(tmp_path, text, family):
    from tests.families import reference

    dense = write_dense(tmp_path / "dense", family)
    run(dense, tmp_path / "moe", text, "--top-k", "2", "--dtype", "float32")
    theirs = reference.load(tmp_path / "moe")
    assert type(theirs).__name__ == "Glm4MoeForCausalLM"
    ours = load_target(tmp_path / "moe")
    assert np.abs(np.asarray(ours(TOKENS)) - reference.logits(theirs, TOKENS)).max() < 2e-4
    assert difference(dense, tmp_path / "moe") > 0.1  # or all of this would be the dense model
    words = "the draft expert"
    assert ours.tokenizer(words).input_ids == tokenizer_of()(words).input_ids
    assert ours.tokenizer.chat_template == tokenizer_of().chat_template


@pytest.mark.slow
def test_a_seed_fixes_every_byte_and_another_changes_them(dense, text, tmp_path):
    for name, seed in (("a", "3"), ("b", "3"), ("c", "4")):
        run(dense, tmp_path / name, text, "--top-k", "2", "--seed", seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


@pytest.mark.slow
def test_correction_brings_the_model_nearer_to_the_dense_one(dense, text, tmp_path):
    with_, without = (
        run(dense, tmp_path / name, text, "--top-k", "2", "--tokens", "8192", *more)
        for name, more in (("with", ()), ("without", ("--no-correct",)))
    )
    assert all(layer["after"] < layer["before"] for layer in with_["layers"])
    assert all(layer["after"] is None for layer in without["layers"])
    assert with_["quality"]["all"]["kl"] < without["quality"]["all"]["kl"]


@pytest.mark.slow
def test_a_healed_model_is_measured_as_upcycling_measures(dense, text, tmp_path, capsys):
    done = run(dense, tmp_path / "moe", text, "--top-k", "2")
    moe, file, out = tmp_path / "moe", tmp_path / "moe.json", tmp_path / "again.json"

    def measured(moe: Path, *more: str) -> dict:
        options = ["--run", str(file), "--held-out", str(text), "--json", str(out), *more]
        upcycle_quality.main([str(dense), str(moe), *options])
        return json.loads(out.read_text())

    assert measured(moe) == done  # but for the time it takes, which is the run's
    record = {"target": done["identity"], "config": {}}
    (moe / "healing.json").write_text(json.dumps(record))
    assert measured(moe)["healing"] == record
    (moe / "healing.json").write_text(json.dumps(record | {"target": "f" * 32}))
    with pytest.raises(UsageError, match="healed from a MoE of identity ffff"):
        measured(moe)
    (moe / "healing.json").unlink()
    run(dense, tmp_path / "other", text, "--top-k", "2", "--seed", "1")
    with pytest.raises(UsageError, match="neither what .*moe.json is about nor healed from it"):
        measured(tmp_path / "other")
    file.write_text('{"quality": 1}')
    with pytest.raises(UsageError, match="not a result of `dejax upcycle --json`"):
        measured(moe)


KILLED_AFTER_A_LAYER = """
import os, signal, sys
import train.upcycle as program
from train.upcycle_state import Unfinished
finish = Unfinished.finish_layer
def finish_layer(self, layer, *rest):
    finish(self, layer, *rest)
    if layer == 1:
        os.kill(os.getpid(), signal.SIGKILL)
Unfinished.finish_layer = finish_layer
program.main(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bytes(dense, text, tmp_path):
    run(dense, tmp_path / "whole", text, "--top-k", "2")
    argv = [str(dense), "--out", str(tmp_path / "moe"), *LAYOUT, *FEW, str(text), "--top-k", "2"]
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_AFTER_A_LAYER, *argv], capture_output=True, check=False
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    left = tmp_path / "moe.unfinished"
    assert (left / "layer_01.safetensors").exists() and not (tmp_path / "moe").exists()
    with pytest.raises(UsageError, match=r"begun with --top-k 2, this call has --top-k 3; give"):
        program.main([*argv[:-1], "3"])
    run(dense, tmp_path / "moe", text, "--top-k", "2")
    names = sorted(file.name for file in (tmp_path / "whole").iterdir())
    assert names == sorted(file.name for file in (tmp_path / "moe").iterdir())
    for name in names:
        one, other = (tmp_path / folder / name for folder in ("whole", "moe"))
        assert one.read_bytes() == other.read_bytes(), name
    assert not left.exists()


@pytest.mark.slow
def test_a_run_stopped_while_it_measures_goes_on_there(dense, text, tmp_path, monkeypatch):
    whole = run(dense, tmp_path / "whole", text, "--top-k", "2")

    def stop(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(program, "compare", stop)
        with pytest.raises(KeyboardInterrupt):
            run(dense, tmp_path / "moe", text, "--top-k", "2")
    weights = tmp_path / "moe" / "model.safetensors"
    written = weights.stat().st_mtime_ns
    done = run(dense, tmp_path / "moe", text, "--top-k", "2")
    assert weights.stat().st_mtime_ns == written and not (tmp_path / "moe.unfinished").exists()
    timed = ("out", "seconds", "fit_seconds", "peak_memory_bytes")
    assert {k: v for k, v in done.items() if k not in timed} == {
        k: v for k, v in whole.items() if k not in timed
    }
    with pytest.raises(UsageError, match="exists already"):
        run(dense, tmp_path / "moe", text, "--top-k", "2")


def test_streams_of_another_run_are_not_gone_on_with(tmp_path):
    out = tmp_path / "moe"
    state = Unfinished(out, {"--seed": 0})
    batch = {"tokens": np.zeros((4, 8), np.int32)}
    streams = [np.ones((4, 8, 3), np.float32) for _ in range(2)]
    state.finish_layer(0, Windows(batch, 1, *streams), None, None)
    assert finished_layers(out) == 1 and state.restore(Windows(batch, 1, *streams)) == 1
    kept = out.with_name("moe.unfinished") / "streams.safetensors"
    wrong = {"dense": streams[0], "moe": streams[1][:, :, :1]}
    save_file(wrong, kept, {"layer": "1"})
    with pytest.raises(UsageError, match=r"moe is float32 \[4, 8, 1\], expected float32 \[4, 8, 3"):
        state.restore(Windows(batch, 1, *streams))
    save_file({"dense": streams[0]}, kept, {"layer": "1"})
    with pytest.raises(UsageError, match="is not what a run leaves behind; remove its folder"):
        finished_layers(out)


# --- bad input -------------------------------------------------------------------------------


def refused(capsys, *argv: str) -> str:
    """The one line of a call that exits with status 2."""
    assert dejax(["upcycle", *argv]) == 2
    *_, line = capsys.readouterr().err.strip().splitlines()
    return line


@pytest.mark.parametrize(
    "options, message",
    [
        ("--shared 64 --experts 5", "192 neurons less 64 shared ones over 5 experts are 25.6 each"),
        ("--shared 96 --experts 2", "48 each; expected a multiple of 32"),
        ("--shared 192 --experts 4", "0 each"),
        ("--shared 64 --experts 1", "--shared: 64 is not a multiple of the experts' width 128"),
        ("--shared 32 --experts 5 --top-k 6", "--top-k: 6 of 5 experts"),
        ("--first-dense 3", "--first-dense: 3 of 3 layers"),
    ],
)
def test_layouts_that_do_not_divide_are_refused(dense, capsys, tmp_path, options, message):
    out = str(tmp_path / "moe")
    assert message in refused(capsys, str(dense), "--out", out, *options.split())
    assert list(tmp_path.iterdir()) == []


def test_text_that_is_too_short_says_how_much_is_needed(dense, capsys, tmp_path):
    out = ["--out", str(tmp_path / "moe")]
    line = refused(capsys, str(dense), *out, "--tokens", "100")
    assert "expected at least 512 (4 windows of 128)" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_more_text_than_there_is_says_how_much_is_needed(dense, capsys, tmp_path):
    out = ["--out", str(tmp_path / "moe")]
    much = refused(capsys, str(dense), *out, "--tokens", "900000000")
    assert "expected more than 899999744" in much
    assert list(tmp_path.iterdir()) == []


def test_models_that_cannot_be_upcycled_are_refused(dense, capsys, tmp_path):
    out = ["--out", str(tmp_path / "out")]
    moe = write_model(tmp_path / "moe")
    assert "is a mixture of experts already" in refused(capsys, str(moe), *out)
    assert "is a mixture of experts already" in refused(capsys, "tiny", *out)
    biased = write_dense(tmp_path / "biased", "llama-biases")
    assert "the model has biases, which a glm4_moe" in refused(capsys, str(biased), *out)
    windowed = write_dense(tmp_path / "windowed", "qwen3-window", attention_bias=False)
    assert "the model has a sliding window" in refused(capsys, str(windowed), *out)
    assert "exists already" in refused(capsys, str(dense), "--out", str(moe))


def test_a_tokenizer_that_is_not_the_models_is_refused(capsys, tmp_path):
    small = write_dense(tmp_path / "small", vocab_size=200)
    out = ["--out", str(tmp_path / "out")]
    line = refused(capsys, str(small), *out)
    assert "the tokenizer has 272 tokens, the model 200" in line
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (small / name).unlink()
    assert "has no tokenizer" in refused(capsys, str(small), *out)


# --- a real model ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.smollm
def test_smollm2_keeps_most_of_its_answers(tmp_path, text):
    """Two of its layers, in a layout with few experts: chance would agree on no token."""
    done = run(
        smollm2(), tmp_path / "moe", text, "--shared", "768", "--experts", "24",
        "--top-k", "12", "--first-dense", "28",
    )  # fmt: skip
    assert done["quality"]["all"]["agreement"] > 0.8

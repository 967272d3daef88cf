"""Dense targets: decoded autoregressively as they are, refused where routed experts are needed."""

import json
import sys

import jax
import numpy as np
import pytest

from dejax import cli
from dejax.errors import UsageError
from dejax.spec.control import ControlConfig
from dejax.spec.sampling import SamplingConfig, TokenPicker
from dejax.target import load_target
from infer.decode_options import DecodeOptions
from infer.decoder import Decoder
from infer.generate import generate
from tests.ckpt.smollm2 import smollm2
from tests.families.random_folder import raw_config, write_folder
from tests.train.small_model import write_model

DENSE = ("llama", "llama-biases", "qwen3", "qwen3-window")
PROMPT, NEW, CONTEXT = 20, 12, 64
DISTILL = ("distill", "distill_tiny", "--set", "target={}", "seq_len=64")
SAMPLINGS = (SamplingConfig(), SamplingConfig(temperature=0.9, top_k=50, top_p=0.95, seed=3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("dense") / "small", "llama")


def plain_loop(target, prompt, sampling, count=NEW):
    """Tokens chosen from whole forward passes, one each."""
    tokens = list(prompt)
    picker = TokenPicker(sampling, sample=0, vocab_size=target.config.vocab_size)
    for _ in range(count):
        padded = np.zeros((1, CONTEXT), np.int32)
        padded[0, : len(tokens)] = tokens
        logits = np.asarray(target(padded))[0, len(tokens) - 1]
        tokens.append(picker.pick(logits, position=len(tokens)))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    "name", [DENSE[0], *(pytest.param(name, marks=pytest.mark.slow) for name in DENSE[1:])]
)
def test_tokens_are_those_of_a_plain_loop(tmp_path, name):
    folder = write_folder(tmp_path / "m", raw_config(name, eos_token_id=None))
    prompt = np.random.default_rng(0).integers(0, 256, PROMPT).tolist()
    with jax.enable_x64(True):
        target = load_target(folder, "float64")
        with Decoder(target, capacity=CONTEXT) as decoder:
            for sampling in SAMPLINGS:
                options = DecodeOptions(max_new_tokens=NEW, sampling=sampling)
                trace = decoder.run(prompt, options)
                tokens = [token for record in trace for token in record.emitted]
                assert tokens == plain_loop(target, prompt, sampling)
                assert len(set(tokens)) > 2
                assert not any(record.loads or record.required for record in trace)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_n_gram_drafts_change_no_token(folder, temperature):
    target = load_target(folder)
    prompts, options = [[7, 8, 9, 10] * 6], dict(max_new_tokens=32, temperature=temperature)
    control = ControlConfig(draft_length=2)
    (plain,) = generate(target, prompts, **options)
    (drafted,) = generate(
        target, prompts, mode="n-gram", control=control, governor=False, **options
    )
    assert drafted.tokens == plain.tokens and drafted.stats["drafted"] > 0


def test_verify_compares_n_grams(folder, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": [3, 1, 4] * 5}))
    argv = ["verify", str(folder), "--prompts", str(prompts), "--max-new-tokens", "8"]
    assert cli.main([*argv, "--json", "-"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["mode"] == "n-gram" and row["real"] == 0
    assert cli.main([*argv, "--r", "2"]) == 2
    assert "--r is for a mixture of experts" in capsys.readouterr().err
    assert cli.main([*argv, "--draft", "init"]) == 2
    assert "dense model; it has no routed experts" in capsys.readouterr().err


def test_an_end_token_ends_it(folder):
    target = load_target(folder)
    (whole,) = generate(target, ["the draft path"], max_new_tokens=8)
    assert whole.finish_reason == "length"
    end = whole.tokens[3]
    raw = json.loads((folder / "config.json").read_text()) | {"eos_token_id": [271, end]}
    ended = write_model(folder.parent / "ended", "llama")
    (ended / "config.json").write_text(json.dumps(raw))
    (part,) = generate(load_target(ended), ["the draft path"], max_new_tokens=8)
    assert part.tokens == whole.tokens[: whole.tokens.index(end) + 1]
    assert part.finish_reason == "eos"


@pytest.mark.parametrize("mode", ["top-r", "draft-expert"])
def test_modes_that_draft_are_refused(folder, mode):
    message = rf"mode {mode} drafts .*\(llama\) is dense; .*mode ar or n-gram"
    with pytest.raises(UsageError, match=message):
        generate(load_target(folder), ["the draft"], mode=mode)


def test_the_program_writes_json_and_streams(folder, capsys, monkeypatch):
    argv = ["generate", str(folder), "--prompt", "the draft", "--max-new-tokens", "12"]
    assert cli.main([*argv, "--json", "-"]) == 0
    printed = capsys.readouterr()
    (found,) = json.loads(printed.out)["generations"]
    assert len(found["tokens"]) == 12 and found["mode"] == "ar"
    assert found["stats"]["drafted"] == 0 and found["stats"]["loads"]["demand"]["count"] == 0
    template = load_target(folder).tokenizer.apply_chat_template(
        [{"role": "user", "content": "the draft"}], tokenize=True, add_generation_prompt=True
    )
    assert found["prompt_tokens"] == template["input_ids"]
    assert "12 tokens" in printed.err and "experts" not in printed.err.replace(str(folder), "")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert cli.main(argv) == 0
    assert capsys.readouterr().out == found["text"].rstrip("\ufffd") + "\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["generate", "{}", "--prompt", "x", "--mode", "top-r"], "drafts with routed experts"),
        (
            ["generate", "{}", "--prompt", "x", "--mode", "draft-expert", "--draft", "init"],
            "drafts with routed experts",
        ),
        (["evaluate", "{}", "--draft", "init"], "dense model; it has no routed experts to draft"),
        (["evaluate", "{}", "--draft", "nowhere"], "dense model; it has no routed experts to dr"),
        (["export", "{}", "--draft", "init", "--out", "{}-x"], "dense model; it has no routed"),
        (["convert", "{}", "--out", "{}-x"], "no MoE layers; there are no experts to convert"),
        (["demo", "--target", "{}", "--out", "{}-x"], "no MoE layers; the demo needs a mixture"),
        ([*DISTILL, "--dry-run"], "llama is a dense family; expected a mixture of experts"),
        ([*DISTILL, "--out", "{}-x"], "llama is a dense family; expected a mixture of experts"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_what_needs_experts_is_one_line(folder, capsys, argv, message):
    assert cli.main([word.format(folder) for word in argv]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("dejax: error: ") and message in line
    assert not folder.with_name(folder.name + "-x").exists()


@pytest.mark.slow
@pytest.mark.smollm
def test_smollm2_answers(capsys):
    question = "What is the capital of France?"
    argv = ["generate", str(smollm2()), "--prompt", question, "--max-new-tokens", "24"]
    assert cli.main([*argv, "--json", "-"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["generations"]
    assert "Paris" in found["text"] and found["finish_reason"] == "eos"

"""GGUF files of dense Llama models: against `transformers`, in every storage type, and strictly."""

import gzip
import json
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest
import torch

from dejax.errors import UsageError
from dejax.target import load_target
from tests.ckpt.gguf_files import random_llama, tensors_of, write
from tests.ckpt.smollm2 import smollm2

TOKENS = np.random.default_rng(0).integers(0, 96, (1, 40))


@pytest.fixture(scope="module")
def theirs():
    return random_llama()


def logits(model) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(TOKENS)).logits.numpy()


def test_logits_are_those_of_the_original(theirs, tmp_path):
    target = load_target(write(tmp_path / "m.gguf", tensors_of(theirs)))
    assert np.abs(np.asarray(target(TOKENS)) - logits(theirs)).max() < 2e-4
    assert target.tokenizer is None and target.name == "m.gguf"


@pytest.mark.parametrize(
    "kind",
    ["Q8_0", *(pytest.param(k, marks=pytest.mark.slow) for k in ("F16", "BF16", "Q4_0", "Q4_1"))],
)
def test_every_storage_type_is_dequantised(theirs, tmp_path, kind):
    tensors = tensors_of(theirs)
    target = load_target(write(tmp_path / "m.gguf", tensors, kind=kind))
    stored = gguf.GGMLQuantizationType[kind]
    expected = gguf.quants.dequantize(
        gguf.quants.quantize(tensors["blk.1.ffn_up.weight"], stored), stored
    )
    np.testing.assert_array_equal(target.model.layers[1].mlp.up_proj.weight[...], expected)
    near = np.abs(np.asarray(target(TOKENS)) - logits(theirs)).max()
    assert near < {"F16": 0.02, "BF16": 0.1, "Q8_0": 0.2}.get(kind, 3.0)


def test_rope_divisors_are_used(theirs, tmp_path):
    divisors = np.linspace(1, 8, 8, dtype=np.float32)
    tensors = tensors_of(theirs)
    plain = load_target(write(tmp_path / "a.gguf", tensors))
    ones = tensors | {"rope_freqs.weight": np.ones(8, np.float32)}
    same = load_target(write(tmp_path / "b.gguf", ones))
    slowed = load_target(write(tmp_path / "c.gguf", tensors | {"rope_freqs.weight": divisors}))
    np.testing.assert_array_equal(plain(TOKENS), same(TOKENS))
    assert np.abs(np.asarray(plain(TOKENS) - slowed(TOKENS))).max() > 0.1
    assert slowed.identity != plain.identity


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda t: t.pop("blk.1.ffn_up.weight"), "1 bad tensors: blk.1.ffn_up.weight: missing"),
        (lambda t: t.update(strange=np.zeros(4, np.float32)), "strange: unknown"),
        (
            lambda t: t.update({"output_norm.weight": np.ones(32, np.float32)}),
            r"output_norm.weight: shape \[32\], expected \[64\]",
        ),
    ],
)
def test_wrong_tensors_are_listed(theirs, tmp_path, spoil, message):
    tensors = tensors_of(theirs)
    spoil(tensors)
    with pytest.raises(UsageError, match=message):
        load_target(write(tmp_path / "m.gguf", tensors))


@pytest.mark.parametrize(
    "more, message",
    [
        (dict(expert_count=4), "a mixture of experts"),
        (dict(rope_scaling_type=gguf.RopeScalingType.YARN), "rope scaling 'yarn' is not read"),
    ],
)
def test_what_is_not_read_is_refused(theirs, tmp_path, more, message):
    with pytest.raises(UsageError, match=message):
        load_target(write(tmp_path / "m.gguf", tensors_of(theirs), **more))


def test_another_architecture_and_a_damaged_file(theirs, tmp_path):
    with pytest.raises(UsageError, match="architecture 'qwen3'"):
        load_target(write(tmp_path / "m.gguf", {}, architecture="qwen3"))
    whole = write(tmp_path / "n.gguf", tensors_of(theirs)).read_bytes()
    for cut in (0, 3, 100, len(whole) // 2):
        (tmp_path / "cut.gguf").write_bytes(whole[:cut])
        with pytest.raises(UsageError, match="not a readable GGUF file"):
            load_target(tmp_path / "cut.gguf")
    with pytest.raises(UsageError, match="no such file"):
        load_target(tmp_path / "none.gguf")


@pytest.mark.slow
@pytest.mark.smollm
def test_smollm2_understands_text():
    """Query and key rows left in GGUF's order give a perplexity of about 108 here."""
    target = load_target(smollm2())
    assets = Path(__file__).parents[2] / "dejax" / "assets" / "demo" / "distill.jsonl.gz"
    documents = map(json.loads, gzip.open(assets, "rt", encoding="utf-8"))
    chats = [d["messages"] for d in documents if d["kind"] == "gsm8k"][:6]
    nats, count = 0.0, 0
    for chat in chats:
        text = "\n".join(turn["content"] for turn in chat)
        ids = target.tokenizer(text, add_special_tokens=False)["input_ids"][:256]
        padded = np.zeros((1, 256), np.int32)
        padded[0, : len(ids)] = ids
        law = np.asarray(jax.nn.log_softmax(target(padded)))[0]
        nats -= law[np.arange(len(ids) - 1), ids[1:]].sum()
        count += len(ids) - 1
    assert np.exp(nats / count) < 7
    prompt = [{"role": "user", "content": "Hi"}]
    assert "<|im_start|>user\nHi<|im_end|>" in target.tokenizer.apply_chat_template(
        prompt, tokenize=False
    )

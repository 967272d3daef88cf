"""GGUF files of dense Llama models: against `transformers`, in every storage type, and strictly."""

import gzip
import json
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dejax.errors import UsageError
from dejax.target import load_target
from tests.ckpt.smollm2 import smollm2

TOKENS = np.random.default_rng(0).integers(0, 96, (1, 40))
SIZES = dict(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    rope_parameters=dict(rope_type="default", rope_theta=5e3),
    tie_word_embeddings=False,
    eos_token_id=2,
)
BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@pytest.fixture(scope="module")
def theirs():
    """A random Llama of `transformers`, eager and float32."""
    config = AutoConfig.for_model("llama", **SIZES)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.2 * noise if "norm" in name else noise * parameter.shape[-1] ** -0.5
    return model


def tensors_of(model) -> dict[str, np.ndarray]:
    """The model's weights under their GGUF names, rows of queries and keys interleaved."""
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}

    def interleaved(array, heads):
        halves = array.reshape(heads, 2, -1, array.shape[1])
        return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)

    result = {
        "token_embd.weight": state["model.embed_tokens.weight"],
        "output_norm.weight": state["model.norm.weight"],
        "output.weight": state["lm_head.weight"],
    }
    for layer in range(SIZES["num_hidden_layers"]):
        for ours, name in BLOCK.items():
            array = state[f"model.layers.{layer}.{name}.weight"]
            heads = {"attn_q": 4, "attn_k": 2}.get(ours)
            array = array if heads is None else interleaved(array, heads)
            result[f"blk.{layer}.{ours}.weight"] = array
    return result


def write(path: Path, tensors, *, kind="F32", architecture="llama", **more) -> Path:
    """A GGUF file of these tensors, matrices stored as `kind`."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5e3)
    writer.add_string("tokenizer.ggml.model", "none")
    for key, value in more.items():
        getattr(writer, f"add_{key}")(value)
    for name, array in tensors.items():
        stored = gguf.GGMLQuantizationType[kind if array.ndim > 1 else "F32"]
        writer.add_tensor(name, gguf.quants.quantize(array, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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

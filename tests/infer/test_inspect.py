"""`dejax inspect`: published figures from a config alone, stored sizes where there are weights."""

import json
import math
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from dejax import families
from dejax.ckpt.draft_state import resolve_draft, save_draft
from dejax.ckpt.hf_weights import abstract_model
from dejax.cli import main
from dejax.target import load_target
from infer.convert import convert
from infer.inspection import Part, inspect, resident_params
from tests.ckpt.gguf_files import random_llama, tensors_of, write
from tests.families.random_folder import raw_config, write_folder
from tests.infer.head_cases import random_head

# config.json as published, and what the reference counts on its meta device.
V2_LITE = dict(
    architectures=["DeepseekV2ForCausalLM"],
    attention_bias=False,
    aux_loss_alpha=0.001,
    bos_token_id=100000,
    eos_token_id=100001,
    first_k_dense_replace=1,
    hidden_act="silu",
    hidden_size=2048,
    intermediate_size=10944,
    kv_lora_rank=512,
    max_position_embeddings=163840,
    model_type="deepseek_v2",
    moe_intermediate_size=1408,
    moe_layer_freq=1,
    n_group=1,
    n_routed_experts=64,
    n_shared_experts=2,
    norm_topk_prob=False,
    num_attention_heads=16,
    num_experts_per_tok=6,
    num_hidden_layers=27,
    num_key_value_heads=16,
    q_lora_rank=None,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    rms_norm_eps=1e-06,
    rope_scaling=dict(
        type="yarn",
        factor=40,
        original_max_position_embeddings=4096,
        beta_fast=32,
        beta_slow=1,
        mscale=0.707,
        mscale_all_dim=0.707,
    ),
    rope_theta=10000,
    routed_scaling_factor=1.0,
    scoring_func="softmax",
    tie_word_embeddings=False,
    topk_group=1,
    topk_method="greedy",
    torch_dtype="bfloat16",
    v_head_dim=128,
    vocab_size=102400,
)
V2 = V2_LITE | dict(
    hidden_size=5120,
    intermediate_size=12288,
    moe_intermediate_size=1536,
    n_group=8,
    n_routed_experts=160,
    num_attention_heads=128,
    num_hidden_layers=60,
    num_key_value_heads=128,
    q_lora_rank=1536,
    routed_scaling_factor=16.0,
    topk_group=3,
    topk_method="group_limited_greedy",
)


def config_folder(folder, raw):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def test_the_published_model_from_its_config(tmp_path, capsys):
    """The paper's figure 1: 15.7 B parameters, 91.6 % routed (26.8 GiB), 2.4 GiB beside them."""
    assert main(["inspect", str(config_folder(tmp_path / "DeepSeek-V2-Lite", V2_LITE))]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "DeepSeek-V2-Lite: deepseek_v2 (no weights here; sizes as bfloat16)"
    for expected in (
        "layers 27 (1 dense, 26 MoE)",
        "routed experts 64 of width 1408, top-6",
        "shared experts width 2816",
        "attention MLA, 16 heads, ranks: query full, KV 512",
        "context 163840 (YaRN: 40 times 4096)",
        "parameters 15.7 B",
        "active a token 2.66 B (2.45 B without the embedding, 2.24 B without the head too)",
        "with the top-1 expert 1.54 B",
        "one expert, converted 17.3 MB as bf16, 34.6 MB as f32, 9.19 MB as fp8, 9.19 MB as int8, "
        "4.87 MB as int4",
        "KV cache a token 31.1 kB in bfloat16, 62.2 kB in float32",
        "routed experts 14.4 B 91.6% bfloat16 26.8 GiB 28.8 GB",
        "the rest 1.31 B 8.4% bfloat16 2.44 GiB 2.62 GB",
        "all 15.7 B 29.3 GiB 31.4 GB",
        "one expert 8.65 M bfloat16 16.5 MiB 17.3 MB",
        "draft experts, on top 225 M bfloat16 429 MiB 450 MB",
        "8 GB 3.2 GB 277 of 1664 (17%)",
        "24 GB 3.2 GB 1202 of 1664 (72%)",
        "80 GB 3.2 GB all 1664",
    ):
        assert expected in lines


def test_counts_are_those_of_the_reference(tmp_path):
    found = inspect(config_folder(tmp_path / "m", V2_LITE))
    assert (found.total, found.routed.params) == (15706484224, 14394851328)
    assert round(found.active / 1e9, 2) == 2.66 and round(found.active_top1 / 1e9, 2) == 1.54
    assert found.rest.params + found.routed.params == found.total
    assert found.kind == "config" and found.identity is None


def test_counts_of_the_larger_model(tmp_path):
    """Its 60 layers are one dense and 59 alike."""
    two, three = (
        inspect(config_folder(tmp_path / str(layers), V2 | dict(num_hidden_layers=layers)))
        for layers in (2, 3)
    )

    def at_60(name):
        return getattr(two, name) + 58 * (getattr(three, name) - getattr(two, name))

    counts = [round(at_60(name) / 1e9, 2) for name in ("total", "active", "active_top1")]
    assert counts == [235.74, 21.38, 14.42]


def test_what_does_not_fit(tmp_path):
    """A vocabulary so large that the resident part alone is too much for two of the devices."""
    found = inspect(config_folder(tmp_path / "m", V2_LITE | dict(vocab_size=6_000_000)))
    assert [fit.experts is None for fit in found.fits] == [True, True, False]
    last = found.fits[-1]
    assert last.experts is not None and 0 < last.experts < found.layer_experts
    used = last.fixed_bytes + last.experts * found.expert.bytes
    assert last.memory_bytes - found.expert.bytes < used <= last.memory_bytes


@pytest.mark.parametrize("dtype, itemsize", [("float32", 4), ("bfloat16", 2)])
def test_sizes_are_those_stored(tmp_path, dtype, itemsize):
    folder = write_folder(tmp_path / "m", dtype=dtype)
    found = inspect(folder)
    assert found.kind == "checkpoint" and found.identity == load_target(folder).identity
    assert (found.routed.dtype, found.routed.bytes) == (dtype, found.routed.params * itemsize)
    assert (found.rest.dtype, found.rest.bytes) == (dtype, found.rest.params * itemsize)
    assert found.expert.bytes == 3 * 32 * 64 * itemsize


def test_a_converted_folder(tmp_path):
    folder = write_folder(tmp_path / "m")
    convert(folder, tmp_path / "c", experts="bf16")
    found, before = inspect(tmp_path / "c"), inspect(folder)
    assert found.kind == "converted" and found.identity == before.identity
    assert found.routed.bytes * 2 == before.routed.bytes and found.routed.dtype == "bfloat16"
    assert found.rest == before.rest


def test_a_model_without_moe_layers(tmp_path, capsys):
    folder = config_folder(tmp_path / "m", raw_config(first_k_dense_replace=3))
    assert main(["inspect", str(folder)]) == 0
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["layers", "3", "(all", "dense)"] in printed
    assert ["device", "memory", "always", "there", "fits"] in printed
    assert [line[-1] for line in printed if line[1:2] == ["GB"]] == ["yes"] * 3


@pytest.mark.parametrize("name", ["v3", "qwen3-moe-sparse", "gpt-oss", "qwen3"])
def test_one_layer_of_each_kind_tells_what_all_weigh(name):
    config = families.model_config(raw_config(name))
    leaves = jax.tree.leaves(abstract_model(config)[1])
    assert resident_params(config) == sum(math.prod(leaf.shape) for leaf in leaves)


# In billions, as published: parameters in all, and those a token uses.
PUBLISHED = {
    "DeepSeek-V2-Lite": ("15.7", "2.4"),
    "DeepSeek-V3.1": ("671", "37"),
    "GLM-4.5-Air": ("106", "12"),
    "Mixtral-8x7B-v0.1": ("46.7", "12.9"),
    "Moonlight-16B-A3B": ("15.29", "2.24"),
    "OLMoE-1B-7B-0924": ("6.9", "1.3"),
    "Qwen3-235B-A22B": ("235", "22"),
    "Qwen3-30B-A3B": ("30.5", "3.3"),
    "gpt-oss-120b": ("116.83", "5.13"),
    "gpt-oss-20b": ("20.91", "3.61"),
}
WITHOUT_EMBEDDING = ("DeepSeek-V2-Lite", "DeepSeek-V3.1", "gpt-oss-120b", "gpt-oss-20b")
WITHOUT_BOTH = ("GLM-4.5-Air", "Moonlight-16B-A3B")


@pytest.mark.parametrize("name", PUBLISHED)
def test_totals_and_active_parameters_are_the_published_ones(tmp_path, name):
    raw = json.loads((Path(__file__).parents[1] / f"families/published/{name}.json").read_text())
    found = inspect(config_folder(tmp_path / name, raw))
    left_out = found.embedding + found.head if name in WITHOUT_BOTH else 0
    total, active = PUBLISHED[name]
    assert (found.total - left_out) / 1e9 == pytest.approx(float(total), rel=0.01)
    left_out += found.embedding if name in WITHOUT_EMBEDDING else 0
    unit = 10.0 ** -len(active.partition(".")[2])  # published rounded, or cut off
    assert abs((found.active - left_out) / 1e9 - float(active)) < unit
    share = found.routed.params / found.total
    assert found.routed_share == share and share > 0.9
    assert [fit.memory_bytes for fit in found.fits] == [8e9, 24e9, 80e9]


def test_a_gguf_file(tmp_path, capsys):
    theirs = random_llama()
    file = write(tmp_path / "m.gguf", tensors_of(theirs), kind="Q8_0")
    assert main(["inspect", str(file)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "m.gguf: llama (GGUF)"
    found, target = inspect(file), load_target(file)
    assert found.identity == target.identity and found.kind == "gguf"
    params = sum(parameter.numel() for parameter in theirs.parameters())
    norms = sum(p.numel() for p in theirs.parameters() if p.dim() == 1)
    stored = (params - norms) // 32 * 34 + 4 * norms
    assert found.rest == Part(params, "F32 and Q8_0", stored)
    assert found.total == found.active == params and found.layer_experts == 0


def test_json(tmp_path, capsys):
    folder = config_folder(tmp_path / "lite", V2_LITE)
    assert main(["inspect", str(folder), "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["name"] == "lite" and found["total"] == 15706484224
    assert found["routed"] == {
        "params": 14394851328,
        "dtype": "bfloat16",
        "bytes": 28789702656,
    }
    assert found["routed_share"] == pytest.approx(0.9165, abs=1e-4)
    assert found["config"]["attention"]["rope"]["yarn"]["factor"] == 40
    assert [fit["experts"] for fit in found["fits"]] == [277, 1202, 1664]
    assert main(["inspect", str(folder), "--json", str(tmp_path / "f.json")]) == 0
    assert "15.7 B" in capsys.readouterr().out
    assert json.loads((tmp_path / "f.json").read_text()) == found


def test_a_fault_is_one_line(tmp_path, capsys):
    folder = config_folder(tmp_path / "m", raw_config(hidden_act="gelu"))
    assert main(["inspect", str(folder)]) == 2
    error = capsys.readouterr().err
    assert error == (
        f"dejax: error: {folder}/config.json: hidden_act is 'gelu'; "
        "expected 'silu' (feed-forward layers are SwiGLU)\n"
    )


def test_weights_that_are_there_must_be_right(tmp_path, capsys):
    folder = write_folder(tmp_path / "m")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: np.dtype(np.float32).itemsize * 100])
    assert main(["inspect", str(folder)]) == 2
    assert "cut short" in capsys.readouterr().err


def test_draft_experts_are_told_of_with_their_head(tmp_path, capsys):
    folder = write_folder(tmp_path / "m")
    target = load_target(folder)
    draft = resolve_draft("init", target)
    save_draft(tmp_path / "plain", draft, target.config)
    head = random_head(target.config.width, positions=8)
    save_draft(tmp_path / "headed", replace(draft, head=head), target.config)
    for name, told in (("plain", "none"), ("headed", "for drafts of 8 tokens")):
        argv = ["inspect", str(folder), "--draft", str(tmp_path / name)]
        assert main(argv) == 0
        shown = capsys.readouterr().out
        assert f"{name}: draft experts" in shown
        assert any("confidence head" in line and told in line for line in shown.splitlines())
        assert main([*argv, "--json", "-"]) == 0
        found = json.loads(capsys.readouterr().out)["draft"]
        assert found["layers"] == len(target.config.moe_layers) and found["top_r"] == 1
        size = 4 * (4 * target.config.width + 2 * 3 + 4 * 8)
        assert found["confidence_head"] == (
            None if name == "plain" else {"positions": 8, "bytes": size}
        )
    other = write_folder(tmp_path / "other", seed=1)
    assert main(["inspect", str(other), "--draft", str(tmp_path / "plain")]) == 2
    assert "was trained for target" in capsys.readouterr().err

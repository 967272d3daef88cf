"""`dejax export --format gguf`: read back number by number, refused in one line, whole or not."""

import json
import shlex
import sys
from pathlib import Path
from unittest import mock

import gguf
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import dejax
from dejax.ckpt.draft_state import load_draft, resolve_draft, save_draft
from dejax.draft.expert import draft_of_params
from dejax.errors import FailedError, UsageError
from dejax.export import gguf_tensors
from dejax.export.gguf_config import architecture
from dejax.export.gguf_tokenizer import pre_tokenizer
from dejax.export.provenance import without_folders
from dejax.families import model_config
from dejax.target import load_target
from infer.convert import convert
from infer.export import main
from tests.families.configurations import raw_config
from tests.families.random_folder import write_folder
from tests.infer import small_tokenizer
from tests.infer.gguf_cases import REFUSED


def export(folder: Path, out: Path, *options: str) -> gguf.GGUFReader:
    """Exports by the command line, and opens the file."""
    assert main([str(folder), "--format", "gguf", "--out", str(out), *options]) == 0
    return gguf.GGUFReader(out)


def value(reader: gguf.GGUFReader, key: str):
    field = reader.get_field(key)
    return None if field is None else field.contents()


def numbers(reader: gguf.GGUFReader) -> dict[str, np.ndarray]:
    """Name -> tensor as numpy has it."""
    return {
        t.name: gguf.quants.dequantize(t.data, t.tensor_type).reshape(tuple(t.shape)[::-1])
        for t in reader.tensors
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small deepseek_v2 with a tokenizer and a licence."""
    raw = raw_config(vocab_size=small_tokenizer.SIZE)
    folder = write_folder(tmp_path_factory.mktemp("gguf") / "small", raw)
    tokenizer = small_tokenizer.byte_level(small_tokenizer.smollm())
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    small_tokenizer.add_to(folder, tokenizer)
    (folder / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\n# Small\n")
    return folder


@pytest.mark.parametrize(
    "name",
    ["full", "v3", "qwen3-moe", "olmoe", "mixtral", "gpt-oss", "glm4-moe", "llama", "qwen3"],
)
def test_every_number_of_the_checkpoint_is_in_the_file_once(name, tmp_path):
    folder = write_folder(tmp_path / "m", raw_config(name))
    found = numbers(export(folder, tmp_path / "m.gguf", "--dtype", "f32"))
    divisors = found.pop("rope_freqs.weight", None)
    assert (divisors is not None) == (name == "llama")
    tensors = load_file(folder / "model.safetensors")
    every = [np.sort(np.concatenate([a.ravel() for a in t.values()])) for t in (found, tensors)]
    assert every[0].tobytes() == every[1].tobytes()


def test_experts_are_stacked_and_kv_b_is_split(model, tmp_path):
    found = numbers(export(model, tmp_path / "m.gguf", "--dtype", "f32"))
    tensors = load_file(model / "model.safetensors")
    layer = "model.layers.2."
    for kind in ("gate", "up", "down"):
        stack = found[f"blk.2.ffn_{kind}_exps.weight"]
        for expert, matrix in enumerate(stack):
            key = f"{layer}mlp.experts.{expert}.{kind}_proj.weight"
            assert matrix.tobytes() == tensors[key].tobytes()
    heads = tensors[layer + "self_attn.kv_b_proj.weight"].reshape(4, 16 + 16, 32)
    np.testing.assert_array_equal(found["blk.2.attn_k_b.weight"], heads[:, :16].transpose(0, 2, 1))
    np.testing.assert_array_equal(found["blk.2.attn_v_b.weight"], heads[:, 16:])


@pytest.mark.parametrize("name", ["llama", "llama-biases"])
def test_a_llama_is_read_back_byte_for_byte(name, tmp_path):
    raw = raw_config(name, mlp_bias=False, attention_bias=False)
    folder = write_folder(tmp_path / "m", raw)
    export(folder, tmp_path / "m.gguf", "--dtype", "f32")
    ours, back = load_target(folder), load_target(tmp_path / "m.gguf")
    pairs = zip(jax.tree.leaves(ours.model), jax.tree.leaves(back.model), strict=True)
    assert all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)
    tokens = [list(range(40))]
    np.testing.assert_allclose(ours(tokens), back(tokens), atol=1e-5)


def test_metadata_tells_what_the_file_is(model, tmp_path, capsys):
    done = tmp_path / "done.json"
    reader = export(model, tmp_path / "m.gguf", "--dtype", "q8_0", "--json", str(done))
    told = json.loads(done.read_text())
    assert told["as"] == "target" and told["architecture"] == "deepseek2"
    assert told["bytes"] == (tmp_path / "m.gguf").stat().st_size
    assert "deepseek2" in capsys.readouterr().out
    assert value(reader, "general.license") == "apache-2.0"
    assert value(reader, "general.name") == "small"
    assert value(reader, "dejax.version") == dejax.__version__
    assert value(reader, "dejax.target.identity") == load_target(model).identity
    assert value(reader, "deepseek2.expert_gating_func") == 1
    assert value(reader, "deepseek2.rope.scaling.yarn_log_multiplier") == pytest.approx(0.0707)
    assert value(reader, "tokenizer.chat_template") == "{{ messages[0]['content'] }}"
    assert value(reader, "tokenizer.ggml.pre") == "smollm"
    assert len(value(reader, "tokenizer.ggml.tokens")) == small_tokenizer.SIZE
    assert str(tmp_path.parent).encode() not in (tmp_path / "m.gguf").read_bytes()


def test_what_is_stored_as_what(model, tmp_path):
    kinds = {}
    for dtype in ("bf16", "q4_0"):
        reader = export(model, tmp_path / f"{dtype}.gguf", "--dtype", dtype)
        kinds[dtype] = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    for name in ("blk.1.ffn_gate_inp.weight", "blk.1.attn_norm.weight", "output_norm.weight"):
        assert kinds["bf16"][name] == kinds["q4_0"][name] == "F32"
    assert kinds["bf16"]["blk.1.ffn_up_exps.weight"] == "BF16"
    assert kinds["q4_0"]["blk.1.ffn_up_exps.weight"] == "Q4_0"
    assert kinds["q4_0"]["output.weight"] == kinds["q4_0"]["token_embd.weight"] == "Q8_0"
    assert kinds["q4_0"]["blk.1.attn_k_b.weight"] == "F16"  # rows of 16


def test_a_checkpoint_keeps_its_dtype(tmp_path):
    folder = write_folder(tmp_path / "m", raw_config("qwen3-moe"), dtype="bfloat16")
    reader = export(folder, tmp_path / "m.gguf")
    assert {t.tensor_type.name for t in reader.tensors} == {"F32", "BF16"}
    assert value(reader, "general.file_type") == 32
    float32 = numbers(export(folder, tmp_path / "f.gguf", "--dtype", "f32"))
    for name, array in numbers(reader).items():
        assert array.tobytes() == float32[name].tobytes()


def test_a_converted_folder_gives_the_same_file(model, tmp_path):
    convert(model, tmp_path / "converted")
    export(model, tmp_path / "small.gguf", "--dtype", "f32")
    export(tmp_path / "converted", tmp_path / "other.gguf", "--dtype", "f32")
    ours, other = (numbers(gguf.GGUFReader(tmp_path / f"{n}.gguf")) for n in ("small", "other"))
    assert ours.keys() == other.keys()
    assert all(ours[name].tobytes() == other[name].tobytes() for name in ours)


def test_mxfp4_experts_of_a_release_are_the_same_numbers(tmp_path):
    raw = raw_config("gpt-oss", intermediate_size=64)
    folder = write_folder(tmp_path / "m", raw, dtype="bfloat16")
    once = numbers(export(folder, tmp_path / "once.gguf", "--dtype", "mxfp4"))
    name = "blk.1.ffn_down_exps.weight"
    stored = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "once.gguf").tensors}
    assert stored[name] == "MXFP4" and stored["blk.1.attn_q.weight"] == "BF16"
    again = gguf.quants.quantize(once[name], gguf.GGMLQuantizationType.MXFP4)
    back = gguf.quants.dequantize(again, gguf.GGMLQuantizationType.MXFP4)
    np.testing.assert_array_equal(back, once[name])


def test_the_adapter_is_the_draft(model, tmp_path):
    target = load_target(model)
    draft = resolve_draft("init:3", target)
    secret = {"target": f"{tmp_path}/models/small", "data": ["text.jsonl"], "steps": 7}
    draft = draft_of_params(
        draft.stacked_params(),
        layers=target.config.moe_layers,
        top_r=1,
        identity=target.identity,
        training=secret,
    )
    save_draft(tmp_path / "draft", draft, target.config)
    reader = export(model, tmp_path / "a.gguf", "--draft", str(tmp_path / "draft"))
    found = numbers(reader)
    assert len(found) == 4 * len(target.config.moe_layers)
    for layer in target.config.moe_layers:
        gate, up, down = np.asarray(draft.layer_params(layer)["weights"])
        np.testing.assert_array_equal(found[f"blk.{layer}.ffn_gate_draft.weight"], gate)
        np.testing.assert_array_equal(found[f"blk.{layer}.ffn_up_draft.weight"], up)
        np.testing.assert_array_equal(found[f"blk.{layer}.ffn_down_draft.weight"], down.T)
        assert found[f"blk.{layer}.ffn_draft.scale"] == draft.layer_params(layer)["gamma"]
    assert value(reader, "general.type") == "adapter"
    assert value(reader, "adapter.type") == "draft-expert"
    assert value(reader, "general.license") == "apache-2.0"
    assert value(reader, "dejax.target.identity") == target.identity
    assert value(reader, "dejax.target.moe_layers") == list(target.config.moe_layers)
    training = json.loads(value(reader, "dejax.draft.training"))
    assert training == {"target": "small", "data": ["text.jsonl"], "steps": 7}
    written = (tmp_path / "a.gguf").read_bytes()
    assert str(tmp_path).encode() not in written
    (tmp_path / "bad.gguf").write_bytes(written.replace(b"draft-expert", b"draft-exper\xff"))
    with pytest.raises(UsageError, match=r"bad.gguf: .* is not readable"):
        load_draft(tmp_path / "bad.gguf")


def test_the_documented_commands(model, tmp_path, monkeypatch):
    """What `docs/export.md` tells to type for llama.cpp; its programs are given what is there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "MODEL").symlink_to(model)
    target = load_target(model)
    save_draft(tmp_path / "D", resolve_draft("init", target), target.config)
    text = (Path(dejax.__file__).parents[1] / "docs" / "export.md").read_text(encoding="utf-8")
    block = text.split("## For llama.cpp")[1].split("```bash\n")[1].split("```")[0]
    lines = [words for line in block.splitlines() if (words := shlex.split(line, comments=True))]
    ours = [words for words in lines if words[:2] == ["dejax", "export"]]
    for words in ours:
        assert main(words[2:]) == 0
    kinds = ["model", "model", "adapter", "model"]
    made = [words[words.index("--out") + 1] for words in ours]
    assert [value(gguf.GGUFReader(name), "general.type") for name in made] == kinds
    others = [words for words in lines if words not in ours]
    assert [words[0] for words in others] == ["llama-cli", "llama-server"]
    named = [word for words in others for word in words if word.endswith(".gguf")]
    assert len(named) == 3 and set(named) <= set(made)


def test_absolute_paths_lose_their_folders():
    root = "/" + "srv"
    given = {
        f"{root}/a/b.jsonl": "b.jsonl",
        f"{root}/my files/b": "b",
        f"kind={root}/a/*.gz,{root}/c/d": "kind=*.gz,d",
        "~me/x,~/y/z": "x,z",
        "runs/mine": "runs/mine",
        "https://x.y/z": "https://x.y/z",
        "a / b": "a / b",
    }
    assert without_folders(list(given)) == list(given.values())


def test_a_stopped_export_leaves_no_file(model, tmp_path):
    out = tmp_path / "m.gguf"
    read, calls = gguf_tensors.read_tensor, []

    def stops(entry):
        calls.append(entry)
        if len(calls) == 9:
            assert [path.name for path in tmp_path.iterdir()] == ["m.gguf.partial"]
            raise KeyboardInterrupt
        return read(entry)

    with mock.patch.object(gguf_tensors, "read_tensor", stops), pytest.raises(KeyboardInterrupt):
        export(model, out)
    assert list(tmp_path.iterdir()) == []
    out.write_bytes(b"older")
    calls.clear()
    with mock.patch.object(gguf_tensors, "read_tensor", side_effect=OSError(28, "No space left")):
        with pytest.raises(FailedError, match="m.gguf: cannot be written: No space left"):
            export(model, out)
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]
    assert out.read_bytes() == b"older"


def test_numbers_beyond_float16_are_not_written_as_infinity(tmp_path):
    raw = raw_config("qwen3")
    folder = write_folder(tmp_path / "m", raw)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = 1e5
    from safetensors.numpy import save_file

    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(FailedError, match="blk.0.ffn_up.weight has numbers that float16 does not"):
        export(folder, tmp_path / "m.gguf", "--dtype", "f16")
    assert not (tmp_path / "m.gguf").exists()


@pytest.mark.parametrize(
    ("name", "more", "options", "message"),
    [
        ("lite", {}, ["--dtype", "mxfp4"], "mxfp4 is for the experts of gpt-oss; deepseek_v2"),
        ("lite", {}, ["--as", "adapter"], "--draft is missing: --as adapter"),
        ("lite", {}, ["--as", "draft-model"], "--draft is missing: --as draft-model"),
        ("lite", {}, ["--as", "target", "--draft", "init"], "leave --draft out"),
        ("lite", {}, ["--as", "model"], "--as: 'model' is not one of"),
        ("lite", {}, ["--dtype", "q5_0"], "--dtype: 'q5_0' is not one of"),
        ("lite", {}, ["--draft", "init", "--dtype", "mxfp4"], "draft experts have none of these"),
        ("lite", {}, ["--format", "safetensors", "--dtype", "f32"], "--draft is missing"),
        (
            "lite",
            {},
            ["--format", "safetensors", "--draft", "init", "--dtype", "f32"],
            "--dtype is for --format gguf",
        ),
        ("lite", dict(attention_bias=True), [], "not a GGUF file: llama.cpp's architecture deepse"),
        (
            "v3",
            {},
            ["--draft", "init", "--as", "draft-model"],
            "no draft model: deepseek_v3 derives an expert's gate from all chosen ones",
        ),
        (
            "qwen3-moe",
            {},
            ["--draft", "init", "--as", "draft-model"],
            "no draft model: qwen3_moe has no shared experts",
        ),
        ("qwen3", {}, ["--draft", "init"], "is a dense model"),
    ],
)
def test_what_cannot_be_exported_is_refused_in_one_line(tmp_path, name, more, options, message):
    folder = write_folder(tmp_path / "m", raw_config(name, **more))
    with pytest.raises(UsageError, match=message) as refusal:
        export(folder, tmp_path / "out.gguf", *options)
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize("message", REFUSED)
def test_configurations_without_a_place_in_llama_cpp_are_refused(message):
    name, more = REFUSED[message]
    with pytest.raises(UsageError, match=message):
        architecture(model_config(raw_config(name, **more)))


def test_places_that_cannot_be_written_are_refused_first(model, tmp_path):
    for out, message in ((str(tmp_path), "--out: .* is a folder"), ("-", "standard output")):
        with pytest.raises(UsageError, match=message):
            main([str(model), "--format", "gguf", "--out", out])


def test_without_the_gguf_package_it_says_what_to_install(model, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UsageError, match=r"--format gguf: .* pip install gguf"):
        main([str(model), "--format", "gguf", "--out", str(tmp_path / "m.gguf")])


@pytest.mark.parametrize(
    ("pre", "family", "expected"),
    [
        (small_tokenizer.smollm(), "deepseek_v2", "smollm"),
        (small_tokenizer.split(small_tokenizer.LLAMA3), "llama", "llama-bpe"),
        (small_tokenizer.split(small_tokenizer.LLAMA3), "glm4_moe", "glm4"),
        (small_tokenizer.split(small_tokenizer.QWEN2), "qwen3", "qwen2"),
        (small_tokenizer.split(small_tokenizer.O200K), "gpt_oss", "gpt-4o"),
        (small_tokenizer.split(*small_tokenizer.DEEPSEEK_V3), "deepseek_v3", "deepseek-v3"),
    ],
)
def test_pre_tokenizers_are_known_by_their_patterns(pre, family, expected):
    backend = json.loads(small_tokenizer.byte_level(pre).backend_tokenizer.to_str())
    assert pre_tokenizer(backend, family) == expected


def test_an_unknown_pre_tokenizer_is_refused():
    backend = small_tokenizer.byte_level(small_tokenizer.split(r"\w+")).backend_tokenizer
    with pytest.raises(UsageError, match=r"tokenizer: its pre-tokenizer \(Split, ByteLevel"):
        pre_tokenizer(json.loads(backend.to_str()), "llama")

"""`dejax export --format torch`: the same numbers in `transformers`, for every family."""

import functools
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import dejax
from dejax.ckpt.draft_state import RAW_FILE, draft_tensors, load_draft, save_draft
from dejax.ckpt.tensor_files import INDEX_FILE, SINGLE_FILE
from dejax.draft.expert import random_draft
from dejax.errors import FailedError, UsageError
from dejax.export import torch_model
from dejax.target import load_tokenizer
from infer.convert import convert
from infer.export import main
from tests.ckpt import tiktoken_cases
from tests.families import reference
from tests.families.configurations import FIRST, MOE_CONFIGS, raw_config
from tests.families.random_folder import write_folder
from tests.infer.draft_path import draft_path
from tests.infer.torch_cases import (
    DRAFT_LENGTH,
    PROMPTS,
    TOKENS,
    TOLERANCE,
    Exported,
    acceptance,
    greedy,
    our_loop,
)

WITH_EXPERTS = [name for name in FIRST.values() if name in MOE_CONFIGS]
"""A configuration of every family with experts."""


def slow_unless(fast, names) -> list:
    return [n if n in fast else pytest.param(n, marks=pytest.mark.slow) for n in names]


@pytest.fixture(scope="module", autouse=True)
def little_optimisation():
    """Programs run a few times each here: to compile them well takes most of the time."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def lite(tmp_path_factory):
    return Exported("lite", tmp_path_factory.mktemp("lite"))


def close(one, other) -> bool:
    return float(np.abs(np.asarray(one) - np.asarray(other)).max()) <= TOLERANCE


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """By name and gates: a case of two layers, made once."""

    @functools.cache
    def make(name: str, gates: str = "full"):
        place = tmp_path_factory.mktemp(name)
        return Exported(name, place, num_hidden_layers=2, gates=gates)

    return make


@pytest.fixture(scope="module")
def attached(case):
    """By name and gates: a case, and its adapter attached in `transformers`; made once."""

    @functools.cache
    def make(name: str, gates: str = "full"):
        made = case(name, gates)
        return made, made.attached(made.export("adapter"))

    return make


@pytest.mark.parametrize("name", slow_unless({"lite"}, WITH_EXPERTS))
def test_target_and_draft_path_are_the_same_in_transformers(attached, name):
    ours, draft = attached(name)
    before = {key: value.clone() for key, value in draft.target.state_dict().items()}
    full = reference.logits(draft.target, TOKENS)
    logits, routing = draft_path(ours.target, ours.draft, TOKENS)
    with torch.no_grad():
        theirs = draft.draft_forward(torch.from_numpy(TOKENS))
    assert close(theirs.logits, logits)
    assert theirs.routing.keys() == routing.keys()
    for layer, (ids, gates) in routing.items():
        np.testing.assert_array_equal(theirs.routing[layer][0], ids)
        assert close(theirs.routing[layer][1], gates)
    # The target is as it was.
    assert np.array_equal(reference.logits(draft.target, TOKENS), full)
    assert not close(full, logits)
    assert all(torch.equal(value, before[k]) for k, value in draft.target.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_assisted_generation_has_the_targets_tokens_and_our_acceptance(attached, name):
    ours, draft = attached(name)
    plain = [greedy(draft.target, prompt) for prompt in PROMPTS]
    drafted = accepted = 0
    for prompt, tokens in zip(PROMPTS, plain, strict=True):
        assert greedy(draft, prompt, draft_length=DRAFT_LENGTH) == tokens
        drafted, accepted = drafted + draft.drafted, accepted + draft.accepted
    generations = our_loop(ours)
    assert [g.tokens for g in generations] == plain
    counts = acceptance(generations)
    assert 0 < accepted < drafted
    assert accepted / drafted == pytest.approx(counts[1] / counts[0], abs=0.02)


def test_sampling_and_end_tokens(lite):
    """A sampled draft may be refused; what is emitted ends where the target says so."""
    draft = lite.attached(lite.export("sampled"))
    prompt = torch.tensor([PROMPTS[0]])
    torch.manual_seed(0)
    out = draft.generate(prompt, max_new_tokens=30, do_sample=True, temperature=0.7)
    assert 0 < draft.accepted < draft.drafted and out.shape[1] <= 42
    tokens = greedy(draft.target, PROMPTS[0])
    ended = greedy(draft, PROMPTS[0], eos_token_id=tokens[6], pad_token_id=0)
    assert ended == tokens[: tokens.index(tokens[6]) + 1]
    assert greedy(draft, PROMPTS[0], draft_length=1) == tokens


def test_a_gradient_reaches_the_draft_experts_alone(lite):
    draft = lite.attached(lite.export("trained")).requires_grad_(True)
    draft.target.requires_grad_(False)
    draft.draft_forward(torch.from_numpy(TOKENS[:, :8])).logits.sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in draft.parameters())
    assert draft.target.lm_head.weight.grad is None


def test_another_target_is_refused_in_transformers(lite, tmp_path):
    folder = lite.export("bound")
    load = lambda: AutoModel.from_pretrained(folder, trust_remote_code=True)  # noqa: E731
    with pytest.raises(ValueError, match="no target"):
        load().draft_forward(torch.from_numpy(TOKENS))
    with pytest.raises(ValueError, match="expects a model of AutoModelForCausalLM, got NoneType"):
        load().attach(None)
    with pytest.raises(ValueError, match="for a deepseek_v2 of 3 layers, the target is a olmoe"):
        load().attach(reference.random_model("olmoe"))
    other = reference.random_model("lite", seed=1)
    with pytest.raises(ValueError, match=f"trained for target {lite.target.identity}"):
        load().attach(other)
    assert load().attach(other, check=False).target is other
    fewer = reference.random_model("lite")
    fewer.config.num_experts_per_tok = 1
    with pytest.raises(ValueError, match="experts a token, this one has 1"):
        load().attach(fewer)
    draft = lite.attached(folder)
    mask = torch.tensor([[0, 1, 1]])
    with pytest.raises(ValueError, match="without padding"):
        draft.generate(torch.tensor([[1, 2, 3]]), attention_mask=mask)
    with pytest.raises(ValueError, match="draft_length is 0"):
        draft.generate(torch.tensor([[1, 2, 3]]), draft_length=0)


def test_an_adapter_folder_says_what_it_is_and_is_read_again(lite):
    folder = lite.export("said")
    config = json.loads((folder / "config.json").read_text())
    assert config["dejax_version"] == dejax.__version__
    assert config["target_identity"] == lite.target.identity
    told = json.loads((folder / "adapter_config.json").read_text())
    assert told["training"] == {"data": "text.jsonl", "ema": 0.0}
    again = load_draft(folder, lite.target)
    ours, theirs = draft_tensors(lite.draft), draft_tensors(again)
    assert ours.keys() == theirs.keys()
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)
    for path in folder.iterdir():
        assert str(lite.place).encode() not in path.read_bytes()
    assert "import dejax" not in (folder / "modeling_draft_experts.py").read_text()
    lite.export("said")  # an older one is replaced


FOLDED = {
    "full": "full",
    "two-mscales-biases-tied": "full",
    "v3": "plain",
    "moonlight": "plain",
    "glm4-moe-groups": "plain",
}
"""Configuration -> gates with which it has a draft model."""


@pytest.mark.parametrize("name", slow_unless({"v3"}, FOLDED))
def test_a_draft_model_is_the_draft_path(case, name):
    ours = case(name, FOLDED[name])
    folder = ours.export("drafter", "--as", "draft-model")
    logits, _ = draft_path(ours.target, ours.draft, TOKENS)
    drafter = reference.load(folder)
    assert drafter.config.num_experts_per_tok == 1
    assert close(reference.logits(drafter, TOKENS), logits)
    assert close(dejax.load_target(folder)(TOKENS), logits)
    target = reference.load(ours.folder)
    options = dict(num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0)
    assisted = greedy(target, PROMPTS[0], assistant_model=drafter, **options)
    assert assisted == greedy(target, PROMPTS[0])


@pytest.mark.slow
def test_plain_gates_draft_alike_in_transformers(attached):
    ours, draft = attached("v3", "plain")
    logits, _ = draft_path(ours.target, ours.draft, TOKENS)
    full, _ = draft_path(
        ours.target, replace(ours.draft, config=replace(ours.draft.config, gates="full")), TOKENS
    )
    with torch.no_grad():
        assert close(draft.draft_forward(torch.from_numpy(TOKENS)).logits, logits)
    assert not close(full, logits)
    counts = [greedy(draft, p, draft_length=DRAFT_LENGTH) and draft.accepted for p in PROMPTS]
    for engine in ("host", "callback"):
        assert [g.stats["accepted"] for g in our_loop(ours, engine=engine)] == counts


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("lite", ["--as", "target"], "--as target writes no draft experts"),
        ("lite", ["--dtype", "bf16"], "an adapter for torch is float32"),
        ("lite", ["--as", "draft-model", "--dtype", "q8_0"], "q8_0 is for --format gguf"),
        ("lite", ["--max-shard-size", "1MB"], "--max-shard-size is for"),
        ("lite", ["--as", "draft-model", "--max-shard-size", "0"], "is 0"),
        ("lite", ["--weights", "raw"], "init holds one set of weights"),
        ("v3", ["--as", "draft-model"], "draft.gates=plain in distillation"),
        ("glm4-moe", ["--as", "draft-model"], "draft.gates=plain in distillation"),
        ("qwen3-moe", ["--as", "draft-model"], "qwen3_moe has no shared experts"),
        ("olmoe", ["--as", "draft-model"], "olmoe has no shared experts"),
        ("mixtral", ["--as", "draft-model"], "mixtral has no shared experts"),
        ("gpt-oss", ["--as", "draft-model"], "gpt_oss has no shared experts"),
        ("llama", [], "dense model"),
    ],
)
def test_what_cannot_be_exported_is_refused(name, options, message, tmp_path):
    folder, out = write_folder(tmp_path / "m", raw_config(name)), tmp_path / "out"
    argv = [str(folder), "--draft", "init", "--format", "torch", "--out", str(out), *options]
    with pytest.raises(UsageError, match=message) as refused:
        main(argv)
    assert "\n" not in str(refused.value) and not out.exists()


def test_a_malformed_companion_is_told_by_its_own_name(tmp_path):
    folder, out = write_folder(tmp_path / "m", raw_config("lite")), tmp_path / "out"
    (folder / "generation_config.json").write_text("[]")
    with pytest.raises(UsageError, match="m/generation_config.json: expected a JSON object"):
        main([str(folder), "--format", "torch", "--out", str(out)])
    assert list(tmp_path.iterdir()) == [folder]


def test_plain_gates_are_for_families_that_have_others(tmp_path):
    with pytest.raises(UsageError, match="expected full for deepseek_v2"):
        Exported("lite", tmp_path, gates="plain").export("adapter")


@pytest.mark.parametrize("name", ["lite", "gpt-oss", "mixtral", "v3"])
def test_a_target_in_shards_is_the_same_byte_for_byte(name, tmp_path):
    folder, out = write_folder(tmp_path / "m", raw_config(name)), tmp_path / "out"
    argv = [str(folder), "--format", "torch", "--out", str(out), "--max-shard-size", "64KB"]
    assert main(argv) == 0
    index = json.loads((out / INDEX_FILE).read_text())
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == files and len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    written = {file: load_file(out / file) for file in files}
    for file, part in written.items():
        assert {name for name, at in index["weight_map"].items() if at == file} == part.keys()
        assert sum(a.nbytes for a in part.values()) <= 64_000 or len(part) == 1
    before = load_file(folder / SINGLE_FILE)
    after = {key: array for part in written.values() for key, array in part.items()}
    assert before.keys() == after.keys()
    assert all(before[key].tobytes() == after[key].tobytes() for key in before)
    assert index["metadata"]["total_size"] == sum(a.nbytes for a in after.values())
    assert dejax.load_target(out).identity == dejax.load_target(folder).identity
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values()) and model.config.num_hidden_layers == len(model.model.layers)


def test_a_converted_folder_is_exported_as_its_source(tmp_path):
    folder = write_folder(tmp_path / "m", raw_config(), dtype="bfloat16")
    between, out = tmp_path / "converted", tmp_path / "o"
    convert(str(folder), between)
    assert main([str(between), "--format", "torch", "--out", str(out)]) == 0
    before, after = load_file(folder / SINGLE_FILE), load_file(out / SINGLE_FILE)
    assert before.keys() == after.keys()
    assert all(before[key].tobytes() == after[key].tobytes() for key in before)


def test_a_tiktoken_file_becomes_a_tokenizer_json(tmp_path):
    raw = raw_config("moonlight", vocab_size=tiktoken_cases.size())
    folder = tiktoken_cases.add_tiktoken(write_folder(tmp_path / "m", raw))
    between, out = tmp_path / "converted", tmp_path / "o"
    convert(str(folder), between)
    assert main([str(between), "--format", "torch", "--out", str(out)]) == 0
    assert not (out / "tiktoken.model").exists() and not [*out.glob("*.py")]
    text = "Grüße, 你好 getUserName <|im_end|>[EOS]"
    ids = load_tokenizer(folder).encode(text)
    assert ids[-1] == len(tiktoken_cases.ranks()) + 1
    theirs = AutoTokenizer.from_pretrained(out)
    assert load_tokenizer(between).encode(text) == theirs.encode(text) == ids
    assert theirs.eos_token == "[EOS]" and theirs.chat_template == tiktoken_cases.TEMPLATE
    for path in out.iterdir():
        assert str(tmp_path).encode() not in path.read_bytes()


def test_dtype_is_of_all_but_selection_biases(tmp_path):
    folder, out = write_folder(tmp_path / "m", raw_config("v3")), tmp_path / "out"
    assert main([str(folder), "--format", "torch", "--out", str(out), "--dtype", "bf16"]) == 0
    for key, array in load_file(out / SINGLE_FILE).items():
        wanted = "float32" if "correction_bias" in key else "bfloat16"
        assert array.dtype.name == wanted, key
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


def test_an_interrupted_export_leaves_nothing(lite, monkeypatch):
    stop = lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left on device"))  # noqa: E731
    there = set(lite.place.iterdir())
    monkeypatch.setattr(torch_model, "_write_json", stop)
    with pytest.raises(FailedError, match="No space left"):
        lite.export("whole", "--as", "draft-model")
    assert set(lite.place.iterdir()) == there
    monkeypatch.undo()
    lite.export("whole", "--as", "draft-model")
    with pytest.raises(UsageError, match="whole is not empty"):
        lite.export("whole", "--as", "draft-model")


def test_a_draft_model_names_no_machine(lite):
    raw = json.loads((lite.folder / "config.json").read_text())
    (lite.folder / "config.json").write_text(json.dumps(raw | {"_name_or_path": str(lite.place)}))
    tokenizer = {"tokenizer_class": "X", "name_or_path": str(lite.place)}
    (lite.folder / "generation_config.json").write_text(json.dumps(tokenizer))
    folder = lite.export("nameless", "--as", "draft-model")
    for path in folder.iterdir():
        assert str(lite.place).encode() not in path.read_bytes()
    told = json.loads((folder / "config.json").read_text())["dejax"]
    assert told["target"] == lite.target.identity and told["version"] == dejax.__version__
    assert told["draft"] == {"width": 24, "top_r": 1}
    assert told["training"]["data"] == "text.jsonl"


def test_average_or_last_step(lite):
    last = random_draft(
        lite.target.config, lite.draft.config, seed=9, identity=lite.target.identity
    )
    both = replace(lite.draft, raw=last.experts, training={"ema": 0.9})
    save_draft(lite.place / "both", both, lite.target.config)
    assert load_draft(lite.place / "both").raw is not None
    wanted = {"ema": lite.draft, "raw": last}
    for weights, draft in wanted.items():
        folder = lite.export(f"of-{weights}", "--weights", weights, draft="both")
        again = load_draft(folder)
        assert again.raw is None and again.training["weights"] == weights
        assert not (folder / RAW_FILE).exists()
        ours, theirs = draft_tensors(draft), draft_tensors(again)
        assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)


def test_the_documented_commands(lite, tmp_path, monkeypatch, capsys):
    """What `docs/export.md` tells to type for `transformers` does what it says."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "MODEL").symlink_to(lite.folder)
    (tmp_path / "D").symlink_to(lite.place / "draft")
    convert("MODEL", tmp_path / "CONVERTED")
    text = (Path(dejax.__file__).parents[1] / "docs" / "export.md").read_text()
    commands, code = text.split("## For transformers")[1].split("<!-- transformers -->")
    (block,) = re.findall(r"```bash\n(.*?)```", commands, re.DOTALL)
    lines = [shlex.split(line, comments=True) for line in block.splitlines()]
    assert [line[:2] for line in lines] == [["dejax", "export"]] * 3
    for line in lines:
        assert main(line[2:]) == 0
    names: dict = {}
    exec(code.split("```python\n")[1].split("```")[0], names)
    assert (
        names["tokens"].tolist()
        == names["target"].generate(names["ids"], max_new_tokens=32, do_sample=False).tolist()
    )
    assert re.search(r"\d+ of \d+ drafted tokens accepted", capsys.readouterr().out)
    assert names["out"].logits.shape == (1, 3, 256) and set(names["out"].routing) == {1, 2}
    assert dejax.load_target("model").identity == lite.target.identity


def test_a_gguf_adapter_is_read_again(lite, tmp_path):
    """Byte for byte in float32; quantised, as near as its blocks are."""
    ours = draft_tensors(lite.draft)
    for dtype, away in (("f32", 0.0), ("q8_0", 0.01), ("q4_0", 0.15)):
        out = tmp_path / f"{dtype}.gguf"
        given = ["--draft", str(lite.place / "draft"), "--format", "gguf", "--dtype", dtype]
        assert main([str(lite.folder), *given, "--out", str(out)]) == 0
        again = load_draft(out, lite.target)
        assert again.config == lite.draft.config and again.identity == lite.draft.identity
        assert again.training == {"data": "text.jsonl", "ema": 0.0}
        for name, array in draft_tensors(again).items():
            error = np.abs(array - ours[name]).max() / np.abs(ours[name]).max()
            assert error <= away, (dtype, name)
    with pytest.raises(UsageError, match="trained for target"):
        load_draft(out, replace(lite.target, identity="another"))
    main([str(lite.folder), "--format", "gguf", "--out", str(tmp_path / "model.gguf")])
    with pytest.raises(UsageError, match="no draft experts"):
        load_draft(tmp_path / "model.gguf")
    with pytest.raises(UsageError, match="no such file"):
        load_draft(tmp_path / "nowhere.gguf")

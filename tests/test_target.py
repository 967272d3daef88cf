"""Loading a target: what a folder must be, dtypes, identity, tokens, converted folders."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dejax
from dejax.cli import main
from dejax.errors import UsageError
from dejax.target import checkpoint_identity, load_config, load_target, load_tokenizer, model_folder
from tests.families.random_folder import edit_tensors, raw_config, write_folder

TOKENS = np.random.default_rng(0).integers(0, 256, (2, 9))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("target") / "small")


@pytest.fixture(scope="module")
def target(folder):
    return load_target(folder)


@pytest.fixture
def broken(folder, tmp_path):
    """A copy to spoil."""
    return shutil.copytree(folder, tmp_path / "broken")


# Folders. `dejax convert` reads everything that loading reads, and shows the one line.


def only_line(capsys, *argv) -> str:
    """The complaint of a command that must end with status 2."""
    assert main(list(map(str, argv))) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("dejax: error: ") and err.count("\n") == 1
    return err


def set_config(folder, **changes):
    file = folder / "config.json"
    raw = json.loads(file.read_text()) | changes
    kept = {key: value for key, value in raw.items() if value is not ...}
    file.write_text(json.dumps(kept))


def cut(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def only_pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def drop_head(folder):
    edit_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))


def in_shards(folder):
    index = {"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def as_integers(folder):
    key = "model.norm.weight"
    edit_tensors(folder, lambda tensors: tensors.update({key: tensors[key].astype(np.int64)}))


BROKEN = {
    "gone": (lambda f: shutil.rmtree(f), "does not exist; expected a model folder, or the name"),
    "a file": (lambda f: (shutil.rmtree(f), f.touch()), "is not a folder"),
    "empty": (lambda f: (shutil.rmtree(f), f.mkdir()), "no config.json; expected a Hugging Face"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no weights; expected model.saf"),
    "pickled": (only_pickled, "safetensors are needed; pytorch_model.bin is not read"),
    "cut short": (cut, "bytes, expected 914360: cut short"),
    "no head": (drop_head, "1 bad tensors: lm_head.weight: missing"),
    "no shard": (in_shards, "shards listed but missing: model-00002-of-00002.safetensors"),
    "integers": (as_integers, "1 bad tensors: model.norm.weight: dtype I64, expected BF16"),
    "two heads": (
        lambda f: set_config(f, tie_word_embeddings=True),
        "lm_head.weight: differs from",
    ),
    "not JSON": (
        lambda f: (f / "config.json").write_text("{"),
        "config.json: not readable as JSON",
    ),
    "a list": (lambda f: (f / "config.json").write_text("[]"), "config.json: expected a JSON obj"),
    "no key": (lambda f: set_config(f, hidden_size=...), "the key hidden_size is missing"),
    "a word": (lambda f: set_config(f, hidden_size="64"), "hidden_size is '64'; expected an int"),
    "another family": (lambda f: set_config(f, model_type="bert"), "model_type 'bert' is not supp"),
    "another rope": (
        lambda f: set_config(f, rope_parameters={"rope_type": "longrope"}),
        "config.json: rope type 'longrope' is unknown; expected default, yarn or llama3",
    ),
    "gelu": (lambda f: set_config(f, hidden_act="gelu"), "hidden_act is 'gelu'; expected 'silu'"),
    "low rank": (lambda f: set_config(f, q_lora_rank=-1), "query_rank is -1; expected a positive"),
    "more experts": (lambda f: set_config(f, n_routed_experts=9), "experts.8.down_proj.weight: mi"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_folder_is_one_line(broken, capsys, tmp_path, fault):
    spoil, message = BROKEN[fault]
    spoil(broken)
    line = only_line(capsys, "convert", broken, "--out", tmp_path / "out")
    assert message in line and str(broken) in line and not (tmp_path / "out").exists()
    with pytest.raises(UsageError) as caught:
        load_target(broken)
    assert line == f"dejax: error: {caught.value}\n"


def test_a_name_for_the_embedded_target(folder, monkeypatch):
    monkeypatch.setattr("dejax.target.BUILT_IN", folder)
    assert model_folder("tiny") == folder and dejax.load_target("tiny").name == "tiny"


def test_a_model_of_a_run_has_the_runs_name(folder, tmp_path):
    model = shutil.copytree(folder, tmp_path / "healed" / "model")
    assert dejax.load_target(model).name == "healed"


def test_what_a_target_is(target, folder):
    assert target.name == "small" and target.tokenizer is None and target.store is None
    assert target.config == load_config(folder) and target.routed.keys() == {1, 2}
    assert target.layer_experts(2).shape == (8, 3, 32, 64)


# Dtypes.


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_weights_are_held_as_asked(folder, target, dtype):
    held = load_target(folder, dtype)
    assert held.model.embedding[...].dtype == held.layer_experts(1).dtype == dtype
    assert held.compute_dtype == jnp.float32 and held.identity == target.identity


@pytest.mark.slow
def test_short_weights_are_computed_with_in_float32(folder, target):
    logits = load_target(folder, "bfloat16")(TOKENS)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, target(TOKENS), atol=0.5)


def test_float64_needs_64_bit_mode(folder, target):
    with pytest.raises(UsageError, match="float64 needs JAX's 64-bit mode"):
        load_target(folder, "float64")
    with jax.enable_x64(True):
        wide = load_target(folder, "float64")
    assert wide.compute_dtype == wide.layer_experts(1).dtype == jnp.float64
    assert wide.identity == target.identity


@pytest.mark.parametrize("dtype", ["int8", "fp32", ""])
def test_unknown_dtypes(folder, dtype):
    with pytest.raises(UsageError, match="expected one of float32, bfloat16, float16, float64"):
        load_target(folder, dtype)


# Identity.


def test_identity_is_that_of_configuration_and_routers(folder, target, broken):
    same = load_target(broken)
    assert same.identity == target.identity and len(target.identity) == 32

    def change(key):
        return lambda tensors: tensors.update({key: tensors[key] * np.float32(1.001)})

    edit_tensors(broken, change("lm_head.weight"))
    assert load_target(broken).identity == target.identity
    edit_tensors(broken, change("model.layers.2.mlp.gate.weight"))
    other = load_target(broken).identity
    set_config(broken, rms_norm_eps=1e-5)
    assert len({target.identity, other, load_target(broken).identity}) == 3


def test_identity_can_be_told_without_loading(folder, target):
    plan = dejax.target.hf_weights.plan_checkpoint(folder, load_config(folder))
    assert checkpoint_identity(plan) == target.identity


# Tokens.


def test_tokens_of_any_kind(target):
    expected = target(TOKENS)
    assert expected.shape == (2, 9, 256)
    for tokens in (TOKENS.tolist(), TOKENS.astype(np.uint8), jnp.asarray(TOKENS)):
        np.testing.assert_array_equal(target(tokens), expected)


def test_sequences_do_not_see_each_other(target):
    others = np.stack([255 - TOKENS[0], TOKENS[1]])
    np.testing.assert_allclose(target(TOKENS)[1], target(others)[1], atol=1e-5)
    assert np.abs(np.asarray(target(TOKENS)[0] - target(others)[0])).max() > 0.1


@pytest.mark.parametrize(
    "tokens, message",
    [
        ([1, 2, 3], r"shape \[3\]; expected \[batch, length\]"),
        (np.zeros((0, 4), int), r"shape \[0, 4\]"),
        (np.zeros((1, 0), int), r"shape \[1, 0\]"),
        ([[1, 2], [3]], "unequal length"),
        ([[0.5]], "tokens are float64; expected integers"),
        ([[True]], "tokens are bool; expected integers"),
        ([[0, 256]], "token 256 is not in the vocabulary; expected 0 to 255"),
        ([[0, -1]], "token -1 is not in the vocabulary"),
        ([[2**40]], "token 1099511627776 is not in the vocabulary"),
        (np.zeros((1, 129), int), "129 tokens are more than the context of 128"),
    ],
)
def test_tokens_that_are_none(target, tokens, message):
    with pytest.raises(UsageError, match=message):
        target(tokens)


# Tokenizer.


@pytest.mark.parametrize("content", ["{nope", "{}", "[]"])
def test_a_damaged_tokenizer_is_one_line(broken, content):
    (broken / "tokenizer.json").write_text(content)
    with pytest.raises(UsageError, match="the tokenizer cannot be read") as caught:
        load_target(broken)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_is_loaded(broken):
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(broken / "tokenizer.json"))
    assert load_tokenizer(broken).encode("a b a c") == [1, 2, 1, 0]


def test_the_context_is_a_limit_not_a_shape(tmp_path):
    folder = write_folder(tmp_path / "m", raw_config(max_position_embeddings=10**9))
    assert load_target(folder).config.context == 10**9

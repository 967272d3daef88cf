"""The tokenizer: exact size and ids, any text round-trips, ChatML, the folder that others read."""

import json
import subprocess
import sys

import pytest

from dejax.errors import UsageError
from train.tokenizer import (
    SPECIAL_TOKENS,
    load_tokenizer,
    save_tokenizer,
    token_bytes,
    token_lengths,
    train_tokenizer,
)

TEXTS = [
    f"def f{i}(x):\n    return x * {i}  # the quick brown fox jumps over the lazy dog, naïve café\n"
    for i in range(60)
]
HARD = "tab\t, 1234 and 日本語, ünïcode, \x00 and\r\n  spaces  ’quoted’ 🙂"
ASK = [{"role": "user", "content": "Add 12 and 30."}]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, vocab_size=300)


def test_size_and_special_ids(tokenizer):
    assert len(tokenizer) == 300
    assert tokenizer.convert_ids_to_tokens([0, 1, 2, 3]) == list(SPECIAL_TOKENS)
    assert tokenizer.eos_token_id == 2
    assert tokenizer.pad_token_id == 3
    assert tokenizer.bos_token_id is None


def test_all_bytes_are_in_the_alphabet(tokenizer):
    assert {b for b in token_bytes(tokenizer) if len(b) == 1} == {bytes([i]) for i in range(256)}


def test_any_text_comes_back(tokenizer):
    ids = tokenizer(HARD)["input_ids"]
    assert tokenizer.decode(ids) == HARD
    assert b"".join(token_bytes(tokenizer)[i] for i in ids) == HARD.encode()
    assert token_lengths(tokenizer)[ids].sum() == len(HARD.encode())


def test_nothing_is_added_and_digits_stand_alone(tokenizer):
    assert tokenizer.convert_ids_to_tokens(tokenizer("2024")["input_ids"]) == list("2024")
    assert tokenizer("")["input_ids"] == []


def test_training_is_deterministic(tokenizer):
    again = train_tokenizer(reversed(TEXTS), vocab_size=300)
    assert again.get_vocab() == tokenizer.get_vocab()
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


def test_chat_template(tokenizer):
    text = tokenizer.apply_chat_template(ASK, add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>user\nAdd 12 and 30.<|im_end|>\n<|im_start|>assistant\n"
    answered = [*ASK, {"role": "assistant", "content": "42"}]
    whole = tokenizer.apply_chat_template(answered, tokenize=False)
    assert whole == text + "42<|im_end|>\n"


def test_saved_folder_loads_without_torch(tokenizer, tmp_path):
    save_tokenizer(tokenizer, tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    backend = json.loads((tmp_path / "tokenizer.json").read_text())
    digits, level = backend["pre_tokenizer"]["pretokenizers"]
    assert (digits["type"], digits["individual_digits"]) == ("Digits", True)
    assert (level["type"], level["add_prefix_space"]) == ("ByteLevel", False)
    code = f"""
import sys
sys.modules["torch"] = None
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained({str(tmp_path)!r})
print(tokenizer.apply_chat_template({ASK!r}, add_generation_prompt=True)["input_ids"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    here = load_tokenizer(tmp_path).apply_chat_template(ASK, add_generation_prompt=True)
    assert json.loads(done.stdout) == here["input_ids"]


def test_errors(tmp_path):
    with pytest.raises(UsageError, match="expected exactly 4096"):
        train_tokenizer(["too little"], vocab_size=4096)
    with pytest.raises(UsageError, match="no tokenizer.json"):
        load_tokenizer(tmp_path)

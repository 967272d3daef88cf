"""A small random model folder with a tokenizer, and documents that it can read."""

import functools
import json
from pathlib import Path

from tests.families.random_folder import raw_config, write_folder
from train.tokenizer import save_tokenizer, train_tokenizer

VOCAB = 272


@functools.cache
def tokenizer_of():
    """A byte-level tokenizer with the embedded target's chat template."""
    text = "the draft expert stands in for the experts that the draft path leaves out " * 4
    return train_tokenizer([text], vocab_size=VOCAB)


def write_model(folder: Path, name: str = "no-yarn-all-moe", *, seed: int = 0) -> Path:
    """A Hugging Face folder of a configuration, with random weights and that tokenizer."""
    write_folder(folder, raw_config(name, vocab_size=VOCAB), seed=seed)
    save_tokenizer(tokenizer_of(), folder)
    return folder


def write_documents(path: Path, *, count: int = 40) -> Path:
    """Documents of a few dozen tokens each."""
    texts = [f"document {i}: {'the draft path ' * (i % 5 + 1)}{i * i}" for i in range(count)]
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return path

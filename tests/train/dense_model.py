"""Small random dense model folders with a tokenizer, and text for them."""

from pathlib import Path

from tests.families.configurations import raw_config
from tests.families.random_folder import write_folder
from tests.train.small_model import VOCAB, tokenizer_of
from train.tokenizer import save_tokenizer

SIZES = dict(vocab_size=VOCAB, intermediate_size=192, num_hidden_layers=3)
"""192 neurons: 64 shared and 4 experts of 32, for example."""


def write_dense(folder: Path, name: str = "llama", *, seed: int = 0, **more) -> Path:
    """A Hugging Face folder of a dense family with random weights."""
    write_folder(folder, raw_config(name, **SIZES | more), seed=seed)
    save_tokenizer(tokenizer_of(), folder)
    return folder

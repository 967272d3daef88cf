"""The byte-level BPE tokenizer of the embedded target.

It sits before everything else in pretraining: documents (`train.text`) are rendered with its chat
template and encoded into token arrays (`train.data`). The pre-tokenizer is the one that llama.cpp
calls `smollm` (single digits, then GPT-2's byte-level split), so that an exported GGUF file
tokenises alike. The tokenizer is saved as an ordinary transformers folder.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from jaxtyping import Int

from dejax.errors import UsageError

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
PAD = "<|pad|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END, PAD)  # ids 0, 1, 2, 3

# ChatML without a default system prompt: what is not said in `messages` is not in the text.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], *, vocab_size: int = 4096, max_length: int = 1024):
    """Train the BPE on `texts` and return a transformers `PreTrainedTokenizerFast`.

    The special tokens take ids 0-3, all 256 bytes follow, then the merges. The result depends
    only on the multiset of texts. `max_length` is the context length recorded in the
    configuration, in tokens. Raises `UsageError` if the text is too little for `vocab_size`.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer=trainer)
    if backend.get_vocab_size() != vocab_size:
        raise UsageError(
            f"tokenizer: the text yields {backend.get_vocab_size()} entries, expected exactly "
            f"{vocab_size}; give more text or a smaller vocabulary"
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=TURN_END,
        pad_token=PAD,
        additional_special_tokens=[END_OF_TEXT, TURN_START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def save_tokenizer(tokenizer, folder: Path | str) -> None:
    """Save as a transformers folder that transformers 4 and llama.cpp's converter read as well."""
    tokenizer.save_pretrained(folder)
    path = Path(folder) / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"  # transformers 5 writes a name of its own
    config["chat_template"] = CHAT_TEMPLATE  # readers from before chat_template.jinja look here
    path.write_text(json.dumps(config, indent=2) + "\n")


def load_tokenizer(folder: Path | str):
    """Load the tokenizer of a transformers folder; raises `UsageError` if there is none."""
    folder = Path(folder)
    if not (folder / "tokenizer.json").is_file():
        raise UsageError(f"tokenizer: {folder} has no tokenizer.json; prepare the data first")
    from transformers import PreTrainedTokenizerFast

    try:
        return PreTrainedTokenizerFast.from_pretrained(folder)
    except Exception as error:  # damaged files end in whatever exception they happen to cause
        first_line = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        raise UsageError(f"{folder}: the tokenizer cannot be read ({first_line})") from None


def token_bytes(tokenizer) -> list[bytes]:
    """Return the bytes that each token id stands for, in id order; special tokens stand for none.

    Joining the entries of a token sequence gives the UTF-8 text that it decodes to with
    `skip_special_tokens=True`.
    """
    to_byte = _byte_of_symbol()
    special = set(tokenizer.all_special_ids)
    symbols = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    return [
        b"" if i in special else bytes(to_byte[c] for c in symbol)
        for i, symbol in enumerate(symbols)
    ]


def token_lengths(tokenizer) -> Int[np.ndarray, " V"]:
    """Return the number of UTF-8 bytes of each token id (0 for special tokens)."""
    return np.array([len(b) for b in token_bytes(tokenizer)], np.int64)


def _byte_of_symbol() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes, inverted (`bytes_to_unicode` in its encoder.py)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(plain)]
    return {chr(b): b for b in plain} | {chr(256 + n): b for n, b in enumerate(others)}

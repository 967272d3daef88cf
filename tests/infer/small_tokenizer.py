"""Tokenizers of a few hundred tokens, of the kinds that the families have."""

from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

SIZE = 320
TEXT = [
    "the quick brown fox isn't 12 or 345678 years old; it's HE'S and we'Ve done x+=1;\n\n  y",
    "other words: then, there, them; 2024 was 100 years; a  b   c\n\t\td",
    "Grüße aus Köln, 東京 and नमस्ते 😀 ...!!! ---",
] * 3
# As in the releases' tokenizer.json.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
    r""" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
)
SPECIAL = ["<unk>", "<s>", "</s>", "<|pad|>"]


def split(*patterns: str) -> Any:
    """Patterns one after the other, then bytes."""
    parts = [pre_tokenizers.Split(Regex(p), "isolated") for p in patterns]
    return pre_tokenizers.Sequence(
        [*parts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def smollm() -> Any:
    """Single digits, then words."""
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])


def byte_level(pre_tokenizer: Any) -> PreTrainedTokenizerFast:
    """Byte-level BPE, which begins a text with nothing."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(
            vocab_size=SIZE - 6,
            special_tokens=SPECIAL,
            initial_alphabet=sorted(alphabet),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<|pad|>"
    )


def sentencepiece() -> PreTrainedTokenizerFast:
    """BPE of characters with bytes for what it lacks, spaces as U+2581, and <s> first."""
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    ascii_text = [text.encode("ascii", "ignore").decode() for text in TEXT]
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE + 30,
        special_tokens=SPECIAL[:3] + [f"<0x{i:02X}>" for i in range(256)],
        show_progress=False,
    )
    backend.train_from_iterator(ascii_text, trainer)
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def add_to(folder: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    """Writes a tokenizer into a model folder."""
    tokenizer.save_pretrained(folder)
    return folder

"""A tiktoken file (`tiktoken.model`: a token in base64 and its rank, a line each) as a tokenizer.

Moonlight's and Kimi's folders hold one instead of a `tokenizer.json`, and code that reads it, which
is never run here: what it would say is the pattern that splits text and the names of reserved
tokens, both written down below (from the `tokenization_moonshot.py` of the releases).

A text is split by the pattern, and in each piece the pair of neighbours whose union has the lowest
rank is merged, the leftmost first, until none has a rank. That is byte-level BPE, with the merges
in the order of the ranks.
"""

import base64
import binascii
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dejax.ckpt.tensor_files import read_json
from dejax.errors import UsageError

TIKTOKEN_FILE = "tiktoken.model"
TOKENIZER_CLASS = "TikTokenTokenizer"
"""What `tokenizer_config.json` calls the tokenizers that split by `PATTERN`."""

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_RESERVED = 256
_MOST_SPECIAL = 2**16
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")


def load_tiktoken(folder: Path) -> Any:
    """The tokenizer of a folder with a tiktoken file, as `transformers` has tokenizers.

    Raises:
      UsageError: a line of the file is malformed, a byte has no token, or the configuration names
        another kind of tokenizer, whose pattern only its code knows.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    config = read_json(folder / "tokenizer_config.json")
    kind = config.get("tokenizer_class")
    if kind != TOKENIZER_CLASS:
        raise UsageError(
            f"{folder / TIKTOKEN_FILE}: how a {kind} splits text is in code of its own, which is "
            f"not run; expected a {TOKENIZER_CLASS} (Moonlight, Kimi), or a tokenizer.json"
        )
    ranks = read_ranks(folder / TIKTOKEN_FILE)
    names = _byte_names()
    text = {token: "".join(names[byte] for byte in token) for token in ranks}
    merges = [(text[left], text[right]) for left, right in merges_of(ranks)]
    vocab = {text[token]: rank for token, rank in ranks.items()}
    # A piece that is a token is taken whole, even where merging would not arrive at it.
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    special = _special_tokens(folder, config, len(ranks))
    backend.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in special]
    )
    for place, name in enumerate(special, start=len(ranks)):
        if backend.token_to_id(name) != place:  # it would be another token, and shift all after it
            raise UsageError(
                f"{folder / 'tokenizer_config.json'}: added_tokens_decoder: {name!r}, of id "
                f"{place}, is empty or the name of another token too"
            )
    named = {key: _content(config[key]) for key in _NAMED if config.get(key) is not None}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, **named
    )
    template = folder / "chat_template.jinja"
    tokenizer.chat_template = (
        template.read_text(encoding="utf-8") if template.exists() else config.get("chat_template")
    )
    return tokenizer


def read_ranks(path: Path) -> dict[bytes, int]:
    """Token -> rank of a tiktoken file; ranks are ids, from 0 on without a gap.

    Raises:
      UsageError: it is not that.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line:
            continue
        try:
            encoded, rank = line.split()
            token, place = base64.b64decode(encoded, validate=True), int(rank)
        except (ValueError, binascii.Error):
            raise UsageError(
                f"{path}, line {number}: {line[:40]!r}; expected a token in base64 and its rank"
            ) from None
        if not token or token in ranks:
            raise UsageError(f"{path}, line {number}: the token {token!r} is empty or there twice")
        ranks[token] = place
    if set(ranks.values()) != set(range(len(ranks))):
        raise UsageError(f"{path}: the ranks of {len(ranks)} tokens are not 0 to {len(ranks) - 1}")
    missing = sum(bytes([byte]) not in ranks for byte in range(256))
    if missing:
        raise UsageError(f"{path}: {missing} of 256 bytes have no token")
    return ranks


def merges_of(ranks: dict[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Pairs to be merged, the first first, which merge as ranks do.

    A token is made from the two parts that merging its own bytes arrives at. Where lower ranks do
    not arrive at two parts, any two tokens that it consists of are merged.
    """
    for token in sorted(ranks, key=ranks.__getitem__):
        if len(token) < 2:
            continue
        places = range(1, len(token))
        pairs = [(token[:i], token[i:]) for i in places]
        pairs = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        parts = tuple(_merged(token, ranks, below=ranks[token])) if len(pairs) > 1 else ()
        yield from [parts] if len(parts) == 2 else pairs


def _merged(piece: bytes, ranks: dict[bytes, int], below: int) -> list[bytes]:
    """A piece's parts after all merges of ranks less than `below`."""
    parts = [piece[i : i + 1] for i in range(len(piece))]
    while len(parts) > 1:
        found = [ranks.get(a + b, below) for a, b in zip(parts, parts[1:], strict=False)]
        best = min(found)
        if best >= below:
            break
        at = found.index(best)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def _special_tokens(folder: Path, config: dict[str, Any], first: int) -> list[str]:
    """Names of the ids from `first` on: those that the configuration has, others reserved."""
    added = config.get("added_tokens_decoder", {})
    try:
        given = {int(i): token["content"] for i, token in added.items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise UsageError(
            f"{folder / 'tokenizer_config.json'}: added_tokens_decoder is no table of id -> token"
        ) from None
    if any(i < first for i in given):
        raise UsageError(
            f"{folder / 'tokenizer_config.json'}: added_tokens_decoder has id {min(given)}, which "
            f"{TIKTOKEN_FILE} has too (it has {first} tokens)"
        )
    if given and max(given) >= first + _MOST_SPECIAL:
        raise UsageError(
            f"{folder / 'tokenizer_config.json'}: added_tokens_decoder has id {max(given)}; "
            f"expected ids below {first + _MOST_SPECIAL}"
        )
    end = max([first + _RESERVED - 1, *given]) + 1
    return [given.get(i, f"<|reserved_token_{i}|>") for i in range(first, end)]


def _content(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else token


def _byte_names() -> list[str]:
    """The character that stands for each byte in byte-level BPE (as GPT-2 has them)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    names = {byte: chr(byte) for byte in plain}
    names |= {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [names[byte] for byte in range(256)]

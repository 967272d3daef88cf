"""A `transformers` tokenizer as the metadata of a GGUF file.

llama.cpp knows two kinds that the families here use: "gpt2", byte-level BPE with merges, whose
pre-tokenizer it knows by a name; and "llama", SentencePiece's BPE, which merges the pair whose
union has the best score.
"""

import json
from typing import Any

from dejax.ckpt.tiktoken_file import PATTERN as TIKTOKEN
from dejax.errors import UsageError
from dejax.export.gguf_file import Value

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = rf"{_SHORT}|{_WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_MARKS = r"\p{Lm}\p{Lo}\p{M}"
_UPPER, _LOWER = rf"[\p{{Lu}}\p{{Lt}}{_MARKS}]", rf"[\p{{Ll}}{_MARKS}]"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT}?|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT}?|"
    rf"\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_BY_PATTERN = {_LLAMA3: "llama-bpe", _QWEN2: "qwen2", _O200K: "gpt-4o", TIKTOKEN: "kimi-k2"}
"""The single pattern that splits text -> llama.cpp's name of the pre-tokenizer."""
_V3_SPLIT = r"\p{N}{1,3}"
_V2_SPLITS = r"[\r\n]", r"\s?[A-Za-z"
"""What the patterns of DeepSeek's tokenizers begin with."""


def tokenizer_metadata(
    tokenizer: Any, *, family: str, vocab_size: int, eos_ids: tuple[int, ...]
) -> dict[str, Value]:
    """The keys below `tokenizer.`; of a target without a tokenizer, those that say so.

    Args:
      tokenizer: of `transformers`, or None.
      vocab_size: rows of the embedding; ids that no token has are filled up.
      eos_ids: what ends a generation, the first first.

    Raises:
      UsageError: llama.cpp has no such tokenizer.
    """
    if tokenizer is None:
        return {"tokenizer.ggml.model": "none"}
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise UsageError(f"tokenizer: {type(tokenizer).__name__} has no tokenizer.json to read")
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    model = backend["model"]
    if model["type"] != "BPE":
        raise UsageError(f"tokenizer: its model is {model['type']}; llama.cpp is given BPE")
    tokens, types = _tokens(backend, vocab_size)
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in model["merges"]]
    keys: dict[str, Value] = {"tokens": tokens, "token_type": types}
    if model.get("byte_fallback"):
        scores = _scores(model["vocab"], merges, vocab_size)
        keys |= {"model": "llama", "pre": "default", "scores": scores}
        keys["add_space_prefix"] = _adds_space(backend)
    else:
        keys |= {"model": "gpt2", "pre": pre_tokenizer(backend, family)}
        keys["merges"] = [" ".join(pair) for pair in merges]
    keys |= _special_ids(tokenizer, eos_ids)
    result = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    template = tokenizer.chat_template
    if isinstance(template, dict):  # several by name
        template = template.get("default")
    return result if template is None else result | {"tokenizer.chat_template": template}


def tokenizer_differences(keys: dict[str, Value]) -> list[str]:
    """Where llama.cpp makes other ids of a text, a sentence each (`keys`: `tokenizer_metadata`)."""
    if keys.get("tokenizer.ggml.pre") != "kimi-k2":
        return []
    return [
        "words are not split before a capital within them (getUserName) and are split at combining "
        "marks: such texts may get other token ids"
    ]


def _tokens(backend: dict[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    """Text and type of every id."""
    model = backend["model"]
    tokens = [f"[PAD{i}]" for i in range(vocab_size)]
    types = [UNUSED] * vocab_size
    known = [(text, i, NORMAL) for text, i in model["vocab"].items()]
    if model.get("byte_fallback"):
        known = [(text, i, BYTE if _is_byte(text) else kind) for text, i, kind in known]
    for added in backend["added_tokens"]:
        kind = CONTROL if added["special"] else USER_DEFINED
        if model.get("byte_fallback") and added["content"] == model.get("unk_token"):
            kind = UNKNOWN
        known.append((added["content"], added["id"], kind))
    for text, i, kind in known:
        if i >= vocab_size:
            raise UsageError(f"tokenizer: token {i} has no row among the {vocab_size} embedded")
        tokens[i], types[i] = text, kind
    return tokens, types


def _is_byte(text: str) -> bool:
    return len(text) == 6 and text.startswith("<0x") and text.endswith(">")


def _scores(vocab: dict[str, int], merges: list[tuple[str, ...]], size: int) -> list[float]:
    """A token's score: the earlier the merge that makes it, the better."""
    scores = [0.0] * size
    for rank, pair in reversed(list(enumerate(merges))):
        scores[vocab["".join(pair)]] = -float(rank)
    return scores


def _adds_space(backend: dict[str, Any]) -> bool:
    """Whether a text is taken as if it began with a space."""
    parts = [*_flat(backend.get("normalizer")), *_flat(backend.get("pre_tokenizer"))]
    prepends = [part for part in parts if part["type"] == "Prepend"]
    schemes = [part.get("prepend_scheme") for part in parts if part["type"] == "Metaspace"]
    return bool(prepends) or any(scheme in ("always", "first") for scheme in schemes)


def pre_tokenizer(backend: dict[str, Any], family: str) -> str:
    """llama.cpp's name for how a byte-level BPE's text is split before merging.

    Raises:
      UsageError: it is none that these families are released with.
    """
    parts = _flat(backend.get("pre_tokenizer"))
    patterns = [
        part["pattern"].get("Regex") or part["pattern"].get("String")
        for part in parts
        if part["type"] == "Split"
    ]
    types = [part["type"] for part in parts]
    by_words = any(part["type"] == "ByteLevel" and part.get("use_regex", True) for part in parts)
    if len(patterns) == 1 and types == ["Split", "ByteLevel"] and not by_words:
        name = _BY_PATTERN.get(patterns[0])
        if name is not None:
            return "glm4" if (name, family) == ("llama-bpe", "glm4_moe") else name
    if len(patterns) == 3 and patterns[0] == _V3_SPLIT:
        return "deepseek-v3"
    if len(patterns) == 5 and all(map(str.startswith, patterns, _V2_SPLITS)):
        return "deepseek-llm"
    if by_words and types == ["Digits", "ByteLevel"]:
        return "smollm"
    if by_words and types == ["ByteLevel"]:
        return "olmo" if family == "olmoe" else "gpt-2"
    shown = ", ".join([*types, *map(repr, patterns)])[:160]
    raise UsageError(f"tokenizer: its pre-tokenizer ({shown}) has no name known to llama.cpp here")


def _flat(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The members of a sequence, or the part itself."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    inner = part.get("pretokenizers") or part.get("normalizers") or []
    return [member for each in inner for member in _flat(each)]


def _special_ids(tokenizer: Any, eos_ids: tuple[int, ...]) -> dict[str, Value]:
    """Ids of tokens with a part to play, and which of them a text begins or ends with."""
    keys: dict[str, Value] = {}
    ends = list(eos_ids) or [tokenizer.eos_token_id]
    for name, value in (
        ("bos", tokenizer.bos_token_id),
        ("unknown", tokenizer.unk_token_id),
        ("padding", tokenizer.pad_token_id),
        *zip(("eos", "eot", "eom"), ends, strict=False),
    ):
        if value is not None:
            keys[f"{name}_token_id"] = int(value)
    ids = tokenizer.encode("a")
    keys["add_bos_token"] = bool(ids) and ids[0] == tokenizer.bos_token_id
    keys["add_eos_token"] = bool(ids) and ids[-1] == tokenizer.eos_token_id
    return keys

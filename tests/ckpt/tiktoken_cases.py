"""A small tiktoken file made of the built-in target's tokens, and what tiktoken makes of texts."""

import base64
import functools
import json
from pathlib import Path

import regex

from dejax.ckpt.tiktoken_file import PATTERN
from dejax.target import BUILT_IN

SPECIAL = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|im_end|>",
    3: "<|im_user|>",
    4: "<|im_assistant|>",
    10: "<|im_system|>",
    17: "<|im_middle|>",
    254: "[UNK]",
    255: "[PAD]",
}
"""Place behind the ranks -> name, as Moonlight has them; other places are reserved tokens."""
TEMPLATE = (
    "{% for m in messages %}<|im_{{ m['role'] }}|>{{ m['role'] }}<|im_middle|>"
    "{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)


@functools.cache
def ranks() -> dict[bytes, int]:
    """Single bytes, then what each merge of the built-in target's tokenizer makes."""
    model = json.loads((BUILT_IN / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(plain))
    byte_of = {chr(byte): byte for byte in plain}
    byte_of |= {chr(256 + i): byte for i, byte in enumerate(others)}
    pairs = [m if isinstance(m, list) else m.split(" ") for m in model["merges"]]
    made = [bytes(byte_of[c] for c in "".join(pair)) for pair in pairs]
    tokens = dict.fromkeys([*(bytes([byte]) for byte in range(256)), *made])
    return {token: rank for rank, token in enumerate(tokens)}


def size() -> int:
    """Tokens, special ones included."""
    return len(ranks()) + 256


def add_tiktoken(folder: Path, **changes: object) -> Path:
    """Writes the files of such a tokenizer into a folder; its code would leave a file if run."""
    lines = (base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks().items())
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    config = {
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_moonshot.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": {"content": "[PAD]", "__type": "AddedToken"},
        "unk_token": "[UNK]",
        "chat_template": TEMPLATE,
        "added_tokens_decoder": {
            str(len(ranks()) + place): {"content": name, "special": True}
            for place, name in SPECIAL.items()
        },
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config | changes))
    code = f"open({str(folder / 'was-run')!r}, 'w').close()\nclass TikTokenTokenizer: pass\n"
    (folder / "tokenization_moonshot.py").write_text(code)
    return folder


def encode(text: str) -> list[int]:
    """Ids of a text without special tokens: in every piece, the lowest rank first."""
    known, ids = ranks(), []
    for piece in regex.findall(PATTERN, text, regex.V1):
        raw = piece.encode()
        parts = [raw] if raw in known else [raw[i : i + 1] for i in range(len(raw))]
        while len(parts) > 1:
            pairs = list(zip(parts, parts[1:], strict=False))
            found = [(known[a + b], i) for i, (a, b) in enumerate(pairs) if a + b in known]
            if not found:
                break
            _, i = min(found)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        ids += [known[part] for part in parts]
    return ids

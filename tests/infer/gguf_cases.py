"""Small models as GGUF files in llama.cpp: those that it computes alike, and those it does not."""

import gzip
import json
from pathlib import Path

import numpy as np

from dejax.export.gguf import export_target
from dejax.target import BUILT_IN, Target, load_target, read_outline
from tests.families.configurations import raw_config, yarn
from tests.families.random_folder import write_folder
from tests.infer import small_tokenizer
from tests.infer.llama_cpp import ask

TOLERANCE = 5e-4
IDS = np.random.default_rng(1).integers(4, 256, 40).tolist()
TRUNCATED = dict(rope_parameters=yarn(truncate=True, rope_theta=150000.0))
WHOLE = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=1.0)
_LLAMA3 = raw_config("llama")["rope_parameters"]

EQUAL = {
    "lite": ("lite", {}),
    "lite of 27 layers": ("lite", dict(num_hidden_layers=27)),
    "no-yarn-all-moe": ("no-yarn-all-moe", {}),
    "v3": ("v3", {}),
    "v3, half-split rotation": ("v3-half-split", dict(attention_bias=False)),
    "moonlight": ("moonlight", {}),
    "qwen3-moe": ("qwen3-moe", {}),
    "qwen3-moe, YaRN": ("qwen3-moe", dict(rope_parameters=yarn(attention_factor=1.3))),
    "olmoe": ("olmoe", {}),
    "olmoe, tied": ("olmoe", dict(tie_word_embeddings=True)),
    "mixtral": ("mixtral", {}),
    "mixtral, frequencies divided": ("mixtral", dict(rope_parameters=_LLAMA3)),
    "gpt-oss, truncate true": ("gpt-oss", TRUNCATED),
    "glm4-moe": ("glm4-moe", {}),
    "glm4-moe-groups": ("glm4-moe-groups", {}),
    "glm4-moe, all rotated": (
        "glm4-moe",
        dict(use_qk_norm=False, attention_bias=False, rope_parameters=WHOLE),
    ),
    "llama": ("llama", {}),
    "llama-biases": ("llama-biases", {}),
    "qwen3": ("qwen3", {}),
}
"""Name -> configuration and changes, which llama.cpp computes as the reference does."""
UNEQUAL = {
    "full": ("full", {}, "ranked by their best two experts"),
    "two mscales": ("lite", dict(rope_parameters=yarn(1.0, 0.5)), "mscale is taken to be equal"),
    "qwen3-moe": ("qwen3-moe", dict(norm_topk_prob=False), "gates are always renormalised"),
    "olmoe": ("olmoe", dict(norm_topk_prob=True), "gates are never renormalised"),
    "olmoe, clip": ("olmoe", dict(clip_qkv=0.8), "not clipped"),
    "mixtral-window": ("mixtral-window", {}, "there is no window"),
    "gpt-oss": ("gpt-oss", {}, "YaRN's range is rounded"),
    "gpt-oss, windows": (
        "gpt-oss",
        dict(TRUNCATED, layer_types=["full_attention", "sliding_attention"] * 2),
        "layers 0, 2, 4",
    ),
    "gpt-oss, activation": ("gpt-oss", dict(TRUNCATED, swiglu_limit=1.0), "limit 7"),
}
"""Name -> configuration, changes, and what the export says llama.cpp does instead."""

REFUSED = {
    "deepseek2 has no biases": ("lite", dict(attention_bias=True)),
    "deepseek2 has no layers without shared experts": ("lite", dict(n_shared_experts=0)),
    "no query rank in models of 27 layers": ("v3", dict(num_hidden_layers=27)),
    "qwen3moe has no biases in its attention": ("qwen3-moe", dict(attention_bias=True)),
    "no dense layers between those with experts": ("qwen3-moe-dense-between", {}),
    "qwen3moe has no dense layers": ("qwen3-moe", dict(mlp_only_layers=[0])),
    "qwen3 has no biases in its attention": ("qwen3", dict(attention_bias=True)),
    "no divisors of rotary frequencies": ("qwen3", dict(rope_parameters=_LLAMA3)),
    "olmoe has no biases in its attention": ("olmoe", dict(attention_bias=True)),
    "only keys and queries as wide as the model": ("olmoe", dict(num_key_value_heads=2)),
    "gpt-oss has biases in every attention": ("gpt-oss", dict(TRUNCATED, attention_bias=False)),
}
"""What the export says -> configuration and changes that llama.cpp would not load."""


def small_model(folder: Path, name: str, more: dict) -> Path:
    write_folder(folder, raw_config(name, vocab_size=small_tokenizer.SIZE, **more))
    return small_tokenizer.add_to(folder, small_tokenizer.byte_level(small_tokenizer.smollm()))


def logprobs(logits) -> np.ndarray:
    wide = np.asarray(logits, np.float64)
    wide = wide - wide.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


def kl(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float((np.exp(ours) * (ours - theirs)).sum(-1).mean())


def both(folder: Path, out: Path) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Log-probabilities after every prefix, ours and llama.cpp's, and what the export warns of."""
    export = export_target(folder, read_outline(folder), "f32")
    export.write(out)
    theirs = ask(out, x={"logprobs": IDS})["x"]
    return logprobs(load_target(folder)([IDS])[0]), theirs, export.warnings


def prompts() -> list[str]:
    lines = (BUILT_IN.parent / "demo" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines]


def documents(count: int) -> list[str]:
    """The beginnings of documents of several kinds."""
    with gzip.open(BUILT_IN.parent / "demo" / "distill.jsonl.gz", "rt", encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    texts = [r["text"] if "text" in r else r["messages"][-1]["content"] for r in records]
    return [text[:400] for text in texts[:: len(texts) // count]][:count]


ODD = [
    "a",
    " a  b   c\t\td\n\n\ne \n f",
    "1 12 123 1234567890 3.14 1,000 0x1F",
    "isn't we'Ve HE'S 'tis l'été d'",
    "Grüße, Ελληνικά, кириллица, 東京タワー, 한국어, नमस्ते, עברית",
    "😀👩‍👩‍👧‍👦🇩🇪 é ﬁ \u00a0\u2003 ½",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "def f(x):\n\treturn x**2 + [i for i in range(10)][-1]  # !?",
]


def several(count: int) -> list[str]:
    """Texts that differ: odd ones, prompts, these backwards, documents."""
    ends = [text for prompt in prompts() for text in (prompt, prompt[::-1])]
    texts = dict.fromkeys([*ODD, *ends, *documents(count)])
    return list(texts)[:count]


def text_of(tiny: Target) -> list[int]:
    return tiny.tokenizer.encode(" ".join(prompts()))[:40]

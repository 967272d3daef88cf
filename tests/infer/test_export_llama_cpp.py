"""GGUF files in llama.cpp itself: it computes what dejax computes, or the export has said not."""

from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import regex

from dejax.ckpt.draft_state import resolve_draft
from dejax.ckpt.gguf_weights import GGUFFile
from dejax.config import DraftConfig
from dejax.draft.expert import Draft, random_draft
from dejax.export import gguf_config
from dejax.export.gguf import export_adapter, export_draft_model, export_target
from dejax.target import Target, load_target, load_tokenizer, read_outline
from tests.ckpt import tiktoken_cases
from tests.ckpt.smollm2 import smollm2
from tests.families.configurations import raw_config
from tests.families.random_folder import write_folder
from tests.infer import small_tokenizer
from tests.infer.draft_path import draft_path
from tests.infer.gguf_cases import (
    EQUAL,
    IDS,
    ODD,
    REFUSED,
    TOLERANCE,
    UNEQUAL,
    both,
    documents,
    kl,
    logprobs,
    prompts,
    several,
    small_model,
    text_of,
)
from tests.infer.llama_cpp import Refused, ask

pytest.importorskip("xllamacpp")
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("case", EQUAL)
def test_llama_cpp_computes_the_same(case, tmp_path):
    ours, theirs, warnings = both(small_model(tmp_path / "m", *EQUAL[case]), tmp_path / "m.gguf")
    assert np.abs(ours - theirs).max() < TOLERANCE
    np.testing.assert_array_equal(ours.argmax(-1), theirs.argmax(-1))
    assert len(warnings) == (case == "moonlight")  # one eps for all norms: within the tolerance


@pytest.mark.parametrize("case", UNEQUAL)
def test_where_llama_cpp_differs_the_export_says_so(case, tmp_path):
    name, more, message = UNEQUAL[case]
    ours, theirs, warnings = both(small_model(tmp_path / "m", name, more), tmp_path / "m.gguf")
    assert len(warnings) == 1 and message in warnings[0]
    assert np.abs(ours - theirs).max() > 10 * TOLERANCE


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_export_refuses_llama_cpp_would_not_load(case, tmp_path):
    folder = small_model(tmp_path / "m", *REFUSED[case])
    with mock.patch.object(gguf_config, "_obstacle", return_value=None):
        with pytest.raises(Refused, match="wrong number of tensors|not found|has wrong shape"):
            both(folder, tmp_path / "m.gguf")


@pytest.fixture(scope="module")
def tiny() -> Target:
    return load_target("tiny")


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    export_target("tiny", read_outline("tiny"), "f32").write(out)
    return out


def test_tiny_has_the_same_tokens_template_and_greedy_continuation(tiny, tiny_file):
    texts = several(1000)
    assert len(texts) == 1000
    messages = [{"role": "user", "content": "What is 7 + 5?"}]
    prompt = tiny.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    ids = tiny.tokenizer.encode(prompt)
    answers = ask(
        tiny_file,
        tokens={"tokenize": texts},
        chat={"chat": messages},
        greedy={"greedy": ids, "count": 64},
    )
    assert answers["chat"] == prompt
    assert answers["tokens"] == [tiny.tokenizer.encode(text) for text in texts]
    greedy, accepted, drafted = answers["greedy"]
    assert len(greedy) == 64 and accepted == drafted == 0
    # Each of our own choices, given theirs before it, is theirs: so are the sequences.
    whole = ids + greedy
    logits = np.array(tiny([whole[:-1]])[0])
    logits[:, list(tiny.config.eos_ids)] = -np.inf  # as theirs: neither may end
    best = logits.argmax(-1)
    assert best[len(ids) - 1 :].tolist() == greedy


LIMITS = {"f32": 1e-6, "f16": 1e-4, "bf16": 1e-3, "q8_0": 2e-2, "q4_0": 0.2}
"""KL in nats of `tiny` as stored, on text."""


@pytest.mark.parametrize("dtype", LIMITS)
def test_quantised_tiny_stays_near(dtype, tiny, tmp_path):
    ids = text_of(tiny)
    export_target("tiny", read_outline("tiny"), dtype).write(tmp_path / "t.gguf")
    theirs, ours = ask(tmp_path / "t.gguf", x={"logprobs": ids})["x"], logprobs(tiny([ids])[0])
    away = kl(ours, theirs)
    assert away < LIMITS[dtype]
    assert dtype in ("f32", "f16") or away > LIMITS["f32"]


def draft_logits(target: Target, draft: Draft, ids: list[int]) -> np.ndarray:
    """Log-probabilities of the draft path over a whole sequence."""
    return logprobs(draft_path(target, draft, np.array([ids]))[0][0])


def test_the_drafter_of_tiny_is_the_draft_path(tiny, tmp_path):
    ids, outline = text_of(tiny), read_outline("tiny")
    draft = resolve_draft("init:4", outline)
    export_draft_model("tiny", outline, draft, "f32").write(tmp_path / "d.gguf")
    ours, theirs = draft_logits(tiny, draft, ids), ask(tmp_path / "d.gguf", x={"logprobs": ids})
    assert np.abs(ours - theirs["x"]).max() < TOLERANCE
    assert np.abs(ours - logprobs(tiny([ids])[0])).max() > 0.1  # it is not the target


def test_llama_cpp_speculates_with_the_drafter(tiny, tiny_file, tmp_path):
    outline = read_outline("tiny")
    export = export_draft_model("tiny", outline, resolve_draft("init", outline), "f32")
    export.write(tmp_path / "d.gguf")
    request = {"greedy": text_of(tiny), "count": 64}
    alone = ask(tiny_file, x=request)["x"]
    drafted = ask(tiny_file, drafter=tmp_path / "d.gguf", x=request)["x"]
    assert drafted[0] == alone[0] and alone[1] == 0
    # Of 64: shared and top-1 experts agree with the target on most tokens.
    assert drafted[2] > drafted[1] >= 16


@pytest.mark.parametrize(
    ("name", "r", "width", "gates"),
    [("lite", 2, 40, "full"), ("full", 1, 32, "full"), ("v3", 1, 32, "plain")],
)
def test_other_drafters_are_the_draft_path(name, r, width, gates, tmp_path):
    folder = small_model(tmp_path / "m", name, {})
    outline = read_outline(folder)
    config = DraftConfig(width=width, top_r=r, gates=gates)
    draft = random_draft(outline.config, config, seed=1, identity=outline.identity)
    export = export_draft_model(folder, outline, draft, "f32")
    assert export.warnings == ()  # groups do not matter where one expert is chosen
    export.write(tmp_path / "d.gguf")
    theirs = ask(tmp_path / "d.gguf", x={"logprobs": IDS})["x"]
    assert np.abs(draft_logits(load_target(folder), draft, IDS) - theirs).max() < TOLERANCE


def test_llama_cpp_does_not_take_an_adapter_for_a_model(tmp_path):
    outline = read_outline("tiny")
    export_adapter("tiny", outline, resolve_draft("init", outline)).write(tmp_path / "a.gguf")
    with pytest.raises(Refused, match="error loading model"):
        ask(tmp_path / "a.gguf")


@pytest.mark.parametrize(
    ("name", "tokenizer"),
    [
        ("llama", small_tokenizer.byte_level(small_tokenizer.split(small_tokenizer.LLAMA3))),
        ("qwen3", small_tokenizer.byte_level(small_tokenizer.split(small_tokenizer.QWEN2))),
        ("gpt-oss", small_tokenizer.byte_level(small_tokenizer.split(small_tokenizer.O200K))),
        ("v3", small_tokenizer.byte_level(small_tokenizer.split(*small_tokenizer.DEEPSEEK_V3))),
        ("glm4-moe", small_tokenizer.byte_level(small_tokenizer.split(small_tokenizer.LLAMA3))),
        ("mixtral", small_tokenizer.sentencepiece()),
    ],
)
def test_tokenizers_of_every_kind_give_the_same_ids(name, tokenizer, tmp_path):
    folder = write_folder(tmp_path / "m", raw_config(name, vocab_size=400))
    small_tokenizer.add_to(folder, tokenizer)
    export_target(folder, read_outline(folder), "f32").write(tmp_path / "m.gguf")
    texts = [*small_tokenizer.TEXT, *ODD, *prompts()[:20]]
    answers = ask(tmp_path / "m.gguf", tokens={"tokenize": texts})["tokens"]
    for text, theirs in zip(texts, answers, strict=True):
        assert theirs == tokenizer.encode(text), text


@pytest.mark.smollm
def test_smollm2s_tokens_are_those_of_the_file_it_comes_in(tmp_path):
    """Its tokenizer exported anew, dejax's, and that of the GGUF file that llama.cpp made."""
    original = smollm2()
    folder = write_folder(tmp_path / "m", raw_config("glm4-moe", vocab_size=49152))
    tokenizer = GGUFFile(original).tokenizer()
    small_tokenizer.add_to(folder, tokenizer)
    export_target(folder, read_outline(folder), "f16").write(tmp_path / "m.gguf")
    texts = several(1000)
    found = [ask(file, x={"tokenize": texts})["x"] for file in (original, tmp_path / "m.gguf")]
    assert found[0] == found[1] == [tokenizer.encode(text) for text in texts]
    assert len(texts) == 1000


OTHERWISE = regex.compile(r"[\p{Ll}\p{Lm}\p{Lo}\p{M}][\p{Lu}\p{Lt}]|\p{M}")
"""What llama.cpp's kimi-k2 does not split as the pattern of the release does."""


def test_moonlights_tokens_are_those_of_tiktoken_but_where_the_export_says(tmp_path):
    raw = raw_config("moonlight", vocab_size=tiktoken_cases.size())
    folder = tiktoken_cases.add_tiktoken(write_folder(tmp_path / "m", raw))
    export = export_target(folder, read_outline(folder), "f32")
    export.write(tmp_path / "m.gguf")
    assert sum("token ids" in warning for warning in export.warnings) == 1
    texts = [*(text for text in ODD if "<|" not in text), *prompts(), *documents(400)]
    turns = [{"role": "user", "content": "你好, was ist 7 + 5?"}]
    tokenizer = load_tokenizer(folder)
    chat = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    answers = ask(tmp_path / "m.gguf", tokens={"tokenize": [*texts, chat]}, chat={"chat": turns})
    *found, of_chat = answers["tokens"]
    assert answers["chat"] == chat and of_chat == tokenizer.encode(chat)
    equal = [
        theirs == tiktoken_cases.encode(text) for text, theirs in zip(texts, found, strict=True)
    ]
    plain = [OTHERWISE.search(text) is None for text in texts]
    assert sum(plain) > 350 and all(e for e, p in zip(equal, plain, strict=True) if p)
    assert not all(equal)

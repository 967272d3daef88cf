"""Writes the tables of `docs/export.md` about drafting with what was exported of `tiny`.

python -m tests.infer.draft_table DRAFT       (DRAFT: a folder from `dejax distill` for tiny)
"""

import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import AutoModel, AutoModelForCausalLM
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from dejax.ckpt.draft_state import load_draft
from dejax.spec.control import ControlConfig
from dejax.target import BUILT_IN, load_target
from infer.export import main as export
from infer.generate import generate
from infer.prompts import DEMO_PROMPTS, encode_prompts, read_prompts
from tests.infer import llama_cpp
from tests.infer.gguf_table import put

PROMPTS, NEW_TOKENS, DRAFT_LENGTH = 16, 64, 4

Tokens = list[list[int]]
Measured = tuple[Tokens, int, int]
"""New tokens of every prompt, tokens drafted, tokens accepted."""


def of_dejax(target: Any, draft: Any, prompts: Tokens) -> Measured:
    """dejax's own loop with a fixed draft length."""
    control = ControlConfig(draft_length=DRAFT_LENGTH, truncate=False)
    options: Any = dict(mode="draft-expert", governor=False, control=control, engine="resident")
    found = generate(target, prompts, draft=draft, max_new_tokens=NEW_TOKENS, **options)
    counts = (sum(g.stats[key] for g in found) for key in ("drafted", "accepted"))
    drafted, accepted = counts
    return [g.tokens for g in found], drafted, accepted


def of_adapter(folder: Path, target: Any, prompts: Tokens) -> Measured:
    """The adapter attached to the target in `transformers`."""
    draft = AutoModel.from_pretrained(folder, trust_remote_code=True).attach(target)
    tokens, drafted, accepted = [], 0, 0
    for prompt in prompts:
        tokens.append(_greedy(draft, prompt, draft_length=DRAFT_LENGTH))
        drafted, accepted = drafted + draft.drafted, accepted + draft.accepted
    return tokens, drafted, accepted


def of_draft_model(folder: Path, target: Any, prompts: Tokens) -> Measured:
    """The draft model as `assistant_model`, with keys and values of its own."""
    drafter = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    drafter.generation_config.num_assistant_tokens = DRAFT_LENGTH
    drafter.generation_config.num_assistant_tokens_schedule = "constant"
    drafter.generation_config.assistant_confidence_threshold = 0.0
    counts = [0, 0]
    drafts, verdicts = (
        AssistedCandidateGenerator.get_candidates,
        AssistedCandidateGenerator.update_candidate_strategy,
    )

    def drafted(self, input_ids, **options):
        ids, laws = drafts(self, input_ids, **options)
        self.drafted = ids[0, input_ids.shape[1] :]
        counts[0] += len(self.drafted)
        return ids, laws

    def accepted(self, input_ids, scores, num_matches):
        end = input_ids[0, -int(num_matches) - 1 :][: len(self.drafted)]
        counts[1] += int((end == self.drafted[: len(end)]).long().cumprod(0).sum())
        return verdicts(self, input_ids, scores, num_matches)

    kind = AssistedCandidateGenerator
    with (
        mock.patch.object(kind, "get_candidates", drafted),
        mock.patch.object(kind, "update_candidate_strategy", accepted),
    ):
        tokens = [_greedy(target, prompt, assistant_model=drafter) for prompt in prompts]
    return tokens, counts[0], counts[1]


def of_llama_cpp(model: Path, drafter: Path, prompts: Tokens) -> Measured:
    """llama.cpp with the draft model's file, its drafts as long."""
    requests = {
        str(i): {"greedy": prompt, "count": NEW_TOKENS, "ends": True}
        for i, prompt in enumerate(prompts)
    }
    found = llama_cpp.ask(model, drafter=drafter, draft_length=DRAFT_LENGTH, **requests)
    answers = [found[str(i)] for i in range(len(prompts))]
    return [a[0] for a in answers], sum(a[2] for a in answers), sum(a[1] for a in answers)


def _greedy(model: Any, prompt: list[int], **options: Any) -> list[int]:
    out = model.generate(
        torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, **options
    )
    return out[0, len(prompt) :].tolist()


def _row(name: str, measured: Measured, expected: Tokens) -> str:
    tokens, drafted, accepted = measured
    same = sum(a == b for a, b in zip(tokens, expected, strict=True))
    shown = [name, f"{drafted:,}", f"{accepted:,}", f"{accepted / drafted:.1%}".replace("%", " %")]
    return f"| {' | '.join([*shown, f'{same} of {len(expected)}'])} |"


def main() -> None:
    """Measures, and puts both tables in their places."""
    source = sys.argv[1]
    target = load_target("tiny")
    encoded = encode_prompts(target, read_prompts(DEMO_PROMPTS)[:PROMPTS], chat=True)
    prompts = [ids for _, ids in encoded]
    plain = [g.tokens for g in generate(target, prompts, max_new_tokens=NEW_TOKENS)]
    theirs = AutoModelForCausalLM.from_pretrained(BUILT_IN, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as place:

        def made(name: str, *options: str) -> Path:
            out = Path(place) / name
            export(["tiny", "--draft", source, "--out", str(out), *options])
            return out

        made_target = Path(place) / "tiny.gguf"
        export(["tiny", "--format", "gguf", "--dtype", "f32", "--out", str(made_target)])
        own = of_dejax(target, load_draft(source, target), prompts)
        rows = [("dejax generate", own)]
        folder = made("adapter", "--format", "torch", "--as", "adapter")
        rows.append(("transformers, adapter", of_adapter(folder, theirs, prompts)))
        for dtype in ("bf16", "f32"):
            options = ("--format", "torch", "--as", "draft-model", "--dtype", dtype)
            measured = of_draft_model(made(f"drafter-{dtype}", *options), theirs, prompts)
            rows.append((f"transformers, draft-model {dtype}", measured))
            file = made(f"drafter-{dtype}.gguf", "--format", "gguf", *options[2:])
            measured = of_llama_cpp(made_target, file, prompts)
            rows.append((f"llama.cpp, draft-model {dtype}", measured))
        put("assisted", [_row(name, found, plain) for name, found in rows])
        rows = [("float32 (as trained)", own)]
        for dtype in ("f16", "q8_0", "q4_0"):
            file = made(f"{dtype}.gguf", "--format", "gguf", "--dtype", dtype)
            rows.append((dtype, of_dejax(target, load_draft(file, target), prompts)))
        put("quantised", [_row(name, found, plain) for name, found in rows])


if __name__ == "__main__":
    main()

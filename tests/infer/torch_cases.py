"""Random targets with draft experts, exported for `transformers`, beside what dejax computes."""

from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import torch
from transformers import AutoModel

from dejax.ckpt.draft_state import save_draft
from dejax.config import DraftConfig
from dejax.draft.expert import DraftExpert, random_draft
from dejax.spec.control import ControlConfig
from dejax.target import load_target
from infer.export import main
from infer.generate import Generation, generate
from tests.families import reference

torch.set_num_threads(1)  # of so small a model, threads cost more than they give

TOLERANCE = 2e-4
TOKENS = np.random.default_rng(0).integers(0, 256, (2, 40))
"""Longer than any window."""
PROMPTS = [np.random.default_rng(seed).integers(3, 256, 12).tolist() for seed in range(3)]
NEW_TOKENS, DRAFT_LENGTH = 20, 2


class Exported:
    """A random model of a named configuration, its draft experts, and where both lie."""

    def __init__(self, name: str, place: Path, *, gates: str = "full", width: int = 24, **changes):
        self.place = place
        self.folder = reference.save(reference.random_model(name, **changes), place / "model")
        self.target = load_target(self.folder)
        config = DraftConfig(width=width, gates=gates)
        draft = random_draft(self.target.config, config, seed=3, identity=self.target.identity)
        experts = {
            layer: DraftExpert(expert.weights[...], jnp.asarray(0.5 + layer))
            for layer, expert in draft.experts.items()
        }
        told = {"data": "/somewhere/text.jsonl", "ema": 0.0}
        self.draft = replace(draft, experts=experts, training=told)
        save_draft(place / "draft", self.draft, self.target.config)

    def export(self, out: str, *options: str, draft: str | None = "draft") -> Path:
        """Runs `dejax export --format torch`."""
        given = [] if draft is None else ["--draft", str(self.place / draft)]
        folder = self.place / out
        argv = [str(self.folder), *given, "--format", "torch", "--out", str(folder), *options]
        assert main(argv) == 0
        return folder

    def attached(self, folder: Path):
        """The exported draft experts, attached to the target as `transformers` loads it."""
        model = AutoModel.from_pretrained(folder, trust_remote_code=True)
        return model.attach(reference.load(self.folder))


def our_loop(case: Exported, prompts=PROMPTS, **options) -> list[Generation]:
    """dejax's own decoding of `prompts` with the draft experts, at a fixed draft length."""
    control = ControlConfig(draft_length=DRAFT_LENGTH, truncate=False)
    fixed = dict(mode="draft-expert", governor=False, max_new_tokens=NEW_TOKENS, control=control)
    options = fixed | dict(engine="callback") | options
    return generate(case.target, prompts, draft=case.draft, **options)


def acceptance(generations: list[Generation]) -> tuple[int, int]:
    """Tokens drafted and accepted."""
    drafted, accepted = ([g.stats[key] for g in generations] for key in ("drafted", "accepted"))
    return sum(drafted), sum(accepted)


def greedy(model, prompt: list[int], **options) -> list[int]:
    """New tokens of a `transformers` model."""
    out = model.generate(
        torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, **options
    )
    return out[0, len(prompt) :].tolist()

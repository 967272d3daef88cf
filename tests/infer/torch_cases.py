"""Random targets with draft experts, exported for `transformers`, beside what dejax computes."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from transformers import AutoModel

from dejax.ckpt.draft_state import save_draft
from dejax.config import DraftConfig
from dejax.draft.expert import Draft, DraftExpert, random_draft
from dejax.draft.path import draft_experts
from dejax.model import embed, layer_full, logits_of, sequence_masks, split_layer
from dejax.spec.control import ControlConfig
from dejax.target import Target, load_target
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


def draft_path(target: Target, draft: Draft, tokens: np.ndarray):
    """Logits [B, T, V] of the draft path, and (ids, gates) [B, T, K] of every MoE layer."""
    ids = jnp.asarray(tokens, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    masks = sequence_masks(target.config, positions, jnp.zeros_like(ids))
    x, routing = embed(target.model, ids, jnp.float32), {}
    for index, layer in enumerate(target.model.layers):
        definition, params = split_layer(layer)
        mask = masks.of_layer(target.config.is_windowed(index))
        routed = index in target.config.moe_layers
        expert = draft.layer_params(index) if routed else None
        stack = target.layer_experts(index) if routed else None
        rule = draft.config.top_r, draft.plain, target.config.moe.activation
        x, chosen = _layer(definition, rule, params, expert, stack, x, positions, mask)
        if chosen is not None:
            routing[index] = jax.tree.map(np.asarray, chosen)
    return np.asarray(logits_of(target.model, x)), routing


@partial(jax.jit, static_argnums=(0, 1))
def _layer(definition, rule, params, expert, stack, x, positions, mask):
    layer, (r, plain, activation) = nnx.merge(definition, params), rule
    experts = lambda h, routing: h  # noqa: E731 (a dense layer asks for none)
    if stack is not None:
        experts = draft_experts(stack, expert, r=r, block=16, activation=activation)
    place = dict(positions=positions, mask=mask, experts=experts)
    x_after, tap = layer_full(layer, x, plain=plain, **place)
    if tap is None:
        return x_after, None
    full = layer.router(tap.hidden)
    return x_after, (full.ids, full.gates)


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

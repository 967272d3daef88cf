"""Greedy chat answers of a dense model and of MoEs made from it, for the card.

    python -m train.upcycle_answers DENSE MOE... --out ANSWERS.json

Both decode through the same small loop, one sequence at a time, every expert at hand.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from dejax.draft.path import routed_output
from dejax.errors import FailedError, UsageError
from dejax.model import (
    DecoderLayer,
    attend_cached,
    combine,
    embed,
    logits_of,
    route,
    split_layer,
    split_outer,
)
from dejax.nn.attention import Cache, init_cache
from dejax.target import Target, load_target
from infer.arguments import InputFile, OutputFile, ParsedBy, Positional, PositiveInt, parse
from infer.console import progress, say
from infer.output import write_json
from infer.prompts import DEMO_PROMPTS, encode_prompt, read_prompts


@partial(jax.jit, static_argnums=0, donate_argnums=4)
def _layer(
    definition: nnx.GraphDef, params: Any, stack: Any, x: Array, cache: Cache, start: Array
) -> tuple[Float[Array, "R D"], Cache]:
    """New rows from position `start` on through one layer."""
    layer: DecoderLayer = nnx.merge(definition, params)
    positions = start + jnp.arange(len(x))
    slots = jnp.arange(jax.tree.leaves(cache)[0].shape[0])
    mask = slots[None] <= positions[:, None]
    x, cache = attend_cached(layer, x, cache, start=start, positions=positions, mask=mask)
    h, routing, always = route(layer, x)
    if routing is None:
        return combine(x, always), cache
    chosen = jax.tree.map(lambda a: a[None], routing)
    return combine(x, always, routed_output(h[None], chosen, stack, block=8)[0]), cache


@partial(jax.jit, static_argnums=0)
def _next(definition: nnx.GraphDef, params: Any, x: Float[Array, " D"]) -> Array:
    return jnp.argmax(logits_of(nnx.merge(definition, params), x))


def greedy(target: Target, prompt: Sequence[int], *, most: int) -> list[int]:
    """At most `most` tokens after `prompt`, the end token left out. Sliding windows are not known.

    Raises:
      UsageError: they do not fit the context.
    """
    config = target.config
    if len(prompt) + most > config.context:
        raise UsageError(
            f"{len(prompt)} tokens and {most} new ones; the context of {target.name} is "
            f"{config.context}"
        )
    layers = [split_layer(layer) for layer in target.model.layers]
    stacks = [
        target.layer_experts(index) if index in config.moe_layers else None
        for index in range(config.num_layers)
    ]
    outer = split_outer(target.model)
    dtype, capacity = target.compute_dtype, len(prompt) + most
    caches = [init_cache(config.attention, capacity, dtype) for _ in layers]
    rows, start, found = list(prompt), 0, []
    while len(found) < most:
        x = embed(target.model, jnp.asarray(rows, jnp.int32), dtype)
        for index, (definition, params) in enumerate(layers):
            x, caches[index] = _layer(
                definition, params, stacks[index], x, caches[index], jnp.int32(start)
            )
        token = int(_next(*outer, x[-1]))
        if token in config.eos_ids:
            break
        found.append(token)
        rows, start = [token], start + len(rows)
    return found


@dataclass(frozen=True)
class Arguments:
    """Arguments of `python -m train.upcycle_answers`."""

    models: Positional[tuple[Annotated[str, ParsedBy(str, "MODEL")], ...]]
    """The dense model (a folder or a .gguf file) and MoEs made from it."""
    out: OutputFile
    """Where to write the answers, as JSON."""
    prompts: InputFile = DEMO_PROMPTS
    """Prompts as JSON lines."""
    count: PositiveInt = 10
    """How many of them, from the first on."""
    tokens: PositiveInt = 96
    """Tokens of an answer at most."""


def answers(models: Sequence[str], records: Sequence[Any], *, tokens: int) -> list[dict[str, Any]]:
    """Prompt and each model's answer; models are loaded one after another."""
    found = [{key: r[key] for key in ("id", "category", "prompt") if key in r} for r in records]
    with progress("answering", len(models) * len(records), "answers") as bar:
        for place, model in enumerate(models):
            target = load_target(model)
            for record in found:
                ids = encode_prompt(target, record["prompt"])
                text = target.tokenizer.decode(greedy(target, ids, most=tokens))
                kept = record.setdefault("answers", {})
                kept["dense" if place == 0 else Path(model).name] = text
                bar.advance(1, model=target.name)
    return found


def main(argv: list[str]) -> int:
    """Runs `python -m train.upcycle_answers`."""
    about = "Greedy chat answers of a dense model and of MoEs made from it."
    args = parse(Arguments, argv, prog="python -m train.upcycle_answers", description=about)
    records = read_prompts(args.prompts)[: args.count]
    write_json(args.out, answers(args.models, records, tokens=args.tokens))
    return 0


if __name__ == "__main__":
    try:
        status = main(sys.argv[1:])
    except (UsageError, FailedError) as error:
        say(f"upcycle_answers: error: {error}")
        status = error.exit_status
    sys.exit(status)

"""What a distillation measures on the way: held-out text, simulated rounds, and real decoding."""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from dejax.draft.expert import Draft, draft_of_params
from dejax.errors import UsageError
from dejax.model import Params
from dejax.sharding import on_host
from dejax.spec.control import ControlConfig
from dejax.target import Target, load_target
from infer.prompts import DEMO_PROMPTS, Speaker, encode_prompts, read_prompts
from train.distill_config import DistillConfig, draft_config
from train.documents import Data
from train.evaluate import in_loop, teacher_forced
from train.gradient_step import DistillState
from train.loop import Measure, Metrics
from train.simulate import GreedyText, simulate, simulated_metrics, write_greedily
from train.teacher import Teacher

MOST_PROMPTS, NEW_TOKENS = 16, 64
"""Held-out prompts, and tokens of an answer, where decoding is measured or simulated."""


def best_draft(state: DistillState) -> Params:
    """What a run is for: the average, where there is one."""
    return state.draft if state.average is None else state.average


def held_out(teacher: Teacher, data: Data, config: DistillConfig, params: Params) -> Metrics:
    """`teacher_forced` on held-out text."""
    top_r = draft_config(config, teacher.config).top_r
    metrics = teacher_forced(teacher, params, data.held_out, r=top_r)
    return {f"heldout_{name}": value for name, value in metrics.items()}


def check_prompts(config: DistillConfig, target: Speaker) -> None:
    """Refuses a run that measures decoding of prompts which the target cannot read.

    Raises:
      UsageError: it has no tokenizer, or none of the prompts leaves room for an answer.
    """
    if not (config.loop.decode_every or config.loop.simulate_every):
        return
    if target.tokenizer is None:
        raise UsageError(
            f"{target.name} has no tokenizer, which loop.decode_every and loop.simulate_every "
            "need for their prompts; set both to 0"
        )
    short_prompts(target)


def measures_of(teacher: Teacher, data: Data, config: DistillConfig) -> list[Measure]:
    """Everything that the configuration asks for, the gradients' norms apart.

    Raises:
      UsageError: as `check_prompts`.
    """
    loop = config.loop
    check_prompts(config, teacher)
    found = []
    if loop.eval_every and data.held_out:
        score = lambda state: held_out(teacher, data, config, best_draft(state))  # noqa: E731
        found.append(Measure(loop.eval_every, score))
    if loop.simulate_every:
        found.append(Measure(loop.simulate_every, _simulated(config, teacher)))
    if loop.decode_every:
        found.append(Measure(loop.decode_every, _decoded(config, teacher)))
    return found


def short_prompts(target: Speaker, new_tokens: int = NEW_TOKENS) -> list[list[int]]:
    """The shorter ones of the prompts that come with dejax, as token ids.

    Raises:
      UsageError: none leaves room for `new_tokens` in the context.
    """
    context, longer = target.config.context, lambda *_: None
    prompts = encode_prompts(target, read_prompts(DEMO_PROMPTS), chat=True, on_bad=longer)
    fits = [ids for _, ids in prompts if len(ids) + new_tokens <= context]
    if not fits:
        raise UsageError(
            f"{target.name}: no prompt that comes with dejax fits its context of {context} tokens "
            f"with {new_tokens} new ones; set loop.decode_every and loop.simulate_every to 0"
        )
    return sorted(fits, key=len)[:MOST_PROMPTS]


def demo_text(teacher: Teacher, new_tokens: int = NEW_TOKENS) -> GreedyText:
    """What the target itself answers to `short_prompts`."""
    prompts = short_prompts(teacher, new_tokens)
    return write_greedily(teacher, prompts, max_new_tokens=new_tokens)


def _simulated(config: DistillConfig, teacher: Teacher) -> Callable[[DistillState], Metrics]:
    """The rounds that decoding would make, on the mesh (`train.simulate`)."""
    text = cache(lambda: demo_text(teacher))
    r = draft_config(config, teacher.config).top_r

    def measure(state: DistillState) -> Metrics:
        rounds = simulate(teacher, best_draft(state), text(), draft_length=config.kv_block, r=r)
        return simulated_metrics([round_ for prompt in rounds for round_ in prompt])

    return measure


def _decoded(config: DistillConfig, teacher: Teacher) -> Callable[[DistillState], Metrics]:
    """Real decoding by the first process, while the others wait."""
    target = cache(lambda: load_target(config.target, dtype=config.dtype))

    def measure(state: DistillState) -> Metrics:
        params = on_host(best_draft(state))
        if jax.process_index() != 0:
            return {}
        draft = draft_of_params(
            jax.tree.map(jnp.asarray, params),
            layers=teacher.config.moe_layers,
            top_r=draft_config(config, teacher.config).top_r,
            gates=draft_config(config, teacher.config).gates,
            identity=teacher.identity,
            training={},
        )
        found = decoded_stats(target(), draft, draft_length=config.kv_block)
        return {f"decode_{name}": found[name] for name in ("acceptance_rate", "tokens_per_round")}

    return measure


def decoded_stats(
    target: Target,
    draft: Draft | None,
    *,
    draft_length: int,
    new_tokens: int = NEW_TOKENS,
    r: int = 1,
) -> dict[str, Any]:
    """Statistics of decoding `short_prompts`, with drafts of fixed length.

    Args:
      draft: None drafts with shared + top-`r` alone.
    """
    return in_loop(
        target,
        draft,
        short_prompts(target, new_tokens),
        max_new_tokens=new_tokens,
        r=r,
        device_cache=None,
        control=ControlConfig(draft_length=draft_length, truncate=False),
    )

"""Comparing decodes with autoregressive ones, and judging a difference in float64.

In float64 every mode emits the same tokens. In a shorter dtype a row's logits differ in the last
bits between row counts, so that a near-tie may fall the other way. A difference is therefore
reported with its margin and a verdict, never as equal.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float

from dejax.spec.sampling import SamplingConfig, TokenPicker
from dejax.target import Target

NEAR_TIE = 1e-3
"""Largest float64 margin, in logits, at which float32 may choose the other token."""


@dataclass(frozen=True)
class Divergence:
    """The first token at which a decode differs from the reference.

    Attributes:
      id: the prompt; index: position among the new tokens.
      reference, emitted: the two tokens.
      margin: float64 score of the better of them minus that of the other.
      float64_verdict: "near-tie" or "real".
    """

    id: str
    index: int
    reference: int
    emitted: int
    margin: float
    float64_verdict: Literal["near-tie", "real"]


def first_difference(reference: Sequence[int], emitted: Sequence[int]) -> int | None:
    """Index of the first difference of two token lists, None if they are equal."""
    for index, (a, b) in enumerate(zip(reference, emitted, strict=False)):
        if a != b:
            return index
    return None if len(reference) == len(emitted) else min(len(reference), len(emitted))


def in_float64(target: Target) -> Target:
    """The target with its weights widened to float64; call under `jax.enable_x64(True)`."""

    def wide(tree: Any) -> Any:
        return jax.tree.map(lambda a: jnp.asarray(np.asarray(a), jnp.float64), tree)

    definition, state = nnx.split(target.model)
    model = nnx.merge(definition, wide(nnx.to_pure_dict(state)))
    routed = {layer: wide(target.layer_experts(layer)) for layer in target.config.moe_layers}
    return replace(target, model=model, routed=routed, store=None)


def next_logits(target: Target, tokens: Sequence[int]) -> Float[np.ndarray, " V"]:
    """Logits after a token sequence, from one whole-sequence pass."""
    logits = target(jnp.asarray([list(tokens)], jnp.int32))
    return np.asarray(logits[0, -1])


def judge(
    target: Target,
    prompt: Sequence[int],
    reference: Sequence[int],
    emitted: Sequence[int],
    sampling: SamplingConfig,
    *,
    id: str,
) -> Divergence | None:
    """The first divergence of a decode, judged in float64; None if there is none."""
    index = first_difference(reference, emitted)
    if index is None:
        return None
    if index >= min(len(reference), len(emitted)):
        longer = reference if len(reference) > len(emitted) else emitted
        return Divergence(id, index, -1, int(longer[index]), float("inf"), "real")
    context = [*prompt, *reference[:index]]
    with jax.enable_x64(True):
        logits = next_logits(in_float64(target), context)
    picker = TokenPicker(sampling, sample=0, vocab_size=len(logits))
    scores = picker.scores(logits, position=len(context))
    pair = scores[reference[index]], scores[emitted[index]]
    margin = float(abs(pair[0] - pair[1]))
    near = margin <= NEAR_TIE and max(pair) >= float(scores.max()) - NEAR_TIE
    verdict: Literal["near-tie", "real"] = "near-tie" if near else "real"
    return Divergence(id, index, int(reference[index]), int(emitted[index]), margin, verdict)

"""A target beside the one it was made from, on the same text: what quantising its experts costs."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from dejax.errors import UsageError
from dejax.target import Target
from train.distill_step import Batch, compare_vocabulary
from train.losses import VocabularyTotals
from train.stacked import StackedDef, StackedParams, forward
from train.teacher import as_teacher


@partial(jax.jit, static_argnames=("definition", "dtype"))
def _totals(
    definition: StackedDef,
    original: StackedParams,
    params: StackedParams,
    batch: Batch,
    *,
    dtype: Any,
) -> VocabularyTotals:
    outer, full, _ = forward(definition, original, batch, dtype=dtype)
    _, other, _ = forward(definition, params, batch, dtype=dtype)
    return compare_vocabulary(outer, full, other, batch)[1]


def beside_original(target: Target, original: Target, batches: Sequence[Batch]) -> dict[str, float]:
    """Loss of both on the same tokens, and how near their laws are.

    Args:
      batches: packed rows, all of one shape.

    Returns:
      loss, original_loss (next token, nats), perplexity, original_perplexity, kl (nats a token),
      agreement (share of tokens with the same most likely successor), tokens.

    Raises:
      UsageError: they are not the same target but for the routed experts' numbers.
    """
    if target.identity != original.identity:
        raise UsageError(
            f"{original.name} ({original.identity}) is another target than {target.name} "
            f"({target.identity}); expected the one that it was converted from"
        )
    ours, theirs = as_teacher(target), as_teacher(original)
    sums = np.zeros(5)
    for batch in batches:
        totals = _totals(ours.definition, theirs.params, ours.params, batch, dtype=ours.dtype)
        found = jax.device_get(totals)
        sums += found.full.sum, found.draft.sum, found.logit.sum, found.agreement.sum, 0
        sums[4] += found.full.count
    original_loss, loss, kl, agreement = sums[:4] / max(sums[4], 1)
    return {
        "loss": float(loss),
        "original_loss": float(original_loss),
        "perplexity": float(np.exp(loss)),
        "original_perplexity": float(np.exp(original_loss)),
        "kl": float(kl),
        "agreement": float(agreement),
        "tokens": float(sums[4]),
    }

"""How the drafts of a decode go, from whole sequences: what a confidence head is fitted to.

Along a text that the target itself wrote, K passes make every draft of K tokens that the decode
loop could begin anywhere in the answer (`train.simulate`), its KV included: target before the
pending token, draft from there. Of each drafted token this tells what the draft pass saw before the
token was chosen, and whether the target accepts it, given that those before it were.

Greedily a token is accepted if it is the text's next one, y. Under seeded sampling (R5) draft and
target choose by the same noise; given that the target chose y, the draft did with probability

    a(y) = 1 / sum_x max(p(x), q(x) p(y) / q(y)),

whose mean over y ~ p is the chance of a match, and whose product along the text that of surviving
so far (an exponential race won by y under both laws; Daliri et al., arXiv 2408.07978). Averaging
over the noise in this way is exact, and less noisy than drawing it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dejax.model import Params, head_of
from dejax.nn.layers import project
from dejax.sharding import on_host
from dejax.spec.confidence import LEAST
from train.distill_step import Batch, paired_forward
from train.simulate import in_blocks, placed_rows, sequence_rows
from train.stacked import StackedDef, StackedParams
from train.teacher import Teacher

Text = tuple[Sequence[int], Sequence[int]]
"""A prompt and its answer, as token ids."""
AT_ONCE, STEP = 16, 32
"""Sequences of a pass, and what their lengths are rounded up to."""


@dataclass(frozen=True)
class Outcomes:
    """S drafts of up to K tokens.

    Attributes:
      tokens: token that the pass consumed whose law the drafted one comes from; hidden: final
        normed hidden state of that pass; law: `dejax.spec.confidence.law_features` of that law.
      accepted: share (greedy: 0 or 1) of noise under which the drafted token is accepted where
        those before it are.
      inside: False behind the end of the text.
      prompts: which text a draft is of.
    """

    tokens: Int[np.ndarray, "S K"]
    hidden: Float[np.ndarray, "S K D"]
    law: Float[np.ndarray, "S K 3"]
    accepted: Float[np.ndarray, "S K"]
    inside: Bool[np.ndarray, "S K"]
    prompts: Int[np.ndarray, " S"]

    def take(self, chosen: Bool[np.ndarray, " S"]) -> "Outcomes":
        """Some of the drafts."""
        return Outcomes(**{name: array[chosen] for name, array in vars(self).items()})


@partial(jax.jit, static_argnames=("definition", "r", "dtype", "temperature"))
def _rows_of_pass(
    definition: StackedDef,
    params: StackedParams,
    draft: Params | None,
    batch: Batch,
    *,
    r: int,
    dtype: Any,
    temperature: float,
) -> tuple[Float[Array, "B N D"], Float[Array, "B N 3"], Float[Array, "B N"]]:
    """Hidden state, features of the law, and acceptance after the rows `batch["shown"]` [B, N]."""
    shown = batch.pop("shown")
    outer, full, drafted, _ = paired_forward(definition, params, draft, batch, r=r, dtype=dtype)
    head = head_of(outer).astype(dtype)
    drafted, full = (jnp.take_along_axis(x, shown[..., None], axis=1) for x in (drafted, full))
    following = jnp.take_along_axis(jnp.roll(batch["tokens"], -1, axis=1), shown, axis=1)
    hidden = outer.norm(drafted)

    def of_sequence(pieces):
        x, seen, following = pieces
        says = project(x, head)
        if temperature == 0:
            accepted = (jnp.argmax(says, axis=-1) == following).astype(dtype)
        else:
            says, wants = says / temperature, project(seen, head) / temperature
            laws = jax.nn.log_softmax(wants), jax.nn.log_softmax(says)
            accepted = match_given(*laws, following)
        return law_features_on_device(jax.nn.log_softmax(says)), accepted

    law, accepted = jax.lax.map(of_sequence, (hidden, outer.norm(full), following))
    return hidden, law, accepted


def match_given(
    p: Float[Array, "N V"], q: Float[Array, "N V"], chosen: Int[Array, " N"]
) -> Float[Array, " N"]:
    """Probability that noise with which log law p chooses `chosen` has q choose it too."""
    ratio = jnp.take_along_axis(p - q, chosen[:, None], axis=-1)
    return jnp.exp(-jax.nn.logsumexp(jnp.maximum(p, q + ratio), axis=-1))


def law_features_on_device(law: Float[Array, "N V"]) -> Float[Array, "N 3"]:
    """`dejax.spec.confidence.law_features` of log probabilities."""
    top, likeliest = law.max(axis=-1), jnp.argmax(law, axis=-1)
    others = jnp.where(jnp.arange(law.shape[-1]) == likeliest[:, None], -jnp.inf, law)
    margin = jnp.minimum(top - others.max(axis=-1), -LEAST)
    entropy = -jnp.sum(jnp.exp(law) * jnp.maximum(law, LEAST), axis=-1)
    return jnp.stack([top, margin, entropy], axis=-1)


def draft_outcomes(
    teacher: Teacher,
    draft: Params | None,
    texts: Sequence[Text],
    *,
    draft_length: int,
    r: int = 1,
    temperature: float = 0.0,
    passes: int | None = None,
    on_text: Callable[[int], None] = lambda count: None,
) -> Outcomes:
    """Drafts of up to `draft_length` tokens in the answers, by their prompts.

    Args:
      draft: stacked draft parameters.
      texts: the answers are the target's own at `temperature`, of two tokens at least.
      passes: how many of the `draft_length` passes are run, each of which has every
        `draft_length`-th draft; None: all, so that a draft begins at every token.
      on_text: told how many texts are done.
    """
    # In steps, so that calls have compiled passes in common.
    width = -(-max(len(prompt) + len(answer) for prompt, answer in texts) // STEP) * STEP
    rows = -(-max(len(answer) for _, answer in texts) // STEP) * STEP
    wanted = draft_length if passes is None else min(passes, draft_length)
    offsets = [draft_length * index // wanted for index in range(wanted)]
    parts = []
    for first in range(0, len(texts), AT_ONCE):
        some = texts[first : first + AT_ONCE]
        tokens, lengths = np.zeros((AT_ONCE, width), np.int32), np.zeros(AT_ONCE, np.int64)
        shown = np.zeros((AT_ONCE, rows), np.int32)
        for row, (prompt, answer) in enumerate(some):
            lengths[row] = len(prompt) + len(answer)
            tokens[row, : lengths[row]] = [*prompt, *answer]
            shown[row] = np.minimum(len(prompt) + np.arange(rows), lengths[row] - 1)
        batch, count = sequence_rows(tokens, lengths, teacher.mesh)
        batch["shown"] = np.pad(shown, ((0, count - AT_ONCE), (0, 0)))
        for offset in offsets:
            with jax.set_mesh(teacher.mesh):
                blocks = in_blocks(batch, offset, draft_length)
                found = _rows_of_pass(
                    teacher.definition,
                    teacher.params,
                    draft,
                    placed_rows(blocks, count, teacher.mesh),
                    r=r,
                    dtype=teacher.dtype,
                    temperature=temperature,
                )
            host = on_host(found)
            for row, (prompt, answer) in enumerate(some):
                begin = (offset - len(prompt)) % draft_length
                starts = np.arange(begin, len(answer) - 1, draft_length)
                places = starts[:, None] + np.arange(draft_length)
                inside = places < len(answer) - 1
                places = np.minimum(places, len(answer) - 1)
                seen = [part[row][places] for part in host]
                whose = np.full(len(places), first + row)
                parts.append((tokens[row][len(prompt) + places], *seen, inside, whose))
        on_text(len(some))
    return Outcomes(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))

"""How sure a draft is of its next token: its own largest probability, or a trained head's word.

A draft's largest probability is no probability of acceptance: a greedy draft is accepted where it
has the target's largest token, which is likelier than its probability says. A head (after DSpark,
arXiv 2607.05147) estimates acceptance from what the draft pass knew before it chose,

    c_i = sigmoid((w . [h_i ; emb(x_{i-1})] + u . f_i + b_i) / t_i),

with h_i the normed final hidden state of the pass that consumed x_{i-1}, emb(x_{i-1}) that token's
embedding, f_i features of the law that the drafted token v_i is then chosen from (`law_features`),
b_i a bias and t_i a temperature of the position i in the draft. The features, the biases and one
head each for greedy and for sampled decoding are ours.

Losslessness. c_i is a function of x_1 ... x_{i-1} alone. Whatever v_i turns out to be, it is the
same, so a draft that ends by it keeps the target's law under every rule, R1 to R3 too. (Children of
a greedy tree other than the first get shares of 1 - c_i by their own probability; only trees that
choose their nodes by confidence read them, which R1 to R3 refuse.)

The product w . [h ; emb] is made on the device (`dejax.draft.confidence`); all else is here.
"""

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Float64

from dejax.spec.rules import DraftChooser
from dejax.spec.sampling import SamplingConfig, law_of

Confidence = Literal["head", "probability"]
"""Whose word counts: the head's where the draft has one, or always the largest probability."""

REGIMES = ("greedy", "sampled")
"""The ways of choosing that a head has weights for, in their order."""
FEATURES = 3
LEAST = -50.0
"""A log probability below which nothing is told apart."""

Logits = Float[np.ndarray, " V"]
Scores = Float[np.ndarray, " M"]


def law_features(logits: Logits, sampling: SamplingConfig) -> Float64[np.ndarray, " 3"]:
    """Of the law that a drafted token is chosen from (greedily: of the plain softmax).

    Its largest log probability, by how much that exceeds the second, and its entropy, in nats.
    """
    plain = SamplingConfig(temperature=1.0) if sampling.temperature == 0 else sampling
    law = law_of(logits, plain)[1]
    top = float(law.max())
    if len(law) == 1:
        return np.array([top, -LEAST, 0.0])
    second = float(np.partition(law, -2)[-2])
    entropy = -float(np.exp(law) @ np.maximum(law, LEAST))
    return np.array([top, min(top - second, -LEAST), entropy])


@dataclass(frozen=True)
class Readout:
    """The host's part of a head, of one regime.

    Attributes:
      law: weights of `law_features`; biases, temperatures: by position in the draft, from 1 on;
      further positions are as the last one.
    """

    law: Float64[np.ndarray, " 3"]
    biases: Float64[np.ndarray, " K"]
    temperatures: Float64[np.ndarray, " K"]

    def logit(self, score: float, features: Float64[np.ndarray, " 3"], position: int) -> float:
        """Before the temperature; `score` is the device's product."""
        place = min(position, len(self.biases)) - 1
        return score + float(self.law @ features) + float(self.biases[place])

    def __call__(self, score: float, features: Float64[np.ndarray, " 3"], position: int) -> float:
        """c_i, in (0, 1)."""
        place = min(position, len(self.biases)) - 1
        logit = self.logit(score, features, position) / self.temperatures[place]
        return float(0.5 * (1.0 + np.tanh(0.5 * logit)))


@runtime_checkable
class Sureness(Protocol):
    """What tells a drafter's confidence. `scores`: the head's, of the pass whose logits these are.

    None are a drafter's without a head. `depth` is that of the drafted token: 1 below the pending
    one.
    """

    def of_chain(self, logits: Logits, scores: Scores | None, *, depth: int) -> float:
        """That the next token of a chain is accepted: known before it is chosen."""
        ...

    def of_children(
        self, logits: Logits, scores: Scores | None, *, position: int, depth: int, count: int
    ) -> list[tuple[int, float]]:
        """A tree's tokens for a position of the sequence, and the confidence in each."""
        ...


@dataclass(frozen=True)
class ByProbability:
    """The draft's own probabilities."""

    chooser: DraftChooser

    def of_chain(self, logits: Logits, scores: Scores | None, *, depth: int) -> float:
        return self.chooser.confidence(logits)

    def of_children(
        self, logits: Logits, scores: Scores | None, *, position: int, depth: int, count: int
    ) -> list[tuple[int, float]]:
        return self.chooser.children(logits, position=position, count=count)


@dataclass(frozen=True)
class ByHead:
    """A trained head's estimates; where a pass gives no scores, the draft's own probabilities.

    A sampled tree keeps its own too: they know the noise that the target will choose with, which
    the head must not, and choose the better nodes for it (measured: docs/decoding.md).
    """

    chooser: DraftChooser
    sampling: SamplingConfig
    readout: Readout

    def of_chain(self, logits: Logits, scores: Scores | None, *, depth: int) -> float:
        if scores is None:
            return self.chooser.confidence(logits)
        score = float(scores[int(self.sampling.temperature > 0)])
        return self.readout(score, law_features(logits, self.sampling), depth)

    def of_children(
        self, logits: Logits, scores: Scores | None, *, position: int, depth: int, count: int
    ) -> list[tuple[int, float]]:
        children = self.chooser.children(logits, position=position, count=count)
        if scores is None or not children or self.sampling.temperature > 0:
            return children
        first = self.of_chain(logits, scores, depth=depth)
        left = 1.0 - children[0][1]
        rest = (1.0 - first) / left if left > 0 else 0.0
        # A child must not be surer than one that is tried before it.
        shares = [(token, min(first, own * rest)) for token, own in children[1:]]
        return [(children[0][0], first), *shares]

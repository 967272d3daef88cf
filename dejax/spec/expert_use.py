"""Which experts were used: by the last token, by each token id, and most of all lately.

What the predictors of EcoSpec (`dejax.spec.ecospec`) know beside the draft router. Learned from the
routes of every verification; nothing here is trained. Ours: EcoSpec's own predictor was not at
hand.
"""

import collections
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from dejax.errors import UsageError
from dejax.shapes import Pair

Flat = Int[np.ndarray, " _"]
"""Layer-experts as numbers (`ExpertGrid.flat`)."""
DECAY = 0.9
"""What a layer-expert's score of use is multiplied by with every committed token."""
_MOST_TOKENS = 8192
"""Token ids that are remembered; the one that was not seen for longest goes first."""


@dataclass(frozen=True)
class ExpertGrid:
    """The layer-experts of a target: its MoE layers, experts in each, and how many a row uses."""

    layers: tuple[int, ...]
    experts: int
    top_k: int

    @property
    def size(self) -> int:
        """Layer-experts there are."""
        return len(self.layers) * self.experts

    @property
    def routes(self) -> int:
        """Layer-experts that a row uses."""
        return len(self.layers) * self.top_k

    def flat(self, pairs: Collection[Pair]) -> Flat:
        """Pairs as numbers from 0 to size - 1, in the order given.

        Raises:
          UsageError: a pair is none of this target's.
        """
        starts = {layer: place * self.experts for place, layer in enumerate(self.layers)}
        try:
            numbers = [starts[layer] + expert for layer, expert in pairs if expert < self.experts]
        except KeyError:
            numbers = []
        if len(numbers) < len(pairs):
            wrong = next(p for p in pairs if p[0] not in starts or p[1] >= self.experts)
            raise UsageError(
                f"routes to layer {wrong[0]}, expert {wrong[1]} are another model's: this target "
                f"has {self.experts} experts in layers {self.layers[0]} to {self.layers[-1]}"
            )
        return np.array(numbers, np.int32)

    def pairs(self, numbers: Flat) -> frozenset[Pair]:
        """The inverse of `flat`."""
        return frozenset(
            (self.layers[number // self.experts], number % self.experts)
            for number in numbers.tolist()
        )


class ExpertUse:
    """What the verified rows of a decode used; kept from prompt to prompt."""

    def __init__(self, grid: ExpertGrid) -> None:
        self.grid = grid
        self._last: Flat | None = None
        self._by_token: collections.OrderedDict[int, Flat] = collections.OrderedDict()
        self._score = np.zeros(grid.size)

    def observe(
        self,
        tokens: Sequence[int],
        routes: Sequence[Collection[Pair]],
        kept: Collection[int],
    ) -> None:
        """Takes in a verification.

        Args:
          tokens, routes: of each of its rows, and the layer-experts that the row used.
          kept: the rows that were committed, from the pending token's down.

        Raises:
          UsageError: the routes are another target's.
        """
        for row, (token, pairs) in enumerate(zip(tokens, routes, strict=True)):
            used = self.grid.flat(pairs)
            # A token's experts depend on what stands before it too: the latest say most.
            self._by_token[token] = used
            self._by_token.move_to_end(token)
            if row in kept:
                self._last = used
                self._score *= DECAY
                self._score[used] += 1.0
        while len(self._by_token) > _MOST_TOKENS:
            self._by_token.popitem(last=False)

    def last(self) -> Flat | None:
        """What the last committed token used; None before there is one."""
        return self._last

    def of_token(self, token: int) -> Flat | None:
        """What this token used when it was verified last; None if it never was."""
        return self._by_token.get(token)

    def hot(self, count: int) -> Flat:
        """The layer-experts of largest decayed use, at most `count`, none that was never used."""
        count = min(count, int((self._score > 0).sum()))
        return np.argsort(-self._score, kind="stable")[:count]

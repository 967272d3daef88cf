"""The exact law of anything that decides by chance: every outcome, with its probability."""

import collections
from collections.abc import Callable, Hashable


class Outcomes:
    """A chance that follows a script, and beyond it takes the first possibility."""

    def __init__(self, script):
        self.script, self.taken, self.probability = script, [], 1.0

    def flip(self, probability: float) -> bool:
        return self._decide([1.0 - probability, probability]) == 1

    def draw(self, law) -> int:
        return self._decide([float(share) for share in law])

    def _decide(self, shares) -> int:
        possible = [index for index, share in enumerate(shares) if share > 0]
        place = len(self.taken)
        chosen = self.script[place] if place < len(self.script) else 0
        self.taken.append((chosen, len(possible)))
        self.probability *= shares[possible[chosen]]
        return possible[chosen]


def law_of_outcomes(run: Callable[[Outcomes], Hashable]) -> dict[Hashable, float]:
    """What `run` returns, with probabilities, over all that its chance may decide."""
    law: dict[Hashable, float] = collections.defaultdict(float)
    script: list[int] | None = []
    while script is not None:
        chance = Outcomes(script)
        law[run(chance)] += chance.probability
        taken = chance.taken
        while taken and taken[-1][0] + 1 == taken[-1][1]:
            taken.pop()
        script = [c for c, _ in taken[:-1]] + [taken[-1][0] + 1] if taken else None
    return dict(law)


def distance(one: dict, other: dict) -> float:
    """Largest difference of two laws."""
    return max(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in {*one, *other})

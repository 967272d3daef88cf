"""Random decisions of the rules R1 to R4: a stream of coins and draws that can be repeated.

The rules ask a `Chance` and nothing else, so that a test can put one in its place that walks
through every outcome and adds up the law of the output.
"""

from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float64

from dejax.spec.sampling import threefry2x32, uniforms

# Any fixed words: streams that have nothing to do with the Gumbel noise of the same seed.
_STREAM = (0x72656A65, 0x6374)
_BLOCK = 256
_PLACES = (0x696E6465, 0x70)


@runtime_checkable
class Chance(Protocol):
    """What decides by chance."""

    def flip(self, probability: float) -> bool:
        """True with this probability."""
        ...

    def draw(self, law: Float64[np.ndarray, " n"]) -> int:
        """An index, of which each has its share of the law; one of zero share never comes."""
        ...


class Stream:
    """Independent decisions of one generation, one after another: `Chance`.

    Two streams of the same seed and sample decide alike if they are asked alike.
    """

    def __init__(self, *, seed: int, sample: int) -> None:
        self._key = (seed ^ _STREAM[0], sample ^ _STREAM[1])
        self._block: list[float] = []  # one number at a time would cost as much as a block
        self._blocks = 0

    def flip(self, probability: float) -> bool:
        return bool(self._next() < probability)

    def draw(self, law: Float64[np.ndarray, " n"]) -> int:
        return quantile(law, self._next())

    def _next(self) -> float:
        if not self._block:
            counters = np.arange(_BLOCK, dtype=np.uint32), np.full(_BLOCK, self._blocks, np.uint32)
            self._block = uniforms(*threefry2x32(self._key, counters)).tolist()[::-1]
            self._blocks += 1
        return self._block.pop()


def draw_at(law: Float64[np.ndarray, " n"], *, seed: int, sample: int, position: int) -> int:
    """A draw that belongs to a position: whoever asks, and however often, it is the same."""
    counters = np.array([position], np.uint32), np.zeros(1, np.uint32)
    key = (seed ^ _PLACES[0], sample ^ _PLACES[1])
    return quantile(law, float(uniforms(*threefry2x32(key, counters))[0]))


def quantile(law: Float64[np.ndarray, " n"], uniform: float) -> int:
    """The index at which the running sum of the law passes `uniform` of its whole."""
    sums = np.cumsum(law)
    index = int(np.searchsorted(sums, uniform * sums[-1], side="right"))
    # Rounding may reach the end, where the law may have no mass.
    return index if index < len(law) else int(np.flatnonzero(law)[-1])

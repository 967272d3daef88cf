"""Choosing a token from a row of logits: greedy (R0), or seeded sampling (R5).

Autoregressive decoding, the draft and the verification all choose through one `TokenPicker`.
Seeded sampling is the Gumbel-max trick with noise that anybody can recompute,

    y = argmax_x  log p(x) + G(seed, sample, position, x),

so what the target chooses at a position depends on its logits there and on four integers, never on
what was drafted, on how many rows a pass had or on which pass asked. Speculative sampling is then
token-identical to autoregressive sampling with the same seed, and a draft that chooses with the
same noise agrees with the target with probability at least (1 - TV) / (1 + TV), where TV is the
total variation between the two laws (Daliri et al., arXiv 2408.07978).

The noise comes from Threefry-2x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
2011), written out here because no library promises to keep its stream across versions.
"""

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal, TypeGuard

import numpy as np
from jaxtyping import Float, Float64, Int, UInt32

from dejax.errors import FailedError, UsageError

_MAX_WORD = 2**32 - 1
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA  # Skein's constant: a zero key does not make a zero key schedule

# A round asks for a few more positions than its draft is deep. Beyond this many, the lowest one is
# dropped and recomputed when asked for, so that a caller who never forgets stays bounded in memory.
_MAX_POSITIONS = 64

# Nearly every nucleus is smaller than this, and sorting a whole vocabulary costs milliseconds.
_NUCLEUS_GUESS = 256


@dataclass(frozen=True)
class SamplingConfig:
    """How tokens are chosen. The same object serves target and draft.

    Attributes:
      temperature: divides the logits; 0 is greedy, and then the other fields have no effect.
      top_k: keep this many of the most likely tokens; 0 keeps all.
      top_p: of those, keep the fewest most likely ones whose mass reaches this; 1 keeps all.
      seed: 32-bit key of the noise. Equal seeds give equal tokens.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        temperature, top_p = self.temperature, self.top_p
        if not (isinstance(temperature, Real) and 0 <= temperature < math.inf):
            raise UsageError(
                f"temperature must be a finite number >= 0 (0 is greedy), got {temperature!r}"
            )
        if not (_is_int(self.top_k) and self.top_k >= 0):
            raise UsageError(f"top_k must be an integer >= 0 (0 keeps all), got {self.top_k!r}")
        if not (isinstance(top_p, Real) and 0 < top_p <= 1):
            raise UsageError(
                f"top_p must be a number above 0 and at most 1 (1 keeps all), got {top_p!r}"
            )
        _check_word("seed", self.seed)

    @property
    def rule(self) -> Literal["R0", "R5"]:
        """Acceptance rule that this way of choosing calls for: greedy match or seeded match."""
        return "R0" if self.temperature == 0 else "R5"


def threefry2x32(
    key: tuple[int, int],
    counter: tuple[UInt32[np.ndarray, " n"], UInt32[np.ndarray, " n"]],
) -> tuple[UInt32[np.ndarray, " n"], UInt32[np.ndarray, " n"]]:
    """Threefry-2x32 with 20 rounds: encrypts n two-word counters under one two-word key."""
    schedule = (key[0], key[1], key[0] ^ key[1] ^ _PARITY)
    x0 = counter[0] + np.uint32(schedule[0])
    x1 = counter[1] + np.uint32(schedule[1])
    for block in range(5):
        for turn in _ROTATIONS[block % 2]:
            x0 += x1
            x1 = (x1 << np.uint32(turn)) | (x1 >> np.uint32(32 - turn))
            x1 ^= x0
        # The wrapping sum is taken on Python integers: numpy warns when a scalar overflows.
        x0 += np.uint32(schedule[(block + 1) % 3])
        x1 += np.uint32((schedule[(block + 2) % 3] + block + 1) & _MAX_WORD)
    return x0, x1


def gumbel_noise(
    *, seed: int, sample: int, position: int, token_ids: Int[np.ndarray, " n"]
) -> Float64[np.ndarray, " n"]:
    """Standard Gumbel noise of tokens at one position; one value for ever per four integers.

    Key (seed, sample), counter (position, token id). The value of a token does not depend on which
    other tokens are asked for. The uniform behind it has 53 bits of which the last is always set:
    it lies in (0, 1), 0 and 1 excluded, is symmetric about 1/2 and exact in float64.

    Args:
      seed: 32-bit integer, `SamplingConfig.seed`.
      sample: 32-bit index that separates independent generations under one seed.
      position: index in the sequence (prompt included) of the token being chosen.
      token_ids: ids >= 0.

    Raises:
      UsageError: if seed, sample or position does not fit 32 bits.
    """
    for name, value in (("seed", seed), ("sample", sample), ("position", position)):
        _check_word(name, value)
    ids = np.asarray(token_ids).astype(np.uint32)
    high, low = threefry2x32((int(seed), int(sample)), (np.full_like(ids, position), ids))
    return -np.log(-np.log(uniforms(high, low)))


def uniforms(
    high: UInt32[np.ndarray, " n"], low: UInt32[np.ndarray, " n"]
) -> Float64[np.ndarray, " n"]:
    """Uniform numbers in (0, 1), both ends excluded, of two random words each."""
    bits = (high.astype(np.uint64) << np.uint64(20)) | (low >> np.uint32(12))
    return (2.0 * bits + 1.0) * 2.0**-53


def log_probs(
    logits: Float[np.ndarray, " V"], sampling: SamplingConfig
) -> Float64[np.ndarray, " V"]:
    """Normalised log law that tokens are drawn from: temperature, then top-k, then top-p.

    Order and meaning are those of Hugging Face's processors, except that equally likely tokens at
    a boundary are told apart (the lower id stays) instead of all being kept by top-k. Tokens
    outside the law, and tokens whose logit is -inf, get -inf. At temperature 0 the law is the
    greedy choice.

    Raises:
      FailedError: if the largest logit is NaN or infinite.
    """
    ids, law = _law(logits, sampling, "logits")
    full = np.full(len(logits), -np.inf)
    full[ids] = law
    return full


class TokenPicker:
    """Chooses the tokens of one generation, for autoregressive decoding, draft and verification.

    The noise of a position is computed once, for the tokens that the law kept, and shared by all
    who ask. What is returned never depends on earlier calls.
    """

    def __init__(self, sampling: SamplingConfig, *, sample: int, vocab_size: int) -> None:
        """Makes the picker of generation number `sample` over a vocabulary of `vocab_size` ids.

        Raises:
          UsageError: if `sample` does not fit 32 bits or `vocab_size` is not positive.
        """
        _check_word("sample", sample)
        if not (_is_int(vocab_size) and vocab_size >= 1):
            raise UsageError(f"vocab_size must be an integer >= 1, got {vocab_size!r}")
        self.sampling = sampling
        self._sample = sample
        self._vocab_size = vocab_size
        self._noise: dict[int, np.ndarray] = {}  # position -> [V]; NaN where not yet computed

    def pick(self, logits: Float[np.ndarray, " V"], *, position: int) -> int:
        """Token that these logits choose at this position of the sequence; ties: the lowest id.

        Args:
          logits: host array, of any floating type.
          position: index in the sequence of the token being chosen: one more than that of the row
            whose logits these are.

        Raises:
          FailedError: if the largest logit is NaN or infinite.
        """
        logits = self._checked(logits)
        where = f"logits that choose the token at position {position}"
        if self.sampling.temperature == 0:
            token = int(np.argmax(logits))  # the first of equals, and NaN counts as the largest
            _check_finite(float(logits[token]), where)
            return token
        ids, law = _law(logits, self.sampling, where)
        return int(ids[np.argmax(law + self._noise_of(ids, position))])

    def scores(
        self, logits: Float[np.ndarray, " V"], *, position: int
    ) -> Float64[np.ndarray, " V"]:
        """What `pick` maximises, for every token: for judging how close a choice was.

        Greedy: the logits; sampling: log p plus the position's noise, -inf outside the law.
        """
        logits = self._checked(logits)
        if self.sampling.temperature == 0:
            return logits.astype(np.float64)
        ids, law = _law(logits, self.sampling, f"logits at position {position}")
        scores = np.full(len(logits), -np.inf)
        scores[ids] = law + self._noise_of(ids, position)
        return scores

    def confidence(self, logits: Float[np.ndarray, " V"]) -> float:
        """Largest probability, in (0, 1]: known before a token is chosen, whatever the choice.

        When sampling, of the law that is drawn from; when greedy, of the plain softmax.
        """
        logits = self._checked(logits)
        if self.sampling.temperature == 0:
            _, law = _law(logits, SamplingConfig(temperature=1.0), "logits")
        else:
            _, law = _law(logits, self.sampling, "logits")
        return float(np.exp(law.max()))

    def children(
        self, logits: Float[np.ndarray, " V"], *, position: int, count: int
    ) -> list[tuple[int, float]]:
        """The `count` tokens that come first in what `pick` maximises, and how sure each is.

        Sure is the softmax of that: greedy, the plain probability; when sampling, of the law with
        the position's noise, since the target will choose with the same noise. Fewer if the law has
        fewer tokens.
        """
        logits = self._checked(logits)
        plain = self.sampling.temperature == 0
        sampling = SamplingConfig(temperature=1.0) if plain else self.sampling
        ids, scores = _law(logits, sampling, f"logits at position {position}")
        if not plain:
            scores = scores + self._noise_of(ids, position)
        return first_of(ids, scores, count)

    def forget(self, before: int) -> None:
        """Frees the noise of positions below `before`, which are committed."""
        for position in [p for p in self._noise if p < before]:
            del self._noise[position]

    def _noise_of(self, ids: Int[np.ndarray, " n"], position: int) -> Float64[np.ndarray, " n"]:
        noise = self._noise.get(position)
        if noise is None:
            if len(self._noise) >= _MAX_POSITIONS:
                del self._noise[min(self._noise)]
            noise = self._noise[position] = np.full(self._vocab_size, np.nan)
        missing = ids[np.isnan(noise[ids])]
        if missing.size:
            noise[missing] = gumbel_noise(
                seed=self.sampling.seed,
                sample=self._sample,
                position=position,
                token_ids=missing,
            )
        return noise[ids]

    def _checked(self, logits: Float[np.ndarray, " V"]) -> Float[np.ndarray, " V"]:
        logits = np.asarray(logits)
        if logits.shape != (self._vocab_size,):
            raise ValueError(
                f"logits must be one row of {self._vocab_size}, got shape {logits.shape}"
            )
        return logits


def first_of(
    ids: Int[np.ndarray, " n"], scores: Float64[np.ndarray, " n"], count: int
) -> list[tuple[int, float]]:
    """The `count` ids of largest score, best first, and their softmax; ties: the lower id first."""
    kept = _largest(scores, min(count, len(scores)))
    kept = kept[np.argsort(-scores[kept], kind="stable")]
    weights = np.exp(scores - scores.max())
    sure = weights[kept] / weights.sum()
    return list(zip(ids[kept].tolist(), sure.tolist(), strict=True))


def law_of(
    logits: Float[np.ndarray, " V"], sampling: SamplingConfig
) -> tuple[Int[np.ndarray, " n"], Float64[np.ndarray, " n"]]:
    """The ids that `log_probs` keeps, ascending, and their normalised log probabilities."""
    return _law(logits, sampling, "logits")


def _law(
    logits: Float[np.ndarray, " V"], sampling: SamplingConfig, where: str
) -> tuple[Int[np.ndarray, " n"], Float64[np.ndarray, " n"]]:
    """Ids that the law keeps, ascending, and their normalised log probabilities."""
    scores = np.asarray(logits).astype(np.float64)
    top = float(scores.max())
    _check_finite(top, where)
    if sampling.temperature == 0:
        return np.array([scores.argmax()]), np.zeros(1)
    # The maximum goes first, so that no temperature, however small, can overflow upwards.
    with np.errstate(over="ignore"):
        scores = (scores - top) / sampling.temperature
    ids = np.flatnonzero(scores > -np.inf)
    scores = scores[ids]
    if 0 < sampling.top_k < len(ids):
        kept = _largest(scores, sampling.top_k)
        ids, scores = ids[kept], scores[kept]
    if sampling.top_p < 1:
        kept = _nucleus(scores, sampling.top_p)
        ids, scores = ids[kept], scores[kept]
    return ids, scores - np.log(np.exp(scores).sum())


def _largest(scores: Float64[np.ndarray, " n"], count: int) -> Int[np.ndarray, " count"]:
    """Indices, ascending, of the `count` largest scores; among equals the lower index stays."""
    bar = np.partition(scores, len(scores) - count)[len(scores) - count]
    above = np.flatnonzero(scores > bar)
    level = np.flatnonzero(scores == bar)[: count - len(above)]
    return np.sort(np.concatenate([above, level]))


def _nucleus(scores: Float64[np.ndarray, " n"], top_p: float) -> Int[np.ndarray, " m"]:
    """Indices, ascending, of the fewest largest scores whose softmax mass reaches `top_p`."""
    weights = np.exp(scores)
    needed = top_p * weights.sum()
    size = min(_NUCLEUS_GUESS, len(scores))
    while True:
        kept = _largest(scores, size)
        order = kept[np.argsort(-scores[kept], kind="stable")]
        mass = np.cumsum(weights[order])
        if mass[-1] >= needed or size == len(scores):
            return np.sort(order[: np.searchsorted(mass, needed) + 1])
        size = min(4 * size, len(scores))


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _check_word(name: str, value: int) -> None:
    if not (_is_int(value) and 0 <= value <= _MAX_WORD):
        raise UsageError(f"{name} must be an integer from 0 to {_MAX_WORD}, got {value!r}")


def _check_finite(top: float, where: str) -> None:
    if not math.isfinite(top):
        raise FailedError(
            f"largest of the {where} is {top}, expected a finite number: "
            "the pass diverged; check the weights, or hold them in a wider dtype"
        )

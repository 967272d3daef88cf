"""What one more drafted token must promise to be worth its time: the cost-derived stop.

A round emits tokens and takes seconds. A policy that wants the most tokens a second, rho, keeps a
drafted token if and only if what it adds to the expected tokens exceeds rho times what it adds to
the expected seconds (Dinkelbach's method for ratios; with rho the rate of the decode so far, its
fixed point is the best rate that such a rule can reach):

    keep v_i  <=>  Surv_i > rho * (t_draft + t_row + exposed load time),

where Surv_i, the probability that v_1, ..., v_i are all accepted, is the product of the drafter's
confidences, each corrected by how often tokens of such a confidence were accepted so far. No
threshold is left to tune. There is no clock here: seconds are given.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StepTimes:
    """Seconds measured in the running decode, and its rate.

    Attributes:
      draft: of a draft pass.
      row: what one more row adds to a target pass, the waiting for experts left out.
      load: of the transfer of one expert.
      rate: tokens a second (rho), at least that of autoregressive decoding, which is always to be
        had.
    """

    draft: float
    row: float
    load: float
    rate: float

    def price(self, exposed_loads: int) -> float:
        """Tokens that a drafted token must promise if so many loads of it cannot be hidden."""
        return self.rate * (self.draft + self.row + exposed_loads * self.load)


class Calibration:
    """How often drafted tokens of a confidence are accepted, learned from the rounds so far.

    A drafter's largest probability is no probability of acceptance: a greedy draft is accepted
    where it has the same largest token, which is likelier than its probability says. Confidences
    are sorted into bins, and a bin's share of accepted tokens counts more with every token seen.
    """

    BINS, PRIOR = 10, 4.0

    def __init__(self) -> None:
        self._seen, self._accepted = [0] * self.BINS, [0] * self.BINS

    def observe(self, confidences: Sequence[float], accepted: int) -> None:
        """Takes in a verified chain; tokens after the first rejected one tell nothing."""
        for place, confidence in enumerate(confidences[: accepted + 1]):
            self._seen[self._bin(confidence)] += 1
            self._accepted[self._bin(confidence)] += place < accepted

    def __call__(self, confidence: float) -> float:
        """Probability that a token of this confidence is accepted where those before it were."""
        index = self._bin(confidence)
        whole = self._seen[index] + self.PRIOR
        return (self._accepted[index] + self.PRIOR * confidence) / whole

    def _bin(self, confidence: float) -> int:
        return min(int(confidence * self.BINS), self.BINS - 1)

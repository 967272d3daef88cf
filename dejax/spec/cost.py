"""What one more drafted token must promise to be worth its time: the cost-derived stop.

A round emits tokens and takes seconds. A policy that wants the most tokens a second, rho, keeps a
drafted token if and only if what it adds to the expected tokens exceeds rho times what it adds to
the expected seconds (Dinkelbach's method for ratios; with rho the rate of the decode so far, its
fixed point is the best rate that such a rule can reach):

    keep v_i  <=>  Surv_i > rho * (t_draft + t_row + exposed load time),

where Surv_i, the probability that v_1, ..., v_i are all accepted, is estimated by the product of
the drafter's confidences. No threshold is left to tune. There is no clock here: seconds are given.
"""

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

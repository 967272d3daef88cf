"""When a draft stops: the confidence-and-expansion controller of DraftExpert, and others.

Source: DraftExpert (arXiv 2607.24434), Algorithm 1. Verifying one more drafted token costs what its
row adds to the experts that the verification must read. A drafted token is dropped, and the draft
ends, if and only if the drafter is unsure of it AND its row would add more than B layer-experts to
those of the rows before it:

    stop  <=>  confidence < tau  and  |new layer-experts| > B.

The paper leaves open which pass predicts the experts of a row. The row whose input is v_i is
predicted by the draft pass that consumes v_i ("consumer", the default): that pass is one the draft
would run anyway to go on, so only the last, dropped token's pass is extra, and only unsure tokens
are looked at before deciding. The literal reading ("producer") charges v_i with the routes of the
pass that produced v_i, one row early; it needs no extra pass.

Losslessness. The consumer's decision depends on the drafted value. That is harmless under the match
rules (R0, R4, R5) and changes the output law under rejection rules (R1-R3), which need the
producer: it uses only what is known before v_i is chosen.

Two controllers take the place of that rule. "cost" keeps what pays by measured times
(`dejax.spec.cost`): it looks at a token only if the token would pay without a single load, and then
counts the loads that the rest of the draft cannot hide. It is a consumer reading, for the match
rules only. "random" keeps every token with one and the same probability, for comparisons at equal
mean draft length. Controllers by confidence alone and by expansion alone are budget "off" and
tau above 1.

The loop that this is made for, with pairs (layer, expert) as routes:

    control.begin_round(routes, available=available(), times=times(), pending=position)
    prefetch(routes)
    while len(draft) < limit:
        token, sure = picker.pick(logits, position=...), picker.confidence(logits)
        routes = None
        if control.needs_look(sure):
            logits, routes = draft_pass(token)
        if not control.keep(sure, routes, available=available(), hide_budget=hide()):
            break
        draft.append(token)
        if routes is None and len(draft) < limit:
            logits, routes = draft_pass(token)
            control.extend(routes, available=available())
        if routes is not None:
            prefetch(routes)
"""

import math
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal, TypeGuard, get_args

import numpy as np

from dejax.errors import UsageError
from dejax.shapes import Pair
from dejax.spec.cost import Calibration, StepTimes
from dejax.spec.sampling import threefry2x32

Controller = Literal["consumer", "producer", "cost", "random"]

_RANDOM_KEY = (0x64656A61, 0x78)  # any fixed key: coins that have nothing to do with the noise


@dataclass(frozen=True)
class ControlConfig:
    """How long a draft may be, and when it stops earlier.

    Attributes:
      draft_length: most tokens in a draft (K_max).
      truncate: whether the stop rule applies; without it every draft is `draft_length` long.
      tau: confidence below which a token counts as unsure. 0: never; above 1: always, which leaves
        a controller by expansion alone.
      budget: B, the new layer-experts that an unsure token may bring. None: half of what one token
        routes to, floor(k * L / 2) for L MoE layers. "cache": only layer-experts neither resident
        nor in flight count, and B is what can be loaded behind the rest of the draft, given by the
        caller. "off": no expansion test (B = -1), so an unsure token always stops the draft: a
        controller by confidence alone.
      controller: which pass predicts the experts of a row, or the rule that takes the place of tau
        and budget ("cost", "random"); see the module.
      keep: probability with which controller "random" keeps a token: a draft has keep + keep^2 +
        ... + keep^draft_length tokens on average.
    """

    draft_length: int = 8
    truncate: bool = True
    tau: float = 0.6
    budget: int | Literal["cache", "off"] | None = None
    controller: Controller = "consumer"
    keep: float = 0.75

    def __post_init__(self) -> None:
        if not (_is_int(self.draft_length) and self.draft_length >= 1):
            raise UsageError(f"draft_length must be an integer >= 1, got {self.draft_length!r}")
        if not isinstance(self.truncate, bool):
            raise UsageError(f"truncate must be True or False, got {self.truncate!r}")
        if not (isinstance(self.tau, Real) and 0 <= self.tau < math.inf):
            raise UsageError(
                f"tau must be a finite number >= 0 (above 1: always unsure), got {self.tau!r}"
            )
        named = self.budget in (None, "cache", "off")
        if not (named or (_is_int(self.budget) and self.budget >= 0)):
            raise UsageError(
                "budget must be an integer >= 0, 'cache', 'off' (no expansion test) or None "
                f"(half of k * L), got {self.budget!r}"
            )
        if self.controller not in get_args(Controller):
            names = ", ".join(map(repr, get_args(Controller)))
            raise UsageError(f"controller must be one of {names}, got {self.controller!r}")
        if not (isinstance(self.keep, Real) and 0 <= self.keep <= 1):
            raise UsageError(f"keep must be a probability from 0 to 1, got {self.keep!r}")


class DraftController:
    """Applies the stop rule over the rounds of one generation. Keeps sets of pairs, no clock.

    `available` is, in every method, what is resident or in flight BEFORE the routes given with it
    are prefetched. Only the "cache" budget and the "cost" controller read it.
    """

    def __init__(
        self,
        config: ControlConfig,
        *,
        top_k: int,
        moe_layers: int,
        calibration: Calibration | None = None,
    ) -> None:
        """Makes the controller for a target that routes each token to `top_k` experts in each of
        `moe_layers` layers. `calibration`, kept by the caller, is for "cost".

        Raises:
          UsageError: if either count is not positive.
        """
        for name, value in (("top_k", top_k), ("moe_layers", moe_layers)):
            if not (_is_int(value) and value >= 1):
                raise UsageError(f"{name} must be an integer >= 1, got {value!r}")
        self.config = config
        self._calibration = Calibration() if calibration is None else calibration
        self._default_budget = top_k * moe_layers // 2
        self._union: set[Pair] = set()
        self._charge = 0  # what the latest pass added, as counted against the budget
        self._times: StepTimes | None = None
        self._survival = 1.0  # of the tokens kept so far
        self._pending = self._kept = 0

    @property
    def union(self) -> frozenset[Pair]:
        """Layer-experts selected by this round's passes over the pending token and kept tokens."""
        return frozenset(self._union)

    def begin_round(
        self,
        routes: AbstractSet[Pair],
        *,
        available: AbstractSet[Pair] = frozenset(),
        times: StepTimes | None = None,
        pending: int = 0,
    ) -> None:
        """Starts a round with the routes of the draft pass over the pending token.

        Args:
          available: see the class.
          times: for "cost"; None while nothing is measured: every token is kept then, because the
            first drafts are what measures.
          pending: index of the pending token in the sequence, the "random" controller's counter.
        """
        self._union = set()
        self._times, self._survival = times, 1.0
        self._pending, self._kept = pending, 0
        self.extend(routes, available=available)

    def needs_look(self, confidence: float) -> bool:
        """Whether the draft pass over the token must be run before `keep` can decide."""
        config = self.config
        if config.controller == "cost":
            return config.truncate and self._pays(confidence, exposed_loads=0)
        return (
            config.controller == "consumer" and config.budget != "off" and self._unsure(confidence)
        )

    def keep(
        self,
        confidence: float,
        routes: AbstractSet[Pair] | None = None,
        *,
        available: AbstractSet[Pair] = frozenset(),
        hide_budget: int | None = None,
    ) -> bool:
        """Whether the drafted token stays; False ends the draft.

        Args:
          confidence: largest draft probability where the token was chosen.
          routes: pairs selected by the pass over the token, or None if it has not run. Taken into
            the union if the token stays. The producer never decides by them.
          available: see the class.
          hide_budget: for the "cache" budget and for "cost", how many loads fit behind the rest of
            the draft: floor(time left to hide / time of one load).

        Raises:
          ValueError: if the rule needs `routes` or `hide_budget` and got None.
        """
        if self._stops(confidence, routes, available, hide_budget):
            return False
        self._survival *= self._calibration(confidence)
        self._kept += 1
        if routes is not None:
            self.extend(routes, available=available)
        return True

    def extend(
        self, routes: AbstractSet[Pair], *, available: AbstractSet[Pair] = frozenset()
    ) -> None:
        """Takes in the routes of a pass over a kept token that ran only after `keep`."""
        self._charge = self._count_new(routes, available)
        self._union |= routes

    def _stops(
        self,
        confidence: float,
        routes: AbstractSet[Pair] | None,
        available: AbstractSet[Pair],
        hide_budget: int | None,
    ) -> bool:
        if not self.config.truncate:
            return False
        if self.config.controller == "random":
            return not self._drawn()
        if self.config.controller == "cost":
            if not self._pays(confidence, exposed_loads=0):
                return True
            new = self._count_new(self._looked_at(routes), available)
            hidden = _given(hide_budget, "controller 'cost'")
            return not self._pays(confidence, exposed_loads=max(0, new - hidden))
        return self._unsure(confidence) and self._expands(routes, available, hide_budget)

    def _pays(self, confidence: float, *, exposed_loads: int) -> bool:
        """Whether the token is worth its time; unmeasured, every token is."""
        if self._times is None:
            return True
        return self._survival * self._calibration(confidence) > self._times.price(exposed_loads)

    def _drawn(self) -> bool:
        """A coin that is the same for ever at one place of one draft after one pending token."""
        counter = np.array([self._pending], np.uint32), np.array([self._kept], np.uint32)
        return float(threefry2x32(_RANDOM_KEY, counter)[0][0]) < self.config.keep * 2.0**32

    def _unsure(self, confidence: float) -> bool:
        return self.config.truncate and confidence < self.config.tau

    def _expands(
        self,
        routes: AbstractSet[Pair] | None,
        available: AbstractSet[Pair],
        hide_budget: int | None,
    ) -> bool:
        budget = self.config.budget
        if budget == "off":
            return True
        if budget == "cache":
            limit = _given(hide_budget, "the 'cache' budget")
        else:
            limit = self._default_budget if budget is None else budget
        if self.config.controller == "producer":
            return self._charge > limit
        return self._count_new(self._looked_at(routes), available) > limit

    def _looked_at(self, routes: AbstractSet[Pair] | None) -> AbstractSet[Pair]:
        if routes is None:
            raise ValueError(
                "an unsure token needs the routes of the pass over it, got None; "
                "run that pass where needs_look() is true"
            )
        return routes

    def _count_new(self, routes: AbstractSet[Pair], available: AbstractSet[Pair]) -> int:
        new = routes - self._union
        if self.config.budget == "cache" or self.config.controller == "cost":
            new = new - available
        return len(new)


def _given(hide_budget: int | None, who: str) -> int:
    if hide_budget is None:
        raise ValueError(f"{who} needs hide_budget, an integer >= 0; got None")
    return hide_budget


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, Integral) and not isinstance(value, bool)

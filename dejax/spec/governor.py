"""Whether to speculate at all: a governor that keeps decoding near autoregressive speed at worst.

Its measure is Cascade's (arXiv 2506.20675): a round's utility is its tokens over its seconds in
autoregressive (AR) steps; above 1 speculation pays. It goes by phases:

    measure  a few plain rounds, which tell t_AR. An AR step emits its token: this costs nothing
             where speculation does not pay, and little where it does.
    test     a few speculative rounds.
    set      after a utility of 1 or more: many speculative rounds, then measure again.
    rest     after less: plain rounds, which measure t_AR on the way, then test again. The rest
             doubles from time to time that speculation fails, and is short again once it has paid.
             After a rest speculation must pay by a margin (hysteresis).

Why the loss is bounded. Call s / t_AR - n the excess of a speculative round of s seconds and n
tokens: the AR steps that it lost, or gained if negative. The governor keeps a credit, C AR steps at
most when a sequence begins. Every token adds `rate` to it, every speculative round takes its
excess, and a round may speculate only while there is credit. So over N tokens of a sequence from
its beginning, however times and acceptance change, the excess is at most

    C + E + rate * N,

E being the excess of one round, the one that used up the credit. Plain rounds have none. With C = 6
and rate = 0.015, and rounds of at most 6 AR steps (E = 5), that is 11 + 0.015 N: below 5.26 % of N,
hence a speed of at least 0.95 of AR, for N of 293 and more. The credit is not renewed with a
sequence: one that finds it used up loses E and `rate` at most, whatever its length. What a sequence
has gained it may lose again (up to `bank`), so that bad luck does not end what pays. t_AR
is the mean of what was measured less its standard error: few and unequal steps may be too long.
What it drifts by between measurements comes on top of the bound.

Why little is lost where speculation pays. A set phase of 48 rounds follows 2 plain ones: at n
tokens a round and utility u these take 2 (u - 1) / (48 n + 2 u) of the time, under 4 % for
u <= n <= 9.

There is no clock here: seconds are given.
"""

import collections
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class GovernorConfig:
    """The lengths of the phases; see the module.

    Attributes:
      credit: AR steps that a sequence may lose before speculation must have paid (C).
      bank: credit that is held at most, with what the sequence has gained.
      rate: credit that every token adds, the share of AR's time that may be lost for ever.
      retry_credit: credit below which a test is not worth starting: a round could use it up.
      first_measure, measure: plain rounds before the first test, and before every later phase.
      test, set: speculative rounds of a phase.
      rest, longest_rest: tokens of the first rest, and most of any.
      margin: utility that ends a rest for good.
    """

    credit: float = 6.0
    bank: float = 32.0
    rate: float = 0.015
    retry_credit: float = 2.0
    first_measure: int = 6
    measure: int = 2
    test: int = 6
    set: int = 48
    rest: int = 16
    longest_rest: int = 1024
    margin: float = 1.05


@dataclass(frozen=True)
class Decision:
    """What the governor made of a phase.

    Attributes:
      speculate: whether it goes on speculating.
      tokens, steps: mean tokens of the phase's rounds, and what one cost in AR steps.
      retry_tokens: tokens after which speculation is tested again; 0 if it goes on.
      first: whether this is the first decision of all.
    """

    speculate: bool
    tokens: float
    steps: float
    retry_tokens: int
    first: bool

    @property
    def utility(self) -> float:
        """Speed beside autoregressive decoding; infinite if the rounds took no time."""
        return self.tokens / self.steps if self.steps > 0 else math.inf


class Governor:
    """Decides round by round whether the next one may draft. Kept from prompt to prompt.

    Attributes:
      on_decision: told every decision, except that speculation goes on as it did.
    """

    def __init__(
        self,
        config: GovernorConfig | None = None,
        *,
        on_decision: Callable[[Decision], None] = lambda decision: None,
    ) -> None:
        self.config = GovernorConfig() if config is None else config
        self.on_decision = on_decision
        self._credit = self.config.credit
        self._plain: collections.deque[float] = collections.deque(maxlen=16)
        self._phase: Literal["test", "set", "rest"] = "test"
        self._measure_left = self.config.first_measure
        self._rounds = self._tokens = 0  # of the speculative rounds of this phase
        self._steps = 0.0
        self._rest = self.config.rest  # tokens of the next rest
        self._rest_left = 0
        self._rested = self._decided = False

    @property
    def speculates(self) -> bool:
        """Whether the next round may draft."""
        return self._phase != "rest" and self._measure_left <= 0

    def begin(self) -> None:
        """A new sequence: what the last one gained is not there to be lost."""
        self._credit = min(self._credit, self.config.credit)

    def observe(self, *, tokens: int, seconds: float, speculative: bool) -> None:
        """Takes in a round.

        Args:
          tokens: emitted, >= 1.
          seconds: of the whole round.
          speculative: whether it drafted. One that might have and had nothing to draft is plain.
        """
        config = self.config
        self._credit = min(self._credit + config.rate * tokens, config.bank)
        if speculative:
            if self._plain:
                self._speculated(tokens, seconds)
            return
        self._plain.append(seconds)
        self._measure_left -= 1
        if self._phase == "rest":
            self._rest_left -= tokens
            if self._rest_left <= 0 and self._credit >= config.retry_credit:
                self._begin("test", measure=0)

    def _speculated(self, tokens: int, seconds: float) -> None:
        steps = seconds / self._step_seconds()
        self._credit = min(self._credit - (steps - tokens), self.config.bank)
        self._rounds += 1
        self._tokens += tokens
        self._steps += steps
        spent = self._credit <= 0
        if spent or self._rounds >= (
            self.config.test if self._phase == "test" else self.config.set
        ):
            wanted = self.config.margin * self._steps if self._rested else self._steps
            self._decide(speculate=not spent and self._tokens >= wanted)

    def _step_seconds(self) -> float:
        """Mean of the AR steps less its standard error: few and unequal ones may be too long."""
        count, mean = len(self._plain), sum(self._plain) / len(self._plain)
        squares = sum((value - mean) ** 2 for value in self._plain)
        error = math.sqrt(squares / (count * max(1, count - 1)))
        return max(mean - error, 1e-12)

    def _decide(self, *, speculate: bool) -> None:
        config, known = self.config, speculate and self._phase == "set"
        tokens, steps = self._tokens / self._rounds, self._steps / self._rounds
        first, self._decided = not self._decided, True
        retry = 0
        if speculate:
            self._rested, self._rest = False, config.rest
            self._begin("set", measure=config.measure)
        else:
            # The credit comes back no faster than `rate` a token.
            missing = (config.retry_credit - self._credit) / config.rate
            retry = self._rest_left = max(self._rest, math.ceil(missing))
            self._rested, self._rest = True, min(2 * self._rest, config.longest_rest)
            self._begin("rest", measure=0)
        if not known:
            self.on_decision(Decision(speculate, tokens, steps, retry, first))

    def _begin(self, phase: Literal["test", "set", "rest"], *, measure: int) -> None:
        self._phase, self._measure_left = phase, measure
        self._rounds = self._tokens = 0
        self._steps = 0.0

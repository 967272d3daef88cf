"""How long the parts of a running decode take: where a round's time goes, and medians of steps.

The medians are for the rules that need them: a single pass that met a busy machine or a collection
of garbage says nothing about the next one.
"""

import collections
import contextlib
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from dejax.spec.cost import Calibration, StepTimes
from dejax.spec.expert_use import ExpertUse
from dejax.spec.governor import Governor
from infer.prefetch import LoadEvent

LATEST = 32
"""How many measurements of a kind are kept."""


@dataclass
class Clock:
    """Seconds of a round by what they went to; decode loop, engine and drafters add to it.

    Attributes:
      device, loads: waiting for jitted steps, and for loads.
      control: deciding what is drafted and verified: confidence and stop rules, growing trees and
        choosing their nodes, the governor. Not draft passes, nor the choice of a tree's tokens.
      aside: what is no part of the decode, and is taken off its times (`infer.oracle`).
    """

    device: float = 0.0
    loads: float = 0.0
    control: float = 0.0
    aside: float = 0.0

    def begin(self) -> None:
        """A new round. What was learned from the one before it counts as control of this one."""
        self.device = self.loads = self.aside = 0.0

    def take_control(self) -> float:
        """`control`, from zero again."""
        control, self.control = self.control, 0.0
        return control

    @contextlib.contextmanager
    def controlling(self) -> Iterator[None]:
        """What is done within it is control."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.control += time.perf_counter() - began


class Recent:
    """The latest measurements of one kind, in seconds."""

    def __init__(self) -> None:
        self._values: collections.deque[float] = collections.deque(maxlen=LATEST)

    def add(self, value: float) -> None:
        self._values.append(value)

    def __len__(self) -> int:
        return len(self._values)

    @property
    def median(self) -> float:
        """0 where nothing was measured."""
        return statistics.median(self._values) if self._values else 0.0


class Timings:
    """Measured seconds of one way to decode; kept from prompt to prompt.

    `waited` is, everywhere, what of the seconds went by waiting for experts: a link that brings
    them then is not free for prefetches, and a row's price has their loads apart.
    """

    def __init__(self) -> None:
        self._draft, self._draft_free = Recent(), Recent()
        self._target: dict[int, Recent] = collections.defaultdict(Recent)  # rows -> seconds
        self._step, self._load = Recent(), Recent()
        self._tokens, self._seconds = 0, 0.0  # of the decode under way

    def begin(self) -> None:
        """A new sequence."""
        self._tokens, self._seconds = 0, 0.0

    def draft_pass(self, seconds: float, *, waited: float) -> None:
        self._draft.add(seconds)
        self._draft_free.add(max(0.0, seconds - waited))

    def target_pass(self, rows: int, seconds: float, *, waited: float) -> None:
        self._target[rows].add(max(0.0, seconds - waited))

    def round(self, tokens: int, seconds: float, *, plain: bool) -> None:
        """`plain`: it was an autoregressive step."""
        self._tokens += tokens
        self._seconds += seconds
        if plain:
            self._step.add(seconds)

    def loads(self, events: Iterable[LoadEvent]) -> None:
        for event in events:
            self._load.add(event.end - event.start)

    @property
    def step_seconds(self) -> float:
        """Of an autoregressive step; 0 while none was measured."""
        return self._step.median

    def step_times(self) -> StepTimes | None:
        """What "cost" weighs; None until an autoregressive step and a draft were measured."""
        step = self.step_seconds
        if step <= 0 or not len(self._draft):
            return None
        # The step counts as one round more: the rate is its rate at first.
        rate = (1 + self._tokens) / (step + self._seconds)
        return StepTimes(
            draft=self._draft.median,
            row=self._row_seconds(),
            load=self._load.median,
            rate=max(rate, 1 / step),
        )

    def hidden_loads(self, passes_left: int, *, in_flight: int) -> int:
        """Loads that still fit behind so many draft passes, after those that are under way."""
        load = self._load.median
        if load <= 0:
            return 0
        return max(0, int(passes_left * self._draft_free.median / load) - in_flight)

    def _row_seconds(self) -> float:
        """Slope of target pass over rows: least squares of the medians, by number of passes.

        A line, although passes are padded to a few sizes: rows that cost nothing on their own lead
        to those that cost a size, and a rule that goes token by token must see the slope.
        """
        total = sum(map(len, self._target.values()))
        if not total:
            return 0.0
        points = [(rows, recent.median, len(recent)) for rows, recent in self._target.items()]
        middle = sum(rows * weight for rows, _, weight in points) / total
        spread = sum(weight * (rows - middle) ** 2 for rows, _, weight in points)
        if spread == 0:
            return 0.0
        slope = sum(weight * (rows - middle) * seconds for rows, seconds, weight in points) / spread
        return max(0.0, slope)


@dataclass
class Pace:
    """What a way to decode has learned about itself; whoever decodes keeps it.

    Attributes:
      calibration: what the drafter's confidences are worth.
      governor: switches drafting off where it does not pay; None: it is never off.
      use: which experts were used, where drafts are chosen by it.
    """

    timings: Timings = field(default_factory=Timings)
    calibration: Calibration = field(default_factory=Calibration)
    governor: Governor | None = None
    use: ExpertUse | None = None

    def begin(self) -> None:
        """A new sequence."""
        self.timings.begin()
        if self.governor is not None:
            self.governor.begin()
